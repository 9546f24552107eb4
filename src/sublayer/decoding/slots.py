"""Slots: the rows of one decoding state, prefilled alone or with prompts as long, and decoded together.

B rows that decode together, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..nn.sublayer import ModelOp
from ..state import State
from ..step import Step

Source = Sequence[int] | Tensor
"""What an encoder reads for one row: ids, or the frames [T, F] of its front end."""


class Slots:
    """The rows that decode together lie in slots 0 … B-1, in the order of the batch: reading them is a view."""

    def __init__(self, model: ModelOp, slots: int, length: int, memory_length: int = 0) -> None:
        self._model = model
        self._state = State.allocate(model, slots, length, memory_length)
        self._device = self._state.length.device

    def prefill(self, slot: int, prompt: Sequence[int], source: Source | None = None, chunk: int = 512) -> Tensor:
        """Reads a prompt into a slot that holds nothing, `chunk` tokens a call; returns the next token's logits [V].

        Only the prompt's last position meets the head. source: what the encoder reads; what cross-attention needs of
        its output stays in the slot.
        """
        return self.prefill_together(slot, [prompt], None if source is None else [source], chunk)[0]

    @torch.inference_mode()
    def prefill_together(
        self, first: int, prompts: Sequence[Sequence[int]], sources: Sequence[Source] | None, chunk: int = 512
    ) -> Tensor:
        """Reads prompts of one length into the slots from `first` on; sources, of any lengths, are padded.

        Returns the next tokens' logits [B, V].
        """
        slots = torch.arange(first, first + len(prompts), device=self._device)
        step = Step(slots=slots)
        if sources is not None:
            rows = [torch.as_tensor(source, device=self._device) for source in sources]
            lengths = torch.tensor([len(row) for row in rows], device=self._device)
            padded = pad_sequence(rows, batch_first=True)
            heard = (torch.arange(padded.shape[1], device=self._device) < lengths[:, None]).long()
            told = Step(memory_segment=None if bool(heard.all()) else heard)
            step = self._model.encode(padded, told)[1].replace(slots=slots)
        hidden = torch.empty(0)
        for part in torch.tensor([list(prompt) for prompt in prompts], device=self._device).split(chunk, dim=1):
            hidden = self._hidden(part, step)
            step = Step(slots=slots)
        return self._model.logits(hidden[:, -1])

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int]) -> Tensor:
        """One more token for each of the slots 0 … B-1; returns the logits [B, V] of those after them."""
        return self._model.logits(self._hidden(self._ids(tokens)[:, None], Step())[:, -1])

    @torch.inference_mode()
    def clear(self, slots: int | Sequence[int]) -> None:
        """Empties a slot, or several."""
        self._state.reset(slots)

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """What a slot holds goes to another one, over what that held."""
        self._state.fork(source, target)
        self._state.reset(source)

    @torch.inference_mode()
    def reorder(self, sources: Sequence[int], *, memory: bool = True) -> None:
        """Slot i becomes a copy of what slot sources[i] held, for every i; memory=False: but for its memory."""
        if list(sources) != list(range(len(sources))):
            self._state.reorder(sources, memory=memory)

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
