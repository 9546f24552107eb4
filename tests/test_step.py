"""Step: where documents start, how their positions count, how long they are — against the same in plain Python."""

from itertools import groupby

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from sublayer.step import Place, Shared, Step, document_lengths, document_positions, document_starts

# Rows as a packer makes them: runs of documents and of padding. A number may come again after another document.
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5).map(
    lambda runs: [number for number, count in runs for _ in range(count)]
)


def plain_starts(row: list[int]) -> list[bool]:
    found, last = [], None
    for number in row:
        found.append(number != 0 and last is not None and number != last)
        last = number or last
    return found


def plain_positions(row: list[int], first: int) -> list[int | None]:
    """None for padding, whose position says nothing."""
    found, place = [], first
    for number, starts in zip(row, plain_starts(row), strict=True):
        place = 0 if starts else place
        found.append(place if number else None)
        place += number != 0
    return found


@given(ROWS)
def test_a_document_starts_where_the_number_changes_padding_apart(row: list[int]) -> None:
    assert document_starts(torch.tensor([row]))[0].tolist() == plain_starts(row)


@given(ROWS, st.integers(0, 9))
def test_positions_count_real_tokens_from_the_start_of_their_document(row: list[int], first: int) -> None:
    segment = torch.tensor([row])
    found = document_positions(segment, document_starts(segment), torch.tensor([[first]]))[0].tolist()
    for place, expected in zip(found, plain_positions(row, first), strict=True):
        assert place >= 0
        assert expected is None or place == expected


@given(st.lists(ROWS, min_size=2, max_size=3))
def test_rows_do_not_know_each_other(rows: list[list[int]]) -> None:
    length = max(map(len, rows))
    segment = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    starts = document_starts(segment)
    positions = document_positions(segment, starts)
    for i, row in enumerate(rows):
        alone = torch.tensor([row])
        assert torch.equal(starts[i : i + 1, : len(row)], document_starts(alone))
        assert torch.equal(positions[i : i + 1, : len(row)], document_positions(alone, document_starts(alone)))


@given(ROWS)
def test_lengths_are_one_more_than_the_largest_position_of_the_document(row: list[int]) -> None:
    segment = torch.tensor([row])
    starts = document_starts(segment)
    document = torch.where(segment != 0, 1 + starts.long().cumsum(1), 0)
    pos = document_positions(segment, starts)
    queries = document.flip(1)
    lengths, query_lengths = document_lengths(pos, document, queries)
    held = [(number, place) for number, place in zip(document[0].tolist(), pos[0].tolist(), strict=True) if number]
    longest = {number: max(place for _, place in group) + 1 for number, group in groupby(held, lambda pair: pair[0])}
    for number, length in zip(document[0].tolist(), lengths[0].tolist(), strict=True):
        assert number == 0 or length == longest[number]
    for number, length in zip(queries[0].tolist(), query_lengths[0].tolist(), strict=True):
        assert number == 0 or length == longest[number]


def test_segments_may_be_of_any_integer_dtype() -> None:
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
        segment = torch.tensor([[0, 1, 1, 2]], dtype=dtype)
        starts = document_starts(segment)
        assert starts.tolist() == [[False, False, False, True]]
        assert document_positions(segment, starts)[0, 1:].tolist() == [0, 1, 0]


def test_a_step_is_frozen_and_a_copy_changes_only_what_is_named() -> None:
    pos, slots = torch.arange(3)[None], torch.arange(1)
    step = Step(pos=pos, slots=slots)
    other = step.replace(pos=pos + 1)
    assert step.pos is pos
    assert other.slots is slots
    assert other.pos is not pos


def test_steps_are_pytrees_of_tensors() -> None:
    """Compiled calls take them apart: only tensors may change from one call to the next."""
    place = Place(slice(0, 1), torch.zeros(1, 3), None, 3, 0, 3, 0)
    shared = Shared(place=place, starts=torch.zeros(1, 3), rotary=((torch.ones(1), torch.ones(2)),))
    step = Step(pos=torch.arange(3)[None], shared=shared)
    leaves, how = pytree.tree_flatten(step)
    assert sum(isinstance(leaf, Tensor) for leaf in leaves) == 5
    again = pytree.tree_unflatten([leaf + 1 if isinstance(leaf, Tensor) else leaf for leaf in leaves], how)
    assert again.pos.tolist() == [[1, 2, 3]]
    assert again.shared.place.used == 3
    assert again.shared.rotary[0][1].tolist() == [2, 2]
    assert again.memory is None
