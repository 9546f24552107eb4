from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sublayer import recipes
from sublayer.errors import UsageError
from sublayer.inspect import profile as module
from sublayer.inspect.profile import Profile, cache_at_70b, cache_bytes, profile_step
from sublayer.nn.sublayer import Model, ModelOp, SublayerOp
from sublayer.recipes.t5 import TINY as T5_TINY
from sublayer.train.batch import Batch
from sublayer.train.language import next_token
from sublayer.train.loss import Loss
from sublayer.train.optim import AdamW
from sublayer.train.recompute import recompute

LLAMA = recipes.llama(48, 3, 4, 2, hidden=128, vocab=96)


def batch(rows: int = 4, length: int = 64) -> Batch:
    ids = torch.randint(0, 96, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return Batch(ids[:, :-1], ids[:, 1:])


def profiled(spec: Model = LLAMA, change: Callable[[ModelOp], None] = lambda model: None, **options: Any) -> Profile:
    model = spec.build(0)
    change(model)
    return profile_step(model, batch(), next_token, AdamW().build(model), **options)


class Time:
    """A clock that stands still but where it is told to go on."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Spend(torch.autograd.Function):
    """The identity, in which time passes: forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, time: Time, forward: float, backward: float) -> Tensor:
        time.now += forward
        ctx.time, ctx.seconds = time, backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.time.now += ctx.seconds
        return gradient, None, None, None


def spending(op: nn.Module, time: Time, forward: float, backward: float) -> None:
    """From now on a call of op takes this long."""
    inner = op.forward

    def slower(*args: Any, **options: Any) -> Any:
        result = inner(*args, **options)
        first, *rest = result if isinstance(result, tuple) else (result,)
        found: Any = Spend.apply(first, time, forward, backward)
        return (found, *rest) if rest else found

    op.forward = slower


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(module, "time", time)
    return time


def measured(spec: Model, time: Time, change: Callable[[ModelOp], None] = lambda model: None) -> Profile:
    """A model of three layers in which known times pass: units for embed, tens for the head, and so on."""
    model = spec.build(0)
    for op in model.modules():
        if isinstance(op, SublayerOp):
            spending(op.op, time, *{"attn": (1e3, 3e3), "ffn": (1e4, 2e4)}[op.spec.name])
            assert op.pre is not None
            spending(op.pre, time, 1e5, 2e5)
    assert model.decoder is not None
    spending(model.decoder.embed, time, 1, 2)
    assert model.decoder.norm is not None
    spending(model.decoder.norm, time, 1e5, 2e5)
    change(model)
    optimizer = AdamW().build(model)
    step = optimizer.step

    def slow_step() -> None:
        time.now += 500
        step()

    optimizer.step = slow_step

    def objective(model: ModelOp, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        total: Any = Spend.apply(loss.sum, time, 20, 40)
        return Loss(total, loss.tokens)

    return profile_step(model, batch(), objective, optimizer)


def test_time_goes_to_the_part_in_which_it_passed_forward_and_backward(time: Time) -> None:
    found = measured(LLAMA, time)
    expected = {
        "embed": 3, "head and loss": 60, "optimiser": 500, "attn": 3 * 4e3, "ffn": 3 * 3e4, "norms": 7 * 3e5, "rest": 0,
    }  # fmt: skip
    assert found.seconds == expected
    assert found.unwatched == sum(expected.values())
    assert found.tokens == 4 * 64


def test_recomputed_blocks_run_forward_twice(time: Time) -> None:
    found = measured(LLAMA, time, recompute)
    expected = {"attn": 3 * 5e3, "norms": 3e5 + 6 * 4e5, "embed": 3, "head and loss": 60, "optimiser": 500}
    assert {part: found.seconds[part] for part in expected} == expected
    # The last layer to run, the one below, need not finish: recomputation stops when all is there that it needs.
    assert found.seconds["ffn"] in (3 * 3e4, 3 * 4e4)
    assert found.unwatched == sum(found.seconds.values())


def test_time_between_the_parts_is_the_rest(time: Time) -> None:
    def change(model: ModelOp) -> None:
        for op in model.modules():
            if isinstance(op, SublayerOp):
                spending(op, time, 0.25, 0.5)

    found = measured(LLAMA, time, change)
    assert found.seconds["rest"] == 6 * 0.75
    assert found.seconds["attn"] == 3 * 4e3

    def recomputed(model: ModelOp) -> None:
        change(model)
        recompute(model)

    # Recomputation breaks off inside the last operation of a block, which is then left all the same.
    assert measured(LLAMA, time, recomputed).seconds["rest"] == 6 * 0.75 + 3 * 0.25


def test_the_step_of_median_time_is_shown(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.build(0)
    optimizer = AdamW().build(model)
    lengths = iter([100, 1, 7, 2, 9, 3, 8])  # the first, then unwatched and watched in turn
    monkeypatch.setattr(optimizer, "step", lambda: setattr(time, "now", time.now + next(lengths)))
    found = profile_step(model, batch(), next_token, optimizer)
    assert found.unwatched == 2
    assert found.seconds["optimiser"] == 8


@pytest.mark.parametrize("change", [lambda model: None, recompute], ids=["kept", "recomputed"])
def test_activations_are_what_the_forward_pass_leaves_in_memory(change: Callable[[ModelOp], None]) -> None:
    """Beside torch's own account: bytes allocated minus bytes freed while the objective runs."""
    model, data = LLAMA.build(0), batch(rows=32)
    change(model)
    found = profile_step(model, data, next_token, AdamW().build(model), repeats=1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as account:
        loss = next_token(model, data)
    held = sum(event.self_cpu_memory_usage for event in account.key_averages())
    assert loss.sum.requires_grad
    assert sum(found.activations.values()) == pytest.approx(held, rel=0.02)


def test_recomputing_keeps_less_and_a_longer_batch_more() -> None:
    kept, recomputed = profiled().activations, profiled(change=recompute).activations
    assert sum(recomputed.values()) < sum(kept.values()) / 3
    assert {"attn", "ffn", "norms", "head and loss"} <= kept.keys()


def test_bytes_of_parameters_gradients_and_moments() -> None:
    found = profiled()
    size = 4 * LLAMA.parameters()
    assert (found.parameters, found.gradients) == (size, size)
    assert 2 * size < found.optimiser <= 2 * size + 4 * 100  # two moments, and a count of steps a parameter
    tied = profiled(LLAMA.replace(tied=True))
    assert tied.parameters == size - 4 * 96 * 48
    assert found.memory == {
        "parameters": size, "gradients": size, "optimiser state": found.optimiser,
        "activations": sum(found.activations.values()),
    }  # fmt: skip


def test_steps_leave_nothing_behind() -> None:
    spec = LLAMA.override("decoder.blocks.*.attn.op.dropout=0.5")
    model = spec.build(0).eval()
    optimizer = AdamW().build(model)
    for _ in range(2):
        next_token(model, batch()).sum.backward()
        optimizer.step()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    drawn = torch.get_rng_state()
    profile_step(model, batch(), next_token, optimizer, repeats=1)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is not None
        torch.testing.assert_close(p.grad, gradients[name], rtol=0, atol=0)
    after = optimizer.state_tensors()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def test_a_new_optimiser_is_new_afterwards() -> None:
    model = LLAMA.build(0)
    optimizer = AdamW().build(model)
    profile_step(model, batch(), next_token, optimizer, repeats=1)
    assert optimizer.state_tensors() == {}
    assert all(p.grad is None for p in model.parameters())


def test_what_fails_leaves_nothing_behind_either() -> None:
    model = LLAMA.build(0)
    before = [p.detach().clone() for p in model.parameters()]

    def fails(model: ModelOp, batch: Batch) -> Loss:
        with torch.no_grad():
            next(model.parameters()).zero_()
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        profile_step(model, batch(), fails, AdamW().build(model))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(UsageError, match="repeats=0"):
        profiled(repeats=0)


def test_an_encoder_decoder_is_watched_too() -> None:
    model = recipes.t5(**T5_TINY).build(0)
    data = batch(2, 8)

    def objective(model: ModelOp, batch: Batch) -> Loss:
        logits = model(batch.inputs % 16, source=batch.inputs % 16)
        return Loss(logits.square().sum(), batch.inputs.numel())

    found = profile_step(model, data, objective, AdamW().build(model), repeats=1)
    assert {"embed", "attn", "cross", "ffn", "norms"} <= found.seconds.keys()


def test_the_cache_of_a_70b_model_takes_what_its_shape_says() -> None:
    assert cache_at_70b() == {64: 343_597_383_680, 8: 42_949_672_960}
    assert cache_at_70b(rows=1, length=1)[8] == 320 * 1024
    assert cache_bytes(LLAMA, 2, 10, torch.float32) == 2 * 10 * 3 * 2 * (2 * 12) * 4
