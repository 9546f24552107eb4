"""Objectives on running text: the next token, masked tokens, corrupted spans.

B rows, L length, M source length, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..errors import UsageError
from ..nn.embed import Embed
from ..nn.head import Head
from ..nn.sublayer import Model, ModelOp
from ..recipes.bert import masked_tokens
from ..step import Step
from ..text.tokenizer import Tokenizer, special_id
from .batch import Batch
from .loss import IGNORED, Loss, head_loss
from .objectives import Objective, refuse_causal, refuse_sighted

if TYPE_CHECKING:
    from ..data.batches import Rows

END = "<|endoftext|>"
MASK = "<|mask|>"
SENTINELS = tuple(f"<|extra_{i}|>" for i in range(100))
# How published tokenizers call the same; the first one that a tokenizer has is taken.
MASKS = (MASK, "[MASK]", "<mask>")
SENTINEL_FORMS = ("<|extra_{}|>", "<extra_id_{}>")


@dataclass(frozen=True)
class Words:
    """What collators have to know of a tokenizer."""

    tokenizer: Tokenizer

    @property
    def end(self) -> int | None:
        """The id that ends a text, and begins the next one."""
        return self.tokenizer.eos[0] if self.tokenizer.eos else None

    @cached_property
    def mask(self) -> int:
        """The id that stands for a masked token. Raises UsageError for a tokenizer without one."""
        found = next((token for name in MASKS if (token := self.special(name)) is not None), None)
        if found is None:
            raise UsageError(f"tokenizer: it has no mask token ({' or '.join(MASKS)})")
        return found

    @cached_property
    def sentinels(self) -> Tensor:
        """int64, the ids that stand for spans, in order. Raises UsageError for a tokenizer without any."""
        for form in SENTINEL_FORMS:
            found = [token for i in range(100) if (token := self.special(form.format(i))) is not None]
            if found:
                return torch.tensor(found)
        raise UsageError(f"tokenizer: it has no tokens that stand for spans ({' or '.join(SENTINEL_FORMS)})")

    @cached_property
    def content(self) -> Tensor:
        """bool [V]: ids that stand for text, and not special ones."""
        return torch.tensor([bool(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.size)])

    @cached_property
    def goes_on(self) -> Tensor:
        """bool [2, V]: ids whose last byte may stand inside a word; and those whose first may."""
        pieces = [self.tokenizer.token_bytes(i) for i in range(self.tokenizer.size)]
        inside = [[_of_a_word(piece[at : at + 1 or None]) for piece in pieces] for at in (-1, 0)]
        return torch.tensor(inside)

    def special(self, name: str) -> int | None:
        """The id of a special token; None where the tokenizer has none of that name."""
        return special_id(self.tokenizer, name)


def _of_a_word(byte: bytes) -> bool:
    return byte.isalnum() or byte >= b"\x80"


# --- the next token ---


class NextToken(Objective):
    """Each next token of running text, for causal decoders."""

    kind: ClassVar[str] = "next_token"
    z_loss: float = 0.0
    """Weight of logsumexp², which keeps logits small (1e-4 in PaLM, arXiv 2204.02311, section 5)."""
    smoothing: float = 0.0
    """Label smoothing (0.1 in 2017)."""

    def check(self) -> None:
        self.require(self.z_loss >= 0, f"z_loss is 0 or above, got {self.z_loss}")
        self.require(0 <= self.smoothing < 1, f"smoothing is a share from 0 to below 1, got {self.smoothing}")

    def fits(self, model: Model) -> None:
        if model.decoder is None or model.encoder is not None or model.head is None:
            raise UsageError(f"objective: {self.kind} trains decoders with a head, and nothing else")
        refuse_sighted(self, model)

    def collate(self, rows: Rows, words: Words, generator: torch.Generator, *, segments: bool = True) -> Batch:
        return next_tokens(rows, words.end, segments=segments)

    def __call__(self, model: ModelOp, batch: Batch) -> Loss:
        return next_token(model, batch, z_loss=self.z_loss, smoothing=self.smoothing)


def next_tokens(rows: Rows, end: int | None, *, segments: bool = True) -> Batch:
    """The batch that predicts each next token of rows (ids and segments [B, L + 1]).

    A document begins with `end`, so what follows a document's last token can be told too: it is `end`. Without such a
    token (None) nothing is asked there. segments=False: rows are read as running text, across documents.
    """
    ids, labels, segment = rows.ids[:, :-1], rows.ids[:, 1:], rows.segment
    asked = segment[:, 1:] != 0
    if not segments:
        segment = segment.clamp(max=1)
    elif end is None:
        asked = asked & (segment[:, 1:] == segment[:, :-1])
    else:
        asked = asked & ((segment[:, 1:] == segment[:, :-1]) | (labels == end))
    if not bool(asked.all()):
        labels = labels.masked_fill(~asked, IGNORED)
    return Batch(ids, labels, _geometry(segment[:, :-1]))


def next_token(model: ModelOp, batch: Batch, *, z_loss: float = 0.0, smoothing: float = 0.0) -> Loss:
    """The code length of each token that is asked, in nats, plus z_loss · logsumexp², plus what the model's ops add.

    What is asked stands in batch.labels, so that this serves every objective whose answers are tokens, position by
    position: masked ones and an encoder-decoder's too.
    """
    found = model(batch.inputs, batch.step, source=batch.source, output="hidden")
    hidden, extras = found if isinstance(found, tuple) else (found, {})
    loss = head_loss(model, hidden, batch.labels, z_loss=z_loss, label_smoothing=smoothing)
    for value in extras.values():
        # An auxiliary loss is a mean over the tokens of its call: times their number, it is a sum as the rest.
        loss = Loss(loss.sum + value * loss.tokens, loss.tokens, loss.extra + value.detach() * loss.tokens)
    return loss


# --- masked tokens ---


class Masked(Objective):
    """Tokens hidden from an encoder, to be told from both sides (BERT, arXiv 1810.04805, section 3.1).

    They are chosen anew in every step (RoBERTa, arXiv 1907.11692, section 4.1), as a function of seed and step.
    """

    kind: ClassVar[str] = "masked"
    specials: ClassVar[tuple[str, ...]] = (MASK,)
    share: float = 0.15
    """Of the tokens that are asked."""
    hidden: float = 0.8
    """Of those, the share that becomes the mask token."""
    replaced: float = 0.1
    """Of those, the share that becomes another token at random; the rest is left as it is."""
    whole_words: bool = False
    """Whether all tokens of a word are chosen together."""

    def check(self) -> None:
        self.require(0 < self.share < 1, f"share is between 0 and 1, got {self.share}")
        rest = self.hidden >= 0 and self.replaced >= 0 and self.hidden + self.replaced <= 1
        self.require(rest, f"hidden and replaced are shares of one whole, got {self.hidden} and {self.replaced}")

    def adapt(self, model: Model, classes: int) -> Model:
        if isinstance(model.head, Head) or not isinstance(model.embedding, Embed):
            return model
        return model.replace(head=masked_tokens(), tied=True)

    def fits(self, model: Model) -> None:
        if model.encoder is None or model.decoder is not None or not isinstance(model.head, Head):
            raise UsageError(f"objective: {self.kind} trains encoders of tokens, and nothing else")
        refuse_causal(self, model)

    def collate(self, rows: Rows, words: Words, generator: torch.Generator, *, segments: bool = True) -> Batch:
        ids, segment = rows.ids[:, :-1], rows.segment[:, :-1]
        chosen = self._chosen(ids, segment, words, generator)
        part = torch.rand(ids.shape, generator=generator)
        others = words.content.nonzero()[:, 0]
        random = others[torch.randint(len(others), ids.shape, generator=generator)]
        shown = ids.masked_fill(chosen & (part < self.hidden), words.mask)
        swapped = chosen & (part >= self.hidden) & (part < self.hidden + self.replaced)
        shown = torch.where(swapped, random, shown)
        geometry = _geometry(segment if segments else segment.clamp(max=1))
        return Batch(shown, ids.masked_fill(~chosen, IGNORED), geometry)

    def _chosen(self, ids: Tensor, segment: Tensor, words: Words, generator: torch.Generator) -> Tensor:
        """bool [B, L]: tokens of the text, never special ones or padding."""
        draw = torch.rand(ids.shape, generator=generator)
        text = words.content[ids] & (segment != 0)
        if self.whole_words:
            ends, begins = words.goes_on
            joined = torch.zeros_like(text)
            joined[:, 1:] = ends[ids[:, :-1]] & begins[ids[:, 1:]] & (segment[:, 1:] == segment[:, :-1]) & text[:, :-1]
            first = torch.where(joined, 0, torch.arange(ids.shape[1])).cummax(1).values
            draw = draw.gather(1, first)  # a word's tokens share what its first one drew
        return text & (draw < self.share)

    def __call__(self, model: ModelOp, batch: Batch) -> Loss:
        return next_token(model, batch)


# --- corrupted spans ---


class SpanCorruption(Objective):
    """Spans of a text replaced by sentinels and told by a decoder, one by one (T5, arXiv 1910.10683, section 3.1.4).

    Each document of a row is corrupted alone; the decoder begins with the token that ends a text.
    """

    kind: ClassVar[str] = "span_corruption"
    specials: ClassVar[tuple[str, ...]] = SENTINELS
    share: float = 0.15
    """Of the tokens that are corrupted."""
    length: float = 3.0
    """Mean length of a span."""
    smoothing: float = 0.0
    """Label smoothing."""

    def check(self) -> None:
        self.require(0 < self.share < 1, f"share is between 0 and 1, got {self.share}")
        self.require(self.length >= 1, f"length is at least 1, got {self.length}")
        self.require(0 <= self.smoothing < 1, f"smoothing is a share from 0 to below 1, got {self.smoothing}")

    def fits(self, model: Model) -> None:
        if model.encoder is None or model.decoder is None or model.head is None:
            raise UsageError(f"objective: {self.kind} trains encoder-decoders with a head, and nothing else")

    def collate(self, rows: Rows, words: Words, generator: torch.Generator, *, segments: bool = True) -> Batch:
        sources, targets = Ragged(), Ragged()
        end = words.end
        if end is None:
            raise UsageError("tokenizer.end: the objective span_corruption needs a token that ends a text")
        for row, numbers in zip(rows.ids[:, :-1], rows.segment[:, :-1], strict=True):
            for number in range(1, int(numbers.max()) + 1) if segments else (None,):
                document = row[numbers == number] if number is not None else row[numbers != 0]
                source, target = corrupt_spans(document, words.sentinels, self.share, self.length, generator)
                sources.add(torch.cat([source, source.new_tensor([end])]), number or 1)
                targets.add(torch.cat([target.new_tensor([end]), target, target.new_tensor([end])]), number or 1)
            sources.close()
            targets.close()
        source, memory_segment = sources.padded()
        ids, segment = targets.padded()
        inside = torch.zeros_like(segment, dtype=torch.bool)
        inside[:, :-1] = segment[:, 1:] == segment[:, :-1]
        labels = torch.full_like(ids, IGNORED)
        labels[:, :-1] = ids[:, 1:].masked_fill(~inside[:, :-1] | (segment[:, 1:] == 0), IGNORED)
        step = Step(segment=segment, memory_segment=memory_segment)
        return Batch(ids, labels, step, source)

    def __call__(self, model: ModelOp, batch: Batch) -> Loss:
        return next_token(model, batch, smoothing=self.smoothing)


def corrupt_spans(
    ids: Tensor, sentinels: Tensor, share: float, length: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(what is left, with a sentinel for each span; the sentinels, each with its span) of ids [L].

    share of the tokens, rounded, is cut into spans of mean `length`; their places and lengths are drawn evenly among
    all ways to cut, and the text begins with what is left. A text of one token has none.
    """
    total = len(ids)
    hidden = min(max(round(total * share), 1), total - 1)
    spans = min(max(round(hidden / length), 1), total - hidden, hidden, len(sentinels)) if total > 1 else 0
    if spans < 1:
        return ids, ids[:0]
    covered, kept = _cut(hidden, spans, generator), _cut(total - hidden, spans, generator)
    source: list[Tensor] = []
    target: list[Tensor] = []
    at = 0
    for sentinel, left, gone in zip(sentinels.split(1), kept, covered, strict=False):
        source += [ids[at : at + left], sentinel]
        target += [sentinel, ids[at + left : at + left + gone]]
        at += left + gone
    return torch.cat(source), torch.cat(target)


def _cut(total: int, parts: int, generator: torch.Generator) -> list[int]:
    """Whole numbers above 0 with this sum, every such list equally likely."""
    cuts = (torch.randperm(total - 1, generator=generator)[: parts - 1] + 1).sort().values.tolist()
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


class Ragged:
    """Rows of documents, put together piece by piece and padded at the end."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[Tensor, int]]] = [[]]

    def add(self, ids: Tensor, number: int) -> None:
        """A document goes on the row that is open."""
        self.rows[-1].append((ids, number))

    def close(self) -> None:
        """The next document begins another row."""
        self.rows.append([])

    def padded(self) -> tuple[Tensor, Tensor]:
        """(ids, segment), int64 [B, L], of the rows that hold something."""
        rows = [row for row in self.rows if row]
        length = max(sum(len(ids) for ids, _ in row) for row in rows)
        ids, segment = torch.zeros(2, len(rows), length, dtype=torch.long)
        for i, row in enumerate(rows):
            at = 0
            for piece, number in row:
                ids[i, at : at + len(piece)], segment[i, at : at + len(piece)] = piece, number
                at += len(piece)
        return ids, segment


def _geometry(segment: Tensor) -> Step:
    """The step of packed rows; a row that is one document without padding needs no segments."""
    return Step() if bool((segment == 1).all()) else Step(segment=segment)
