"""How new models begin: the spread of every parameter, for a seed the same, and never left to chance."""

import math

import pytest
import torch
from torch import Tensor, nn

from sublayer.errors import SpecError
from sublayer.nn.attention import Attention
from sublayer.nn.embed import Embed
from sublayer.nn.initialise import Init, initialise
from sublayer.nn.norm import LayerNorm, RMSNorm
from sublayer.nn.op import Context, Op, Part
from sublayer.nn.position import Shaw, T5Buckets
from sublayer.nn.sublayer import Block, Model, ModelOp, Trunk, pre_norm
from sublayer.recipes import gpt2, llama

LAYERS = 6
DEPTH = math.sqrt(2 * LAYERS)  # two sublayers of each layer write into the stream
GPT2 = gpt2(192, LAYERS, 4, vocab=1000, context=256, tied=False)
LLAMA = llama(192, LAYERS, 4, 2, 300, vocab=1000, qkv_bias=True, out_bias=True, ffn_bias=True)


def wanted(name: str, plain: float, position: float | None = None) -> float | None:
    """The standard deviation a parameter should have; None: it is constant."""
    if name.endswith("bias") or "pre.weight" in name or "norm.weight" in name:
        return None
    if "position" in name:
        return position
    return plain / DEPTH if name.endswith(("out.weight", "down.weight")) else plain


def assert_spread(values: Tensor, std: float, name: str) -> None:
    """Mean and spread within five standard errors of a normal sample, and its tails: 1 in 370 lies beyond three."""
    count = values.numel()
    assert abs(values.mean().item()) < 5 * std / math.sqrt(count), name
    assert abs(values.std().item() / std - 1) < 5 / math.sqrt(2 * count), name
    beyond = (values.abs() > 3 * std).double().mean().item()
    assert abs(beyond - 0.0027) < 5 * math.sqrt(0.0027 / count), name


@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_every_parameter_has_the_spread_its_recipe_says(spec: Model) -> None:
    model = spec.build(seed=3)
    seen = set()
    for name, parameter in model.named_parameters():
        std = wanted(name, 0.02, position=0.01)
        if std is None:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name
        else:
            assert_spread(parameter.detach().double(), std, name)
        seen.add(std)
    assert len(seen) == (4 if spec is GPT2 else 3)


def test_residual_writers_are_counted_through_the_whole_model() -> None:
    small = gpt2(64, 1, 2, vocab=9, context=8).build()
    large = gpt2(64, 9, 2, vocab=9, context=8).build()
    spread = [model.get_parameter("decoder.blocks.0.ffn.op.down.weight").std().item() for model in (small, large)]
    assert abs(spread[0] / spread[1] - 3) < 0.1
    same = GPT2.override("init.residual=same").build()
    assert_spread(same.get_parameter("decoder.blocks.3.attn.op.out.weight").detach().double(), 0.02, "out")


def test_fan_in_follows_the_width_of_the_inputs() -> None:
    model = LLAMA.override('init={"spec": "Init", "std": "fan_in", "embedding": 1.0}').build()
    for name, inputs in (("attn.op.q", 192), ("ffn.op.down", 300), ("ffn.op.up", 192)):
        weight = model.get_parameter(f"decoder.blocks.2.{name}.weight").detach().double()
        assert_spread(weight, inputs**-0.5, name)
    assert_spread(model.get_parameter("decoder.embed.tokens.weight").detach().double(), 1.0, "tokens")
    assert_spread(model.get_parameter("head.weight").detach().double(), 192**-0.5, "head")


def test_parameters_of_parts_that_are_not_matrices_begin_too() -> None:
    attention = Attention(4, sinks=True, position=Shaw(3), qk_norm=RMSNorm(plus_one=True))
    block = Block((pre_norm("attn", attention, LayerNorm()),))
    trunk = Trunk(Embed(50, types=9), (block,), RMSNorm(), bias=T5Buckets(4, False))
    model = Model(256, decoder=trunk, init=Init(0.5)).build()
    values = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    assert torch.equal(values["decoder.blocks.0.attn.op.sink_logits"], torch.zeros(4).double())
    assert torch.equal(values["decoder.blocks.0.attn.op.q_norm.weight"], torch.zeros(64).double())
    assert_spread(values["decoder.blocks.0.attn.op.shaw.key"], 0.5, "shaw")
    assert_spread(values["decoder.bias.weight"], 256**-0.5, "T5")
    assert_spread(values["decoder.embed.types.weight"], 0.5, "types")


def parameters(model: ModelOp) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_seed_is_one_model_whatever_the_dtype_and_what_was_drawn_before() -> None:
    first = parameters(LLAMA.build(seed=7))
    torch.rand(10)
    for dtype in (torch.float64, torch.bfloat16):
        for name, value in parameters(LLAMA.build(seed=7, dtype=dtype)).items():
            assert torch.equal(value, first[name].to(dtype)), name


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    LLAMA.build(seed=7)
    assert torch.equal(torch.rand(3), wanted)


def test_other_seeds_are_other_models_and_layers_differ() -> None:
    first, second = parameters(LLAMA.build(seed=1)), parameters(LLAMA.build(seed=2))
    matrices = [name for name, value in first.items() if value.dim() == 2]
    assert not any(torch.equal(first[name], second[name]) for name in matrices)
    drawn = {tuple(first[name].flatten()[:4].tolist()) for name in matrices}
    assert len(drawn) == len(matrices)


class Forgetful(Part):
    kind: int

    def build(self, dim: int, context: Context) -> nn.Module:
        return (ForgetfulOp, ForgetfulModule)[self.kind](dim)


class ForgetfulOp(Op):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(dim))


class ForgetfulModule(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(dim))


@pytest.mark.parametrize("kind", [0, 1])
def test_a_parameter_that_nothing_sets_is_refused(kind: int) -> None:
    """An op that forgets to override `initialise`, and a module that has none."""
    block = Block((pre_norm("mix", Forgetful(kind), RMSNorm()),))
    with pytest.raises(SpecError, match=r"decoder.blocks.0.mix.op.gain: nothing says how this parameter of Forgetful"):
        Model(4, decoder=Trunk(Embed(3), (block,))).build()


def test_what_was_there_before_does_not_shine_through() -> None:
    model = LLAMA.build(seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9)
    initialise(model, LLAMA.init, 1)
    for name, value in parameters(LLAMA.build(seed=1)).items():
        assert torch.equal(value, model.get_parameter(name)), name


@pytest.mark.parametrize(
    "values", [{"std": 0.0}, {"std": -1.0}, {"embedding": 0.0}, {"position": -0.1}, {"std": "fan_out"}]
)
def test_a_spread_that_cannot_be_is_refused(values: dict) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(values))}"):
        Init(**values)


def test_torchs_own_matrices() -> None:
    """Uniform within one over the root of the input width; residual outputs divided as ever, tables at 0.02."""
    spec = gpt2(64, 2, 2, vocab=1000).override("init.std=torch")
    found = dict(spec.build().named_parameters())
    up, down = found["decoder.blocks.0.ffn.op.up.weight"], found["decoder.blocks.0.ffn.op.down.weight"]
    assert 0.999 * 64**-0.5 < up.abs().max() <= 64**-0.5
    assert up.std().item() == pytest.approx((3 * 64) ** -0.5, rel=0.02)
    assert 0.999 * (256 * 4) ** -0.5 < down.abs().max() <= (256 * 4) ** -0.5
    assert found["decoder.embed.tokens.weight"].std().item() == pytest.approx(0.02, rel=0.02)
