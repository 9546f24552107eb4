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
    _check(step, batch, length)
    if state is None and step.segment is None:
        return step.replace(shared=Shared())
    if length == 0:
        raise InputError("no tokens: a call needs at least one a row")
    place, first, document = None, 0, torch.ones(1, 1, dtype=torch.long, device=tokens.device)
    if state is not None:
        place = state.place(step, batch, length)
        first, document = state.last(place)
        _check_prefix(step, first, length)
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
        # Hidden cells are empty ones, unless the slot holds an earlier document or the caller hides more.
        compiling = torch.compiler.is_compiling()
        clean = step.mask is None and (step.segment is None if compiling else int(document.max()) <= 1)
        layout = Layout(pos.expand(x.shape[:2]), k_pos, document, k_document, clean=clean)
    elif document is not None or step.pos is not None:
        layout = Layout(pos, pos, document, document)
    shared = Shared(place, starts, document, layout, _cross(step, x, state))
    shared = replace(shared, **_rotary(rotary, pos, k_pos, document, k_document, x.dtype))
    scores = step.bias
    if bias is not None:
        own = bias(pos, k_pos, x.dtype)
        scores = own if scores is None else own + scores
    memory = step.memory
    if memory is not None and state is not None and step.memory_segment is not None:
        memory = memory.masked_fill(step.memory_segment[..., None] == 0, 0)  # what is kept of padding is finite
    return step.replace(shared=shared, bias=scores, memory=memory)


UNNUMBERED = -1  # the document of a memory that names none: seen by all


def _cross(step: Step, x: Tensor, state: State | None) -> Layout | None:
    """Who sees which memory: the documents of the same number, or all of it where memory or tokens name none."""
    place = step.shared.place if step.shared is not None else None
    memory, kept = step.memory_segment, False
    if state is not None and place is not None and state.memory_segment.shape[1]:
        if step.memory is None:
            memory, kept = state.memory_segment[:, : place.memory_used][place.rows].long(), True
        else:
            whole = torch.full(step.memory.shape[:2], UNNUMBERED, dtype=torch.int32, device=x.device)
            state.remember(memory if memory is not None else whole, place)
    if memory is None:
        return None
    tokens = step.segment
    if tokens is None:
        if kept and memory.shape[1] and not torch.compiler.is_compiling():
            numbers = memory.abs()
            if bool(((numbers != 0) & (numbers != numbers.amax(1, keepdim=True))).any()):
                raise InputError("the memory holds several documents: say with Step.segment which one a token reads")
        tokens, memory = torch.ones_like(x[..., 0], dtype=torch.long), (memory != 0).long()
    elif kept:
        free = (memory == UNNUMBERED).any(1, keepdim=True)
        tokens = torch.where(free, tokens != 0, tokens)
        memory = torch.where(free, memory != 0, memory)
    return Layout(None, None, tokens, memory, clean=kept)


def _check(step: Step, batch: int, length: int) -> None:
    """The shapes and dtypes of what the caller gives. Raises InputError for the first that does not fit."""
    rows, memory = (batch,), None if step.memory is None else step.memory.shape[1]
    for name, given, whole, shape in (
        ("segment", step.segment, True, (rows, length)),
        ("pos", step.pos, True, ((batch, 1), length)),
        ("types", step.types, True, (rows, length)),
        ("prefix", step.prefix, True, (rows,)),
        ("memory", step.memory, False, (rows, None, None)),
        ("memory_segment", step.memory_segment, True, (rows, memory)),
    ):
        if given is None:
            continue
        if not isinstance(given, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"Step.{name} is a tensor, got {type(given).__name__}")
        fits = given.dim() == len(shape) and given.shape[0] in shape[0]
        if not fits or any(want not in (None, size) for size, want in zip(given.shape[1:], shape[1:], strict=True)):
            raise InputError(f"Step.{name} is {list(given.shape)}, the inputs are [{batch}, {length}]")
        if whole and (given.is_floating_point() or given.dtype == torch.bool):
            raise InputError(f"Step.{name} holds whole numbers, got {given.dtype}")
    for name, given in (("mask", step.mask), ("bias", step.bias)):
        sizes = (1,) * (4 - given.dim()) + tuple(given.shape) if given is not None and given.dim() <= 4 else (1,) * 4
        if given is not None and (given.dim() > 4 or sizes[0] not in (1, batch) or sizes[2] not in (1, length)):
            raise InputError(f"Step.{name} is {list(given.shape)}, which is no [B, N, L, M] of [{batch}, {length}]")


def _check_prefix(step: Step, first: Tensor, length: int) -> None:
    """A prefix sees itself whole, so one call has to hold it: its earlier tokens cannot be computed again."""
    if step.prefix is None or torch.compiler.is_compiling():
        return
    start = first[:, 0]
    split = ((start > 0) & (step.prefix > start)) | ((start == 0) & (step.prefix > length))
    if bool(split.any()):
        row = int(split.nonzero()[0])
        raise InputError(f"row {row}: the prefix of {int(step.prefix[row])} tokens has to lie within its first call")


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
