"""The dense mixture of 1991 against its published equations, written naively in fp64."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from sublayer.errors import SpecError
from sublayer.nn.feed_forward import FeedForward
from sublayer.nn.op import Context
from sublayer.recipes import mixture, to_hf
from sublayer.recipes.mixture import TINY, Mixture, MixtureOp, competition, cooperation, likelihood, localisation
from tests.oracle import close

E, D = 3, 4


def drawn() -> tuple[MixtureOp, Tensor, Tensor]:
    """(a layer, inputs [5, D], targets [5, D])."""
    op = Mixture(E, FeedForward(6, "relu", bias=True)).build(D, Context()).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.normal_(generator=generator)
    x, d = torch.randn(2, 5, D, dtype=torch.float64, generator=generator)
    return op, x, d


def published(op: MixtureOp, x: Tensor) -> tuple[Tensor, Tensor]:
    """(p [E], o [E, D]) of one case."""
    s = torch.stack([op.gate.weight[i] @ x for i in range(E)])
    p = s.exp() / s.exp().sum()
    w = op.experts
    assert w.up_bias is not None
    assert w.down_bias is not None
    o = [w.down[i] @ (w.up[i] @ x + w.up_bias[i]).clamp(min=0) + w.down_bias[i] for i in range(E)]
    return p, torch.stack(o)


def check_parity(op: MixtureOp, x: Tensor) -> None:
    """The output, and the gradient of every parameter."""
    expected = torch.stack([(p[:, None] * o).sum(0) for p, o in (published(op, case) for case in x)])
    found, parameters = op(x), list(op.parameters())
    close(found, expected)
    gradients = (torch.autograd.grad(y.square().sum(), parameters) for y in (found, expected))
    for one, other in zip(*gradients, strict=True):
        close(one, other)


def test_the_layer_is_the_sum_of_all_experts_by_their_shares() -> None:
    op, x, _ = drawn()
    check_parity(op, x)
    assert_close(op(x.view(1, 5, D)), op(x)[None])


def test_the_papers_losses() -> None:
    """Equations 1.1, 1.2 and 1.3, case by case."""
    op, x, d = drawn()
    shares, outputs = op.parts(x)
    for i, case in enumerate(x):
        p, o = published(op, case)
        errors = torch.stack([(d[i] - o[j]).square().sum() for j in range(E)])
        error = d[i] - torch.stack([p[j] * o[j] for j in range(E)]).sum(0)
        close(cooperation(shares, outputs, d)[i], error @ error)
        close(localisation(shares, outputs, d)[i], torch.stack([p[j] * errors[j] for j in range(E)]).sum())
        close(competition(shares, outputs, d)[i], -(p * (-errors / 2).exp()).sum().log())


def test_the_best_expert_learns_most_from_competition() -> None:
    """The paper's eq. 1.5: the gradient of an expert's output is its posterior share times its error."""
    op, x, d = drawn()
    shares, outputs = (part.detach().requires_grad_() for part in op.parts(x))
    competition(shares, outputs, d).sum().backward()
    errors = (d[:, None] - outputs).square().sum(-1)
    posterior = shares * (-errors / 2).exp()
    posterior = posterior / posterior.sum(-1, keepdim=True)
    assert outputs.grad is not None
    close(outputs.grad, -posterior[..., None] * (d[:, None] - outputs))


def test_likelihood_is_a_density() -> None:
    """It integrates to 1, over one dimension."""
    shares, outputs = torch.tensor([0.3, 0.7]).double(), torch.tensor([[-1.0], [2.0]]).double()
    grid = torch.linspace(-12, 12, 4001, dtype=torch.float64)[:, None]
    density = likelihood(shares.expand(4001, 2), outputs.expand(4001, 2, 1), grid).exp()
    assert math.isclose(float(torch.trapezoid(density, grid[:, 0])), 1.0, rel_tol=1e-9)


def test_a_certain_gate_has_a_finite_loss() -> None:
    shares, outputs = torch.tensor([1.0, 0.0]), torch.zeros(2, 3)
    assert float(competition(shares, outputs, torch.zeros(3))) == 0.0


def test_shares_are_told() -> None:
    op, x, _ = drawn()
    seen: list[Tensor] = []
    op.watch = seen.append
    op(x)
    assert_close(seen[0].sum(-1), torch.ones(5, dtype=torch.float64))


def test_no_class_of_theirs_is_this_model_and_sizes_are_checked() -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(mixture(**TINY))
    with pytest.raises(SpecError, match="experts must be above 0"):
        Mixture(0, FeedForward(3))
