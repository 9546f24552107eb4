"""What the tests of image families share: the same images asked of transformers' model and of ours."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

import sublayer
from sublayer.nn.sublayer import ModelOp
from tests.oracle import agree, close, raised, saved


def noise(height: int, width: int, channels: int = 3) -> Tensor:
    """[2, C, H, W] in fp64."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, channels, height, width, generator=generator, dtype=torch.float64)


def check_parity(
    theirs: PreTrainedModel,
    folder: Path,
    images: Tensor,
    hidden: Tensor | None = None,
    unread: tuple[str, ...] = (),
    **inputs: Any,
) -> ModelOp:
    """Saves theirs, loads it, and compares logits (or hidden vectors), loss and the gradient of every parameter;
    returns ours. hidden: the patches that the mask token stands for."""
    ours = sublayer.load(saved(theirs, folder), dtype=torch.float64)
    found, expected = answers(theirs, ours, images, hidden, **inputs)
    agree(theirs, ours, folder, found, expected, _loss if ours.spec.head else Tensor.var, unread=unread)
    return ours


def answers(
    theirs: PreTrainedModel, ours: ModelOp, images: Tensor, hidden: Tensor | None = None, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """(ours, theirs): logits [B, C], of which ours gives every token the same, or hidden vectors [B, L, D]."""
    with raised():
        given = {} if hidden is None else {"bool_masked_pos": hidden}
        answer = theirs(images, **given, **inputs)
    found = ours(images if hidden is None else {"images": images, "hidden": hidden})
    if ours.spec.head is None:
        return found, answer.last_hidden_state
    assert torch.equal(found, found[:, :1].expand_as(found))
    return found[:, 0], answer.logits


def check_export(theirs: PreTrainedModel, folder: Path, images: Tensor) -> None:
    """Import → export → import is exact to the bit, and transformers reads the export as the same function."""
    first = sublayer.load(saved(theirs, folder / "theirs"), dtype=torch.float64)
    sublayer.save(first, folder / "ours", layout="hf")
    again = sublayer.load(folder / "ours", dtype=torch.float64)
    assert again.spec == first.spec
    ours, others = dict(first.named_parameters()), dict(again.named_parameters())
    assert ours.keys() == others.keys()
    assert all(torch.equal(parameter, others[name]) for name, parameter in ours.items())
    with raised(), warnings.catch_warnings(action="ignore"):
        found: Any = type(theirs).from_pretrained(
            folder / "ours", dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
    back, report = found
    assert not any(report.values()), report
    close(*answers(back.double().eval(), first, images), "answer of the export")


def _loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits)) % 2)
