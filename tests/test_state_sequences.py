"""Whatever is done to a state's slots, each holds exactly its own tokens.

The model under the state is what a user sees, so random sequences of operations compare its answers with those of full
forward passes over plain lists of tokens.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from torch.testing import assert_close

from sublayer.errors import InputError, StateError
from sublayer.state import PerToken, State
from sublayer.step import Step
from tests.states import CAPACITY, SLOTS, Token, V, assert_same, attention_only, copied, tensors, with_recurrence


class AnySequence(RuleBasedStateMachine):
    """Operations in random order against S lists of tokens. What a list cannot do must be refused."""

    build: Any = staticmethod(attention_only)
    recurrent = False

    @initialize()
    def start(self) -> None:
        torch.manual_seed(0)
        self.model = self.build()
        self.state = State.allocate(self.model, SLOTS, CAPACITY)
        self.slots: list[list[Token]] = [[] for _ in range(SLOTS)]
        self.snapshots: list[tuple[list[int], list[list[Token]], Any]] = []
        self.bytes = self.state.bytes()

    def expected(self, tokens: list[Token]) -> Tensor:
        """[L, V] of one full forward pass."""
        ids, documents = (torch.tensor(row)[None] for row in zip(*tokens, strict=True))
        return self.model(ids, Step(segment=documents))[0]

    def refused(self, call: Any, *arguments: Any) -> None:
        before = copied(self.state)
        with pytest.raises(StateError) as caught:
            call(*arguments)
        assert "\n" not in str(caught.value)
        assert_same(before, copied(self.state))

    @rule(
        rows=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True),
        length=st.integers(1, 5),
        seed=st.integers(0, 999),
        plain=st.booleans(),
    )
    @torch.no_grad()
    def append(self, rows: list[int], length: int, seed: int, plain: bool) -> None:
        """New tokens for some slots in any order; unless plain, with padding on either side and a second document."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(V, (len(rows), length), generator=generator)
        segment = torch.ones_like(ids)
        if not plain:
            a, b, c = torch.randint(length + 1, (3, len(rows), 1), generator=generator).sort(0).values
            place = torch.arange(length)
            segment = torch.where((place < a) | (place >= c), 0, torch.where(place < b, 7, 3))
        step = Step(slots=torch.tensor(rows), segment=None if plain else segment)
        longer = [list(self.slots[row]) for row in rows]
        for row, tokens in enumerate(longer):
            number, previous = (tokens[-1][1] if tokens else 1), None
            for token, kind in zip(ids[row].tolist(), segment[row].tolist(), strict=True):
                if kind:
                    number += previous not in (None, kind)
                    previous = kind
                    tokens.append((token, number))
        if max(map(len, longer)) > CAPACITY:
            return self.refused(self.model, ids, step, self.state)
        logits = self.model(ids, step, self.state)
        for row, (slot, tokens) in enumerate(zip(rows, longer, strict=True)):
            new = len(tokens) - len(self.slots[slot])
            if new:
                assert_close(logits[row][segment[row] != 0], self.expected(tokens)[-new:], rtol=0, atol=1e-12)
            self.slots[slot] = tokens
        return None

    @rule(row=st.integers(0, SLOTS - 1), length=st.integers(1, 4))
    @torch.no_grad()
    def fail(self, row: int, length: int) -> None:
        """A call that ends in an error half-way counts for nothing."""
        if len(self.slots[row]) + length <= CAPACITY:
            ids = torch.full((1, length), V)
            with pytest.raises(InputError, match=f"token id {V} is outside the vocabulary of {V}"):
                self.model(ids, Step(slots=torch.tensor([row])), self.state)

    @rule(src=st.integers(0, SLOTS - 1), dst=st.integers(0, SLOTS - 1), share=st.floats(0, 1), whole=st.booleans())
    def fork(self, src: int, dst: int, share: float, whole: bool) -> None:
        length = len(self.slots[src]) if whole else round(share * len(self.slots[src]))
        if self.recurrent and length < len(self.slots[src]):
            return self.refused(self.state.fork, src, dst, length)
        self.state.fork(src, dst, None if whole else length)
        self.slots[dst] = self.slots[src][:length]
        return None

    @rule(chosen=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS))
    def reorder(self, chosen: list[int]) -> None:
        self.state.reorder(torch.tensor(chosen) if len(chosen) % 2 else chosen)
        self.slots[: len(chosen)] = [list(self.slots[row]) for row in chosen]

    @rule(rows=st.lists(st.integers(0, SLOTS - 1), max_size=2))
    def reset(self, rows: list[int]) -> None:
        self.state.reset(rows)
        for row in rows:
            self.slots[row] = []

    @rule(rows=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=2, unique=True))
    def snapshot(self, rows: list[int]) -> None:
        self.snapshots.append((rows, [list(self.slots[row]) for row in rows], self.state.snapshot(rows)))

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 99))
    def restore(self, which: int) -> None:
        """Back to a snapshot, where the slots have only grown since; to one of longer slots never."""
        rows, held, snapshot = self.snapshots[which % len(self.snapshots)]
        lengths = [len(tokens) for tokens in held]
        if any(len(self.slots[row]) < length for row, length in zip(rows, lengths, strict=True)):
            return self.refused(self.state.truncate, rows, lengths, snapshot)
        if all(self.slots[row][: len(tokens)] == tokens for row, tokens in zip(rows, held, strict=True)):
            self.state.truncate(rows, lengths, snapshot)
            for row, tokens in zip(rows, held, strict=True):
                self.slots[row] = list(tokens)
        return None

    @rule(row=st.integers(0, SLOTS - 1), share=st.floats(0, 1))
    def truncate(self, row: int, share: float) -> None:
        length = round(share * len(self.slots[row]))
        if self.recurrent and length < len(self.slots[row]):
            return self.refused(self.state.truncate, row, length)
        self.state.truncate(row, length)
        self.slots[row] = self.slots[row][:length]
        return None

    @rule()
    def save_and_load(self) -> None:
        with TemporaryDirectory() as folder:
            self.state.save(Path(folder) / "state")
            again = State.load(Path(folder) / "state", self.model)
        assert_same(copied(self.state), copied(again))
        self.state = again

    @invariant()
    def the_books_are_right(self) -> None:
        lengths = [len(tokens) for tokens in self.slots]
        assert self.state.length.tolist() == lengths
        assert self.state.bytes() == self.bytes == sum(tensor.nbytes for tensor in tensors(self.state).values())
        for row, tokens in enumerate(self.slots):
            documents = [number for _, number in tokens]
            assert self.state.store.document[row, : len(tokens)].tolist() == documents
            places = [i - documents.index(number) for i, number in enumerate(documents)]
            assert self.state.store.pos[row, : len(tokens)].tolist() == places

    @invariant()
    def cells_without_a_token_are_zeros(self) -> None:
        for name, tensor in tensors(self.state).items():
            if name in ("pos", "document") or isinstance(self.state.store.declared.get(name), PerToken):
                for row, tokens in enumerate(self.slots):
                    assert not tensor[row, len(tokens) :].any(), (name, row)


class AnySequenceWithRecurrence(AnySequence):
    build = staticmethod(with_recurrence)
    recurrent = True


TestAttention = AnySequence.TestCase
TestRecurrence = AnySequenceWithRecurrence.TestCase
TestAttention.settings = TestRecurrence.settings = settings(max_examples=60, stateful_step_count=25)
