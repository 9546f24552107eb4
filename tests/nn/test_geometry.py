"""What a trunk works out once for its layers: geometry that the caller gives is checked, used, and never lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sublayer.errors import InputError, SpecError, StateError
from sublayer.nn.attention import Attention
from sublayer.nn.embed import Embed
from sublayer.nn.feed_forward import FeedForward
from sublayer.nn.initialise import Init
from sublayer.nn.norm import RMSNorm
from sublayer.nn.position import Alibi, Sinusoidal
from sublayer.nn.recurrent import Recurrent
from sublayer.nn.rope import Rope
from sublayer.nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from sublayer.recipes import llama
from sublayer.state import State
from sublayer.step import Step

IDS = torch.arange(12).view(2, 6)


def translator(layers: int = 1, encoder_layers: int = 1) -> Model:
    norm = RMSNorm()
    read = Block((pre_norm("attn", Attention(2, causal=False), norm), pre_norm("ffn", FeedForward(24), norm)))
    write = Block((pre_norm("attn", Attention(2), norm), pre_norm("cross", Attention(2, cross=True), norm)))
    embed = Embed(16, position=Sinusoidal())
    encoder, decoder = Trunk(embed, repeat(read, encoder_layers), norm), Trunk(embed, repeat(write, layers), norm)
    return Model(16, decoder, encoder, init=Init("fan_in", residual="depth", embedding=1.0))


def decoder(**attention: Any) -> Any:
    block = Block((pre_norm("attn", Attention(2, **attention), RMSNorm()),))
    return Model(16, Trunk(Embed(16), (block,), bias=Alibi(2)), init=Init("fan_in", embedding=1.0)).build().double()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step(prefix=torch.tensor([1, 2, 3])), "Step.prefix is [3]"),
        (Step(segment=torch.ones(6, dtype=torch.long)), "Step.segment is [6]"),
        (Step(segment=torch.ones(2, 6)), "Step.segment holds whole numbers"),
        (Step(pos=torch.zeros(3, 6, dtype=torch.long)), "Step.pos is [3, 6]"),
        (Step(types=torch.zeros(2, 5, dtype=torch.long)), "Step.types is [2, 5]"),
        (Step(memory=torch.zeros(2, 3, 16)), "Step.memory: nothing in this model reads it"),
        (Step(memory_segment=torch.ones(2, 3)), "Step.memory_segment: nothing in this model reads it"),
        (Step(types=torch.zeros(2, 6, dtype=torch.long)), "Step.types: the model knows no token types"),
        (Step(mask=torch.ones(3, 1, 6, 6, dtype=torch.bool)), "Step.mask is [3, 1, 6, 6]"),
        (Step(bias=torch.zeros(2, 2, 5, 6)), "Step.bias is [2, 2, 5, 6]"),
    ],
)
def test_geometry_that_does_not_fit_the_inputs_is_one_line(step: Step, message: str) -> None:
    with pytest.raises(InputError) as caught:
        decoder()(IDS, step)
    assert message in str(caught.value)


def test_a_memory_that_does_not_fit_is_one_line() -> None:
    model = translator().build().double()
    with pytest.raises(InputError, match=r"Step.memory is \[2, 16\]"):
        model(IDS, Step(memory=torch.zeros(2, 16)))
    with pytest.raises(InputError, match=r"Step.memory_segment is \[2, 4\]"):
        model(IDS, Step(memory=torch.zeros(2, 3, 16), memory_segment=torch.ones(2, 4, dtype=torch.long)))


@pytest.mark.parametrize("name", ["prefix", "mask", "bias"])
def test_what_attention_alone_reads_is_refused_without_it(name: str) -> None:
    model = Model(16, Trunk(Embed(16), (Block((pre_norm("mixer", Recurrent("gru"), RMSNorm()),)),))).build()
    with pytest.raises(InputError, match=f"Step.{name}: nothing in this model reads it"):
        model(IDS, Step().replace(**{name: torch.zeros(2)}))


def test_a_score_bias_of_the_caller_is_added_to_the_trunks() -> None:
    model = decoder()
    bias = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    own = model.decoder.bias(torch.arange(6)[None], torch.arange(6)[None], torch.float64)
    model.decoder.bias = None
    expected = model(IDS, Step(bias=own + bias))
    model = decoder()
    torch.testing.assert_close(model(IDS, Step(bias=bias)), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(model(IDS), expected)


def test_a_prefix_has_to_lie_within_its_first_call() -> None:
    model = decoder()
    prefix = torch.tensor([5, 2])
    whole = model(IDS, Step(prefix=prefix))
    state = State.allocate(model, 2, 8)
    with pytest.raises(InputError, match="row 0: the prefix of 5 tokens has to lie within its first call"):
        model(IDS[:, :3], Step(prefix=prefix), state)
    state = State.allocate(model, 2, 8)
    parts = [model(IDS[:, :5], Step(prefix=prefix), state), model(IDS[:, 5:], Step(prefix=prefix), state)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    with pytest.raises(InputError, match="row 1: the prefix of 9"):
        model(IDS[:, :1], Step(prefix=torch.tensor([0, 9])), state)


def test_tokens_without_a_document_may_not_read_a_memory_of_several() -> None:
    model = translator().build()
    state = State.allocate(model, 1, 8, 4)
    packed = torch.tensor([[1, 1, 2, 2]])
    model(IDS[:1, :4], Step(segment=packed, memory_segment=packed), state, source=IDS[1:, :4])
    with pytest.raises(InputError, match="the memory holds several documents"):
        model(IDS[:1, 4:5], Step(), state)
    model(IDS[:1, 4:5], Step(segment=torch.tensor([[2]])), state)


@pytest.mark.parametrize("number", [1, 2])
def test_memory_without_documents_is_seen_by_all_also_from_the_state(number: int) -> None:
    model = translator().build().double()
    source = IDS[1:, :4]
    whole = model(IDS[:1], source=source)
    state = State.allocate(model, 1, 8, 4)
    first = model(IDS[:1, :3], Step(), state, source=source)
    rest = model(IDS[:1, 3:], Step(segment=torch.full((1, 3), number)), state)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, rtol=0, atol=1e-12)


def test_cross_attention_without_memory_is_one_line_also_with_a_state() -> None:
    model = translator().build()
    for state in (None, State.allocate(model, 2, 8, 4)):
        with pytest.raises(InputError, match="cross-attention needs Step.memory"):
            model(IDS, Step(), state)


def test_nan_in_padded_memory_reaches_nothing_also_from_the_state() -> None:
    model = translator().build()
    memory = torch.randn(2, 4, 16)
    padded = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1]])
    memory[padded == 0] = torch.nan
    step = Step(memory=memory, memory_segment=padded)
    state = State.allocate(model, 2, 8, 4)
    assert model(IDS[:, :3], step, state).isfinite().all()
    assert model(IDS[:, 3:], Step(), state).isfinite().all()


def test_nan_hidden_by_an_explicit_mask_reaches_nothing_with_a_state() -> None:
    model = decoder()
    with torch.no_grad():
        model.decoder.embed.tokens.weight[2] = torch.nan  # the third token of row 0
    visible = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    visible[..., 2] = False
    for state in (None, State.allocate(model, 1, 8)):
        y = model(IDS[:1], Step(mask=visible), state)
        assert y[:, [0, 1, 3, 4, 5]].isfinite().all()


def test_gradients_do_not_pile_up_from_call_to_call() -> None:
    model = decoder()
    state = State.allocate(model, 2, 8)
    for token in IDS.split(1, 1):
        model(token, Step(), state).sum().backward()  # a graph that reached back would have been freed
    assert not any(tensor.requires_grad for tensor in state.store.tensors.values())


def test_a_state_of_another_dtype_serves() -> None:
    model = llama(16, 2, 2, 1, hidden=24, vocab=16).build()
    state = State.allocate(model, 2, 8, dtype=torch.bfloat16)
    parts = torch.cat([model(part, state=state) for part in IDS.split([4, 1, 1], 1)], 1)
    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts, model(IDS), rtol=0, atol=2e-3)


def test_residual_outputs_start_by_the_depth_of_their_own_trunk() -> None:
    model: Any = translator(layers=2, encoder_layers=32).build()
    shallow = model.decoder.blocks["0"].attn.op.out.weight.std().item()
    deep = model.encoder.blocks["0"].attn.op.out.weight.std().item()
    assert shallow == pytest.approx(16**-0.5 / 4**0.5, rel=0.25)
    assert deep == pytest.approx(16**-0.5 / 64**0.5, rel=0.25)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(2, cross=True, position=Rope()), "cross-attention has no position"),
        (lambda: RMSNorm(-1.0), "eps must be at least 0"),
        (lambda: llama(16, 3, 2, 2, 24, 16, window=(4, None)), "gives 2 windows for 3 layers"),
    ],
)
def test_specs_that_mean_nothing_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def test_an_unknown_output_is_refused() -> None:
    with pytest.raises(InputError, match="output='logit'"):
        decoder()(IDS, output="logit")


def test_slots_are_whole_numbers() -> None:
    model = decoder()
    with pytest.raises(StateError, match="whole numbers"):
        model(IDS, Step(slots=torch.tensor([True, False])), State.allocate(model, 2, 8))
