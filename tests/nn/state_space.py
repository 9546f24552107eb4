"""S4 as it is defined: each channel's N × N matrix, discretised by inverses and exponentials, one token at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sublayer.nn.s4 import S4Op


def written(op: S4Op, u: Tensor) -> Tensor:
    """[L, D] → [L, D], one document in fp64."""
    a, b, c = continuous(op)
    a, b = discrete(a, b, op.log_step.exp(), op.spec.discretisation)
    state, rows = torch.zeros(u.shape[1], a.shape[1], dtype=torch.complex128), []
    for token in u.to(torch.complex128):
        state = (a @ state[..., None])[..., 0] + b * token[:, None]
        rows.append((c * state).sum(1).real)
    y = F.gelu(torch.stack(rows) + op.skip * u)
    value, gate = F.linear(y, op.out.weight, op.out.bias).chunk(2, 1)
    return value * gate.sigmoid()


def continuous(op: S4Op) -> tuple[Tensor, Tensor, Tensor]:
    """(A [D, N, N], B [D, N], C [D, N]) with both of each pair of conjugates."""
    eigenvalues = _both(torch.complex(-op.log_decay.exp(), op.frequency))
    a, b = torch.diag_embed(eigenvalues), torch.ones_like(eigenvalues)
    if op.p is not None and op.b is not None:
        p = _both(torch.view_as_complex(op.p))
        a, b = a - p[:, :, None] * p.conj()[:, None], _both(torch.view_as_complex(op.b))
    return a, b, _both(torch.view_as_complex(op.c))


def discrete(a: Tensor, b: Tensor, delta: Tensor, discretisation: str) -> tuple[Tensor, Tensor]:
    """(Ā, B̄) for steps delta [D]: arXiv 2111.00396, eq. 3, or the exponential of the system and its held input."""
    size, step = a.shape[1], delta[:, None, None]
    if discretisation == "bilinear":
        identity = torch.eye(size, dtype=a.dtype)
        inverse = torch.linalg.inv(identity - step / 2 * a)
        return inverse @ (identity + step / 2 * a), (inverse @ (step * b[..., None]))[..., 0]
    held = F.pad(torch.cat([a, b[..., None]], 2), (0, 0, 0, 1))
    exponential = torch.linalg.matrix_exp(step * held)
    return exponential[:, :size, :size], exponential[:, :size, size]


def _both(z: Tensor) -> Tensor:
    return torch.cat([z, z.conj()], 1)
