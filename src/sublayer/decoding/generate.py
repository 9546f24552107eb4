"""Generation: prompts in, continuations out — all at once (`generate`) or as they come (`stream`). One decode path.

B rows that decode together, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from ..errors import SublayerError, UsageError
from ..nn.sublayer import ModelOp
from .beam import Hypothesis, Search
from .kept import KeptSlot
from .request import Frames, Options, Prompts, Row, read_options, read_rows
from .sample import best, log_probabilities, precise, sample, without
from .slots import Slots, evaluating
from .stop import GrowingText

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

Finish = Literal["stop", "stop_string", "length"]
"""Why a row ended: a token of stop_ids, a stop string, or max_tokens or the context."""


@dataclass(frozen=True)
class Event:
    """What is new in one row; the row's last event has `finish`. All its texts joined are the row's text."""

    row: int
    ids: tuple[int, ...]
    text: str
    """What has become certain; "" while a character or a possible stop string is incomplete, or without a tokenizer."""
    logprobs: tuple[float, ...]
    """One an id, where logprobs were asked for; else ()."""
    top_logprobs: tuple[dict[int, float], ...]
    """For each id the best alternatives in its place, the best first; else ()."""
    finish: Finish | None = None
    beams: tuple[Hypothesis, ...] = ()
    """Of a beam search: all that was found, the best first."""


@dataclass(frozen=True)
class Generated:
    """The continuation of one prompt."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    """What was generated; the last one is the stop token, if one ended the row."""
    text: str | None
    """What the ids read as behind the prompt, cut before a stop token or string; None without a tokenizer."""
    finish: Finish | None
    """None only in what an unfinished Stream has so far."""
    seed: int | None
    """With it, the row alone gives the same ids again; None where nothing was drawn."""
    logprobs: tuple[float, ...] | None
    """log p of each id under the model itself, before any step of Sampling; None unless asked for."""
    top_logprobs: tuple[dict[int, float], ...] | None
    """For each id the most probable alternatives in its place, the best first."""
    beams: tuple[Hypothesis, ...] = ()
    """Of a beam search: up to `beams` hypotheses, the best first, which is `ids`."""


def generate(
    model: ModelOp,
    prompts: Prompts,
    *,
    tokenizer: Tokenizer | None = None,
    sources: Prompts | Frames | None = None,
    seed: int | Sequence[int] | None = None,
    each: Sequence[Mapping[str, Any]] | None = None,
    kept: KeptSlot | None = None,
    **options: Any,
) -> list[Generated]:
    """Continues prompts: ids, lists of ids, or text where a tokenizer is given. Returns one Generated a prompt.

    sources: for a model with an encoder, what it reads for each prompt; the prompt is then what the decoder starts
    with. seed: one a row, or one number: row i then has seed + i; None: one that is drawn and reported. options: the
    fields of Options (max_tokens, stop, beams, …) and Sampling (temperature, top_k, …). each: one mapping a prompt of
    options for it alone (max_tokens, stop, stop_ids, suppress, logprobs, and Sampling's). kept: a slot that stays
    filled, so that the next prompt's beginning need not be read again; for one prompt, without sources and beams.

    A row depends on its prompt, source, seed and options only, never on its neighbours or the number of slots, up to
    the rounding of matrix products (with slots=1 to the last bit).
    Raises UsageError for options that cannot be meant, InputError naming the row for a prompt that the model cannot
    take, SublayerError for logits that are NaN.
    """
    events = stream(model, prompts, tokenizer=tokenizer, sources=sources, seed=seed, each=each, kept=kept, **options)
    for _ in events:
        pass
    return events.generated()


def stream(
    model: ModelOp,
    prompts: Prompts,
    *,
    tokenizer: Tokenizer | None = None,
    sources: Prompts | Frames | None = None,
    seed: int | Sequence[int] | None = None,
    each: Sequence[Mapping[str, Any]] | None = None,
    kept: KeptSlot | None = None,
    **options: Any,
) -> Stream:
    """As `generate`, token by token; a request that cannot be meant is refused here, not at the first token.

    A beam search gives one event a row.
    """
    read = read_options(options)
    if read.stop_ids is None:
        read = read.replace(stop_ids=tokenizer.eos if tokenizer is not None else ())
    rows = read_rows(model, prompts, sources, seed, tokenizer, read, each)
    if kept is not None and (len(rows) > 1 or sources is not None or read.beams > 1):
        raise UsageError("kept=… continues one prompt, without sources and beams")
    return Stream(model, rows, read, tokenizer, kept)


class Stream(Iterator[Event]):
    """The events of all rows, as they come. While it is being read, the model is in evaluation mode."""

    def __init__(
        self,
        model: ModelOp,
        rows: list[Row],
        options: Options,
        tokenizer: Tokenizer | None,
        kept: KeptSlot | None = None,
    ) -> None:
        self._rows, self._tokenizer = {row.index: row for row in rows}, tokenizer
        self._events: dict[int, list[Event]] = {row.index: [] for row in rows}
        self._run = _run(model, rows, options, tokenizer, kept)

    def __next__(self) -> Event:
        event = next(self._run)
        self._events[event.row].append(event)
        return event

    def close(self) -> None:
        """Ends all rows: the decoding state is freed, and the model is in its former mode again."""
        self._run.close()

    @overload
    def generated(self) -> list[Generated]: ...
    @overload
    def generated(self, row: int) -> Generated: ...
    def generated(self, row: int | None = None) -> list[Generated] | Generated:
        """One Generated a prompt, of what has come so far; row: that of one alone."""
        if row is not None:
            return _joined(self._rows[row], self._events[row], self._tokenizer)
        return [_joined(one, self._events[one.index], self._tokenizer) for one in self._rows.values()]


def _run(
    model: ModelOp, rows: list[Row], options: Options, tokenizer: Tokenizer | None, kept: KeptSlot | None
) -> Generator[Event]:
    count = min(len(rows), options.slots or 8)
    length = max(len(row.prompt) + row.room - 1 for row in rows)
    memory_length = max(0 if row.source is None else len(row.source) for row in rows)
    with evaluating(model):
        if kept is not None:
            kept.reserve(model, length)
        slots = kept or Slots(model, count * options.beams, length, memory_length)
        way = _search if options.beams > 1 else _decode
        yield from way(slots, count, rows, options, tokenizer)


def _decode(
    slots: Slots, count: int, rows: list[Row], options: Options, tokenizer: Tokenizer | None
) -> Iterator[Event]:
    """The loop: fill the slots, decode them together, give a slot on as soon as its row ends."""
    waiting = deque(rows)
    live: list[_Live] = []  # live[i] is in slot i
    while waiting or live:
        while waiting and len(live) < count:
            row = waiting.popleft()
            live.append(_Live(row, tokenizer))
            yield live[-1].take(slots.prefill(len(live) - 1, row.prompt, row.source, options.chunk))
            _drop_finished(slots, live)
        if live:
            for row, logits in zip(live, precise(slots.decode([row.last for row in live])), strict=True):
                yield row.take(logits)
            _drop_finished(slots, live)


def _drop_finished(slots: Slots, live: list[_Live]) -> None:
    """Frees the slots of rows that ended; the last row moves into a gap, so that the batch stays one view."""
    for slot in reversed(range(len(live))):
        if live[slot].finish is not None:
            last = live.pop()
            if slot < len(live):
                slots.move(len(live), slot)
                live[slot] = last
            else:
                slots.clear(slot)


class _Live:
    """A row while it grows."""

    def __init__(self, row: Row, tokenizer: Tokenizer | None) -> None:
        self.last = -1
        self.finish: Finish | None = None
        self._row = row
        self._options = options = row.options
        self._count = 0
        self._seen = set(row.prompt)
        self._text = None if tokenizer is None else GrowingText(tokenizer, options.stops, row.prompt[-1])

    def take(self, logits: Tensor) -> Event:
        """Chooses the next token from logits [V]."""
        options, seed = self._options, self._row.seed or 0
        with _naming(self._row, self._count):
            allowed = without(logits, options.suppressed(self._count))
            token = sample(allowed, options.sampling, seen=self._seen, seed=seed, draw=self._count)
            logprob, top = _logprobs(logits, token, options.logprobs)
        self.last = token
        self._count += 1
        self._seen.add(token)
        return Event(self._row.index, (token,), self._read(token), logprob, top, self.finish)

    def _read(self, token: int) -> str:
        """The text that the token makes certain; sets `finish`."""
        ends = token in (self._options.stop_ids or ())
        text = self._text.push(token) if self._text is not None and not ends else ""
        if ends:
            self.finish = "stop"
        elif self._count == self._row.room:
            self.finish = "length"
        if self._text is not None:
            if self.finish is not None:
                text += self._text.finish()
            if self._text.stopped:
                self.finish = "stop_string"
        return text


def _search(
    slots: Slots, count: int, rows: list[Row], options: Options, tokenizer: Tokenizer | None
) -> Iterator[Event]:
    """Beam searches, `count` prompts together; the live beams of each lie in neighbouring slots."""
    waiting = deque(sorted(rows, key=lambda row: len(row.prompt if row.source is None else row.source)))
    live: list[tuple[Row, Search]] = []
    used = 0  # slots
    while waiting or live:
        logits: list[Tensor] = []
        if live:
            tokens = [search.last for _, search in live]
            logits += slots.decode([token for beams in tokens for token in beams]).split([*map(len, tokens)])
        fresh = [waiting.popleft() for _ in range(min(len(waiting), count - len(live)))]
        for _, group in groupby(fresh, lambda row: len(row.prompt)):
            entering = list(group)
            sources = [row.source for row in entering if row.source is not None]
            prompts = [row.prompt for row in entering]
            logits += slots.prefill_together(used, prompts, sources or None, options.chunk).split(1)
            used += len(entering)
            live += [(row, Search(options.beams, row.room, row.options.stop_ids or (), options.length_penalty,
                                  row.options.suppressed)) for row in entering]  # fmt: skip
        before, after, parents, going = list[int](), list[int](), list[int](), list[tuple[Row, Search]]()
        for (row, search), of_row in zip(live, logits, strict=True):
            with _naming(row, search.tokens):
                chosen = search.step(of_row)
            parents += [len(before) + parent for parent in chosen]
            before += [row.index] * len(of_row)
            after += [row.index] * len(chosen)
            if chosen:
                going.append((row, search))
            else:
                yield _event(row, search.found, tokenizer)
        slots.reorder(parents, memory=before != after)
        slots.clear(range(len(after), len(before)))
        live, used = going, len(after)


def _event(row: Row, found: list[Hypothesis], tokenizer: Tokenizer | None) -> Event:
    first, text = found[0], ""
    if tokenizer is not None:
        growing = GrowingText(tokenizer, before=row.prompt[-1])
        text = "".join(map(growing.push, first.ids[:-1] if first.finish == "stop" else first.ids)) + growing.finish()
    wanted = row.options.logprobs is not None
    return Event(row.index, first.ids, text, first.logprobs if wanted else (), (), first.finish, tuple(found))


def _logprobs(
    logits: Tensor, token: int, alternatives: int | None
) -> tuple[tuple[float, ...], tuple[dict[int, float], ...]]:
    if alternatives is None:
        return (), ()
    values = log_probabilities(logits)
    ids = best(values, alternatives) if alternatives else []
    return (float(values[token]),), ({int(other): float(values[other]) for other in ids},)


def _joined(row: Row, events: list[Event], tokenizer: Tokenizer | None) -> Generated:
    wanted = row.options.logprobs is not None
    return Generated(
        prompt=row.prompt,
        ids=tuple(token for event in events for token in event.ids),
        text="".join(event.text for event in events) if tokenizer is not None else None,
        finish=events[-1].finish if events else None,
        seed=row.seed,
        logprobs=tuple(value for event in events for value in event.logprobs) if wanted else None,
        top_logprobs=tuple(top for event in events for top in event.top_logprobs) if wanted else None,
        beams=events[-1].beams if events else (),
    )


@contextmanager
def _naming(row: Row, token: int) -> Iterator[None]:
    """Puts the place before what is wrong with logits."""
    try:
        yield
    except SublayerError as error:
        raise SublayerError(f"row {row.index}, token {token}: {error}") from None
