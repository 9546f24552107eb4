"""Geometry: what a trunk computes once a forward pass for all of its layers, and leaves in Step.shared.

B batch, L new tokens, M keys or memory length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..state import State
from ..step import Shared, Step, document_lengths, document_positions, document_starts
from .mask import Layout
from .rope import Rope


def locate(step: Step, tokens: Tensor, state: State | None) -> Step:
    """Positions, documents and cells of the new tokens, before the front end reads positions."""
    if tokens.dim() < 2:
        raise InputError(f"inputs of shape {list(tokens.shape)}: a model takes a batch of rows, [B, L]")
    batch, length = tokens.shape[:2]
    for name, given, rows in (("segment", step.segment, (batch,)), ("pos", step.pos, (batch, 1))):
        if given is not None and (given.shape[0] not in rows or given.shape[-1] != length):
            raise InputError(f"Step.{name} is {list(given.shape)}, the inputs are [{batch}, {length}]")
    if state is None and step.segment is None:
        return step.replace(shared=Shared())
    if length == 0:
        raise InputError("no tokens: a call needs at least one a row")
    place, first, document = None, 0, torch.ones(1, 1, dtype=torch.long, device=tokens.device)
    if state is not None:
        place = state.place(step, batch, length)
        first, document = state.last(place)
    starts = None
    if step.segment is not None:
        starts = document_starts(step.segment)
        document = torch.where(step.segment != 0, document + starts.long().cumsum(1), 0)
        pos = document_positions(step.segment, starts, first)
    else:
        document = document.expand(batch, length)
        pos = first + torch.arange(length, device=tokens.device)[None]
    pos = step.pos if step.pos is not None else pos
    return step.replace(pos=pos, shared=Shared(place=place, starts=starts, document=document))


def share(
    step: Step, x: Tensor, state: State | None, rotary: Sequence[tuple[Rope, int]], bias: nn.Module | None
) -> Step:
    """The layouts, rotary tables and score bias that all layers use."""
    assert step.shared is not None
    place, starts, document = step.shared.place, step.shared.starts, step.shared.document
    pos = step.pos if step.pos is not None else torch.arange(x.shape[1], device=x.device)[None]
    k_pos, k_document, layout = pos, document, None
    if state is not None and place is not None and document is not None:
        state.note(place, pos.expand(x.shape[:2]), document)  # not before the front end has taken the inputs
        k_pos, k_document = state.keys(place)
        clean = not torch.compiler.is_compiling() and int(document.max()) <= 1  # hidden cells are empty ones
        layout = Layout(pos.expand(x.shape[:2]), k_pos, document, k_document, clean=clean)
    elif document is not None or step.pos is not None:
        layout = Layout(pos, pos, document, document)
    shared = Shared(place, starts, document, layout, _cross(step, x, state))
    shared = replace(shared, **_rotary(rotary, pos, k_pos, document, k_document, x.dtype))
    return step.replace(shared=shared, bias=step.bias if bias is None else bias(pos, k_pos, x.dtype))


def _cross(step: Step, x: Tensor, state: State | None) -> Layout | None:
    """Who sees which memory: the documents of the same number, or all of it where the tokens name none."""
    place = step.shared.place if step.shared is not None else None
    segment, kept = step.memory_segment, False
    if state is not None and place is not None and state.memory_segment.shape[1]:
        if step.memory is None:
            segment, kept = state.memory_segment[:, : place.memory_used][place.rows], True
        else:
            whole = torch.ones(step.memory.shape[:2], dtype=torch.int32, device=x.device)
            state.remember(segment if segment is not None else whole, place)
    if segment is None:
        return None
    if step.segment is not None:
        return Layout(None, None, step.segment, segment.long(), clean=kept)
    return Layout(None, None, torch.ones_like(x[..., 0], dtype=torch.long), (segment != 0).long(), clean=kept)


def _rotary(
    rotary: Sequence[tuple[Rope, int]],
    pos: Tensor,
    k_pos: Tensor,
    document: Tensor | None,
    k_document: Tensor | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Tables for the new tokens, and for all keys where a scaling depends on the document's length."""
    lengths, k_lengths = None, None
    if any(rope.dynamic for rope, _ in rotary):
        if document is None or k_document is None:
            k_lengths = (k_pos.amax(1, keepdim=True) + 1).expand_as(k_pos)
            lengths = k_lengths[:, :1].expand_as(pos)
        else:
            k_lengths, lengths = document_lengths(k_pos.expand_as(k_document), k_document, document)
    tables: list[tuple[Tensor, Tensor]] = []
    key_tables: list[tuple[Tensor, Tensor] | None] = []
    for rope, head_size in rotary:
        tables.append(rope.tables(pos, head_size, lengths=lengths if rope.dynamic else None, dtype=dtype))
        keys = rope.tables(k_pos, head_size, lengths=k_lengths, dtype=dtype) if rope.dynamic else None
        key_tables.append(keys)
    return {"rotary": tuple(tables), "key_rotary": tuple(key_tables)}
