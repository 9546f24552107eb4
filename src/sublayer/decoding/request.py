"""What is asked of generation, checked before any work: options, and one Row a prompt."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from ..errors import InputError, UsageError, nearest
from ..nn.embed import Embed
from ..nn.position import LearnedOp
from ..nn.sublayer import ModelOp, Trunk, TrunkOp
from ..spec import Spec
from ..text.tokenizer import begun
from .sample import Sampling

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

Prompts = str | Tensor | Sequence[int] | Sequence[str | Sequence[int]]
Frames = Tensor | Sequence[Tensor]
"""Sources for an encoder that reads no tokens: [B, T, F], or one [T, F] a prompt."""


OWN = ("max_tokens", "stop", "stop_ids", "suppress", "suppress_first", "logprobs")
"""Fields of Options that a row may have for itself, as all of Sampling's; the others are of the whole call."""


class Options(Spec):
    """How prompts are continued. The fields of Sampling are given beside these, not inside `sampling`."""

    sampling: Sampling = Sampling()
    """How a token is chosen."""
    max_tokens: int = 128
    """Tokens after which a row ends; the context may end it earlier."""
    stop: str | tuple[str, ...] = ()
    """Strings that end a row; the text is cut before them. They need a tokenizer."""
    stop_ids: tuple[int, ...] | None = None
    """Tokens that end a row; None: the tokenizer's end-of-text tokens, if there is one."""
    logprobs: int | None = None
    """Log-probabilities: of each token, and of so many best alternatives in its place; None: none."""
    suppress: tuple[int, ...] = ()
    """Tokens that are never chosen; they go before any step of Sampling."""
    suppress_first: tuple[int, ...] = ()
    """Tokens that are not chosen as the first one."""
    beams: int = 1
    """Above 1: beam search of this width; nothing is drawn then."""
    length_penalty: float = 0.0
    """α: hypotheses rank by log-probability / ((5 + tokens) / 6)^α (arXiv 1609.08144, eq. 14); 0: no penalty."""
    slots: int | None = None
    """Prompts that decode together, each with all of its beams; further ones wait for a free slot; None: all, up to
    8."""
    length: int | None = None
    """Tokens that a slot may hold, where memory is short; None: what the longest row needs."""
    chunk: int = 512
    """Tokens of a prompt read in one call."""

    def check(self) -> None:
        for name in ("max_tokens", "beams", "slots", "length", "chunk"):
            value = getattr(self, name)
            self.require(value is None or value >= 1, f"{name} is at least 1, got {value}")
        self.require(self.logprobs is None or self.logprobs >= 0, f"logprobs is 0 or above, got {self.logprobs}")
        self.require("" not in self.stops, "an empty stop string would stop before any text")
        if self.beams > 1:
            drawn = self.sampling not in (Sampling(), Sampling(temperature=0.0))
            self.require(not drawn, f"beam search draws nothing and takes no {self.sampling!r}")
            self.require(not self.stops, "beam search ends at stop_ids, not at stop strings")
            self.require(not self.logprobs, "beam search lists no alternatives: logprobs is 0 or None")
        else:
            self.require(self.length_penalty == 0, "length_penalty needs beams above 1")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    def suppressed(self, count: int) -> tuple[int, ...]:
        """What is not chosen after `count` tokens."""
        return self.suppress if count else self.suppress + self.suppress_first


@dataclass(frozen=True)
class Row:
    """One prompt, ready to run."""

    index: int
    prompt: tuple[int, ...]
    source: tuple[int, ...] | Tensor | None  # ids, or frames [T, F]
    seed: int | None  # None: nothing is drawn
    room: int  # tokens it may produce
    options: Options


def read_options(given: Mapping[str, Any], base: Options | None = None) -> Options:
    """Options from flat keywords, the others as in base. Raises UsageError for an unknown one, SpecError for a wrong
    value."""
    ours, sampling = (_names(spec) for spec in (Options, Sampling))
    for name in given:
        if name not in ours | sampling:
            raise UsageError(f"unknown option {name!r} of generate{nearest(name, ours | sampling)}")
    base = base or Options()
    chosen: Sampling = given.get("sampling", base.sampling)
    changed = {name: value for name, value in given.items() if name in sampling}
    rest: dict[str, Any] = {name: value for name, value in given.items() if name in ours - {"sampling"}}
    if isinstance(rest.get("stop_ids"), int):
        rest["stop_ids"] = (rest["stop_ids"],)
    return base.replace(sampling=chosen.replace(**changed), **rest)


def read_rows(
    model: ModelOp,
    prompts: Prompts,
    sources: Prompts | Frames | None,
    seed: int | Sequence[int] | None,
    tokenizer: Tokenizer | None,
    options: Options,
    each: Sequence[Mapping[str, Any]] | None = None,
) -> list[Row]:
    """One Row a prompt; each: what a row has of options for itself.

    Raises UsageError for a model that cannot generate and for requests that cannot be meant, InputError naming the row
    for prompts that the model cannot take.
    """
    _check_model(model, sources is not None)
    trunk = cast(TrunkOp, model.decoder)
    vocab = cast(int, model.spec.vocab)
    ids = _read_ids(prompts, "prompt", tokenizer, vocab)
    limit, of = longest(trunk, options.length)
    for index, prompt in enumerate(ids):
        if limit is not None and len(prompt) > limit:
            raise InputError(f"row {index}: the prompt of {len(prompt)} tokens is longer than {of}")
    _check_ends(options, vocab, tokenizer)
    own = [options] * len(ids) if each is None else _read_each(each, len(ids), options, vocab, tokenizer)
    # The last token is an answer and is never read, so a context of n positions gives room for one more.
    rooms = [one.max_tokens if limit is None else min(one.max_tokens, limit - len(row) + 1)
             for one, row in zip(own, ids, strict=True)]  # fmt: skip
    found = _read_sources(model, sources, len(ids), tokenizer)
    drawn = [not one.sampling.greedy and one.beams == 1 for one in own]
    return [Row(i, *row) for i, row in enumerate(zip(ids, found, _seeds(seed, drawn), rooms, own, strict=True))]


def _read_each(
    each: Sequence[Mapping[str, Any]], rows: int, options: Options, vocab: int, tokenizer: Tokenizer | None
) -> list[Options]:
    if len(each) != rows:
        raise UsageError(f"options of {len(each)} rows for {rows} prompts: give one mapping a prompt")
    own = {*OWN, *_names(Sampling)}
    found: list[Options] = []
    for index, given in enumerate(each):
        bad = next((name for name in given if name not in own), None)
        if bad is not None:
            raise UsageError(f"row {index}: {bad!r} is no option of a row{nearest(bad, own)}")
        try:
            found.append(read_options(given, options))
            _check_ends(found[-1], vocab, tokenizer)
        except UsageError as error:
            raise UsageError(f"row {index}: {error}") from None
    return found


def _check_ends(options: Options, vocab: int, tokenizer: Tokenizer | None) -> None:
    for token in options.stop_ids or ():
        if not 0 <= token < vocab:
            raise UsageError(f"stop token {token} is outside the vocabulary of {vocab}; stop_ids=() stops at none")
    for token in options.suppressed(0):
        if not 0 <= token < vocab:
            raise UsageError(f"suppressed token {token} is outside the vocabulary of {vocab}")
    if len({*options.suppressed(0)}) == vocab:
        raise UsageError(f"suppress leaves none of the {vocab} tokens to choose")
    if options.stops and tokenizer is None:
        raise UsageError("stop strings need a tokenizer; give tokenizer=…, or stop_ids")


def _names(spec: type[Spec]) -> set[str]:
    return {field.name for field in fields(cast(Any, spec))}


def _check_model(model: ModelOp, with_sources: bool) -> None:
    if model.decoder is None or model.head is None or model.spec.vocab is None:
        raise UsageError("the model cannot generate: that takes a decoder over tokens with a head")
    if with_sources != (model.encoder is not None):
        reads = "has no encoder: leave sources out" if with_sources else "has an encoder: give one source a prompt"
        raise UsageError(f"the model {reads}")


def longest(trunk: TrunkOp, length: int | None) -> tuple[int | None, str]:
    """How many tokens a slot may hold, and what says so."""
    positions = [module.spec.length for module in trunk.modules() if isinstance(module, LearnedOp)]
    limits = [(size, f"the {size} positions that the model has learned") for size in positions]
    if length is not None:
        limits.append((length, f"a slot (length={length})"))
    return min(limits, default=(None, ""))


def _read_ids(given: Prompts, what: str, tokenizer: Tokenizer | None, vocab: int) -> list[tuple[int, ...]]:
    if isinstance(given, Tensor):
        given = cast("list[int] | list[list[int]]", given.tolist())
    if isinstance(given, str) or (len(given) > 0 and not isinstance(given[0], Sized)):
        given = cast("Sequence[str] | Sequence[Sequence[int]]", [given])
    if not len(given):
        raise UsageError(f"no {what}s: give at least one")
    rows = [_row_ids(row, f"row {i}: the {what}", tokenizer) for i, row in enumerate(cast("Sequence[Any]", given))]
    for index, row in enumerate(rows):
        bad = next((place for place, token in enumerate(row) if not 0 <= token < vocab), None)
        if bad is not None:
            raise InputError(f"row {index}: token id {row[bad]} at place {bad} is outside the vocabulary of {vocab}")
    return rows


def _row_ids(row: str | Sequence[int] | Tensor, what: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if isinstance(row, str):
        if tokenizer is None:
            raise UsageError(f"{what} is text, which needs a tokenizer: give tokenizer=…, or token ids")
        try:
            ids = begun(tokenizer, row) if what.endswith("prompt") else tokenizer.encode(row, framed=True)
        except InputError as error:
            raise InputError(f"{what}: {error}") from None
    else:
        try:
            ids = [operator.index(token) for token in row]
        except TypeError:
            raise UsageError(f"{what} is neither text nor a list of token ids: {row!r:.60}") from None
    if not ids:
        raise InputError(f"{what} is empty; give at least one token, such as the one that begins a text")
    return tuple(ids)


def _read_sources(
    model: ModelOp, sources: Prompts | Frames | None, rows: int, tokenizer: Tokenizer | None
) -> Sequence[tuple[int, ...] | Tensor | None]:
    if sources is None:
        return [None] * rows
    embed = cast(Trunk, model.spec.encoder).embed
    if isinstance(embed, Embed):
        found = _read_ids(cast(Prompts, sources), "source", tokenizer, embed.vocab)
    else:
        found = _read_frames(sources, type(embed).__name__)
    if len(found) != rows:
        raise UsageError(f"{len(found)} sources for {rows} prompts: give one source a prompt")
    limit, of = longest(cast(TrunkOp, model.encoder), None)
    for index, source in enumerate(found):
        if limit is not None and len(source) > limit:
            raise InputError(f"row {index}: the source of {len(source)} tokens is longer than {of}")
    return found


def _read_frames(sources: Any, front: str) -> list[Tensor]:
    """[B, T, F], or a list of [T, F] of various lengths."""
    rows = list(sources)
    fits = all(isinstance(row, Tensor) and row.is_floating_point() and row.dim() == 2 and len(row) for row in rows)
    if not rows or not fits:
        raise UsageError(f"the encoder reads {front}: sources are one floating-point tensor [T, F] a prompt")
    return rows


def _seeds(seed: int | Sequence[int] | None, drawn: Sequence[bool]) -> Sequence[int | None]:
    """One seed a row that draws: those given; or one number, counted up from the first row on; or one that nobody
    knows."""
    rows = len(drawn)
    if seed is None:
        seed = secrets.randbits(32)
    seeds = [seed + row for row in range(rows)] if isinstance(seed, int) else list(seed)
    if len(seeds) != rows:
        raise UsageError(f"{len(seeds)} seeds for {rows} prompts: give one seed, or one a prompt")
    bad = next((number for number in seeds if not (isinstance(number, int) and 0 <= number < 2**63)), None)
    if bad is not None:
        raise UsageError(f"a seed is a whole number from 0 to below 2^63, got {bad!r}")
    return [one if draws else None for one, draws in zip(seeds, drawn, strict=True)]
