"""The families side by side, read off their specs: what mixes positions, where norms stand, what a token costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from .. import recipes
from ..nn.additive import Additive
from ..nn.attention import Attention
from ..nn.feed_forward import FeedForward
from ..nn.latent import LatentAttention
from ..nn.moe import MoE
from ..nn.op import Growth, Part
from ..nn.sublayer import Block, Model, Sublayer, Trunk
from ..spec import Spec
from .count import cost, readable, readable_bytes


@dataclass(frozen=True)
class Architecture:
    """What a spec says about itself, in the words of the field."""

    mixers: tuple[str, ...]
    """What mixes positions, in the order of the blocks."""
    positions: tuple[str, ...]
    """How positions are told."""
    norms: tuple[str, ...]
    """Where norms stand, and which."""
    ffn: tuple[str, ...]
    """What else a block holds."""
    parameters: int
    active: int
    """Parameters that a token goes through."""
    state_per_token: int
    """Bytes, in 2-byte elements."""
    state_per_row: int
    """Bytes, in 2-byte elements, whatever the length."""
    growth: tuple[Growth, ...]
    """Of each mixer."""


def architecture(spec: Model) -> Architecture:
    """What the spec of a model says about itself. Raises SpecError for sizes that do not fit."""
    sizes, (mixers, positions, norms, ffn) = cost(spec), _words_of(spec)
    return Architecture(
        tuple(mixers), positions, norms, ffn,
        sizes.parameters, spec.active_parameters(), sizes.state_bytes_per_token, sizes.state_bytes_per_slot,
        tuple(mixers.values()),
    )  # fmt: skip


def table() -> str:
    """docs/architectures.md: the families in one table, each with those of its sizes that are made of other parts."""
    rows: list[str] = []
    growth: dict[str, Growth] = {}
    for name, size, spec in _unlike():
        found = architecture(spec)
        growth |= dict(zip(found.mixers, found.growth, strict=True))
        active = readable(found.active) if found.active != found.parameters else "all"
        state = readable_bytes(found.state_per_token) if found.state_per_token else "0"
        state += f" + {readable_bytes(found.state_per_row)} a row" if found.state_per_row else ""
        cells = [
            f"`{name}`", size, *map(", ".join, (found.mixers, found.positions, found.norms, found.ffn)),
            readable(found.parameters), active, state,
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    mixed = [f"| {name} | {' | '.join(grown)} |" for name, grown in _by_kind(growth).items()]
    return PAGE.format(families="\n".join(rows), mixers="\n".join(mixed))


PAGE = """# Architectures

Made from the recipes by `sublayer recipes --page`; every entry is read off a spec, none is written by hand.

Each family with the first of its published sizes, and with those made of other parts (`sublayer recipes` lists all,
`sublayer show NAME` draws one). State is what decoding keeps for a token, in 2-byte elements; "a row" is what a
sequence keeps whatever its length.

| family | size | mixes positions by | positions | norms | else | parameters | active | state |
|---|---|---|---|---|---|---|---|---|
{families}

## How the mixers grow

In a sequence of n tokens (m in the memory), width d, head size h, state s, window w, kernel k, r rows of an alignment:
operations a layer, operations that must follow one another while training, and the longest way between two positions
(Vaswani et al. 2017, table 1). A linear recurrence reaches any distance in one layer, though what it carries fades.
Measured times and memory by length: `make bench ONLY=mixers`.

| mixer | operations | one after the other | path |
|---|---|---|---|
{mixers}
"""


Words = tuple[str, ...]


def _unlike() -> Iterator[tuple[str, str, Model]]:
    """(family, size, spec): the first size of each family, and each that differs from those before it in words."""
    for name in recipes.FAMILIES:
        family, seen = recipes.family(name), set[str]()
        for size, sizes in family.SIZES.items():
            spec = getattr(family, name)(**sizes)
            mixers, *rest = _words_of(spec)
            words = re.sub(r"[\d,]+ experts", "experts", str((sorted(set(map(_kind, mixers))), rest)))
            if words not in seen:
                seen.add(words)
                yield name, size, spec


def _words_of(spec: Model) -> tuple[dict[str, Growth], Words, Words, Words]:
    """What mixes positions and how that grows, how positions are told, norms, and what else blocks hold."""
    trunks = [trunk for trunk in (spec.encoder, spec.decoder) if trunk is not None]
    mixers: dict[str, Growth] = {}
    positions, norms, ffn = list[str](), list[str](), list[str]()
    for trunk in trunks:
        positions += [_position(part) for part in _places(trunk.embed) if part is not None]
        positions += [_position(trunk.bias)] if trunk.bias is not None else []
        for sublayer in _sublayers(trunk):
            norms.append(_norm(sublayer))
            for part in _inside(sublayer.op):
                if part.growth is not None:
                    mixers[_mixer(part)] = part.growth
                if isinstance(part, Attention) and type(part) is not Attention:
                    positions.append(_words(type(part).__name__))  # scores of its own
                rotary = isinstance(part, Attention | LatentAttention) and part.position
                positions += [_position(rotary)] if rotary else []
            ffn += [_ffn(part) for part in _inside(sublayer.op) if isinstance(part, FeedForward | MoE)][:1]
    return mixers, _once(positions) or ("none",), _once(norms), _once(ffn) or ("none",)


def _sublayers(trunk: Trunk) -> Iterator[Sublayer]:
    within = [part for part in _inside(trunk.embed) if isinstance(part, Block)]  # a front end may hold a trunk
    for block in dict.fromkeys((*within, *trunk.blocks)):
        yield from cast(Block, block).sublayers


def _inside(part: Part) -> Iterator[Part]:
    """A part and the parts in it, outermost first."""
    yield part
    for value in vars(part).values():
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Part):
                yield from _inside(inner)


def _places(embed: Part) -> list[Any]:
    found = [getattr(part, "position", None) for part in _inside(embed)]
    return [position for position in found if isinstance(position, Spec)]


def _mixer(part: Part) -> str:
    """The name of what mixes; attention by its heads, its mask and what it reads."""
    if not isinstance(part, Attention):
        kind = RECURRENT.get(getattr(part, "kind", ""))
        attends = "additive attention in " if isinstance(part, Additive) else ""
        return attends + kind if kind else _words(type(part).__name__)
    groups = part.kv_heads or part.heads
    kind = "single-head" if part.heads == 1 else "multi-query" if groups == 1 else "multi-head"
    kind = "grouped-query" if 1 < groups < part.heads else kind
    sight = "cross" if part.cross else "causal" if part.causal else "two-way"
    return f"{sight} {kind} attention" + (f", window {part.window:,}" if part.window else "")


def _position(position: Spec) -> str:
    scaling = getattr(position, "scaling", None)
    name = {"Rope": "RoPE", "Alibi": "ALiBi"}.get(type(position).__name__, _words(type(position).__name__))
    return f"{name} ({_words(type(scaling).__name__)})" if scaling is not None else name


def _norm(sublayer: Sublayer) -> str:
    places = {"pre": sublayer.pre, "sandwich": sublayer.post if sublayer.pre else None}
    places |= {"post, inside": None if sublayer.pre else sublayer.post, "post": sublayer.after}
    found = [(where, norm) for where, norm in places.items() if norm is not None]
    if not found:
        return "none"
    where, norm = found[-1]
    return f"{where}: {type(getattr(norm, 'norm', norm)).__name__}"  # some places norm a part of the stream


def _ffn(part: Part) -> str:
    if isinstance(part, MoE):
        return f"{part.experts} experts of {_ffn(part.expert)}"
    assert isinstance(part, FeedForward)
    names = {"silu": "SwiGLU", "gelu": "GeGLU", "gelu_tanh": "GeGLU", "relu": "ReGLU"}
    plain = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU", "relu": "ReLU"}
    return (names if part.gated else plain).get(part.activation, part.activation)


def _by_kind(growth: dict[str, Growth]) -> dict[str, Growth]:
    """One line for mixers that grow alike and differ by a number or a name only."""
    found: dict[str, Growth] = {}
    for name, grown in growth.items():
        kind = _kind(name)
        found.setdefault(", ".join(RECURRENT.values()) if kind in RECURRENT.values() else kind, grown)
    return dict(sorted(found.items()))


def _kind(mixer: str) -> str:
    """A mixer without its numbers."""
    kind = mixer.split(", window")[0] + (", window w" if ", window" in mixer else "")
    for heads in ("single-head ", "multi-head ", "multi-query ", "grouped-query "):
        kind = kind.replace(heads, "")
    return kind


def _words(name: str) -> str:
    """ "LinearAttention" → "linear attention"; names of models stay as they are written."""
    if name in NAMES:
        return NAMES[name]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()


RECURRENT = {"elman": "Elman", "lstm": "LSTM", "gru": "GRU"}
NAMES = {"Mamba": "Mamba", "Mamba2": "Mamba-2", "S4": "S4", "T5Buckets": "T5 buckets", "Yarn": "YaRN",
         "LongRope": "LongRoPE", "DynamicNtk": "dynamic NTK", "Llama3": "Llama 3"}  # fmt: skip


def _once(names: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
