from itertools import product
from typing import Any

import pytest
import torch

from sublayer.decoding import Hypothesis, generate
from sublayer.decoding.beam import penalty
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import llama
from sublayer.state import State
from sublayer.text import Bytes
from tests.case import rough
from tests.cases import CASES
from tests.decoding.models import ENCODER_DECODERS, SPECS, log_probability, next_logits, tiny

PROMPT = [5, 9, 2]
TOY = llama(16, 1, 2, 1, hidden=16, vocab=5)


def test_the_penalty_of_2016() -> None:
    # ((5 + L) / 6)^0.6 at L = 5, 10, 20
    assert [round(penalty(tokens, 0.6), 6) for tokens in (5, 10, 20)] == [1.358655, 1.732862, 2.354362]
    assert penalty(7, 0.0) == 1


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, -0.5])
def test_the_score_is_the_teacher_forced_log_probability(name, length_penalty) -> None:
    # hf#46612, #29730: for state space models too, whose whole state has to follow the beams.
    model = tiny(SPECS[name])
    (row,) = generate(
        model, PROMPT, beams=3, max_tokens=10, stop_ids=[4, 8, 16], length_penalty=length_penalty, logprobs=0
    )
    assert len(row.beams) == 3
    assert len({beam.ids for beam in row.beams}) == 3
    for beam in row.beams:
        expected = log_probability(model, PROMPT, beam.ids)
        torch.testing.assert_close(torch.tensor(beam.logprobs, dtype=torch.float64), expected)
        torch.testing.assert_close(beam.logprob, float(expected.sum()))
        torch.testing.assert_close(beam.score, beam.logprob / ((5 + len(beam.ids)) / 6) ** length_penalty)
    assert [beam.score for beam in row.beams] == sorted((beam.score for beam in row.beams), reverse=True)
    best = row.beams[0]
    assert (row.ids, row.logprobs, row.finish, row.seed) == (best.ids, best.logprobs, best.finish, None)


@pytest.mark.parametrize("name", ["llama", "recurrent"])
def test_states_that_do_not_follow_their_beams_are_noticed(name, monkeypatch) -> None:
    monkeypatch.setattr(
        State, "reorder", lambda self, slots, memory=True: self.fork(0, 1) if len(set(slots)) < 2 else None
    )
    model = tiny(SPECS[name])
    (row,) = generate(model, PROMPT, beams=3, max_tokens=10)
    expected = log_probability(model, PROMPT, row.ids).sum()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(row.beams[0].logprob, float(expected))


def everything(model: ModelOp, prompt: list[int], room: int, stop: int) -> list[tuple[int, ...]]:
    """All continuations that end with the stop token, or have `room` tokens."""
    found = []
    for tokens in range(1, room + 1):
        for ids in product(range(5), repeat=tokens):
            if stop not in ids[:-1] and (ids[-1] == stop or tokens == room):
                found.append(ids)
    return found


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.5, -1.0])
def test_with_a_beam_for_every_prefix_the_search_is_exact(length_penalty) -> None:
    model, room, stop = tiny(TOY, sharpness=20.0), 4, 3
    ranked = sorted(
        (-float(log_probability(model, [1, 2], ids).sum()) / penalty(len(ids), length_penalty), ids)
        for ids in everything(model, [1, 2], room, stop)
    )
    (row,) = generate(model, [1, 2], beams=5**room, max_tokens=room, stop_ids=[stop], length_penalty=length_penalty)
    assert len(row.beams) == len(ranked) == 1 + 4 + 16 + 64 * 5
    assert [beam.ids for beam in row.beams] == [ids for _, ids in ranked]
    torch.testing.assert_close([beam.score for beam in row.beams], [-score for score, _ in ranked])


def searched(
    model: ModelOp, prompt: list[int], beams: int, room: int, stop: int, length_penalty: float
) -> list[tuple[tuple[int, ...], float]]:
    """The same search, from whole forward passes and without stopping early."""
    live, finished = [((), 0.0)], []
    for _ in range(room):
        grown = []
        for ids, total in live:
            for token, value in enumerate(next_logits(model, [*prompt, *ids]).log_softmax(0).tolist()):
                grown.append(((*ids, token), total + value))
        grown.sort(key=lambda beam: -beam[1])
        finished += [beam for beam in grown[:beams] if beam[0][-1] == stop]
        live = [beam for beam in grown if beam[0][-1] != stop][:beams]
    finished += live
    scored = [(ids, total / penalty(len(ids), length_penalty)) for ids, total in finished]
    return sorted(scored, key=lambda beam: -beam[1])[:beams]


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0, -1.0])
@pytest.mark.parametrize("beams", [2, 3])
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_stopping_early_changes_no_result(beams, stop, length_penalty) -> None:
    for sharpness, prompt in product((20.0, 80.0), ([1, 2], [3], [4])):
        model = tiny(TOY, sharpness=sharpness)
        expected = searched(model, prompt, beams, 12, stop, length_penalty)
        (row,) = generate(model, prompt, beams=beams, max_tokens=12, stop_ids=[stop], length_penalty=length_penalty)
        assert [beam.ids for beam in row.beams] == [ids for ids, _ in expected]
        torch.testing.assert_close([beam.score for beam in row.beams], [score for _, score in expected])


def test_the_search_does_stop_early(monkeypatch) -> None:
    model, calls, forward = tiny(TOY, sharpness=20.0), [], ModelOp.forward
    monkeypatch.setattr(ModelOp, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    lengths = [len(generate(model, [1, 2], beams=2, max_tokens=60, stop_ids=[stop])[0].ids) for stop in range(5)]
    assert min(lengths) < 10
    assert len(calls) < 5 * 60


STOPS = list(range(0, 60, 5))


@pytest.mark.parametrize("name", ["llama", "recurrent"])
@pytest.mark.parametrize("slots", [1, 2, None])
def test_every_prompt_is_searched_as_if_alone(name, slots) -> None:
    model, prompts = tiny(SPECS[name]), [[5, 9, 2], [7], [1, 2, 3, 4], [8, 8, 1]]
    rows = generate(model, prompts, beams=3, max_tokens=6, stop_ids=STOPS, slots=slots)
    alone = [generate(model, prompt, beams=3, max_tokens=6, stop_ids=STOPS)[0] for prompt in prompts]
    assert len({len(row.ids) for row in rows}) > 1  # searches end at different times
    if slots == 1:
        assert rows == alone
    for row, other in zip(rows, alone, strict=True):
        assert [beam.ids for beam in row.beams] == [beam.ids for beam in other.beams]
        torch.testing.assert_close([beam.score for beam in row.beams], [beam.score for beam in other.beams])


SOURCES = [[4, 5, 6], [9, 8, 7, 6, 5], [1], [3, 3, 3, 3, 3, 3, 3], [2, 4], [11, 12, 13]]


@pytest.mark.parametrize("name", ENCODER_DECODERS)
@pytest.mark.parametrize("slots", [2, None])
def test_many_sources_are_searched_together(name, slots) -> None:
    """Each score is the teacher-forced log-probability given the row's own source, unpadded, over the penalty."""
    model = tiny(ENCODER_DECODERS[name])
    options = {"beams": 4, "max_tokens": 8, "stop_ids": [7, 19, 30], "length_penalty": 0.6}
    rows = generate(model, [[0]] * len(SOURCES), sources=SOURCES, slots=slots, **options)
    assert len({row.ids for row in rows}) > 2
    for row, source in zip(rows, SOURCES, strict=True):
        (alone,) = generate(model, [0], sources=[source], **options)
        assert [beam.ids for beam in row.beams] == [beam.ids for beam in alone.beams]
        for beam in row.beams:
            expected = float(log_probability(model, [0], beam.ids, source).sum())
            torch.testing.assert_close(beam.logprob, expected)
            torch.testing.assert_close(beam.score, expected / ((5 + len(beam.ids)) / 6) ** 0.6)


def test_many_sources_are_one_batch(monkeypatch) -> None:
    """Six sources and four beams take about as many calls of the model as one source and four beams."""
    model, calls, forward = tiny(ENCODER_DECODERS["t5"]), [], ModelOp.forward
    monkeypatch.setattr(ModelOp, "forward", lambda *a, **k: calls.append(len(a[1])) or forward(*a, **k))
    generate(model, [[0]] * 6, sources=SOURCES, beams=4, max_tokens=8)
    assert calls == [6] + [24] * 7


def test_memory_moves_only_where_it_changes(monkeypatch) -> None:
    moved, reorder = [], State.reorder
    monkeypatch.setattr(State, "reorder", lambda *a, memory: moved.append(memory) or reorder(*a, memory=memory))
    generate(tiny(ENCODER_DECODERS["t5"]), [[0]] * 6, sources=SOURCES, beams=4, max_tokens=8)
    assert moved[0]
    assert not any(moved[1:])


# Where positions stretch with the document's own length, no step's logits are those of the whole: nothing to compare.
DECODERS = [
    name for name, case in CASES.items() if (case.language_model or case.translates) and not case.length_dependent
]


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_can_be_searched(name) -> None:
    """Whatever a decoder keeps follows its beams (hf#46612: keys and values alone did): the score is the teacher-forced
    log-probability."""
    case = CASES[name]
    model, source = rough(case), case.documents(case, [1], 3)[0].source
    sources: Any = None if source is None else [source if source.is_floating_point() else source.tolist()]
    (row,) = generate(model, [PROMPT], sources=sources, beams=3, max_tokens=5, logprobs=0)
    assert len({beam.ids for beam in row.beams}) == 3
    for beam in row.beams:
        expected = log_probability(model, PROMPT, beam.ids, source)
        torch.testing.assert_close(torch.tensor(beam.logprobs, dtype=torch.float64), expected)


def test_text_and_events_of_a_search() -> None:
    model = tiny(SPECS["gpt2"])
    (free,) = generate(model, [65], beams=2, max_tokens=6)
    (row,) = generate(model, "A", tokenizer=Bytes(), beams=2, max_tokens=6, stop_ids=[free.ids[-1]])
    best: Hypothesis = row.beams[0]
    assert row.finish == best.finish == "stop"
    assert row.text == Bytes().decode(best.ids[:-1])


def test_ids_beyond_the_tokenizer_read_as_nothing() -> None:
    model = tiny(llama(16, 1, 2, 1, hidden=16, vocab=300))
    (row,) = generate(model, [65], tokenizer=Bytes(), beams=2, max_tokens=9)
    assert max(row.ids) > 255
    assert row.text == Bytes().decode([token for token in row.ids if token < 256])


def test_a_vocabulary_smaller_than_the_beams() -> None:
    model = tiny(TOY)
    (row,) = generate(model, [1], beams=9, max_tokens=1)
    assert sorted(beam.ids for beam in row.beams) == [(0,), (1,), (2,), (3,), (4,)]
