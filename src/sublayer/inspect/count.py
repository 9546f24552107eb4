"""What a model costs, read from the model built on meta: no formula is written twice, nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn import Module

from ..nn.head import Classifier, Head, Spans
from ..nn.latent import LatentAttentionOp
from ..nn.moe import MoEOp
from ..nn.op import Op
from ..nn.sublayer import Model, ModelOp, SublayerOp
from ..state import State


@dataclass(frozen=True)
class Cost:
    """Sizes of an architecture."""

    parameters: int
    """All parameters; a tied table counts once."""
    active: int
    """Those that a token goes through: all but those of the experts it is not sent to."""
    parts: dict[str, int]
    """Parameters by part: "embed", "norm", "head", and each sublayer's name over all layers, by trunk."""
    state_bytes_per_token: int
    """What one more token adds to the decoding state of one row (keys and values), in bytes."""
    state_bytes_per_slot: int
    """What a row keeps whatever its length (recurrences, convolutions), in bytes."""
    state_bytes_per_memory: int
    """What one vector of cross-attention's memory adds, in bytes."""

    def state_bytes(self, slots: int, length: int, memory_length: int = 0) -> int:
        """Bytes that the leaves of a state of this size take, full-length for windowed layers."""
        row = length * self.state_bytes_per_token + self.state_bytes_per_slot
        return slots * (row + memory_length * self.state_bytes_per_memory)


@dataclass(frozen=True)
class Memory:
    """What a model takes while it generates, in bytes."""

    weights: int
    state: int
    """All that decoding allocates for its rows: leaves, positions, documents."""
    state_needed: int
    """The leaves alone if windowed layers kept no more than their windows."""
    activations: int
    """About: the widest moment between two layers' boundaries, of a prompt's chunk or of all rows."""
    logits: int
    """Of one token a row, with their copy in fp64 that a token is chosen from."""

    @property
    def total(self) -> int:
        return self.weights + self.state + self.activations + self.logits


def memory(spec: Model, rows: int, length: int, dtype: torch.dtype = torch.bfloat16, chunk: int = 512) -> Memory:
    """For `rows` rows of `length` tokens, weights and state in `dtype`; a memory of the encoder's is as long.

    A model without a decoder answers all rows at once; one with reads prompts `chunk` tokens a call, one prompt at a
    time. Weights, state and logits are what is allocated; activations are estimated: four vectors of the stream, twice
    what the products of the widest sublayer give, and the keys and values that latent attention makes anew.
    """
    model = _on_meta(spec)
    size = dtype.itemsize
    read = rows * length if spec.decoder is None else max(min(length, chunk), rows)
    if spec.encoder is not None and spec.decoder is not None:
        read = max(read, length)  # a source is read whole
    needed = 0
    state = 0
    if spec.decoder is not None:
        kept = State.allocate(model, rows, length, length if spec.encoder else 0, dtype=dtype, device="meta")
        state, needed = kept.bytes(), kept.bytes_needed()
    answers = rows if spec.decoder is not None else read
    return Memory(
        size * sum(parameter.numel() for parameter in model.parameters()),
        state,
        needed,
        size * (4 * spec.dim * read + max((_held(op, spec.dim, read, length) for op in _sublayers(model)), default=0)),
        answers * _answered(spec) * (size + 8),
    )


def _answered(spec: Model) -> int:
    """Logits of a token; none where vectors are the answer."""
    if isinstance(spec.head, Head):
        return spec.vocab or 0
    return spec.head.classes if isinstance(spec.head, Classifier) else 2 if isinstance(spec.head, Spans) else 0


def _sublayers(model: ModelOp) -> Iterator[Module]:
    return (module.op for module in model.modules() if isinstance(module, SublayerOp))


def _held(op: Module, dim: int, read: int, length: int) -> int:
    """Numbers that an op holds at its widest, about: of the tokens that are read, and of all that attention sees."""
    latent = [module for module in op.modules() if isinstance(module, LatentAttentionOp)]
    rebuilt = [
        (2 * one.spec.content_size + one.spec.rotary_size + one.spec.value_size) * one.spec.heads for one in latent
    ]
    return 2 * read * _width(op, dim) + length * sum(rebuilt)


def _width(op: Module, dim: int) -> int:
    """Numbers that the products of an op give for a token, the one back to the stream left out."""
    routed = {id(parameter): module.spec.router.active for module in op.modules() if isinstance(module, MoEOp)
              for parameter in module.parameters()}  # fmt: skip
    total = 0
    for parameter in op.parameters():
        if parameter.dim() == 2:
            total += parameter.shape[0]
        elif parameter.dim() == 3:  # one matrix an expert, of which a token meets a few
            total += parameter.shape[1] * routed.get(id(parameter), 1)
    return max(total - dim, 0)


def windowed_bytes(spec: Model, slots: int, length: int, state_dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the leaves if windowed layers kept no more than their windows."""
    return State.allocate(_on_meta(spec), slots, length, dtype=state_dtype, device="meta").bytes_needed()


def cost(spec: Model, state_dtype: torch.dtype = torch.bfloat16) -> Cost:
    """The cost of a spec, its state kept in `state_dtype`. Raises SpecError for sizes that do not fit."""
    model = _on_meta(spec)
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = _part(name, both=spec.encoder is not None and spec.decoder is not None)
        parts[part] = parts.get(part, 0) + parameter.numel()
    state = State.allocate(model, 1, 1, 1, dtype=state_dtype, device="meta")
    return Cost(
        sum(parts.values()),
        sum(parts.values()) - sum(module.idle for module in model.modules() if isinstance(module, Op)),
        parts,
        state.bytes_per("token"),
        state.bytes_per("slot"),
        state.bytes_per("memory"),
    )


@lru_cache(maxsize=1)
def _on_meta(spec: Model) -> ModelOp:
    """Built once for all that is asked of one spec in turn."""
    return spec.build(device="meta")


def _part(name: str, both: bool) -> str:
    """decoder.blocks.3.attn.op.q.weight is "attn", or "decoder attn" beside an encoder; a sublayer's norms are its."""
    keys = name.split(".")
    if keys[0] == "head":
        return "head"
    part = keys[3] if keys[1] == "blocks" else keys[1]
    return f"{keys[0]} {part}" if both else part


def readable(count: float) -> str:
    """8030261248 → "8.03B": three digits and a decimal suffix."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{suffix}" if count / limit < 100 else f"{count / limit:.0f}{suffix}"
    return f"{count:.0f}"


def readable_bytes(count: float) -> str:
    """131072 → "128 KiB"."""
    for suffix in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or suffix == "TiB":
            return f"{count:.4g} {suffix}"
        count /= 1024
    return ""
