"""Objectives on examples: text to text, a class or tags of a text, pairs of texts that mean the same.

B examples, L and M lengths, C classes, D width of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.examples import Example, padded
from ..errors import InputError, UsageError
from ..nn.head import Classifier, Pooled, of_documents
from ..nn.sublayer import Model, ModelOp
from ..step import Step
from ..text.tokenizer import frame
from .batch import Batch
from .language import Words, next_token
from .loss import IGNORED, Loss
from .objectives import Objective, Reads, refuse_causal


class OnExamples(Objective):
    """Base of what is trained on examples: a record's values become ids, and examples a batch."""

    reads: ClassVar[Reads] = "examples"
    uses: ClassVar[tuple[str, ...]] = ("field", "target", "prefix", "judge", "bad_bytes", "length", "held")
    labelled: ClassVar[bool] = False
    """Whether the second field is one of a set of names, or a list of them."""

    def example(self, values: Sequence[Any], words: Words, labels: Mapping[str, int], prefix: str) -> Example:
        """The ids of a record's two values. Raises InputError for values of another type."""
        raise InputError(f"objective: {self.kind} reads no examples")

    def gather(self, examples: Sequence[Mapping[str, Tensor]], words: Words) -> Batch:
        """The batch of some examples."""
        raise InputError(f"objective: {self.kind} makes no batches")


def text_of(value: Any) -> str:
    """A value that is to be text. Raises InputError for any other."""
    if not isinstance(value, str):
        raise InputError(f"expected text, found {type(value).__name__}")
    return value


# --- text to text ---


class TextToText(OnExamples):
    """A target text from a source text, for encoder-decoders: translation, or any task put into words (T5).

    A source may have a prefix that names its task. Source and target end with the token that ends a text, and the
    decoder begins with it, or with the token named by `start`.
    """

    kind: ClassVar[str] = "text_to_text"
    smoothing: float = 0.0
    """Label smoothing (0.1 in 2017)."""
    start: str | None = None
    """The special token that the decoder begins with (T5's is "<pad>"); None: the one that ends a text."""

    def check(self) -> None:
        self.require(0 <= self.smoothing < 1, f"smoothing is a share from 0 to below 1, got {self.smoothing}")

    def fits(self, model: Model) -> None:
        if model.encoder is None or model.decoder is None or model.head is None:
            raise UsageError(f"objective: {self.kind} trains encoder-decoders with a head, and nothing else")

    def example(self, values: Sequence[Any], words: Words, labels: Mapping[str, int], prefix: str) -> Example:
        source, target = map(text_of, values)
        return {
            "source": self.source(source, words, prefix),
            "target": [*words.tokenizer.encode(target), self.end(words)],
        }

    def source(self, text: str, words: Words, prefix: str = "") -> list[int]:
        """The ids that the encoder reads for a text."""
        return [*words.tokenizer.encode(prefix + text), self.end(words)]

    def end(self, words: Words) -> int:
        if words.end is None:
            raise UsageError(f"tokenizer.end: the objective {self.kind} needs a token that ends a text")
        return words.end

    def begin(self, words: Words) -> int:
        """The id that the decoder begins with."""
        if self.start is None:
            return self.end(words)
        found = words.special(self.start)
        if found is None:
            raise UsageError(f"objective.start: the tokenizer has no special token {self.start!r}")
        return found

    def gather(self, examples: Sequence[Mapping[str, Tensor]], words: Words) -> Batch:
        source, memory_segment = padded([example["source"] for example in examples])
        labels, segment = padded([example["target"] for example in examples], IGNORED)
        begin = torch.full_like(labels[:, :1], self.begin(words))
        ids = torch.cat([begin, labels[:, :-1].clamp(min=0)], 1)
        return Batch(ids, labels, Step(segment=segment, memory_segment=memory_segment), source)

    def __call__(self, model: ModelOp, batch: Batch) -> Loss:
        return next_token(model, batch, smoothing=self.smoothing)


# --- classes and tags ---


class Classification(OnExamples):
    """One of C classes for a text. A model without a head that pools gets one: of the first token, or of the last where
    the model is a decoder."""

    kind: ClassVar[str] = "classification"
    answer: ClassVar[str] = "text"
    labelled: ClassVar[bool] = True
    smoothing: float = 0.0
    """Label smoothing."""

    def check(self) -> None:
        self.require(0 <= self.smoothing < 1, f"smoothing is a share from 0 to below 1, got {self.smoothing}")

    def adapt(self, model: Model, classes: int) -> Model:
        if isinstance(model.head, Classifier) and model.head.pool is not None:
            return model.replace(head=model.head.replace(classes=classes))
        head = Classifier(classes, pool="last" if model.encoder is None else "first")
        return model.replace(head=head, tied=False)

    def fits(self, model: Model) -> None:
        if model.encoder is not None and model.decoder is not None:
            raise UsageError(f"objective: {self.kind} trains one trunk, an encoder or a decoder, and no translator")

    def example(self, values: Sequence[Any], words: Words, labels: Mapping[str, int], prefix: str) -> Example:
        text, name = values
        return {"text": framed(words, prefix + text_of(text)), "class": [labels[str(name)]]}

    def gather(self, examples: Sequence[Mapping[str, Tensor]], words: Words) -> Batch:
        ids, segment = padded([example["text"] for example in examples])
        return Batch(ids, torch.cat([example["class"] for example in examples]), Step(segment=segment))

    def __call__(self, model: ModelOp, batch: Batch) -> Loss:
        return class_loss(model, batch, self.smoothing)


def class_loss(model: ModelOp, batch: Batch, smoothing: float = 0.0) -> Loss:
    """Cross-entropy of a pooled head against labels [B], one a row, with how many were right."""
    found = model(batch.inputs, batch.step)
    logits, extras = found if isinstance(found, tuple) else (found, {})
    logits = logits if logits.dim() == 2 else of_documents(logits, batch.step)
    return answer_loss(logits, batch.labels, smoothing, sum(extras.values()))


def answer_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0, auxiliary: Tensor | float = 0.0) -> Loss:
    """Loss of logits [N, C] against labels [N], those of -100 left out, with how many were right."""
    counted = labels != IGNORED
    logits, labels = logits[counted], labels[counted]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    nats = F.cross_entropy(wide, labels, reduction="sum")
    total = F.cross_entropy(wide, labels, reduction="sum", label_smoothing=smoothing) + auxiliary * len(labels)
    right = (logits.argmax(-1) == labels).sum()
    return Loss(total, len(labels), (total - nats).detach(), right)


class Tagging(OnExamples):
    """A tag for each word of a text that comes as a list of words; a word's first token carries it."""

    kind: ClassVar[str] = "tagging"
    uses: ClassVar[tuple[str, ...]] = tuple(key for key in OnExamples.uses if key != "prefix")
    answer: ClassVar[str] = "word"
    labelled: ClassVar[bool] = True

    def adapt(self, model: Model, classes: int) -> Model:
        return model.replace(head=Classifier(classes), tied=False)

    def fits(self, model: Model) -> None:
        if model.encoder is None or model.decoder is not None:
            raise UsageError(f"objective: {self.kind} trains encoders, and nothing else")

    def example(self, values: Sequence[Any], words: Words, labels: Mapping[str, int], prefix: str) -> Example:
        texts, tags = values
        if not isinstance(texts, list) or not isinstance(tags, list) or len(texts) != len(tags):
            raise InputError("expected a list of words and as many tags")
        ids, told = list[int](), list[int]()
        for i, (text, tag) in enumerate(zip(texts, tags, strict=True)):
            piece = words.tokenizer.encode((" " if i else "") + text_of(text))
            ids += piece
            told += [labels[str(tag)], *[IGNORED] * (len(piece) - 1)][: len(piece)]
        before, after = frame(words.tokenizer)
        return {"text": before + ids + after, "tags": [IGNORED] * len(before) + told + [IGNORED] * len(after)}

    def gather(self, examples: Sequence[Mapping[str, Tensor]], words: Words) -> Batch:
        ids, segment = padded([example["text"] for example in examples])
        labels, _ = padded([example["tags"] for example in examples], IGNORED)
        return Batch(ids, labels, Step(segment=segment))

    def __call__(self, model: ModelOp, batch: Batch) -> Loss:
        found = model(batch.inputs, batch.step)
        logits, extras = found if isinstance(found, tuple) else (found, {})
        return answer_loss(logits.flatten(0, 1), batch.labels.flatten(), 0.0, sum(extras.values()))


# --- pairs that mean the same ---


class Contrastive(OnExamples):
    """Embeddings of two texts that mean the same nearer to each other than to the others of the batch (InfoNCE,
    arXiv 1807.03748; with sentence pairs, arXiv 1908.10084 and 2104.08821). More rows in a forward pass are more to
    tell apart, so `train.micro` changes what is minimised.
    """

    kind: ClassVar[str] = "contrastive"
    answer: ClassVar[str] = "text"
    temperature: float = 0.05
    """What cosines are divided by."""

    def check(self) -> None:
        self.require(self.temperature > 0, f"temperature is above 0, got {self.temperature}")

    def adapt(self, model: Model, classes: int) -> Model:
        return model if isinstance(model.head, Pooled) else model.replace(head=Pooled("mean"), tied=False)

    def fits(self, model: Model) -> None:
        if model.encoder is None or model.decoder is not None:
            raise UsageError(f"objective: {self.kind} trains encoders, and nothing else")
        refuse_causal(self, model)

    def example(self, values: Sequence[Any], words: Words, labels: Mapping[str, int], prefix: str) -> Example:
        one, other = (framed(words, prefix + text_of(value)) for value in values)
        return {"one": one, "other": other}

    def gather(self, examples: Sequence[Mapping[str, Tensor]], words: Words) -> Batch:
        rows = [example[name] for name in ("one", "other") for example in examples]
        ids, segment = padded(rows)
        count, length = len(examples), ids.shape[1]
        # [B, 2, L]: the two texts of a pair stay together when rows are split.
        ids, segment = (t.view(2, count, length).transpose(0, 1) for t in (ids, segment))
        return Batch({"ids": ids, "segment": segment}, torch.arange(count))

    def __call__(self, model: ModelOp, batch: Batch) -> Loss:
        ids, segment = batch.inputs["ids"].flatten(0, 1), batch.inputs["segment"].flatten(0, 1)
        step = Step(segment=segment)
        found = model(ids, step)
        vectors, extras = found if isinstance(found, tuple) else (found, {})
        vectors = F.normalize(of_documents(vectors, step), dim=-1).unflatten(0, (-1, 2))
        return contrast(vectors[:, 0], vectors[:, 1], self.temperature, sum(extras.values()))


def contrast(one: Tensor, other: Tensor, temperature: float, auxiliary: Tensor | float = 0.0) -> Loss:
    """InfoNCE both ways, over unit vectors [B, D]: each is to find its partner among the others of the batch."""
    scores = one @ other.t() / temperature
    partner = torch.arange(len(one), device=one.device)
    both = [F.cross_entropy(way, partner, reduction="sum") for way in (scores, scores.t())]
    nats = (both[0] + both[1]) / 2
    extra = auxiliary * len(one)
    right = (scores.argmax(1) == partner).sum()
    return Loss(nats + extra, len(one), extra.detach() if isinstance(extra, Tensor) else extra, right)


def framed(words: Words, text: str) -> list[int]:
    """The ids of a text as its model expects it: between its special tokens; at least one."""
    ids = words.tokenizer.encode(text, framed=True)
    if not ids:
        raise InputError("an empty text")
    return ids
