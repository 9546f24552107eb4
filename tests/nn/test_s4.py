"""State spaces against dense matrices, scipy's discretisation, and the paper's algorithm for the kernel."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from sublayer.errors import SpecError
from sublayer.nn import s4
from sublayer.nn.embed import Embed
from sublayer.nn.s4 import S4, S4Op, System, hippo_legs, s4d
from sublayer.nn.sublayer import Block, Model, ModelOp, Sublayer, Trunk
from sublayer.state import State
from sublayer.step import Step
from tests.nn.recurrence import V, check_documents, check_state, ids, same_with_gradients
from tests.nn.state_space import continuous, discrete, written
from tests.oracle import close

D = 5
FORMS = (
    {},
    {"structure": "diagonal"},
    {"structure": "diagonal", "discretisation": "zoh", "start": "lin"},
    {"structure": "diagonal", "discretisation": "zoh", "start": "inv"},
)


def model(size: int = 8, **options: Any) -> ModelOp:
    """Tokens and one S4 layer without a residual: what comes out is the layer."""
    mixer = Sublayer("mixer", S4(size, step_min=0.01, step_max=0.3, **options), skip=0.0)
    spec = Model(D, decoder=Trunk(Embed(V), (Block((mixer,)),)), head=None)
    built = spec.override("init.std=1.0").build(1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in op(built).parameters():  # channels that differ
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return built


def op(built: ModelOp) -> S4Op:
    return next(module for module in built.modules() if isinstance(module, S4Op))


def expected(built: ModelOp, ids: Tensor) -> Tensor:
    return written(op(built), built.get_parameter("decoder.embed.tokens.weight")[ids])


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 17, 130])
def test_the_convolution_is_the_dense_recurrence(length: int, options: dict) -> None:
    built = model(**options)
    found, wanted = built(ids(length)[None])[0], expected(built, ids(length))
    if length > 1:  # one token does not meet Ā
        same_with_gradients(found, wanted, built)
    close(found, wanted)


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_documents_of_a_row_are_convolved_alone(options: dict) -> None:
    check_documents(model(**options), expected)


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_a_state_carries_on_over_blocks_steps_and_documents(options: dict, monkeypatch) -> None:
    monkeypatch.setattr(s4, "BLOCK", 4)
    check_state(model(**options), expected)


@pytest.mark.parametrize(
    ("discretisation", "a", "b"),
    [
        ("zoh", (0.9087441787554829, 0.2811075161107981), (0.09610275231942195, 0.0144014816949354)),
        ("bilinear", (0.9103086779266163, 0.2795573675014561), (0.09551543389633083, 0.013977868375072809)),
    ],
)
def test_a_discretised_mode_is_scipys(discretisation: Any, a: tuple, b: tuple) -> None:
    """−1/2 + 3i and an input of 1 in steps of 0.1: cont2discrete of scipy 1.17.1, real and imaginary parts."""
    layer = op(model(2, structure="diagonal", discretisation=discretisation))
    with torch.no_grad():
        layer.log_step.fill_(0.1).log_()
        layer.log_decay.fill_(0.5).log_()
        layer.frequency.fill_(3)
        system = layer.system(torch.float64)
        found = system.matrix.times(torch.tensor([1.0, 0.0], dtype=torch.float64).expand(D, 1, 2))[0, 0]
    assert_close(found, torch.tensor(a, dtype=torch.float64), rtol=0, atol=1e-15)
    assert_close(system.b[0], torch.tensor(b, dtype=torch.float64), rtol=0, atol=1e-15)


def test_hippo_legs_in_another_basis_answers_an_impulse_as_scipys_does() -> None:
    """N = 4 in steps of 0.1, read along P: scipy 1.17.1's bilinear cont2discrete of the matrix of arXiv 2008.07669."""
    kernel = hippo(4, 0.1).kernel(6)[0]
    assert_close(kernel, torch.tensor(KERNEL, dtype=torch.float64), rtol=0, atol=1e-14)


KERNEL = (0.769392866937593, 0.2311662059934425, -0.018574887824534675, -0.11183470149844932, -0.12583509061517498,
          -0.10435721358448065)  # fmt: skip


def hippo(size: int, delta: float) -> System:
    built = Model(1, decoder=Trunk(Embed(V), (Block((Sublayer("mixer", S4(size)),)),)), head=None)
    layer = op(built.build(dtype=torch.float64))
    with torch.no_grad():
        layer.log_step.fill_(delta).log_()
        assert layer.p is not None
        layer.c.copy_(layer.p * torch.tensor([1.0, -1.0]))  # P*
        return layer.system(torch.float64)


@pytest.mark.parametrize("size", [2, 16, 64])
def test_hippo_legs_is_the_dense_recurrence_of_its_matrix(size: int) -> None:
    n = torch.arange(size, dtype=torch.float64)
    roots = (2 * n + 1).sqrt()
    a = -(roots[:, None] * roots).tril(-1) - torch.diag(n + 1)
    a, b = discrete(a[None], roots[None], torch.tensor([0.02], dtype=torch.float64), "bilinear")
    state, kernel = b[0], []
    for _ in range(200):
        kernel.append((n + 0.5).sqrt() @ state)
        state = a[0] @ state
    close(hippo(size, 0.02).kernel(200)[0], torch.stack(kernel))


def test_eigenvalues_of_hippo_legs_decay_alike_and_those_of_s4d_are_as_published() -> None:
    eigenvalues, p, b = hippo_legs(6)
    assert_close(eigenvalues.real, torch.full((3,), -0.5, dtype=torch.float64))
    assert (2 * p.abs().square().sum()).item() == pytest.approx(sum(n + 0.5 for n in range(6)))
    assert (2 * b.abs().square().sum()).item() == pytest.approx(sum(2 * n + 1 for n in range(6)))
    assert s4d(6, "lin").imag.tolist() == pytest.approx([0, torch.pi, 2 * torch.pi])
    assert s4d(6, "inv").imag.tolist() == pytest.approx([6 / torch.pi * x for x in (5, 1, 0.2)])


@pytest.mark.parametrize("length", [1, 6, 33])
def test_the_kernel_is_that_of_the_papers_algorithm(length: int) -> None:
    """Algorithm 1 of arXiv 2111.00396: the truncated generating function at the roots of unity, by Cauchy products and
    Woodbury's identity, and an inverse Fourier transform."""
    layer = op(model())
    a, b, c = continuous(layer)
    discrete_a, _ = discrete(a, b, layer.log_step.exp(), "bilinear")
    assert layer.p is not None
    p = torch.view_as_complex(layer.p)
    p = torch.cat([p, p.conj()], 1)
    eigenvalues = torch.diagonal(a + p[:, :, None] * p.conj()[:, None], dim1=1, dim2=2)
    # The nodes are turned by a quarter of their distance, off −1, where g has its pole; their power of L is then i.
    c = c - 1j * (c[:, None] @ torch.linalg.matrix_power(discrete_a, length))[:, 0]
    nodes = torch.exp(2j * torch.pi * (torch.arange(length, dtype=torch.float64) + 0.25) / length)
    g = 2 / layer.log_step.exp()[:, None] * (1 - nodes) / (1 + nodes)

    def cauchy(v: Tensor, w: Tensor) -> Tensor:
        return (v * w / (g[..., None] - eigenvalues[:, None])).sum(-1)

    c, b, p = (x[:, None] for x in (c, b, p))
    low_rank = cauchy(c, p) * cauchy(p.conj(), b) / (1 + cauchy(p.conj(), p))
    spectrum = 2 / (1 + nodes) * (cauchy(c, b) - low_rank)
    turned = torch.exp(-0.5j * torch.pi * torch.arange(length, dtype=torch.float64) / length)
    kernel = (torch.fft.fft(spectrum, dim=1) / length * turned).real
    close(layer.system(torch.float64).kernel(length), kernel)


def test_the_state_is_kept_in_fp32_in_a_model_of_half_precision() -> None:
    built = model().bfloat16()
    assert {leaf.dtype for leaf in State.allocate(built, 1, 4).store.tensors.values()} == {torch.float32}
    wanted = model()(ids(40)[None]).detach()
    assert_close(built(ids(40)[None]).double(), wanted, rtol=0, atol=0.05 * float(wanted.abs().max()))


def test_a_kernel_of_the_usual_size_is_right_in_fp32() -> None:
    layer = op(Model(16, decoder=Trunk(Embed(V), (Block((Sublayer("mixer", S4()),)),)), head=None).build(3))
    with torch.no_grad():
        found, wanted = layer.system(torch.float32).kernel(2000), layer.double().system(torch.float64).kernel(2000)
    assert_close(found.double(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    "options",
    [{"size": 7}, {"size": 0}, {"step_min": 0.0}, {"step_min": 1.0}, {"discretisation": "zoh"}, {"start": "lin"}],
    ids=str,
)
def test_what_does_not_fit_together_is_refused(options: dict) -> None:
    with pytest.raises(SpecError, match="size|step|structure|low rank"):
        S4(**options)


def test_under_autocast_answers_are_still_computed_in_fp32() -> None:
    layer = op(model().float())
    u = torch.randn(1, 50, D, generator=torch.Generator().manual_seed(4))
    with torch.no_grad(), patch.object(layer, "out", torch.nn.ZeroPad1d((0, D))):
        expected = layer(u, Step())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(u, Step()), expected)
