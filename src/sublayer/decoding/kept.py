"""A slot that stays filled between prompts, so that a conversation is read once and not again at every turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import UsageError
from ..nn.sublayer import ModelOp
from ..state import Snapshot
from ..step import Step
from .slots import Slots, Source

FIRST = 4096  # tokens that a slot has room for at first, where the limit allows: most conversations never outgrow it


class KeptSlot(Slots):
    """One slot for `stream(model, prompt, kept=slot)`: of each prompt, only what is new is read.

    What a prompt has in common with what the slot holds, id for id, stays; the rest is cut off, or taken back to the
    last prompt where the model has recurrences, which cannot be cut: there the state before a prompt's last token is
    kept too. The result is that of reading the whole prompt, up to the rounding of matrix products. Where that could
    not be (rotary scalings that depend on the length, past the trained length), all is read again.
    The model's weights may not change in between; `forget` empties the slot.
    """

    def __init__(self, model: ModelOp, limit: int | None = None) -> None:
        """limit: tokens that it will never exceed, so that no room is kept for more."""
        self._model = model
        self._limit = limit
        self._room = 0
        self._held: list[int] = []  # the ids that the state holds
        self._before: Snapshot | None = None  # the moment before the last token of the last prompt
        self._torn = False  # a call broke off: recurrences may be half a step ahead
        positions = [getattr(getattr(op, "spec", None), "position", None) for op in model.modules()]
        scalings = [getattr(position, "scaling", None) for position in positions]
        self._exact_up_to = min((s.trained_length for s in scalings if s is not None and s.dynamic), default=None)

    @property
    def held(self) -> tuple[int, ...]:
        """The ids that need not be read again."""
        return tuple(self._held)

    def forget(self) -> None:
        """Frees all that is kept."""
        self._room, self._held, self._before, self._torn = 0, [], None, False
        self.__dict__.pop("_state", None)

    def reserve(self, model: ModelOp, length: int) -> None:
        """Makes sure that the slot has room for `length` tokens; one that has to grow forgets.

        Raises UsageError for another model than the slot's.
        """
        if model is not self._model:
            raise UsageError("kept=…: the slot of another model")
        if length > self._room:
            self.forget()  # first, so that never two are alive
            room = max(FIRST, 2 * length)
            room = max(length, room if self._limit is None else min(room, self._limit))
            super().__init__(model, 1, room)
            self._room = room

    @torch.inference_mode()
    def prefill(self, slot: int, prompt: Sequence[int], source: Source | None = None, chunk: int = 512) -> Tensor:
        """As Slots.prefill, but that the slot may hold the beginning already."""
        self._cut(prompt)
        fresh = torch.tensor([list(prompt[len(self._held) :])], device=self._device)
        for part in fresh[:, :-1].split(chunk, 1) if fresh.shape[1] > 1 else ():
            self._read(part)
        self._before = self._state.snapshot(0)
        return self._model.logits(self._read(fresh[:, -1:])[:, -1])[0]

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int]) -> Tensor:
        return self._model.logits(self._read(self._ids(tokens)[:, None])[:, -1])

    def clear(self, slots: int | Sequence[int]) -> None:
        """Nothing: the slot stays filled."""

    def _read(self, ids: Tensor) -> Tensor:
        self._torn = True
        hidden = self._hidden(ids, Step())
        self._held += cast(Any, ids[0]).tolist()
        self._torn = False
        return hidden

    def _cut(self, prompt: Sequence[int]) -> None:
        """Takes the slot back to the longest beginning of the prompt, all but its last token, that it can come to."""
        common = _common(self._held, prompt[:-1])
        if self._exact_up_to is not None and max(len(self._held), len(prompt)) > self._exact_up_to:
            common = 0
        snapshot = self._before
        recurrent = snapshot is not None and snapshot.leaves
        if common == 0 or (snapshot is None and self._torn):
            self._state.reset(0)
            common, self._before = 0, None
        elif not recurrent:
            self._state.truncate(0, common)
        elif self._torn or common < len(self._held):
            assert snapshot is not None
            if snapshot.length[0] <= common:
                common = snapshot.length[0]
                self._state.truncate(0, common, snapshot)
            else:
                self._state.reset(0)
                common, self._before = 0, None
        del self._held[common:]
        self._torn = False


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest beginning of both."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
