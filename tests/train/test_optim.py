"""Optimisers: kinds of parameters, both updates against formulas in fp64, states that go on to the last bit."""

import math
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import sublayer
from sublayer.errors import InputError, SpecError, WeightsError
from sublayer.nn.attention import Attention
from sublayer.nn.embed import Embed
from sublayer.nn.feed_forward import FeedForward
from sublayer.nn.norm import LayerNorm
from sublayer.nn.op import Op
from sublayer.nn.position import Learned, Shaw, T5Buckets
from sublayer.nn.sublayer import Block, Model, Trunk, post_norm, pre_norm
from sublayer.train.optim import AdamW, Muon, Optimizer, clip, kinds

BOTH = [AdamW(rate=0.01), Muon(rate=0.01)]


def everything(tied: bool = False) -> Model:
    """A model with every part that holds parameters; no name tells a norm from a matrix."""
    attention = Attention(2, position=Shaw(3), qk_norm=LayerNorm(), sinks=True, bias=True)
    block = Block((pre_norm("weight", attention, LayerNorm()), post_norm("bias", FeedForward(24), LayerNorm())))
    embed = Embed(11, position=Learned(16), types=2, norm=LayerNorm())
    return Model(16, decoder=Trunk(embed, (block,), LayerNorm(), T5Buckets(2, False, 8, 16)), tied=tied)


def gradients(model: nn.Module, seed: int) -> None:
    """The same for a seed whatever the model's history; one that is used by nobody has none."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


# --- kinds ---


def test_every_parameter_has_a_kind_by_what_it_is_and_not_by_its_name() -> None:
    model = everything().build()
    found = kinds(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    matrices = {name for name, kind in found.items() if kind == "matrix"}
    tables = {name for name, kind in found.items() if kind == "table"}
    block = "decoder.blocks.0"
    assert matrices == {
        *(f"{block}.weight.op.{name}.weight" for name in ("q", "k", "v", "out")),
        *(name for name, _ in model.named_parameters() if name.startswith(f"{block}.bias.op") and "weight" in name),
    }
    assert tables == {
        "decoder.embed.tokens.weight",
        "decoder.embed.types.weight",
        "decoder.embed.position.weight",
        "decoder.bias.weight",
        f"{block}.weight.op.shaw.key",
        f"{block}.weight.op.shaw.value",
    }
    assert [name for name, kind in found.items() if kind == "outer"] == ["head.weight"]
    vectors = [model.get_parameter(name) for name, kind in found.items() if kind == "vector"]
    assert {p.dim() for p in vectors} == {1}
    assert len(vectors) > 15


def test_a_tied_table_is_one_table() -> None:
    found = kinds(everything(tied=True).build())
    assert "head.weight" not in found
    assert found["decoder.embed.tokens.weight"] == "table"


def test_a_parameter_that_two_modules_share_is_listed_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    assert kinds(model) == {"0.weight": "table"}
    assert len(AdamW().build(model).parameters()) == 1


def test_what_an_op_holds_for_itself_decays_only_where_it_says_so() -> None:
    class Recurrence(Op):
        matrices = ("mix",)

        def __init__(self) -> None:
            super().__init__()
            self.mix, self.rates = nn.Parameter(torch.ones(3, 4, 4)), nn.Parameter(torch.ones(4, 4))

    assert kinds(Recurrence()) == {"mix": "matrix", "rates": "vector"}
    optimizer = Muon().build(nn.Sequential(Recurrence(), nn.Linear(4, 4)))  # stacks are not Muon's
    groups = {id(p): group["weight_decay"] for group in optimizer.groups for p in group["params"]}
    assert sorted(groups.values()) == [0.0, 0.0, 0.1, 0.1]


def test_a_front_end_that_projects_is_outer() -> None:
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.embed, model.decoder.mix = nn.Conv2d(3, 4, 2), nn.Linear(4, 4)
    assert kinds(model) == {
        "decoder.embed.weight": "outer",
        "decoder.embed.bias": "vector",
        "decoder.mix.weight": "matrix",
        "decoder.mix.bias": "vector",
    }


def decays(optimizer: Optimizer) -> dict[str, bool]:
    return {optimizer.names[id(p)]: g["weight_decay"] > 0 for g in optimizer.groups for p in g["params"]}


@pytest.mark.parametrize("spec", BOTH)
def test_matrices_decay_and_nothing_else_does(spec: Any) -> None:
    model = everything().build()
    found = kinds(model)
    assert decays(spec.build(model)) == {name: kind in ("matrix", "outer") for name, kind in found.items()}


def test_tables_decay_if_asked() -> None:
    model = everything().build()
    found = decays(AdamW(decay_tables=True).build(model))
    assert found == {name: kind != "vector" for name, kind in kinds(model).items()}
    found = decays(Muon(rest=AdamW(decay_tables=True)).build(model))
    assert found == {name: kind != "vector" for name, kind in kinds(model).items()}


def test_muon_takes_the_matrices_between_and_adamw_the_rest() -> None:
    model = everything().build()
    muon, rest = Muon().build(model).parts
    assert type(muon).__name__ == "_Muon"
    assert isinstance(rest, torch.optim.AdamW)
    taken = {id(p) for group in muon.param_groups for p in group["params"]}
    assert taken == {id(model.get_parameter(name)) for name, kind in kinds(model).items() if kind == "matrix"}


@pytest.mark.parametrize("spec", BOTH)
def test_frozen_parameters_are_left_out(spec: Any) -> None:
    model = everything().build()
    frozen = model.get_parameter("decoder.blocks.0.weight.op.q.weight").requires_grad_(False)
    optimizer = spec.build(model)
    assert id(frozen) not in {id(p) for p in optimizer.parameters()}
    assert len(optimizer.parameters()) == len(list(model.parameters())) - 1


@pytest.mark.parametrize("spec", BOTH)
def test_nothing_to_train_is_said(spec: Any) -> None:
    with pytest.raises(InputError, match="nothing to train"):
        spec.build(everything().build().requires_grad_(False))


def test_a_parameter_in_two_groups_or_in_none_is_refused() -> None:
    model = nn.Linear(2, 2)
    for lists in ([model.weight], [model.weight, model.bias, model.bias]):
        parts = [torch.optim.SGD([p], lr=1.0) for p in lists]
        with pytest.raises(InputError, match="exactly once"):
            Optimizer(model, parts)


# --- the updates ---


def test_adamw_against_its_formula() -> None:
    """Three steps in fp64: decay, both means, their correction, eps outside of the root."""
    spec = AdamW(rate=0.02, betas=(0.8, 0.9), eps=1e-3, decay=0.3)
    model = nn.Linear(3, 2).double()
    expected = [p.detach().clone() for p in model.parameters()]
    mean, square = [torch.zeros_like(p) for p in expected], [torch.zeros_like(p) for p in expected]
    optimizer = spec.build(model)
    for step, factor in enumerate((0.5, 1.0, 0.25), start=1):
        gradients(model, step)
        optimizer.set_rate(factor)
        optimizer.step()
        rate = 0.02 * factor
        for i, (p, now) in enumerate(zip(expected, model.parameters(), strict=True)):
            assert now.grad is not None
            p *= 1 - rate * (0.3 if p.dim() == 2 else 0)
            mean[i] = 0.8 * mean[i] + 0.2 * now.grad
            square[i] = 0.9 * square[i] + 0.1 * now.grad**2
            p -= rate * (mean[i] / (1 - 0.8**step)) / ((square[i] / (1 - 0.9**step)).sqrt() + 1e-3)
            torch.testing.assert_close(now.detach(), p, rtol=1e-12, atol=1e-14)


def iterated(x: Tensor) -> Tensor:
    """Five Newton–Schulz steps 3.4445 X − 4.7750 (X Xᵀ) X + 2.0315 (X Xᵀ)² X from X / ‖X‖."""
    x = x / x.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x


@pytest.mark.parametrize("shape", [(12, 12), (20, 8), (8, 20)])
@pytest.mark.parametrize("scale", ["adamw", "original"])
def test_muon_against_newton_and_schulz_in_fp64(shape: tuple[int, int], scale: Any) -> None:
    """Three steps: decay, the mean gradient with Nesterov's look ahead, the iteration and the size of its result."""
    model = nn.Linear(shape[1], shape[0], bias=False).double()
    p, mean = model.weight.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    optimizer = Muon(rate=0.1, momentum=0.8, decay=0.5, scale=scale).build(model)
    size = 0.2 * math.sqrt(max(shape)) if scale == "adamw" else math.sqrt(max(1, shape[0] / shape[1]))
    for step, factor in enumerate((0.5, 1.0, 0.25)):
        gradients(model, step)
        optimizer.set_rate(factor)
        optimizer.step()
        assert model.weight.grad is not None
        mean = 0.8 * mean + 0.2 * model.weight.grad
        update = iterated(0.8 * mean + 0.2 * model.weight.grad)
        p = p * (1 - 0.1 * factor * 0.5) - 0.1 * factor * size * update
        torch.testing.assert_close(model.weight.detach(), p, rtol=1e-10, atol=1e-12)


class Exact(TorchFunctionMode):
    """torch's own Muon iterates in bfloat16; here that cast keeps fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].clone() if func is Tensor.bfloat16 else func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("scale", "theirs"), [("adamw", "match_rms_adamw"), ("original", "original")])
def test_muon_is_that_of_torch(scale: Any, theirs: str) -> None:
    ours, other = (nn.Sequential(nn.Linear(6, 9, False), nn.Linear(9, 4, False)).double() for _ in range(2))
    other.load_state_dict(ours.state_dict())
    optimizer = Muon(rate=0.05, momentum=0.9, decay=0.2, scale=scale).build(ours)
    peer = torch.optim.Muon(other.parameters(), lr=0.05, momentum=0.9, weight_decay=0.2, adjust_lr_fn=theirs)
    for step in range(4):
        gradients(ours, step)
        gradients(other, step)
        optimizer.step()
        with Exact():
            peer.step()
    for p, q in zip(ours.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_a_gradient_of_zero_moves_nothing_but_the_decay() -> None:
    model = nn.Linear(3, 3, bias=False)
    before = model.weight.detach().clone()
    model.weight.grad = torch.zeros(3, 3)
    Muon(rate=0.1, decay=0.5).build(model).step()
    torch.testing.assert_close(model.weight.detach(), before * 0.95)


def test_an_update_of_muon_is_nearly_orthogonal() -> None:
    model = nn.Linear(16, 16, bias=False)
    before = model.weight.detach().clone()
    gradients(model, 0)
    Muon(rate=1.0, decay=0.0, scale="original").build(model).step()
    values = torch.linalg.svdvals(before - model.weight.detach())
    assert 0.3 < values.median() < 1.3
    assert values.max() < 1.3


@pytest.mark.parametrize("spec", BOTH)
def test_rates_are_shares_of_the_peaks(spec: Any) -> None:
    optimizer = (spec if isinstance(spec, AdamW) else spec.replace(rest=AdamW(rate=0.4))).build(everything().build())
    peaks = [group["lr"] for group in optimizer.groups]
    assert optimizer.rate == 0.01
    for factor in (0.5, 0.25, 1.0):  # of the peak, not of the last rate
        optimizer.set_rate(factor)
        assert [group["lr"] for group in optimizer.groups] == [factor * peak for peak in peaks]
    assert len(set(peaks)) == len(optimizer.parts)


def test_gradients_are_forgotten_and_parameters_without_one_stay() -> None:
    model = everything().build()
    optimizer = Muon().build(model)
    gradients(model, 0)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


# --- the state ---


@pytest.mark.parametrize("spec", BOTH)
def test_a_saved_state_goes_on_to_the_last_bit(spec: Any, tmp_path) -> None:
    """Through a file: five steps at once against two, a save, and three in new objects."""
    whole, first, second = (everything().build() for _ in range(3))
    skipped = "decoder.blocks.0.weight.op.v.weight"  # has no gradient until the last step

    def run(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            gradients(model, step)
            if step < 4:
                model.get_parameter(skipped).grad = None
            optimizer.set_rate(1 / (step + 1))
            optimizer.step()

    run(whole, spec.build(whole), range(5))
    optimizer = spec.build(first)
    assert optimizer.state_tensors() == {}
    run(first, optimizer, range(2))
    state = optimizer.state_tensors()
    assert not any(name.startswith(skipped) for name in state)
    save_file(state, tmp_path / "state.safetensors")
    second.load_state_dict(first.state_dict())
    again = spec.build(second)
    again.load_state_tensors(load_file(tmp_path / "state.safetensors"))
    assert again.state_tensors().keys() == state.keys()
    run(second, again, range(2, 5))
    for name, p in whole.named_parameters():
        assert torch.equal(p, second.get_parameter(name)), name
        assert not torch.equal(p, first.get_parameter(name)), name


def test_loading_replaces_and_copies() -> None:
    model = everything().build()
    optimizer = AdamW().build(model)
    gradients(model, 0)
    optimizer.step()
    kept = {name: value.clone() for name, value in optimizer.state_tensors().items()}
    given = {name: value.clone() for name, value in kept.items()}
    optimizer.step()
    optimizer.load_state_tensors(given)
    optimizer.step()
    assert all(torch.equal(given[name], kept[name]) for name in kept)
    assert int(optimizer.state_tensors()["head.weight#step"]) == 2
    optimizer.load_state_tensors({})
    assert optimizer.state_tensors() == {}


def test_a_state_that_does_not_fit_is_refused_before_anything_changes() -> None:
    model = everything().build()
    gradients(model, 0)
    optimizer, muon = AdamW().build(model), Muon().build(model)
    for each in (optimizer, muon):
        each.step()
    state = optimizer.state_tensors()
    before = {name: value.clone() for name, value in state.items()}
    first, last = list(state)[1], list(state)[-1]
    broken = [
        ({**state, "head.wieght#step": state[first]}, "'head.wieght' is no parameter that trains here (did you mean"),
        ({name: value for name, value in state.items() if name != last}, "this optimiser keeps"),
        ({**state, last: state[last][:-1]}, f"{last} is torch.float32 [7, 2], not torch.float32 [8, 2]"),
        ({**state, last: state[last].double()}, f"{last} is torch.float64 [8, 2], not torch.float32 [8, 2]"),
        (muon.state_tensors(), "has ['momentum_buffer'], this optimiser keeps ['exp_avg', 'exp_avg_sq', 'step']"),
    ]
    for tensors, message in broken:
        with pytest.raises(WeightsError, match=re.escape(message)):
            optimizer.load_state_tensors(tensors)
    after = optimizer.state_tensors()
    assert all(torch.equal(after[name], before[name]) for name in before)


# --- clipping ---


def test_clipping_takes_the_norm_over_all_parameters() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.tensor([0.0, 4.0])
    assert clip(model.parameters(), 10.0).item() == 5
    assert model.bias.grad.tolist() == [0, 4]
    assert clip(model.parameters(), 1.0).item() == 5
    assert model.weight.grad[0, 0].item() == pytest.approx(0.6, rel=1e-5)
    assert model.bias.grad[1].item() == pytest.approx(0.8, rel=1e-5)


def test_a_scale_comes_before_the_limit() -> None:
    """Gradients of a sum over 10 tokens: norm 50 is 5 a token, clipped to 1."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([30.0, 40.0])
    assert clip([parameter], scale=0.1).item() == pytest.approx(5)
    torch.testing.assert_close(parameter.grad, torch.tensor([3.0, 4.0]))
    parameter.grad = torch.tensor([30.0, 40.0])
    assert clip([parameter], 1.0, 0.1).item() == pytest.approx(5)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
    assert clip([parameter], 2.0, 3.0).item() == pytest.approx(3)  # a scale above 1 too
    torch.testing.assert_close(parameter.grad, torch.tensor([1.2, 1.6]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_seen(bad: float) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([1.0, bad]), torch.tensor([1.0])
    assert not clip(parameters, 1.0).isfinite()


def test_no_gradients_have_norm_0() -> None:
    assert clip([nn.Parameter(torch.zeros(2))], 1.0, 0.5).item() == 0


# --- the specs ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(rate=0.0), "rate must be above 0"),
        (lambda: AdamW(betas=(0.9, 1.0)), "betas are from 0 to below 1"),
        (lambda: AdamW(eps=-1.0), "eps must be at least 0"),
        (lambda: AdamW(decay=-0.1), "decay must be at least 0"),
        (lambda: Muon(rate=-1.0), "rate must be above 0"),
        (lambda: Muon(momentum=1.0), "momentum is from 0"),
        (lambda: Muon(decay=-0.1), "decay must be at least 0"),
        (lambda: Muon(scale="rms"), "Muon.scale"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_settings_that_train_nothing_are_refused(make, message) -> None:
    with pytest.raises(SpecError, match=message):
        make()


@pytest.mark.parametrize("spec", [AdamW(rate=0.01), Muon(rate=0.01, rest=AdamW(rate=0.01))])
def test_both_train_a_llama(spec: Any) -> None:
    model = sublayer.recipes.llama(16, 1, 2, 2, hidden=24, vocab=10).build()
    optimizer, ids = spec.build(model), torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        clip(optimizer.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2
    assert losses[-1] < 0.5
