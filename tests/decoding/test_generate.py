import doctest
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from sublayer.decoding import Generated, Sampling, generate, sample, stream
from sublayer.errors import SublayerError
from sublayer.state import State
from sublayer.text import Bytes, Policy, Pretrained
from tests.decoding.models import CONTEXT, ENCODER_DECODERS, SPECS, log_probability, next_logits, tiny

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30, 30], [3, 1, 4, 1, 5, 9, 2, 6]]
RICH = {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.4}


def text(row: Generated) -> str:
    assert row.text is not None
    return row.text


everywhere = pytest.mark.parametrize("name", SPECS)


# --- one row ---


@everywhere
def test_greedy_is_the_argmax_of_the_full_forward(name) -> None:
    model, ids = tiny(SPECS[name]), [5, 9, 2]
    (row,) = generate(model, ids, max_tokens=64, temperature=0.0)
    for _ in range(64):
        ids = [*ids, int(next_logits(model, ids).argmax())]
    assert row.ids == tuple(ids[3:])
    assert len(set(row.ids)) > 5  # no constant
    assert (row.prompt, row.finish, row.seed, row.text, row.logprobs) == ((5, 9, 2), "length", None, None, None)


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"temperature": 1.5, "seed": 3}, {"beams": 3}], ids=str)
def test_suppressed_tokens_are_not_chosen_and_logprobs_stay_the_models_own(way: dict) -> None:
    model = tiny(SPECS["llama"])
    (free,) = generate(model, [5, 9, 2], max_tokens=12, **way)
    first, never = free.ids[0], free.ids[3]
    (row,) = generate(model, [5, 9, 2], max_tokens=24, suppress=[never], suppress_first=[first], logprobs=0, **way)
    assert never not in row.ids
    assert row.ids[0] != first
    torch.testing.assert_close(torch.tensor(row.logprobs), log_probability(model, [5, 9, 2], row.ids).float())
    if way == {"temperature": 0.0}:
        ids = [5, 9, 2]
        for place in range(24):
            logits = next_logits(model, ids)
            logits[[never, first] if place == 0 else never] = -torch.inf
            ids.append(int(logits.argmax()))
        assert row.ids == tuple(ids[3:])


@everywhere
def test_each_step_of_decoding_has_the_logits_of_the_full_forward(name) -> None:
    # In fp32, over 64 steps (x-transformers#219, litgpt#2165, hf#25420): all V log-probabilities of each step.
    model = tiny(SPECS[name], torch.float32)
    (row,) = generate(model, [5, 9, 2], max_tokens=64, temperature=0.0, logprobs=1000)
    assert row.top_logprobs is not None
    for step, top in enumerate(row.top_logprobs):
        expected = next_logits(model, [5, 9, 2, *row.ids[:step]]).log_softmax(-1)
        ours = torch.tensor([top[token] for token in range(len(expected))])
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@everywhere
def test_sampling_is_sampling_from_the_full_forward(name) -> None:
    model, ids = tiny(SPECS[name]), [5, 9, 2]
    (row,) = generate(model, ids, max_tokens=20, seed=4, **RICH)
    for draw in range(20):
        # The draw of that number, with all of prompt and answer penalised.
        ids = [*ids, sample(next_logits(model, ids), Sampling(**RICH), seen=set(ids), seed=4, draw=draw)]
    assert row.ids == tuple(ids[3:])
    assert len(set(row.ids)) > 5


@everywhere
@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_a_prompt_read_in_chunks_is_the_prompt(name, chunk) -> None:
    model = tiny(SPECS[name])
    options = {"max_tokens": 8, "temperature": 0.0, "logprobs": 0}
    whole, parts = (generate(model, PROMPTS[2], chunk=size, **options)[0] for size in (512, chunk))
    assert whole.ids == parts.ids
    torch.testing.assert_close(torch.tensor(parts.logprobs), torch.tensor(whole.logprobs))


def test_logprobs_are_the_models_own_whatever_the_sampler_did() -> None:
    model = tiny(SPECS["gpt2"])
    (row,) = generate(model, [5, 9, 2], max_tokens=12, logprobs=3, seed=1, **RICH)
    expected = log_probability(model, row.prompt, row.ids)
    torch.testing.assert_close(torch.tensor(row.logprobs, dtype=torch.float64), expected)
    assert row.top_logprobs is not None
    for step, top in enumerate(row.top_logprobs):
        values, ids = next_logits(model, [*row.prompt, *row.ids[:step]]).log_softmax(-1).topk(3)
        assert list(top) == ids.tolist()
        torch.testing.assert_close(torch.tensor(list(top.values()), dtype=torch.float64), values)


# --- rows do not meet ---


@everywhere
@pytest.mark.parametrize("slots", [1, 2, 3, None])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, RICH, {"temperature": 0.0, "repetition_penalty": 1.8}])
def test_alone_equals_batched(name, slots, options) -> None:
    # text-generation-inference PR#1765: neighbours, and what a slot held before, change nothing.
    model = tiny(SPECS[name])
    free = generate(model, PROMPTS, seed=10, max_tokens=12, **options)
    stop_ids = [free[0].ids[4], free[1].ids[7], free[2].ids[0]]  # rows leave the batch at different times
    asked = {"max_tokens": 12, "logprobs": 2, "stop_ids": stop_ids, **options}
    together = generate(model, PROMPTS, seed=10, slots=slots, **asked)
    assert len({len(row.ids) for row in together}) > 2
    for index, row in enumerate(together):
        (alone,) = generate(model, PROMPTS[index], seed=10 + index, **asked)
        assert (alone.ids, alone.finish, alone.seed) == (row.ids, row.finish, row.seed)
        torch.testing.assert_close(torch.tensor(row.logprobs), torch.tensor(alone.logprobs))


def test_one_slot_gives_each_row_its_lone_result_to_the_last_bit() -> None:
    model = tiny(SPECS["llama"], torch.float32)
    asked: dict[str, Any] = {"max_tokens": 12, "logprobs": 0}
    together = generate(model, PROMPTS, seed=range(len(PROMPTS)), slots=1, **asked)
    assert together == [generate(model, prompt, seed=i, **asked)[0] for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_models_with_an_encoder_read_one_source_a_prompt(name) -> None:
    model = tiny(ENCODER_DECODERS[name])
    prompts, sources = [[0], [0, 7, 7], [0]], [[4, 5, 6], [9, 8, 7, 6, 5, 4, 3], [11]]
    rows = generate(model, prompts, sources=sources, max_tokens=10, temperature=0.0, logprobs=0, slots=2, chunk=2)
    for row, source in zip(rows, sources, strict=True):
        expected = log_probability(model, row.prompt, row.ids, source)
        torch.testing.assert_close(torch.tensor(row.logprobs, dtype=torch.float64), expected)
        ids = list(row.prompt)
        for token in row.ids:
            assert token == int(next_logits(model, ids, source).argmax())
            ids.append(token)
    assert len({row.ids for row in rows}) == 3


# --- seeds ---


def test_a_seed_gives_the_same_row_again() -> None:
    model = tiny(SPECS["llama"])
    assert generate(model, PROMPTS, seed=3, max_tokens=10) == generate(model, PROMPTS, seed=3, max_tokens=10)
    assert generate(model, [5], seed=3, max_tokens=10)[0].ids != generate(model, [5], seed=4, max_tokens=10)[0].ids


def test_one_seed_counts_up_from_row_to_row_and_rows_may_bring_their_own() -> None:
    model = tiny(SPECS["llama"])
    counted = generate(model, [[5], [5], [5]], seed=3, max_tokens=10)
    assert [row.seed for row in counted] == [3, 4, 5]
    assert len({row.ids for row in counted}) == 3
    given = generate(model, [[5], [5], [5]], seed=[5, 3, 5], max_tokens=10)
    assert [row.ids for row in given] == [counted[2].ids, counted[0].ids, counted[2].ids]


def test_without_a_seed_one_is_drawn_and_reported() -> None:
    model = tiny(SPECS["llama"])
    first, second = (generate(model, [5], max_tokens=10)[0] for _ in range(2))
    assert first.seed != second.seed
    assert generate(model, [5], max_tokens=10, seed=first.seed)[0].ids == first.ids


# --- ends ---


def test_a_stop_token_ends_the_row_and_is_its_last_id_but_not_in_its_text() -> None:
    model, tokenizer = tiny(SPECS["gpt2"]), Bytes()
    (free,) = generate(model, [5], tokenizer=tokenizer, max_tokens=20, temperature=0.0)
    place = next(i for i in range(3, 20) if free.ids[i] not in free.ids[:i])
    (row,) = generate(model, [5], tokenizer=tokenizer, max_tokens=20, temperature=0.0, stop_ids=free.ids[place])
    assert row.ids == free.ids[: place + 1]
    assert row.text == tokenizer.decode(row.ids[:-1])
    assert row.finish == "stop"


def test_the_tokenizers_end_of_text_stops_unless_told_otherwise() -> None:
    model = tiny(SPECS["gpt2"])
    (free,) = generate(model, [5], max_tokens=10, temperature=0.0)

    class Ending(Bytes):
        @property
        def eos(self) -> tuple[int, ...]:
            return (free.ids[4],)

    expected = free.ids.index(free.ids[4]) + 1
    asked = {"tokenizer": Ending(), "max_tokens": 10, "temperature": 0.0}
    assert generate(model, [5], **asked)[0].ids == free.ids[:expected]
    assert generate(model, [5], stop_ids=(), **asked)[0].ids == free.ids


def test_a_stop_string_ends_the_row_across_tokens_and_is_cut_off() -> None:
    model, tokenizer = tiny(SPECS["gpt2"]), Bytes()
    (free,) = generate(model, [5], tokenizer=tokenizer, max_tokens=40, temperature=0.0)
    stop = text(free)[6:9]  # one byte a token, below 97: three tokens
    place = text(free).index(stop)
    events = list(stream(model, [5], tokenizer=tokenizer, max_tokens=40, temperature=0.0, stop=["@@@@", stop]))
    assert "".join(event.text for event in events) == text(free)[:place]
    assert tuple(token for event in events for token in event.ids) == free.ids[: place + 3]
    assert [event.finish for event in events] == [None] * (place + 2) + ["stop_string"]


def test_a_stop_string_that_the_last_token_completes_is_named_before_the_length() -> None:
    model, tokenizer = tiny(SPECS["gpt2"]), Bytes()
    (free,) = generate(model, [5], tokenizer=tokenizer, max_tokens=20, temperature=0.0)
    place = next(i for i in range(3, 20) if free.ids[i] not in free.ids[:i])
    stop = text(free)[place]
    (row,) = generate(model, [5], tokenizer=tokenizer, max_tokens=place + 1, temperature=0.0, stop=stop)
    assert (row.finish, row.text, len(row.ids)) == ("stop_string", text(free)[:place], place + 1)


def test_learned_positions_and_the_length_of_a_slot_end_a_row() -> None:
    model = tiny(SPECS["gpt2"])
    full, long = ([i % 90 for i in range(size)] for size in (CONTEXT, CONTEXT - 4))
    rows = generate(model, [full, long, [1]], max_tokens=7, temperature=0.0)
    # The last token is answered and never read: a full context still gives one.
    assert [(len(row.ids), row.finish) for row in rows] == [(1, "length"), (5, "length"), (7, "length")]
    ids = list(long)
    for token in rows[1].ids:
        assert token == int(next_logits(model, ids).argmax())
        ids.append(token)
    rows = generate(tiny(SPECS["llama"]), [[1, 2, 3], [1]], max_tokens=7, temperature=0.0, length=5)
    assert [len(row.ids) for row in rows] == [3, 5]


# --- text and streams ---


def test_text_prompts_are_encoded_and_answers_decoded() -> None:
    model = tiny(SPECS["gpt2"])
    rows = generate(model, ["Why?", "So"], tokenizer=Bytes(), max_tokens=6, temperature=0.0)
    assert [row.prompt for row in rows] == [tuple(b"Why?"), tuple(b"So")]
    assert [row.ids for row in rows] == [
        row.ids for row in generate(model, [list(b"Why?"), list(b"So")], max_tokens=6, temperature=0.0)
    ]
    assert all(row.text == Bytes().decode(row.ids) for row in rows)
    assert generate(model, "Why?", tokenizer=Bytes(), max_tokens=6, temperature=0.0) == rows[:1]


def test_a_prompt_is_framed_but_not_ended_and_a_source_is_both() -> None:
    class Framing(Bytes):
        @property
        def eos(self) -> tuple[int, ...]:
            return (58,)

        def encode(self, text: str, *, framed: bool = False, specials: Policy = "text") -> list[int]:
            ids = super().encode(text, specials=specials)
            return [57, *ids, end] if framed else ids

    end = 59  # an end of the frame that is not one of texts

    model = tiny(SPECS["gpt2"])
    assert generate(model, "05", tokenizer=Framing(), max_tokens=1)[0].prompt == (57, *b"05")
    assert generate(model, "", tokenizer=Framing(), max_tokens=1)[0].prompt == (57,)
    end = 58
    assert generate(model, "05", tokenizer=Framing(), max_tokens=1)[0].prompt == (57, *b"05")
    assert generate(model, "", tokenizer=Framing(), max_tokens=1)[0].prompt == (57,)
    model, asked = (
        tiny(ENCODER_DECODERS["t5"]),
        {"tokenizer": Framing(), "max_tokens": 5, "temperature": 0.0, "logprobs": 0},
    )
    (text,), (ids,), (unframed,) = (
        generate(model, [[0]], sources=source, **asked) for source in ("05", [[57, *b"05", 58]], [[*b"05"]])
    )
    assert text == ids
    assert text.logprobs != unframed.logprobs


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"seed": 2}, {"beams": 2}], ids=str)
def test_a_text_goes_on_from_its_prompt(way: dict[str, Any]) -> None:
    """SentencePiece's decoders drop the space before the first word of a text; that of an answer is not the first."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"▁w{i}": i for i in range(97)}))
    library.decoder = tokenizers.decoders.Metaspace()
    model, prompt = tiny(SPECS["llama"]), [5, 9]
    (row,) = generate(model, prompt, tokenizer=Pretrained(library), max_tokens=6, **way)
    assert "w5 w9" + str(row.text) == library.decode([*prompt, *row.ids])


@pytest.mark.parametrize("as_given", [[5, 9], (5, 9), torch.tensor([5, 9]), torch.tensor([[5, 9]]), [[5, 9]]])
def test_prompts_may_be_lists_tuples_or_tensors(as_given) -> None:
    (row,) = tiny(SPECS["llama"]).generate(as_given, max_tokens=3, temperature=0.0)
    assert (row.prompt, len(row.ids)) == ((5, 9), 3)


def test_a_streams_events_are_the_result_in_pieces() -> None:
    model, asked = tiny(SPECS["llama"]), {"tokenizer": Bytes(), "max_tokens": 9, "logprobs": 2, "seed": 2, "slots": 2}
    events = list(stream(model, PROMPTS, **asked))
    for index, row in enumerate(generate(model, PROMPTS, **asked)):
        own = [event for event in events if event.row == index]
        assert [event.finish for event in own] == [None] * 8 + ["length"]
        assert tuple(token for event in own for token in event.ids) == row.ids
        assert "".join(event.text for event in own) == row.text
        assert tuple(value for event in own for value in event.logprobs) == row.logprobs
        assert tuple(top for event in own for top in event.top_logprobs) == row.top_logprobs
    assert [event.row for event in events[:3]] == [0, 1, 0]  # two slots filled, then both go on


def test_closing_a_stream_early_frees_the_state_and_the_mode(monkeypatch) -> None:
    # vllm#54947: generation goes on after the client left.
    made, allocate = [], State.allocate.__func__
    monkeypatch.setattr(
        State, "allocate", classmethod(lambda cls, *a, **k: made.append(allocate(cls, *a, **k)) or made[-1])
    )
    model = tiny(SPECS["llama"]).train()
    norm = model.get_submodule("decoder.norm").eval()
    events = stream(model, PROMPTS, max_tokens=50, seed=1)
    assert next(events).row == 0
    assert not model.training
    alive = weakref.ref(made.pop().store)
    events.close()
    gc.collect()
    assert alive() is None
    assert (model.training, norm.training) == (True, False)
    assert list(events) == []
    assert [len(row.ids) for row in events.generated()] == [1, 0, 0, 0, 0]
    assert {row.finish for row in events.generated()} == {None}


def test_generation_needs_no_evaluation_mode_and_leaves_no_trace() -> None:
    spec = SPECS["gpt2"].override("decoder.embed.dropout=0.5")
    model = tiny(spec).train()
    (row,) = generate(model, [5, 9, 2], max_tokens=8, temperature=0.0)
    assert row.ids == generate(model.eval(), [5, 9, 2], max_tokens=8, temperature=0.0)[0].ids
    model(torch.tensor([[5, 9, 2]])).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_logits_that_are_no_distribution_name_row_and_token() -> None:
    model = tiny(SPECS["gpt2"])
    with torch.no_grad():
        model.get_parameter("decoder.embed.position.weight")[4] = float("nan")  # the fifth position
    every: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 1}, {"logprobs": 0}]
    for options in every:
        with pytest.raises(SublayerError) as error:
            generate(model, [[1], [1, 2, 3]], max_tokens=5, **options)
        assert str(error.value) == "row 1, token 2: the model's logits are no distribution: their maximum is nan"
    with pytest.raises(SublayerError, match="row 0, token 0"):
        generate(model, [[1, 2, 3, 4, 5]], max_tokens=5, beams=2)


def test_the_examples_of_the_page_run() -> None:
    page = Path(__file__).parents[2] / "docs" / "generation.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert (failed, attempted > 0) == (0, True)
