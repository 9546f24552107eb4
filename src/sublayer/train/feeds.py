"""Feed: what a run trains on and is judged by — text, examples, images, alignments — as batches of its objective.

A feed finds or makes what it needs in the run's folder (tokenizer, names of labels, tokens), so that a resumed run and
the other ranks of a run read what the first one wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch

from ..data.alignments import AlignmentBatches, Crop, alignments, gathered, held_crops, parted
from ..data.batches import Batches, windows
from ..data.examples import Example, ExampleBatches, Examples, bundles
from ..data.images import ImageBatches, Images, NoSplit, images, whole
from ..data.readers import Seen, documents, measure, records
from ..data.shards import Progress, prepare
from ..data.tokens import Tokens, fingerprint
from ..errors import InputError, UsageError
from ..files import write_json
from ..text import Tokenizer
from . import checkpoint
from .batch import Batch
from .config import Run, RunSource
from .episodes import EpisodeFeed
from .examples import OnExamples
from .language import Masked, NextToken, SpanCorruption, Words
from .loss import IGNORED
from .prepare import tokenizer_of
from .process import world
from .protein import MaskedAlignment
from .view import View
from .vision import OnImages

BAD_BYTES = {"replace": "they are U+FFFD now", "skip": "their documents are left out"}
MAX_CLASSES = 100_000


class Feed(Protocol):
    """The data of a run."""

    tokenizer: Tokenizer | None
    """What made the ids; None where there are none."""
    sizes: Mapping[str, Any]
    """What the data decides of the model: `vocab`, `classes`, `image`, `channels`."""
    length: Any
    """Positions of a row, for counting operations, int; None where an answer is not one position's."""
    bytes_per_token: float
    """Of text; 0 where that means nothing."""

    def open(self) -> None:
        """Reads the data, or encodes it first."""
        ...

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Batch, Sequence[str]]:
        """(batch, where each row comes from) of a step, from 0 on: all rows, or those of one of several ranks."""
        ...

    def held(self, limit: int | None, stride: int | None = None) -> tuple[int, Iterator[tuple[Batch, int]]]:
        """(how many, batches of held-out data with the bytes of text that they ask for); a limit in tokens."""
        ...


def feed_of(run: Run, out: Path, view: View) -> Feed:
    """The feed of the run's objective; its tokenizer and labels are there, its data is still to be opened."""
    kinds = {
        "text": TextFeed,
        "examples": ExampleFeed,
        "images": ImageFeed,
        "alignments": AlignmentFeed,
        "episodes": EpisodeFeed,
    }
    return kinds[run.objective.reads](run, out, view)


def drawn(seed: int, what: str, number: int) -> torch.Generator:
    """Random numbers as a function of these alone."""
    digest = blake2b(f"{seed} {what} {number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class TextFeed:
    """Running text, in packed rows."""

    def __init__(self, run: Run, out: Path, view: View) -> None:
        self.run, self.out, self.view = run, out, view
        self.objective = cast("NextToken | Masked | SpanCorruption", run.objective)
        self.tokenizer = tokenizer_of(run, out, view, self._texts)
        self.words = Words(self.tokenizer)
        self.sizes: Mapping[str, Any] = {"vocab": self.tokenizer.size}
        self.length = run.data.length

    def open(self) -> None:
        data = self.run.data
        sources = [self._tokens(source) for source in data.all_sources()]
        weighted = [(train, source.weight) for (train, _), source in zip(sources, data.all_sources(), strict=True)]
        self.batches = Batches(weighted, data.length, self.run.train.batch, self.run.seed)
        self.kept = [held for _, held in sources]
        sizes = [(len(tokens), tokens.bytes) for tokens in self.batches.sources]
        self.bytes_per_token = 0.0  # where a part of the tokens is asked, the loss is no code of the text
        if isinstance(self.objective, NextToken):
            self.bytes_per_token = sum(size for _, size in sizes) / sum(tokens for tokens, _ in sizes)

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Batch, Sequence[str]]:
        rows = self.batches.at(step, rank, ranks)
        generator = drawn(self.run.seed, f"rank {rank}", step)
        batch = self.objective.collate(rows, self.words, generator, segments=self.run.data.segments)
        return batch, rows.where

    def held(self, limit: int | None, stride: int | None = None) -> tuple[int, Iterator[tuple[Batch, int]]]:
        """With a limit, the first tokens of each source, so many in all. A stride is for the next token alone."""
        length, following = self.length, isinstance(self.objective, NextToken)
        stride = min(stride, length) if stride is not None and following else length
        share = min(1.0, limit / sum(map(len, self.kept))) if limit is not None else 1.0
        rows = max(1, min(8192, limit or 8192) // length)
        counts = [math.ceil(share * len(held) / stride / rows) for held in self.kept]

        def batches() -> Iterator[tuple[Batch, int]]:
            for held, count in zip(self.kept, counts, strict=True):
                for number, (found, counted) in enumerate(islice(windows(held, length, stride, rows), count)):
                    generator = drawn(self.run.seed, "held", number)
                    batch = self.objective.collate(found, self.words, generator, segments=self.run.data.segments)
                    if not following:
                        yield batch, 0
                        continue
                    batch = replace(batch, labels=batch.labels.masked_fill(counted == IGNORED, IGNORED))
                    if limit is not None:
                        yield batch, int(self._bytes_of[batch.labels[batch.labels != IGNORED]].sum())
                    else:  # of the whole at once, for some tokenizers' ids do not tell what they were made of
                        yield batch, held.bytes if number == 0 else 0

        return sum(counts), batches()

    @cached_property
    def _bytes_of(self) -> torch.Tensor:
        """[V]: bytes of text that each id stands for."""
        return torch.tensor([len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.size)])

    def _texts(self) -> Iterator[str]:
        """The texts of all sources, but for what this run writes, with progress by bytes read."""
        data, label = self.run.data, "reading for the tokenizer"
        sources, before = data.all_sources(), 0
        total = sum(measure(source.paths, without=self.out).bytes for source in sources)
        for source in sources:
            seen, options = Seen(), {"field": source.field, "bad_bytes": data.bad_bytes, "without": self.out}
            for document in documents(source.paths, seen=seen, **options):
                yield document.text
                self.view.progress(label, before + seen.bytes, total)
            before += seen.bytes
            if seen.bad:
                self.view.note(f"{seen.bad} places hold bytes that are not UTF-8: {BAD_BYTES[data.bad_bytes]}")
        self.view.progress(label, total, total)

    def _tokens(self, source: RunSource) -> tuple[Tokens, Tokens]:
        """A source's tokens, to train on and held out; encoded first where they are not there.

        Once there is a checkpoint they are taken as they are: the text may have changed or gone since.
        """
        folder, data = self.out / "data" / (source.name or ""), self.run.data
        if checkpoint.saved(self.out / "checkpoints"):
            train, held = Tokens.open(folder / "train"), Tokens.open(folder / "held")
            train.check(self.tokenizer)
            return train, held
        label = f"encoding {source.name or ''}".strip()

        def progress(made: Progress) -> None:
            if made.share is not None:
                self.view.progress(label, made.share, 1.0)

        return prepare(
            source.paths, self.tokenizer, folder, held=data.held, field=source.field,
            bad_bytes=data.bad_bytes, without=self.out, progress=progress, say=self.view.note,
        )  # fmt: skip


class ExampleFeed:
    """Examples, in batches of like length: `train.batch` rows of `data.length` ids, padding counted, are a batch."""

    bytes_per_token: float = 0.0

    def __init__(self, run: Run, out: Path, view: View) -> None:
        self.run, self.out, self.view = run, out, view
        self.objective = cast(OnExamples, run.objective)
        self.tokenizer = tokenizer_of(run, out, view, self._texts)
        self.words = Words(self.tokenizer)
        self.sizes: dict[str, int] = {"vocab": self.tokenizer.size}
        self.length = run.data.length
        self.labels: dict[str, int] = {}
        if self.objective.labelled:
            self.labels = self._labels()
            self.sizes["classes"] = len(self.labels)

    def open(self) -> None:
        data = self.run.data
        sides = [self._examples(source) for source in data.all_sources()]
        weighted = [(train, source.weight) for (train, _), source in zip(sides, data.all_sources(), strict=True)]
        self.batches = ExampleBatches(weighted, self.budget, self.run.seed, least=world())  # each rank has an example
        self.kept = [held for _, held in sides if held is not None]
        if data.judge:
            self.kept = [self._read("judge", data.judge, data.all_sources()[0], lambda text: True)]

    @property
    def budget(self) -> int:
        """Ids of a batch, padding counted."""
        return self.run.train.batch * self.run.data.length

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Batch, Sequence[str]]:
        examples, where = self.batches.at(step, rank, ranks)
        return self.objective.gather(examples, self.words), where

    def held(self, limit: int | None, stride: int | None = None) -> tuple[int, Iterator[tuple[Batch, int]]]:
        """With a limit, about so many tokens of all held-out examples, evenly chosen among their lengths."""
        plans: list[tuple[Examples, list[int]]] = []
        for kept in self.kept:
            lengths = kept.lengths()
            order = lengths.argsort(kind="stable")
            cuts = bundles(lengths[order], self.budget)
            share = min(1.0, limit / int(lengths.sum())) if limit is not None else 1.0
            parts = [order[start:stop].tolist() for start, stop in pairwise(cuts)]
            plans += [(kept, part[: max(1, math.ceil(share * len(part)))]) for part in parts]

        def batches() -> Iterator[tuple[Batch, int]]:
            for kept, part in plans:
                yield self.objective.gather([kept[number] for number in part], self.words), 0

        return len(plans), batches()

    def _records(
        self, source: RunSource, label: str, paths: str | tuple[str, ...] | None = None
    ) -> Iterator[tuple[list[Any], str]]:
        """The two values of each record and where it came from, with progress by bytes read."""
        paths, seen = paths or source.paths, Seen()
        total = measure(paths, without=self.out).bytes
        options: dict[str, Any] = {"bad_bytes": self.run.data.bad_bytes, "without": self.out, "seen": seen}
        for i, record in enumerate(records(paths, (source.field, source.target), **options)):
            yield list(record.values), record.source
            if i % 100 == 0:
                self.view.progress(label, min(seen.bytes, total - 1), total)
        self.view.progress(label, total, total)

    def _texts(self) -> Iterator[str]:
        """All text of all sources."""
        for source in self.run.data.all_sources():
            for values, _ in self._records(source, "reading for the tokenizer"):
                for value in values[:1] if self.objective.labelled else values:
                    yield " ".join(map(str, value)) if isinstance(value, list) else str(value)

    def _labels(self) -> dict[str, int]:
        """The names of classes or tags, in labels.json: sorted, so that the number of a name depends on no order."""
        path = self.out / "labels.json"
        if not path.exists():
            names = set[str]()
            for source in self.run.data.all_sources():
                for (_, value), where in self._records(source, "reading labels"):
                    names |= set(map(str, value)) if isinstance(value, list) else {str(value)}
                    if len(names) > MAX_CLASSES:
                        many = f"more than {MAX_CLASSES:,} different labels"
                        raise InputError(f"{where}: {many}: is the field {source.target!r} one?")
            write_json(path, sorted(names))
        found = cast(Any, json.loads(path.read_text(encoding="utf-8")))
        return {name: i for i, name in enumerate(found)}

    def _examples(self, source: RunSource) -> tuple[Examples, Examples | None]:
        """A source's examples, to train on and held out: an example's own first text decides on which side it falls."""
        data, name = self.run.data, source.name or ""

        def kept(text: str) -> bool:
            digest = blake2b(text.encode(errors="replace"), digest_size=4).digest()
            return int.from_bytes(digest, "little") / 2**32 < data.held

        if data.judge:
            return self._read(f"{name}/train", source.paths, source, lambda text: True), None
        train = self._read(f"{name}/train", source.paths, source, lambda text: not kept(text))
        return train, self._read(f"{name}/held", source.paths, source, kept)

    def _read(
        self, name: str, paths: str | tuple[str, ...], source: RunSource, wanted: Callable[[str], bool]
    ) -> Examples:
        """Examples from the run's folder, encoded first where they are not there, or not from the same files."""
        path = self.out / "data" / f"{name.strip('/')}.safetensors"
        going_on = checkpoint.saved(self.out / "checkpoints")
        labels = blake2b(json.dumps(self.labels).encode()).hexdigest()  # an example keeps its label's number
        data = self.run.data
        options = [self.objective.to_json(), source.to_json(), self.length, data.held, data.bad_bytes, labels]
        if path.exists() and going_on:
            return Examples.load(path)
        stamp = json.dumps([fingerprint(self.tokenizer), *options, measure(paths, without=self.out).stamp])
        if path.exists():
            found = Examples.load(path)
            if found.stamp == stamp:
                self.view.note(f"{path}: used again, {len(found):,} examples")
                return found
        long = 0

        def examples() -> Iterable[tuple[Example, str]]:
            nonlocal long
            for values, where in self._records(source, f"encoding {name.strip('/')}", paths):
                first = " ".join(map(str, values[0])) if isinstance(values[0], list) else str(values[0])
                if not wanted(first):
                    continue
                try:
                    example = self.objective.example(values, self.words, self.labels, source.prefix)
                except KeyError as error:
                    raise InputError(f"{where}: the label {error} occurs in no training example") from None
                except InputError as error:
                    raise InputError(f"{where}: {error}") from None
                if max(map(len, example.values())) > self.length:
                    long += 1
                else:
                    yield example, where

        try:
            found = Examples.gather(examples(), stamp)
        except InputError as error:
            if str(error) != "no examples":
                raise
            said = f": {long:,} are longer than data.length={self.length}" if long else ""
            raise InputError(f"{path.stem}: no examples{said}; give more, or another data.held") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
        over = f"; {long:,} longer than data.length={self.length} are left out" if long else ""
        self.view.note(f"{name.strip('/')}: {len(found):,} examples{over}")
        return found


class ImageFeed:
    """Labelled images of one size: the training split of a folder, and its test split or a share to judge by."""

    tokenizer = None
    length = None
    bytes_per_token: float = 0.0

    def __init__(self, run: Run, out: Path, view: View) -> None:
        data = run.data
        source, *others = data.all_sources()
        judged = (data.judge,) if isinstance(data.judge, str) else data.judge
        if others or not isinstance(source.paths, str) or len(judged) > 1:
            raise UsageError("data.paths: images are read from one folder, with splits train and test")
        self.run, self.objective = run, cast(OnImages, run.objective)
        options: dict[str, Any] = {"size": data.size, "channels": data.channels}
        self.images = images(source.paths, "train", **options)
        try:
            self.kept = images(judged[0] if judged else source.paths, "test", classes=self.images.classes, **options)
        except NoSplit:
            if data.judge:
                raise
            self.images, self.kept = _parted(self.images, data.held)
            view.note(f"{source.paths}: no test images, so {len(self.kept):,} are held out")
        if self.kept.shape != self.images.shape:
            raise InputError(f"{self.kept.where(0)}: {self.kept.shape}, and images to train on {self.images.shape}")
        channels, height, width = self.images.shape
        image = height if height == width else (height, width)
        self.sizes: dict[str, Any] = {"classes": len(self.images.classes), "image": image, "channels": channels}
        path = out / "labels.json"
        if not path.exists():
            write_json(path, self.images.classes)

    def open(self) -> None:
        run = self.run
        self.batches = ImageBatches(self.images, run.train.batch, run.seed, augment=run.data.augment)

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Batch, Sequence[str]]:
        found = self.batches.at(step, rank, ranks)
        generator = drawn(self.run.seed, f"rank {rank}", step)
        return self.objective.collate(found, len(self.images.classes), generator), found.where

    def held(self, limit: int | None, stride: int | None = None) -> tuple[int, Iterator[tuple[Batch, int]]]:
        """With a limit, so many images of all that are held out, evenly chosen."""
        kept, rows = self.kept, max(self.run.train.batch, 64)
        if limit is not None and limit < len(kept):
            kept = kept.only(np.linspace(0, len(kept) - 1, limit).round().astype(np.int64))

        def batches() -> Iterator[tuple[Batch, int]]:
            for number, found in enumerate(whole(kept, rows)):
                yield self.objective.collate(found, len(kept.classes), drawn(self.run.seed, "held", number)), 0

        return -(-len(kept) // rows), batches()


def _parted(source: Images, held: float) -> tuple[Images, Images]:
    """Images to train on, and a share held out; an image's number alone decides on which side it falls."""
    digests = [blake2b(str(number).encode(), digest_size=4).digest() for number in range(len(source))]
    kept = np.array([int.from_bytes(digest, "little") / 2**32 < held for digest in digests])
    if kept.all() or not kept.any():
        raise InputError(f"too few images to hold out a share of {held}: {len(source):,}")
    return source.only((~kept).nonzero()[0]), source.only(kept.nonzero()[0])


class AlignmentFeed:
    """Alignments of proteins, cropped; a share of each one's sequences is held out, or other alignments are."""

    tokenizer = None
    length = None
    bytes_per_token: float = 0.0

    def __init__(self, run: Run, out: Path, view: View) -> None:
        self.run, self.view, self.objective = run, view, cast(MaskedAlignment, run.objective)
        self.sizes: Mapping[str, Any] = {}

    def open(self) -> None:
        """Reads all of them: a family takes as many bytes as it has cells."""
        data, run = self.run.data, self.run
        sources = [(alignments(source.paths), source.weight) for source in data.all_sources()]
        parts = [([(one, one) if data.judge else parted(one, data.held) for one in found], w) for found, w in sources]
        weighted = [(train, weight / len(found)) for found, weight in parts for train, _ in found]
        self.batches = AlignmentBatches(weighted, run.train.batch, data.length, data.depth, run.seed)
        pairs = [(train, held.cells) for found, _ in parts for train, held in found]
        if data.judge:  # the first sequence is the target, and all others are asked for
            pairs = [(one.only(np.array([0])), one.cells[1:]) for one in alignments(data.judge)]
        self.kept = [crop for train, held in pairs for crop in held_crops(train, held, data.length, data.depth)]
        if not self.kept:
            raise InputError(f"data.held: no sequence falls into a share of {data.held}: give more, or data.judge")
        held = sum(len(held) for _, held in pairs)
        self.view.note(
            f"{len(weighted):,} alignments to train on; held out: {held:,} sequences, of {len(pairs):,} alignments"
        )

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Batch, Sequence[str]]:
        crops = self.batches.at(step, rank, ranks)
        return self.objective.collate(crops, drawn(self.run.seed, f"rank {rank}", step)), crops.where

    def held(self, limit: int | None, stride: int | None = None) -> tuple[int, Iterator[tuple[Batch, int]]]:
        """With a limit, about so many masked cells of held-out sequences, the crops evenly chosen."""
        kept, rows = self.kept, self.run.train.batch
        masked = self.objective.share * sum(int(crop.asked.sum()) * crop.cells.shape[1] for crop in kept)
        count = len(kept) if limit is None else max(1, min(len(kept), math.ceil(len(kept) * limit / max(masked, 1))))
        chosen: list[Crop] = [kept[i] for i in np.linspace(0, len(kept) - 1, count).round().astype(int)]

        def batches() -> Iterator[tuple[Batch, int]]:
            for number, start in enumerate(range(0, count, rows)):
                generator = drawn(self.run.seed, "held", number)
                yield self.objective.collate(gathered(chosen[start : start + rows]), generator), 0

        return -(-count // rows), batches()
