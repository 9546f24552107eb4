"""S4: a linear state space for each channel, run as a long convolution or as a recurrence.

B batch, L length, D model width (channels), N state size, R documents laid side by side as rows.
Source: Gu et al. 2022, arXiv 2111.00396 (S4); arXiv 2206.11893 (S4D, its diagonal form); arXiv 2008.07669 (HiPPO).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..state import Leaf, PerSlot, State
from ..step import Step
from .chunks import wide
from .documents import Documents
from .initialise import Init, normal
from .op import Context, Growth, Op, Part
from .projection import Projection

BLOCK = 256  # tokens that a call with a state takes at once: what it needs for each is [D, N]


class S4(Part):
    """x' = A x + B u, y = 2 Re(C x) + skip · u for each channel, then GELU, a linear map to 2 D and a GLU.

    Time steps are learned. States come in conjugate pairs, of which one of each is kept, so A is given by N / 2
    eigenvalues; the "dplr" form subtracts a term of rank 1, P P*.
    """

    size: int = 64
    """N, even."""
    structure: Literal["dplr", "diagonal"] = "dplr"
    """"dplr": diagonal minus low rank (S4); "diagonal" (S4D), where B is 1, for only B · C matters."""
    discretisation: Literal["bilinear", "zoh"] = "bilinear"
    """From continuous time to steps: Tukey's bilinear transform, or an input held constant over a step."""
    start: Literal["legs", "lin", "inv"] = "legs"
    """A's first values: HiPPO-LegS, or S4D's simpler "lin" and "inv" (arXiv 2206.11893, section 4)."""
    step_min: float = 0.001
    """New time steps are drawn from here, evenly in their logarithm …"""
    step_max: float = 0.1
    """… to here."""

    def check(self) -> None:
        self.require(self.size > 0 and self.size % 2 == 0, f"size counts states in pairs: even, got {self.size}")
        self.require(0 < self.step_min <= self.step_max, "time steps are above 0, from step_min to step_max")
        whole = self.structure == "diagonal"
        self.require(whole or self.discretisation == "bilinear", 'discretisation="zoh" needs structure="diagonal"')
        self.require(whole or self.start == "legs", f'start="{self.start}" is diagonal: it has no term of low rank')

    @property
    def growth(self) -> Growth:
        return Growth("n log n d", "log n", "1")

    def build(self, dim: int, context: Context) -> S4Op:
        return S4Op(self, dim)


class S4Op(Op):
    """[B, L, D] → [B, L, D]; its state is [D, N], the real parts of N / 2 numbers and then their imaginary parts."""

    residual_outputs = ("out",)

    def __init__(self, spec: S4, dim: int) -> None:
        super().__init__()
        self.spec = spec
        pairs = spec.size // 2
        self.log_step = nn.Parameter(torch.empty(dim))
        self.log_decay = nn.Parameter(torch.empty(dim, pairs))  # the eigenvalues are −exp(log_decay) + i frequency
        self.frequency = nn.Parameter(torch.empty(dim, pairs))
        full = spec.structure == "dplr"
        self.p = nn.Parameter(torch.empty(dim, pairs, 2)) if full else None
        self.b = nn.Parameter(torch.empty(dim, pairs, 2)) if full else None
        self.c = nn.Parameter(torch.empty(dim, pairs, 2))
        self.skip = nn.Parameter(torch.empty(dim))
        self.out = Projection(dim, 2 * dim)

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        """As the authors' code: one A and B for all channels, C and the skip drawn."""
        spec = self.spec
        span = math.log(spec.step_max) - math.log(spec.step_min)
        self.log_step.copy_(torch.rand(self.log_step.shape, generator=generator) * span + math.log(spec.step_min))
        eigenvalues, p, b = hippo_legs(spec.size)
        if spec.start != "legs":
            eigenvalues = s4d(spec.size, spec.start)
        self.log_decay.copy_((-eigenvalues.real).log().expand_as(self.log_decay))
        self.frequency.copy_(eigenvalues.imag.expand_as(self.frequency))
        for parameter, value in ((self.p, p), (self.b, b)):
            if parameter is not None:
                parameter.copy_(torch.view_as_real(value).expand_as(parameter))
        normal(self.c, 0.5**0.5, generator)
        normal(self.skip, 1.0, generator)

    def state(self) -> dict[str, Leaf]:
        return {"x": PerSlot((len(self.skip), self.spec.size), wide(self.skip.dtype))}

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        dtype = wide(x.dtype)
        u = x.to(dtype)
        with torch.autocast(x.device.type, enabled=False):  # powers of Ā keep their digits
            y = F.gelu(self._answers(u, step, state) + self.skip.to(dtype) * u)
        return F.glu(self.out(y.to(x.dtype)), -1)

    def _answers(self, u: Tensor, step: Step, state: State | None) -> Tensor:
        system = self.system(u.dtype)
        past = None if state is None else state["x"].read(step).to(u.dtype)
        if past is not None and u.shape[1] == 1:
            y, now = system.move(past, u[:, 0])
            if step.segment is not None:
                now = torch.where((step.segment != 0)[..., None], now, past)
            y = y[:, None]
        elif step.segment is None:
            y, now = system.run(u, past)
        else:
            y, now = _by_document(system, u, past, step.segment)
        if state is not None and now is not None:
            state["x"].write(now, step)
        return y

    def system(self, dtype: torch.dtype) -> System:
        """The recurrence in discrete time."""
        delta = self.log_step.to(dtype).exp()[:, None]
        eigenvalues = torch.complex(-self.log_decay.to(dtype).exp(), self.frequency.to(dtype))
        c = self.c.to(dtype)
        c = 2 * torch.cat([c[..., 0], -c[..., 1]], -1)  # 2 Re(C x), as a product of real numbers
        b = torch.ones_like(eigenvalues) if self.b is None else torch.view_as_complex(self.b.to(dtype))
        if self.p is not None:
            p = torch.view_as_complex(self.p.to(dtype))
            matrix = _Dplr(delta, eigenvalues, p)
            return System(matrix, _real(matrix.solve(delta * b)), c)
        if self.spec.discretisation == "zoh":
            a = (delta * eigenvalues).exp()
            return System(_Diagonal(a), _real((a - 1) / eigenvalues * b), c)
        half = delta * eigenvalues / 2
        return System(_Diagonal((1 + half) / (1 - half)), _real(delta * b / (1 - half)), c)


def hippo_legs(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(Λ, P, B), complex [N / 2] in fp64: HiPPO-LegS as Λ − P P* with inputs B, in the basis where Λ is diagonal.

    Source: arXiv 2111.00396, appendix C.1. Eigenvectors are turned so that P is real and positive.
    """
    n = torch.arange(size, dtype=torch.float64)
    p, b = (n + 0.5).sqrt(), (2 * n + 1).sqrt()
    skew = -(b[:, None] * b / 2).tril(-1)
    skew = skew - skew.T  # A + p pᵀ is this and −1/2 on the diagonal
    frequencies, vectors = cast("tuple[Tensor, Tensor]", cast(Any, torch.linalg).eigh(-1j * skew.to(torch.complex128)))
    chosen = vectors[:, frequencies > 0]
    projected = chosen.conj().T @ p.to(torch.complex128)
    chosen = chosen * (projected / projected.abs())
    eigenvalues = torch.complex(torch.full((size // 2,), -0.5, dtype=torch.float64), frequencies[frequencies > 0])
    return eigenvalues, projected.abs().to(torch.complex128), chosen.conj().T @ b.to(torch.complex128)


def s4d(size: int, start: Literal["lin", "inv"]) -> Tensor:
    """Λ, complex [N / 2] in fp64, of S4D-Lin and S4D-Inv (arXiv 2206.11893, section 4)."""
    n = torch.arange(size // 2, dtype=torch.float64)
    frequencies = math.pi * n if start == "lin" else size / math.pi * (size / (2 * n + 1) - 1)
    return torch.complex(torch.full_like(n, -0.5), frequencies)


# --- the recurrence x ← Ā x + b u, y = c x of all channels, in real numbers ---


class System:
    """Ā in one of its forms, b and c [D, N]; states are [R, D, N], inputs [R, L, D]. It lives for one forward pass, and
    keeps what it has computed."""

    def __init__(self, matrix: _Diagonal | _Dplr, b: Tensor, c: Tensor) -> None:
        self.matrix, self.b, self.c = matrix, b, c
        self._kernel = b.new_empty(len(b), 0)
        self._blocks: tuple[_Diagonal | _Dense, Tensor, Tensor] | None = None

    def move(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """One step, u [R, D]: (y [R, D], x)."""
        x = self.matrix.times(x[..., None, :])[..., 0, :] + self.b * u[..., None]
        return (self.c * x).sum(-1), x

    def kernel(self, length: int) -> Tensor:
        """[D, L]: c Āˡ b for l from 0 to L − 1, the answers to an impulse.

        Āˡ is Ā^(kT) Āᵗ with T about √L: two short sequences and their product, so memory is D · N · √L.
        """
        if self._kernel.shape[1] < length:
            power, inner = self.matrix.plain(), self.b[:, None]
            while inner.shape[1] ** 2 < length:
                inner, power = torch.cat([inner, power.times(inner)], 1), power.squared()
            outer = _sequence(power.transposed(), self.c, -(-length // inner.shape[1]))
            self._kernel = (outer @ inner.transpose(1, 2)).flatten(1)
        return self._kernel[:, :length]

    def run(self, u: Tensor, x: Tensor | None, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(y [R, L, D], the state after each row's `lengths` tokens, where there was one)."""
        if x is None:
            return convolve(u, self.kernel(u.shape[1])), None
        if lengths is None:
            lengths = torch.full((len(u),), u.shape[1], device=u.device)
        power, columns, rows = self._block(min(BLOCK, u.shape[1]))
        y: list[Tensor] = []
        for first in range(0, u.shape[1], BLOCK):
            part = u[:, first : first + BLOCK]
            size, here = part.shape[1], (lengths - first).clamp(0, part.shape[1])
            answer = torch.einsum("rdn,dln->rld", x, rows[:, 1 : size + 1])
            y.append(convolve(part, (rows[:, :size] * self.b[:, None]).sum(-1)) + answer)
            driven = torch.einsum("rld,dln->rdn", _backwards(part, here), columns[:, :size])
            x = _advanced(power, x, here) + driven
        return torch.cat(y, 1), x

    def _block(self, size: int) -> tuple[_Diagonal | _Dense, Tensor, Tensor]:
        """Ā, Āˡ b for l below `size`, and c Āˡ for l up to it."""
        if self._blocks is None or self._blocks[1].shape[1] < size:
            power = self.matrix.plain()
            rows = _sequence(power.transposed(), self.c, size + 1)
            self._blocks = (power, _sequence(power, self.b, size), rows)
        return self._blocks


@dataclass(frozen=True)
class _Diagonal:
    a: Tensor  # [D, N / 2] complex

    def times(self, x: Tensor) -> Tensor:
        """Ā x for each of [.., D, M, N]."""
        return _real(self.a[:, None] * _complex(x))

    def squared(self) -> _Diagonal:
        return _Diagonal(self.a * self.a)

    def transposed(self) -> _Diagonal:
        return _Diagonal(self.a.conj())

    def plain(self) -> _Diagonal:
        return self


@dataclass(frozen=True)
class _Dense:
    a: Tensor  # [D, N, N]

    def times(self, x: Tensor) -> Tensor:
        return x @ self.a.transpose(1, 2)

    def squared(self) -> _Dense:
        return _Dense(self.a @ self.a)

    def transposed(self) -> _Dense:
        return _Dense(self.a.transpose(1, 2))


@dataclass(frozen=True)
class _Dplr:
    """Ā = (1 − Δ/2 A)⁻¹ (1 + Δ/2 A) with A = Λ − P P*, applied in N operations (arXiv 2111.00396, appendix C.2)."""

    delta: Tensor  # [D, 1]
    eigenvalues: Tensor  # [D, N / 2] complex
    p: Tensor  # [D, N / 2] complex

    def times(self, x: Tensor) -> Tensor:
        delta, eigenvalues, p = (t[:, None] for t in (self.delta, self.eigenvalues, self.p))
        z = _complex(x)
        return _real(self.solve(z + delta / 2 * (eigenvalues * z - p * _paired(p, z)), many=True))

    def solve(self, z: Tensor, *, many: bool = False) -> Tensor:
        """(1 − Δ/2 A)⁻¹ z for [D, N / 2], or for each of [.., D, M, N / 2]; by Woodbury's identity."""
        delta, eigenvalues, p = (t[:, None] if many else t for t in (self.delta, self.eigenvalues, self.p))
        inverse = 1 / (1 - delta / 2 * eigenvalues)
        z, along = inverse * z, inverse * p
        return z - along * (delta / 2 * _paired(p, z) / (1 + delta / 2 * _paired(p, along)))

    def plain(self) -> _Dense:
        """The matrix [D, N, N] itself, whose powers have no such form."""
        size = 2 * self.p.shape[1]
        basis = torch.eye(size, dtype=self.delta.dtype, device=self.delta.device)
        return _Dense(self.times(basis).transpose(1, 2))


def _paired(p: Tensor, z: Tensor) -> Tensor:
    """P* z over all N states, whose second halves are conjugates of the first."""
    return 2 * (p.conj() * z).real.sum(-1, keepdim=True)


def _real(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], -1)


def _complex(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.complex(x[..., :half], x[..., half:])


def _sequence(power: _Diagonal | _Dense, first: Tensor, length: int) -> Tensor:
    """[D, L, N]: v, Ā v, Ā² v, …, doubled until there are enough."""
    known = first[:, None]
    while known.shape[1] < length:
        power = power if known.shape[1] == 1 else power.squared()
        known = torch.cat([known, power.times(known)], 1)
    return known[:, :length]


def _advanced(power: _Diagonal | _Dense, x: Tensor, steps: Tensor) -> Tensor:
    """Ā^steps x of each row, without inputs."""
    for bit in range(int(steps.max()).bit_length()):
        moved = power.times(x[..., None, :])[..., 0, :]
        x, power = torch.where((steps >> bit & 1).bool()[:, None, None], moved, x), power.squared()
    return x


def _backwards(u: Tensor, lengths: Tensor) -> Tensor:
    """Each row's first `lengths` inputs, the last one first; then zeros."""
    index = lengths[:, None] - 1 - torch.arange(u.shape[1], device=u.device)
    taken = u.gather(1, index.clamp(min=0)[..., None].expand_as(u))
    return taken.masked_fill((index < 0)[..., None], 0)


def convolve(u: Tensor, kernel: Tensor) -> Tensor:
    """y[t] = Σ kernel[:, l] · u[t − l], by FFT. u: [R, L, D]; kernel: [D, L]."""
    length = u.shape[1]
    size = 1 << (2 * length - 1).bit_length()
    fft = cast(Any, torch.fft)
    return fft.irfft(fft.rfft(u, size, 1) * fft.rfft(kernel.T, size, 0), size, 1)[:, :length]


def _by_document(system: System, u: Tensor, past: Tensor | None, segment: Tensor) -> tuple[Tensor, Tensor | None]:
    """Each document of packed rows alone, laid into a row of its own beside those of about its length."""
    documents = Documents.of(segment)
    states = None
    if past is not None:  # a row's first document goes on, the others begin
        states = past[documents.row].masked_fill((documents.place > 0)[:, None, None], 0)
    y = torch.zeros_like(u).flatten(0, 1)
    for numbers, part in documents.alike():  # the longest first: its kernel serves all
        answers, after = system.run(part.split(u), None if states is None else states[numbers], part.length)
        y = y.index_copy(0, part.cells, answers.flatten(0, 1)[part.spots])
        if states is not None and after is not None:
            states = states.index_copy(0, numbers, after)
    return y.view_as(u), None if states is None else states[documents.newest]
