"""What a model costs, read from the model built on meta: no formula is written twice, nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..nn.sublayer import Model
from ..state import State


@dataclass(frozen=True)
class Cost:
    """Sizes of an architecture."""

    parameters: int
    """All parameters; a tied table counts once."""
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


def windowed_bytes(spec: Model, slots: int, length: int, state_dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the leaves if windowed layers kept no more than their windows."""
    return State.allocate(spec.build(device="meta"), slots, length, dtype=state_dtype, device="meta").bytes_needed()


def cost(spec: Model, state_dtype: torch.dtype = torch.bfloat16) -> Cost:
    """The cost of a spec, its state kept in `state_dtype`. Raises SpecError for sizes that do not fit."""
    model = spec.build(device="meta")
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = _part(name, both=spec.encoder is not None and spec.decoder is not None)
        parts[part] = parts.get(part, 0) + parameter.numel()
    state = State.allocate(model, 1, 1, 1, dtype=state_dtype, device="meta")
    return Cost(
        sum(parts.values()),
        parts,
        state.bytes_per("token"),
        state.bytes_per("slot"),
        state.bytes_per("memory"),
    )


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
