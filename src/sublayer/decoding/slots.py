"""Slots: the rows of one decoding state, prefilled one at a time and decoded together.

B rows that decode together, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..nn.sublayer import ModelOp
from ..state import State
from ..step import Step


class Slots:
    """The rows that decode together lie in slots 0 … B-1, in the order of the batch: reading them is a view."""

    def __init__(self, model: ModelOp, slots: int, length: int, memory_length: int = 0) -> None:
        self._model = model
        self._state = State.allocate(model, slots, length, memory_length)
        self._device = self._state.length.device

    @torch.inference_mode()
    def prefill(
        self, slot: int, prompt: Sequence[int], source: Sequence[int] | None = None, chunk: int = 512
    ) -> Tensor:
        """Reads a prompt into a slot that holds nothing, `chunk` tokens a call; returns the next token's logits [V].

        The prompt is read alone, so there is no padding, and only its last position meets the head. source: ids for
        the encoder; what cross-attention needs of its output stays in the slot.
        """
        slots = torch.tensor([slot], device=self._device)
        ids = self._ids(prompt)[None]
        step = Step(slots=slots)
        if source is not None:
            step = self._model.encode(self._ids(source)[None])[1].replace(slots=slots)
        for part in ids.split(chunk, dim=1):
            hidden = self._hidden(part, step)
            step = Step(slots=slots)
        return self._model.logits(hidden[0, -1])

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int]) -> Tensor:
        """One more token for each of the slots 0 … B-1; returns the logits [B, V] of those after them."""
        return self._model.logits(self._hidden(self._ids(tokens)[:, None], Step())[:, -1])

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self._state.reset(slot)

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """What a slot holds goes to another one, over what that held."""
        self._state.fork(source, target)
        self._state.reset(source)

    @torch.inference_mode()
    def reorder(self, sources: Sequence[int]) -> None:
        """Slot i becomes a copy of what slot sources[i] held, for every i."""
        if list(sources) != list(range(len(sources))):
            self._state.reorder(sources)

    def _hidden(self, ids: Tensor, step: Step) -> Tensor:
        result: Any = self._model(ids, step, self._state, output="hidden")
        return result[0] if isinstance(result, tuple) else result  # auxiliary losses are for training

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.long, device=self._device)


@contextmanager
def evaluating(model: ModelOp) -> Iterator[None]:
    """The model in evaluation mode, and afterwards as it was, module by module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
