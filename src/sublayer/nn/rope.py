"""Rotary positions: Rope, its length scalings, the rotation itself, and config.json of transformers read and written.

B batch, L length, N heads, H head size, R rotated dims (at most H), i a pair of dims (0 … R/2 − 1).
Source: Su et al. 2021, arXiv 2104.09864, eq. 34: pair i at position p turns by the angle p · theta^(−2i/R).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import lru_cache
from operator import index
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..errors import InputError, SpecError, nearest
from ..spec import Spec
from .constant import constant, traced_as_constant
from .rope_scaling import DynamicNtk, Linear, Llama3, LongRope, Ntk, Proportional, Scaling, Yarn, geometric

Pairing = Literal["half", "interleaved"]
MAX_PAIRS = 1 << 14  # that are turned in a head, of any model; a list that is longer is a mistake, and would take long


class Rope(Spec):
    """Rotary position embedding of queries and keys; see `tables` and `rotate`."""

    theta: float = 10000.0
    """Base of the frequencies. 10000 is the paper's; models of long context train with larger ones."""
    size: int | None = None
    """R, how many leading dims of each head are rotated; None rotates the whole head."""
    pairing: Pairing = "half"
    """Which dims turn together: "half" i and i + R/2 (GPT-NeoX, transformers), "interleaved" 2i and 2i + 1 (paper)."""
    scaling: Scaling | None = None
    """How the frequencies are changed to reach past the trained length; None: not at all."""

    def check(self) -> None:
        self.require(self.theta > 1, f"theta is a base above 1, got {self.theta}")
        if self.size is not None:
            self.require(
                self.size > 0 and self.size % 2 == 0,
                f"size counts rotated dims in pairs: even and above 0, got {self.size}",
            )
            if self.scaling is not None:
                self.scaling.fit(self.size)

    @property
    def dynamic(self) -> bool:
        """The frequencies depend on the document's own length: cache keys unrotated, rotate them when read."""
        return self.scaling is not None and self.scaling.dynamic

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by (so scores by its square); 1 unless YaRN or LongRoPE asks."""
        return 1.0 if self.scaling is None else self.scaling.magnitude()

    def rotated(self, head_size: int) -> int:
        """R for this head size. Raises SpecError where it does not fit."""
        size = head_size if self.size is None else self.size
        if size > head_size:
            raise SpecError(f"Rope.size: {size} rotated dims do not fit a head of size {head_size}")
        if size % 2:
            raise SpecError(f"Rope: the head size {head_size} is odd; give an even size to rotate a part of it")
        if self.scaling is not None:
            self.scaling.fit(size)
        return size

    @traced_as_constant
    def frequencies(self, head_size: int) -> tuple[float, ...]:
        """R/2 angles per position; of a dynamic scaling those of a document within the trained length."""
        return _frequencies(self, head_size)

    def tables(
        self, pos: Tensor, head_size: int, *, lengths: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at integer positions, times the attention factor; each [B|1, L, R/2].

        pos: [B|1, L]. lengths: [B|1, L], the length of the document that each token belongs to; only a dynamic
        scaling reads it, token by token, so neighbours in a batch or a packed row never change each other.
        Angles and results are in fp32 whatever the model's dtype, in fp64 for dtype=torch.float64.
        Raises InputError if a dynamic scaling gets no lengths.
        """
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        head_size = index(head_size)  # one number for a compiler too, that has taken it for a changing one
        frequencies = constant(self.frequencies(head_size), pos, dtype)
        if self.scaling is not None and self.dynamic:
            if lengths is None:
                raise InputError(f"{type(self.scaling).__name__} needs lengths, the length of each token's document")
            frequencies = self.scaling.stretch(frequencies, lengths, self.theta, self.rotated(head_size))
        angles = pos.to(dtype).unsqueeze(-1) * frequencies
        factor = self.attention_factor
        return (angles.cos(), angles.sin()) if factor == 1.0 else (angles.cos() * factor, angles.sin() * factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing = "half") -> Tensor:
    """x with the pairs of its first R dims turned by the tables' angles; the other dims pass unchanged.

    x: [B, N, L, H] or [B, L, H]; cos, sin: [B|1, L, R/2] from `Rope.tables`, broadcast over heads.
    Returns x's shape and dtype, computed in at least fp32. Raises InputError if R is beyond H.
    """
    size = 2 * cos.shape[-1]
    if size > x.shape[-1]:
        raise InputError(f"rotary tables for {size} dims do not fit heads of size {x.shape[-1]}")
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    turning = x[..., :size].to(torch.promote_types(x.dtype, torch.float32))
    if torch.compiler.is_compiling():  # which fuses what is written out
        a, b = _pairs(turning, pairing)
        parts = (a * cos - b * sin, b * cos + a * sin)
        turned = torch.cat(parts, -1) if pairing == "half" else torch.stack(parts, -1).flatten(-2)
    else:
        turned = cast(Tensor, cast(Any, _Turn).apply(turning, cos, sin, pairing))
    turned = turned.to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)


def _pairs(x: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second dims of all pairs."""
    if pairing == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


class _Turn(torch.autograd.Function):
    """The rotation in half the passes over memory, with nothing of x kept: its gradient is the rotation back."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:  # pyright: ignore
        turned = torch.empty_like(x)
        (a, b), (first, second) = _pairs(x, pairing), _pairs(turned, pairing)
        torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=second).addcmul_(a, sin)
        return turned

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, cos, sin, ctx.pairing = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        cos, sin = ctx.saved_tensors
        return cast(Any, _Turn).apply(grad, cos, -sin, ctx.pairing), None, None, None


def pairing_permutation(head_size: int, size: int | None = None) -> Tensor:
    """Indices p [H] with interleaved[j] = half[p[j]] within a head; the way back is p.argsort().

    Only the first size dims move (None: all). A query or key projection is permuted by `repair`.
    """
    size = head_size if size is None else size
    pairs = torch.arange(size).view(2, -1).T.flatten()
    return torch.cat((pairs, torch.arange(size, head_size)))


def repair(rows: Tensor, head_size: int, size: int | None = None, *, to: Pairing) -> Tensor:
    """A q or k projection [heads · H, …] (or its bias) of one pairing turned into the other; values are unchanged.

    It takes the head size and no head count, so grouped keys cannot be permuted with the queries' count.
    """
    order = pairing_permutation(head_size, size).to(rows.device)
    if to == "half":
        order = order.argsort()
    return rows.reshape(-1, head_size, *rows.shape[1:]).index_select(1, order).reshape(rows.shape)


@lru_cache(maxsize=1024)
def _frequencies(rope: Rope, head_size: int) -> tuple[float, ...]:
    size = rope.rotated(head_size)
    scaling = rope.scaling
    return tuple(geometric(rope.theta, size) if scaling is None else scaling.frequencies(rope.theta, size))


def rope_from_hf(config: Mapping[str, Any], head_size: int, *, pairing: Pairing = "half") -> Rope:
    """The Rope of a config.json: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before).

    Which dims pair is in no config but in the family's code: say so. Other keys of the config are not looked at.
    Raises SpecError naming the key for a rope_type or a key of it that is not known here, and for one that is missing.
    """
    where, given = _hf_parameters(config)
    theta = next((t for t in (given.pop("rope_theta", None), config.get("rope_theta")) if t is not None), 10000.0)
    part = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    older, newer = given.pop("type", None), given.pop("rope_type", None)
    kind = str(newer or older or "default")
    kind = "longrope" if kind == "su" else kind  # Phi-3's first name for it
    if kind == "proportional":  # which takes the part for its own
        given["partial_rotary_factor"], part = part, 1.0
    size = None if int(head_size * part) == head_size else int(head_size * part)
    if kind not in _HF:
        raise SpecError(f"{where}.rope_type: {kind!r} is not known{nearest(kind, _HF)}")
    scaling, keys = _HF[kind]
    more = given.pop("attn_factor", None) if kind == "yarn" else None  # a factor of the usual one, in DeepSeek's files
    unknown = next((key for key in given if key not in keys), None)
    if unknown is not None:
        raise SpecError(f"{where}.{unknown}: not a key of rope_type {kind!r}{nearest(unknown, keys)}")
    if scaling is None:
        return Rope(theta, size, pairing)
    lengths = {key: len(cast("list[object]", value)) for key, value in given.items() if isinstance(value, list)}
    for key, length in lengths.items():
        if length > MAX_PAIRS:
            raise SpecError(f"{where}.{key}: {length} numbers, and no head has more than {MAX_PAIRS} pairs")

    longest = config.get("max_position_embeddings")
    fields = {keys[key]: value for key, value in given.items()}
    if scaling is DynamicNtk:
        fields["trained_length"] = longest
    elif "trained_length" in keys.values():  # the top level wins, as in transformers: Phi-3 has it there
        trained = config.get("original_max_position_embeddings") or fields.get("trained_length")
        fields["trained_length"] = trained or longest
    if scaling in (Yarn, LongRope) and longest and fields["trained_length"]:
        fields.setdefault("factor", longest / fields["trained_length"])
    theirs = {ours: f"{where}.{key}" for key, ours in keys.items()}
    for field in dataclasses.fields(cast(Any, scaling)):
        if field.default is dataclasses.MISSING and fields.get(field.name) is None:
            key = theirs.get(field.name, "max_position_embeddings")
            raise SpecError(f"{key}: missing, rope_type {kind!r} needs it")
    made = scaling(**fields)
    if more is not None:
        if type(more) not in (float, int) or not 0 < more < math.inf or fields.get("attention_factor") is not None:
            raise SpecError(f"{where}.attn_factor={more!r}: a number above 0, where there is no attention_factor")
        made = made.replace(attention_factor=made.magnitude() * more)
    return Rope(theta, size, pairing, made)


def rope_to_hf(rope: Rope, head_size: int) -> dict[str, Any]:
    """The keys of config.json, as transformers 5 spells them, that `rope_from_hf` reads as the same Rope.

    DynamicNtk sets max_position_embeddings too, its trained length. Ntk, which transformers lacks, becomes its base;
    a LongRope without a factor gets its attention factor written out: the same function, not an equal spec.
    """
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    config: dict[str, Any] = {"rope_parameters": parameters}
    size, scaling = rope.rotated(head_size), rope.scaling
    if size != head_size:
        # They take the whole part of head_size · factor; half a dim more where rounding would lose one.
        part = size / head_size
        parameters["partial_rotary_factor"] = part if int(head_size * part) == size else (size + 0.5) / head_size
    if scaling is None:
        return config
    if isinstance(scaling, Ntk):
        parameters["rope_theta"] = scaling.base(rope.theta, size)
        return config
    kind, keys = next((kind, keys) for kind, (known, keys) in _HF.items() if known is type(scaling))
    parameters["rope_type"] = kind
    for key, ours in keys.items():
        value = getattr(scaling, ours)
        if value is not None:
            parameters[key] = list(cast("tuple[float, ...]", value)) if isinstance(value, tuple) else value
    if isinstance(scaling, DynamicNtk):
        config["max_position_embeddings"] = scaling.trained_length
    if isinstance(scaling, LongRope) and scaling.factor is None:
        parameters["attention_factor"] = scaling.magnitude()  # else they would derive one from the lengths
    return config


def _hf_parameters(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(the key they stand under, the parameters without those set to null)."""
    spellings = [key for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    if len(spellings) == 2 and config["rope_parameters"] != config["rope_scaling"]:
        raise SpecError("rope_scaling: differs from rope_parameters, its newer spelling; keep one")
    where = spellings[0] if spellings else "rope_parameters"
    given = cast("dict[str, Any]", config.get(where) or {})
    return where, {key: value for key, value in given.items() if value is not None}


# rope_type of transformers: our scaling and, their keys beside our fields; read in both directions.
_HF: dict[str, tuple[type[Scaling] | None, dict[str, str]]] = {
    "default": (None, {}),
    "linear": (Linear, {"factor": "factor"}),
    "proportional": (Proportional, {"partial_rotary_factor": "share", "factor": "factor"}),
    "dynamic": (DynamicNtk, {"factor": "factor"}),  # its trained length is max_position_embeddings
    "llama3": (
        Llama3,
        {
            "factor": "factor",
            "low_freq_factor": "low_frequency_factor",
            "high_freq_factor": "high_frequency_factor",
            "original_max_position_embeddings": "trained_length",
        },
    ),
    "yarn": (
        Yarn,
        {
            "factor": "factor",
            "original_max_position_embeddings": "trained_length",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "attention_factor": "attention_factor",
            "mscale": "mscale",
            "mscale_all_dim": "mscale_all_dim",
            "truncate": "truncate",
        },
    ),
    "longrope": (
        LongRope,
        {
            "short_factor": "short",
            "long_factor": "long",
            "original_max_position_embeddings": "trained_length",
            "factor": "factor",
            "attention_factor": "attention_factor",
        },
    ),
}
