"""Sublayer, Block, Trunk and Model: what they compute around their parts, with parts simple enough to follow."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from sublayer.errors import InputError, SpecError, StateError
from sublayer.nn.attention import Attention, AttentionOp
from sublayer.nn.embed import Embed
from sublayer.nn.feed_forward import FeedForward
from sublayer.nn.head import Head
from sublayer.nn.initialise import Init
from sublayer.nn.norm import RMSNorm
from sublayer.nn.op import Context, Op, Part
from sublayer.nn.position import Alibi, T5Buckets
from sublayer.nn.rope import Rope
from sublayer.nn.sublayer import Block, Model, ModelOp, Sublayer, Trunk, post_norm, pre_norm, repeat
from sublayer.recipes import gpt2
from sublayer.recipes.gpt2 import TINY as TINY_GPT2
from sublayer.state import State
from sublayer.step import Step
from tests.tiny import tiny

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


class Affine(Part):
    """a · x + b, and a times the condition where one is given: what a place may do."""

    a: float
    b: float = 0.0
    conditioned: bool = False

    def build(self, dim: int, context: Context) -> AffineOp:
        return AffineOp(self)


class AffineOp(Op):
    def __init__(self, spec: Affine) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        factor = step.condition if self.spec.conditioned else 1.0
        assert factor is not None
        return self.spec.a * factor * x + self.spec.b


class Losing(Part):
    """Passes x on, with an auxiliary loss."""

    loss: float
    name: str = "balance"

    def build(self, dim: int, context: Context) -> LosingOp:
        return LosingOp(self)


class LosingOp(Op):
    def __init__(self, spec: Losing) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {self.spec.name: torch.tensor(self.spec.loss)}


class Swap(Part):
    """Of two streams it changes one, or both."""

    both: bool = False

    def build(self, dim: int, context: Context) -> SwapOp:
        return SwapOp(self)


class SwapOp(Op):
    def __init__(self, spec: Swap) -> None:
        super().__init__()
        self.both = spec.both

    def forward(self, x: dict[str, Tensor], step: Step, state: State | None = None) -> dict[str, Tensor]:
        return {"a": x["b"] * 10} | ({"b": x["a"] * 10} if self.both else {})


def apply(part: Sublayer | Block, x: Any, step: Step | None = None) -> Any:
    return part.build(3, Context()).eval()(x, step or Step())


X = torch.tensor([[[1.0, 2.0, 3.0]]])


@pytest.mark.parametrize(
    ("sublayer", "wanted"),
    [
        (Sublayer("s", Affine(2, 1)), X + (2 * X + 1)),
        (Sublayer("s", Affine(2, 1), pre=Affine(3)), X + (2 * 3 * X + 1)),
        (Sublayer("s", Affine(2, 1), post=Affine(3)), X + 3 * (2 * X + 1)),
        (Sublayer("s", Affine(2, 1), after=Affine(3)), 3 * (X + 2 * X + 1)),
        (Sublayer("s", Affine(2, 1), scale=0.5), X + 0.5 * (2 * X + 1)),
        (Sublayer("s", Affine(2, 1), scale=0), X + 0),
        (Sublayer("s", Affine(2, 1), skip=0), 2 * X + 1),
        (Sublayer("s", Affine(2, 1), skip=4), 4 * X + (2 * X + 1)),
        (Sublayer("s", Affine(2, 1), Affine(3), Affine(5), Affine(7), 0.5, 4), 7 * (4 * X + 0.5 * 5 * (2 * 3 * X + 1))),
        (pre_norm("s", Affine(2, 1), Affine(3)), X + (2 * 3 * X + 1)),
        (post_norm("s", Affine(2, 1), Affine(3)), 3 * (X + 2 * X + 1)),
    ],
    ids=str,
)  # fmt: skip
def test_a_sublayer_is_its_formula(sublayer: Sublayer, wanted: Tensor) -> None:
    y, extras = apply(sublayer, X)
    assert_close(y, wanted)
    assert extras == {}


def test_every_place_reads_the_step() -> None:
    """DiT's adaptive norm and gate are parts in places, not a subclass."""
    place = Affine(1, conditioned=True)
    step = Step(condition=torch.tensor(2.0))
    y, _ = apply(Sublayer("s", Affine(1), pre=place, post=place, after=place, scale=place), X, step)
    assert_close(y, 2 * (X + 2 * 2 * 2 * X))


def test_streams_that_an_op_does_not_return_pass_unchanged() -> None:
    x = {"a": X, "b": X + 1, "c": X + 2}
    y, _ = apply(Sublayer("s", Swap(), post=Affine(2), scale=0.5, after=Affine(3)), x)
    assert_close(y["a"], 3 * (X + 0.5 * 2 * 10 * (X + 1)))
    assert y["b"] is x["b"]
    assert y["c"] is x["c"]
    assert list(y) == ["a", "b", "c"]
    both, _ = apply(Sublayer("s", Swap(both=True), scale=0.5), x)
    assert_close(both["a"], X + 5 * (X + 1))
    assert_close(both["b"], X + 1 + 5 * X)
    block = Block((Sublayer("s", Swap()), Sublayer("t", Swap())), parallel=True)
    assert_close(apply(block, x)[0]["a"], X + 20 * (X + 1))


def test_a_trunk_drops_out_what_its_norm_gives_in_training_only() -> None:
    model = gpt2(**TINY_GPT2).override("decoder.dropout=0.25").build()
    step, ids = Step(), torch.zeros(20, 50, dtype=torch.long)
    kept = model.eval()(ids, step, output="hidden")
    dropped = model.train()(ids, step, output="hidden")
    assert 0.2 < (dropped == 0).float().mean() < 0.3
    torch.testing.assert_close(dropped[dropped != 0], (kept / 0.75)[dropped != 0])


@torch.no_grad()
def test_the_stream_stays_within_float16() -> None:
    """Beyond 65504 is infinity, and its norm NaN; so branches and sums end there, in float16 alone."""
    sublayer = Sublayer("s", Affine(10.0), post=Affine(0.5, 0.5)).build(4, Context())
    x = torch.tensor([[[1.0, 20000.0, -60000.0, 10.0]]])
    assert sublayer(x.half(), Step())[0].tolist() == [[[6.5, 52736.0, -65504.0, 60.5]]]
    assert sublayer(x, Step())[0].tolist() == [[[6.5, 120000.5, -359999.5, 60.5]]]


def test_dropout_acts_after_post_in_training_only() -> None:
    x = torch.ones(1, 1, 2000)
    sublayer = Sublayer("s", Affine(1), post=Affine(1, 1), dropout=0.25).build(2000, Context())
    y, _ = sublayer(x, Step())
    assert_close(y.unique(), torch.tensor([1.0, 1 + 2 / 0.75]))
    assert abs((y == 1).double().mean().item() - 0.25) < 0.05
    assert_close(sublayer.eval()(x, Step())[0], x + 2)


def test_sublayers_run_in_order_or_in_parallel_on_one_input() -> None:
    one, two = Sublayer("one", Affine(2, 1), pre=Affine(3)), Sublayer("two", Affine(5), pre=Affine(7))
    between = X + 6 * X + 1
    assert_close(apply(Block((one, two)), X)[0], between + 35 * between)
    assert_close(apply(Block((one, two), parallel=True), X)[0], X + 6 * X + 1 + 35 * X)
    shared = Block((one.replace(pre=None), two.replace(pre=None)), parallel=True, pre=Affine(3))
    assert_close(apply(shared, X)[0], X + 6 * X + 1 + 15 * X)


def test_auxiliary_losses_are_summed_by_name_over_blocks() -> None:
    block = Block((Sublayer("s", Losing(0.5)), Sublayer("t", Losing(2.0, "z")), Sublayer("u", Losing(0.25))))
    model = Model(3, decoder=Trunk(Embed(9), repeat(block, 4))).build()
    logits, extras = model(IDS)
    assert logits.shape == (2, 4, 9)
    assert {name: value.item() for name, value in extras.items()} == {"balance": 3.0, "z": 8.0}


def test_a_trunk_is_its_front_end_its_blocks_then_its_norm() -> None:
    block = Block((Sublayer("s", Affine(2)),))
    model = Model(3, decoder=Trunk(Embed(9), repeat(block, 2), Affine(5, 1)), head=None).build()
    assert_close(model(IDS), 5 * (3 * 3 * model.get_parameter("decoder.embed.tokens.weight")[IDS]) + 1)


def test_layers_sit_under_stable_keys() -> None:
    """The names in every checkpoint of a tiny model: what changes here orphans files."""
    names = [name for name, _ in tiny(layers=1).empty(device="meta").named_parameters()]
    layer = "decoder.blocks.0"
    assert names == [
        "decoder.embed.tokens.weight",
        f"{layer}.attn.pre.weight",
        *(f"{layer}.attn.op.{name}.weight" for name in ("q", "k", "v", "out")),
        f"{layer}.ffn.pre.weight",
        *(f"{layer}.ffn.op.{name}.weight" for name in ("gate", "up", "down")),
        "decoder.norm.weight",
        "head.weight",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sublayer("two words", Affine(1)), "name='two words' must be an identifier"),
        (lambda: Sublayer("", Affine(1)), "must be an identifier"),
        (lambda: Sublayer("a.b", Affine(1)), "must be an identifier"),
        (lambda: Sublayer("s", Affine(1), dropout=1.0), "dropout is a share"),
        (lambda: Block((Sublayer("s", Affine(1)), Sublayer("s", Affine(2)))), "sublayers share a name: ['s', 's']"),
        (lambda: Block((Sublayer("s", Affine(1)),), pre=Affine(1)), "set parallel=True"),
        (lambda: Block((Sublayer("s", Affine(1), skip=2.0),), parallel=True), "no `after` and a plain skip"),
        (lambda: Block((Sublayer("s", Affine(1), after=Affine(1)),), parallel=True), "no `after` and a plain skip"),
        (lambda: Model(3), "a model needs an encoder or a decoder"),
        (lambda: Model(0, decoder=Trunk(Embed(3), ())), "dim must be above 0, got 0"),
        (lambda: Model(3, decoder=Trunk(Affine(1), ()), tied=True), "tied=True needs a token embedding"),
    ],
)
def test_what_describes_no_model_is_refused(make: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["pre", "spec", "names", "forward", "train", "parameters"])
def test_a_name_that_modules_use_themselves_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"a sublayer cannot be named '{name}'"):
        Block((Sublayer(name, Affine(1)),)).build(3, Context())


def test_logits_over_tokens_need_tokens() -> None:
    with pytest.raises(SpecError, match="Head: logits over tokens need a token embedding"):
        Model(3, decoder=Trunk(Affine(1), ())).build()


def test_a_spec_that_builds_nothing_says_so() -> None:
    with pytest.raises(SpecError, match="Part builds no module by itself"):
        Model(3, decoder=Trunk(Embed(3), (Block((Sublayer("s", Part()),)),))).build()


# --- the model ---


def drawn(**changes: Any) -> ModelOp:
    """Larger weights than new ones, so that every part tells in the answer."""
    model = tiny(**changes).build(dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


def test_hidden_vectors_then_the_head_are_the_logits() -> None:
    for tied in (False, True):
        model = drawn(tied=tied)
        hidden = model(IDS, output="hidden")
        assert hidden.shape == (2, 4, 32)
        assert torch.equal(model.logits(hidden), model(IDS))
        weight = model.get_parameter("decoder.embed.tokens.weight" if tied else "head.weight")
        assert_close(model(IDS), hidden @ weight.t(), rtol=0, atol=1e-12)


def test_a_tied_head_is_no_second_parameter_and_gets_both_gradients() -> None:
    model = drawn(tied=True)
    assert "head.weight" not in model.state_dict()
    table = model.get_parameter("decoder.embed.tokens.weight")
    model(IDS).sum().backward()
    assert table.grad is not None
    unused = [i for i in range(97) if i not in IDS]
    assert table.grad[unused].abs().min() > 0  # from the head alone


def test_a_head_scales_adds_its_bias_and_caps() -> None:
    spec = tiny().override('head={"spec": "Head", "bias": true, "scale": 0.5, "softcap": 2.0}')
    model = spec.build(dtype=torch.float64)
    head = model.head
    assert head is not None
    with torch.no_grad():
        head.get_parameter("bias").normal_()
        head.get_parameter("weight").normal_()
    hidden = model(IDS, output="hidden")
    plain = 0.5 * hidden @ head.get_parameter("weight").t() + head.get_parameter("bias")
    assert_close(model(IDS), 2 * torch.tanh(plain / 2), rtol=0, atol=1e-12)
    assert Head(softcap=2.0) == Head(False, 1.0, 2.0)


def test_a_model_without_a_head_answers_hidden_vectors() -> None:
    model = tiny().replace(head=None).build()
    assert model(IDS).shape == (2, 4, 32)
    assert torch.equal(model(IDS), model(IDS, output="hidden"))


def test_evaluation_is_repeatable_and_training_drops() -> None:
    model = gpt2(**TINY_GPT2).override("decoder.embed.dropout=0.3").build()
    model.train()
    assert not torch.equal(model(IDS), model(IDS))
    model.eval()
    assert torch.equal(model(IDS), model(IDS))


@torch.no_grad()
def test_positions_given_are_those_that_count() -> None:
    model = drawn()
    shifted = model(IDS, Step(pos=torch.arange(4)[None].expand(2, 4) + 100))
    assert_close(shifted, model(IDS), rtol=0, atol=1e-10)  # rotary positions are relative
    learned = gpt2(**TINY_GPT2).build(dtype=torch.float64).eval()
    plain = learned(IDS)
    assert_close(learned(IDS, Step(pos=torch.arange(4)[None].expand(2, 4))), plain)
    assert (learned(IDS, Step(pos=torch.arange(4)[None].expand(2, 4) + 1)) - plain).abs().max() > 1e-6


@torch.no_grad()
def test_layers_with_other_rotary_positions_do_not_share_tables() -> None:
    """Two thetas in one trunk: swapping the layers' specs changes the answer, and each equals its own model."""
    spec = tiny()
    mixed = spec.override("decoder.blocks.1.attn.op.position.theta=7")
    swapped = spec.override("decoder.blocks.0.attn.op.position.theta=7")
    one, two, three = (made.build(seed=1, dtype=torch.float64) for made in (spec, mixed, swapped))
    ops = [op for op in two.modules() if isinstance(op, AttentionOp)]
    assert [op.table for op in ops] == [0, 1]
    assert not torch.equal(one(IDS), two(IDS))
    assert not torch.equal(two(IDS), three(IDS))
    for op in ops:  # one table for both, by hand: what each layer reads is its own
        op.table = 0
    assert torch.equal(one(IDS), two(IDS))


@pytest.mark.parametrize("bias", [Alibi(4), T5Buckets(4, bidirectional=False)])
@torch.no_grad()
def test_a_trunks_bias_reaches_every_layer_packed_and_decoding(bias: Part) -> None:
    spec = tiny().override("decoder.blocks.*.attn.op.position=null")
    spec = spec.override(**{"decoder.bias": bias})
    model = spec.build(dtype=torch.float64)
    full = model(IDS)
    without = spec.override("decoder.bias=null").empty(dtype=torch.float64)
    without.load_state_dict({k: v for k, v in model.state_dict().items() if "decoder.bias" not in k})
    assert (full - without(IDS)).abs().max() > 1e-6
    state = State.allocate(model, 2, 4)
    assert_close(torch.cat([model(piece, None, state) for piece in IDS.split(1, 1)], 1), full, rtol=0, atol=1e-12)
    packed = model(IDS.view(1, 8), Step(segment=torch.tensor([[1] * 4 + [2] * 4])))
    assert_close(packed.view(2, 4, -1), full, rtol=0, atol=1e-12)


def encoder_decoder() -> Model:
    read = Block((pre_norm("attn", Attention(2, causal=False, position=Rope()), RMSNorm()),))
    write = Block((pre_norm("attn", Attention(2, position=Rope()), RMSNorm()),
                   pre_norm("cross", Attention(2, cross=True), RMSNorm()),
                   pre_norm("ffn", FeedForward(8), RMSNorm())))  # fmt: skip
    return Model(8, Trunk(Embed(9), (write,)), Trunk(Embed(11), repeat(read, 2)), init=Init(0.5))


@torch.no_grad()
def test_an_encoders_output_is_the_decoders_memory() -> None:
    model = encoder_decoder().build(dtype=torch.float64)
    source = torch.randint(11, (2, 5))
    memory, step = model.encode(source)
    assert memory.shape == (2, 5, 8)
    assert step.memory is memory
    assert torch.equal(model(IDS, step), model(IDS, None, None, source))
    assert model(IDS, None, None, source).shape == (2, 4, 9)
    assert (model(IDS, None, None, source.flip(1)) - model(IDS, None, None, source)).abs().max() > 1e-6
    with pytest.raises(InputError, match="the second argument is a Step, got a tensor; an encoder's input is source="):
        cast(Any, model)(source, IDS)


@torch.no_grad()
def test_an_encoder_alone_sees_both_ways_and_keeps_documents_apart() -> None:
    read = Block((pre_norm("attn", Attention(2, causal=False, position=Rope()), RMSNorm()),))
    model = Model(8, encoder=Trunk(Embed(9), (read,)), init=Init(0.5)).build(dtype=torch.float64)
    changed = IDS.clone()
    changed[:, -1] = 0
    assert ((model(IDS) - model(changed)).abs().amax(-1) > 1e-6).all()
    packed = model(IDS.view(1, 8), Step(segment=torch.tensor([[1] * 4 + [2] * 4])))
    assert_close(packed.view(2, 4, -1), model(IDS), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m(torch.tensor([[97]])), InputError, "token id 97 is outside the vocabulary of 97"),
        (lambda m: m(torch.tensor([[-1]])), InputError, "token id -1 is outside the vocabulary"),
        (lambda m: m(IDS, None, None, IDS), InputError, "the model has no encoder: leave source out"),
        (lambda m: m.encode(IDS), InputError, "the model has no encoder"),
        (lambda m: m(IDS, Step(segment=torch.ones(2, 3, dtype=torch.long))), InputError, "Step.segment is [2, 3]"),
        (lambda m: m(IDS, Step(segment=torch.ones(3, 4, dtype=torch.long))), InputError, "Step.segment is [3, 4]"),
        (lambda m: m(IDS, Step(pos=torch.ones(2, 5, dtype=torch.long))), InputError, "Step.pos is [2, 5]"),
        (lambda m: m(torch.tensor([1, 2, 3])), InputError, "[B, L]"),
        (lambda m: m(torch.ones(1, 2)), InputError, "token ids are int64 or int32, got torch.float32"),
        (lambda m: m(IDS[:, :0], None, State.allocate(m, 2, 8)), InputError, "no tokens: a call needs at least one"),
        (lambda m: m(IDS[:, :0], Step(segment=IDS[:, :0])), InputError, "no tokens"),
        (lambda m: m(torch.tensor([1, 2, 3]), None, State.allocate(m, 1, 8)), InputError, "[B, L]"),
        (lambda m: m(IDS, None, State.allocate(m, 2, 3)), StateError, "4 tokens do not fit a state of length 3"),
        (lambda m: m(IDS, None, State.allocate(m, 1, 8)), StateError, "a batch of 2 rows does not fit a state of 1"),
    ],
)
def test_inputs_that_cannot_be_meant_are_one_line(call: Any, error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        call(drawn())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_beyond_any_memory_are_one_line() -> None:
    with pytest.raises(SpecError) as caught:
        tiny().override("decoder.blocks.*.ffn.op.hidden=4611686018427387904").parameters()
    assert "\n" not in str(caught.value)


def test_on_meta_nothing_is_allocated_and_counts_are_known() -> None:
    spec = tiny()
    assert all(parameter.is_meta for parameter in spec.build(device="meta").parameters())
    assert spec.parameters() == sum(parameter.numel() for parameter in spec.build().parameters())
    assert tiny(tied=True).parameters() == spec.parameters() - 97 * 32
    assert isinstance(spec.empty(device="meta"), nn.Module)
