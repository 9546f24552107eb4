"""Norms against their formulas, and against transformers in reduced precision."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sublayer.errors import SpecError
from sublayer.nn.norm import LayerNorm, RMSNorm
from sublayer.nn.op import Context


def centred(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()


def scaled(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()


FORMULAS = {
    LayerNorm(0.1): lambda x, w, b: centred(x) * w + b,
    LayerNorm(0.1, bias=False): lambda x, w, b: centred(x) * w,
    RMSNorm(0.1): lambda x, w, b: scaled(x) * w,
    RMSNorm(0.1, weight=False): lambda x, w, b: scaled(x),
    RMSNorm(0.1, plus_one=True): lambda x, w, b: scaled(x) * (1 + w),
}


def drawn(spec: LayerNorm | RMSNorm, dim: int, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    norm = spec.build(dim, Context()).to(dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(0.5, 0.5)
    return norm


@pytest.mark.parametrize("spec", FORMULAS, ids=repr)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_values_and_gradients_are_those_of_the_formula(spec, shape: list[int]) -> None:
    norm = drawn(spec, shape[-1])
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    parameters = list(norm.parameters())
    wanted = FORMULAS[spec](x, norm.weight, getattr(norm, "bias", None))
    weights = torch.randn_like(wanted)
    assert_close(norm(x), wanted, rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad((y * weights).sum(), [x, *parameters]) for y in (norm(x), wanted))
    assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("spec", FORMULAS, ids=repr)
def test_gradients_have_gradients(spec) -> None:
    norm = drawn(spec, 5)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        names = dict(zip(dict(norm.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(norm, names, (x,))

    assert torch.autograd.gradgradcheck(run, (x, *norm.parameters()))


@pytest.mark.parametrize("spec", FORMULAS, ids=repr)
def test_training_and_inference_compute_the_same(spec) -> None:
    norm, x = drawn(spec, 7), torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    trained = norm(x)
    assert trained.requires_grad
    with torch.no_grad():
        assert_close(norm(x), trained.detach(), rtol=0, atol=1e-14)
    with torch.autocast("cpu", torch.bfloat16):  # whose products would round the gradient
        norm, x = norm.float(), x.detach().float().requires_grad_()
        found = torch.autograd.grad(norm(x).square().sum(), x)[0]
    wanted = torch.autograd.grad(norm(x).square().sum(), x)[0]
    assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("spec", "theirs"), [(RMSNorm(1e-5), LlamaRMSNorm), (RMSNorm(1e-5, True), GemmaRMSNorm)])
def test_rounding_is_that_of_the_published_models(dtype: torch.dtype, spec: RMSNorm, theirs: type) -> None:
    """Where a family rounds to the narrow dtype decides the last bit; in fp32 the order of a sum does."""
    norm, other = drawn(spec, 64, dtype), theirs(64, eps=1e-5).to(dtype)
    other.load_state_dict({"weight": norm.weight})
    x = torch.randn(3, 64, dtype=dtype)
    close = 1e-6 if dtype == torch.float32 else 0
    assert_close(norm(x), other(x), rtol=close, atol=close)


@pytest.mark.parametrize("spec", FORMULAS, ids=repr)
def test_statistics_do_not_overflow_in_half_precision(spec) -> None:
    """300² is beyond float16's 65504."""
    x = torch.tensor([[300.0, -300.0, 300.0, -300.0]], dtype=torch.float16)
    norm = drawn(spec, 4, torch.float16)
    parameters = {name: parameter.double() for name, parameter in norm.named_parameters()}
    wanted = FORMULAS[spec](x.double(), parameters.get("weight"), parameters.get("bias"))
    assert_close(norm(x).double(), wanted, rtol=2e-3, atol=2e-3)
    assert norm(x).dtype == torch.float16


def test_parameters_are_what_the_spec_says() -> None:
    names = [sorted(dict(spec.build(3, Context()).named_parameters())) for spec in FORMULAS]
    assert names == [["bias", "weight"], ["weight"], ["weight"], [], ["weight"]]


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_groups_are_normalised_alone(dtype: torch.dtype, plus_one: bool) -> None:
    whole = RMSNorm(1e-3, plus_one, groups=3).build(12, Context()).to(dtype)
    part = RMSNorm(1e-3, plus_one).build(4, Context()).to(dtype)
    x = torch.randn(2, 5, 12, dtype=dtype)
    with torch.no_grad():
        weight = whole.get_parameter("weight").normal_()
        parts = []
        for i in range(3):
            part.get_parameter("weight").copy_(weight[4 * i : 4 * i + 4])
            parts.append(part(x[..., 4 * i : 4 * i + 4]))
    assert_close(whole(x), torch.cat(parts, -1))


def test_groups_divide_the_width() -> None:
    with pytest.raises(SpecError, match="groups=5 do not divide the width 12"):
        RMSNorm(groups=5).build(12, Context())
