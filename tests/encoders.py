"""Encoders and their heads against transformers: each head answers in its own field, for tokens or for documents."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import sublayer
from sublayer.nn.head import of_documents
from sublayer.nn.sublayer import ModelOp
from sublayer.step import Step
from tests.oracle import PADDED, agree, close, raised, reopened, round_trip, saved

IDS = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(1))  # 0 and 1 are padding, whose rows
# of the table get no gradient in theirs
TYPES = (torch.arange(12)[None] > torch.tensor([[5], [7]])).long()
RIGHT = PADDED.flip(1)


def answer(theirs: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    """What a model of theirs says: [B, L, C] for tokens, [B, C] for rows."""
    with raised():
        found: Any = theirs(ids, **inputs)
    if "start_logits" in found:
        return torch.stack([found.start_logits, found.end_logits], -1)
    for name in ("logits", "pooler_output", "last_hidden_state"):
        if found.get(name) is not None:
            return found[name]
    raise AssertionError(f"no answer among {list(found)}")


def check_head(
    theirs: PreTrainedModel, folder: Path, ids: Tensor = IDS, segment: Tensor | None = None, *, unread: Any = (),
    types: Tensor | None = None,
) -> ModelOp:  # fmt: skip
    """Answers, loss and gradients of any head, on padded rows where a segment of ones and zeros says so."""
    ours = sublayer.load(saved(theirs, folder), dtype=torch.float64)
    step = Step(segment=segment, types=types)
    inputs = {} if types is None else {"token_type_ids": types}
    expected = answer(theirs, ids, **inputs | ({} if segment is None else {"attention_mask": segment}))
    found = ours(ids, step)
    if expected.dim() == 2:
        found = of_documents(found, step)
    elif segment is not None:
        found, expected = found[segment.bool()], expected[segment.bool()]
    agree(theirs, ours, folder, found, expected, unread=unread)
    return ours


def check_heads_export(theirs: PreTrainedModel, folder: Path) -> None:
    """Import → export → import is exact to the bit, and transformers reads the export as the same function."""
    round_trip(theirs, folder)
    again = reopened(folder / "ours", type(theirs))
    close(answer(again, IDS), answer(theirs, IDS), "answer of the export")
