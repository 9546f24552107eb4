"""The gated delta rule against the written recurrence, token by token in fp64."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from sublayer.errors import SpecError
from sublayer.nn import delta
from sublayer.nn.chunks import faded
from sublayer.nn.delta import GatedDelta, GatedDeltaOp, gated_delta
from sublayer.nn.embed import Embed
from sublayer.nn.sublayer import Block, Model, ModelOp, Sublayer, Trunk
from sublayer.state import State
from sublayer.step import Shared, Step, document_starts
from tests.nn.recurrence import V, check_documents, check_state, ids, same_with_gradients

D = 12


def model(**options: Any) -> ModelOp:
    """Tokens and one delta rule without a residual: what comes out is the rule."""
    sizes: dict[str, Any] = {"key_heads": 2, "value_heads": 4, "key_size": 6, "value_size": 5}
    spec = GatedDelta(**sizes | options)
    built = Model(D, decoder=Trunk(Embed(V), (Block((Sublayer("mixer", spec, skip=0.0),)),)), head=None).build(
        dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if not name.endswith(("log_rate", "rate_bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        op(built).log_rate.copy_(torch.linspace(-3, 1, spec.value_heads))
    return built


def op(built: ModelOp) -> GatedDeltaOp:
    return next(module for module in built.modules() if isinstance(module, GatedDeltaOp))


def written(built: ModelOp, ids: Tensor) -> Tensor:
    """[L, D]: eq. 10 of arXiv 2412.06464 for one document, with all that stands around it."""
    rule, spec = op(built), op(built).spec
    x = built.get_parameter("decoder.embed.tokens.weight")[ids]
    channels = torch.cat([x @ p.weight.T for p in (rule.q, rule.k, rule.v)], 1)
    padded = F.pad(channels.T, (3, 0))
    channels = F.silu(F.conv1d(padded, rule.convolution.weight, groups=len(padded))).T
    q, k, v = channels.split((12, 12, 20), 1)
    q, k = (h / (h.square().sum(2, keepdim=True) + 1e-6).sqrt() for h in (q.view(-1, 2, 6), k.view(-1, 2, 6)))
    v, gate = v.view(-1, 4, 5), F.silu(x @ rule.gate.weight.T).view(-1, 4, 5)
    beta = (x @ rule.beta.weight.T).sigmoid()
    alpha = (-rule.log_rate.exp() * F.softplus(x @ rule.decay.weight.T + rule.rate_bias)).exp()
    rows = []
    weight = rule.norm.weight
    assert weight is not None
    memories = [torch.zeros(6, 5, dtype=torch.float64)] * spec.value_heads
    for t in range(len(ids)):
        answers = []
        for n in range(spec.value_heads):
            key, query = k[t, n // 2, :, None], q[t, n // 2]
            erase = torch.eye(6, dtype=torch.float64) - beta[t, n] * key @ key.T
            memories[n] = alpha[t, n] * erase @ memories[n] + beta[t, n] * key * v[t, n]
            y = query @ memories[n] / 6**0.5
            answers.append(y / (y.square().mean() + spec.eps).sqrt() * weight * gate[t, n])
        rows.append(torch.cat(answers))
    return torch.stack(rows) @ rule.out.weight.T


@pytest.mark.parametrize("length", [2, 7, 64, 100])
def test_it_is_the_written_recurrence(length: int) -> None:
    built = model()
    same_with_gradients(built(ids(length)[None])[0], written(built, ids(length)), built)


def test_documents_of_a_row_are_remembered_alone_over_the_edges_of_chunks(monkeypatch) -> None:
    monkeypatch.setattr(delta, "CHUNK", 4)
    check_documents(model(), written)


def test_a_state_carries_on_over_chunks_steps_and_documents(monkeypatch) -> None:
    monkeypatch.setattr(delta, "CHUNK", 4)
    check_state(model(), written)


def test_a_document_that_fades_at_once_costs_its_neighbours_no_digits() -> None:
    """Decays are summed from each token on: one running sum over the chunk would be of size 64,000 at its end, and
    its differences right to 0.004."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (F.normalize(torch.randn(1, 1, 64, 8, generator=generator), dim=3) for _ in range(3))
    fade, beta = -torch.rand(1, 1, 64, generator=generator), torch.rand(1, 1, 64, generator=generator)
    fade[..., :40] *= 1000
    segment = torch.tensor([[1] * 40 + [2] * 24])
    step = Step(segment=segment, shared=Shared(starts=document_starts(segment)))
    found, memory = gated_delta(q, k, v, fade, beta, step)
    q, k, v, fade, beta = (x[:, :, 40:].double() for x in (q, k, v, fade, beta))
    expected, last = gated_delta(q, k, v, fade, beta, Step())
    assert_close(found[:, :, 40:].double(), expected, rtol=0, atol=1e-6)
    assert_close(memory.double(), last, rtol=0, atol=1e-6)


def test_the_memory_is_kept_in_fp32_in_a_model_of_half_precision() -> None:
    built = model().bfloat16()
    leaves = State.allocate(built, 1, 4).store.tensors
    assert {name.rpartition(".")[2]: leaf.dtype for name, leaf in leaves.items()} == {
        "memory": torch.float32,
        "inputs": torch.bfloat16,
    }
    wanted = model()(ids(40)[None]).detach()
    assert_close(built(ids(40)[None]).double(), wanted, rtol=0, atol=0.05 * float(wanted.abs().max()))


@pytest.mark.parametrize("options", [{"value_heads": 3}, {"key_heads": 0}, {"value_size": 0}, {"eps": -1.0}])
def test_sizes_that_do_not_fit_are_refused(options: dict) -> None:
    with pytest.raises(SpecError, match="heads|eps|size"):
        model(**options)


def test_under_autocast_the_memory_is_still_computed_in_fp32() -> None:
    built = model().float()
    seen: list[Any] = []

    def look(*args: Any) -> Any:
        seen.append((torch.is_autocast_enabled("cpu"), *{x.dtype for x in args[:5]}))
        return gated_delta(*args)

    with patch.object(delta, "gated_delta", look), torch.autocast("cpu", torch.bfloat16):
        built(ids(5)[None])
    assert seen == [(False, torch.float32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_has_faded_is_never_denormal(dtype: torch.dtype) -> None:
    logs = torch.linspace(-800, 0, 4001, dtype=dtype, requires_grad=True)
    found = faded(logs, dtype)
    found.sum().backward()
    kept = found > 0
    assert float(found[kept].min()) ** 2 >= torch.finfo(dtype).tiny
    assert_close(found, logs.exp(), rtol=1e-6, atol=1.1e-19)
    assert logs.grad is not None
    assert_close(logs.grad, found, rtol=1e-6, atol=0)
    assert 0 < int(kept.sum()) < len(kept)
