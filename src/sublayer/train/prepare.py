"""What stands before the first step: the run's folder, its tokenizer, its architecture, its tokens.

All of it is found again by whoever comes later: a resumed run, and the other ranks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, get_type_hints

from ..data.readers import Seen, documents, measure
from ..data.shards import Progress, prepare
from ..data.tokens import Tokens, fingerprint
from ..errors import UsageError
from ..files import replacing
from ..nn.attention import Attention
from ..nn.sublayer import Model
from ..spec import Spec
from ..text import Bytes, Characters, Tokenizer, Words, load_tokenizer
from ..text.train import train_bpe
from ..weights.load import read_json
from . import checkpoint
from .config import LOOSE, Run, RunSource, free
from .process import MARK
from .view import View

END = "<|endoftext|>"
BAD_BYTES = {"replace": "they are U+FFFD now", "skip": "their documents are left out"}


def look(run: Run, out: Path) -> None:
    """Raises, before anything is made or read, what can be told from the configuration and the names of files."""
    for source in run.data.all_sources() if not checkpoint.saved(out / "checkpoints") else ():
        measure(source.paths)
        for path in (source.paths,) if isinstance(source.paths, str) else source.paths:
            if Path(path).is_dir() and out.exists() and Path(path).samefile(out):
                raise UsageError(f"out: {out} is the folder of the text; choose another")
    if run.model.start is None:
        _spec_for(run, run.tokenizer.vocab).empty(device="meta")  # the vocabulary may still be another


def settle(run: Run, out: Path, view: View, *, restart: bool) -> None:
    """Writes run.json, or finds the same run there."""
    path = out / "run.json"
    if restart and path.exists():
        _move_aside(out)
    if path.exists():
        before, now = _flat(read_json(path)), _flat(run.to_json())
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        changed = [key for key in changed if not _under(key, free(run))]
        bound = next((key for key in changed if not _under(key, LOOSE)), None)
        if bound is not None and not checkpoint.saved(out / "checkpoints"):
            shutil.rmtree(out / "tokenizer", ignore_errors=True)  # it has not begun, and the text is still there
        elif bound is not None:
            raise UsageError(
                f"out: {out} holds another run, with {bound} = {before.get(bound)} and not {now.get(bound)}; "
                "choose another out, or --restart, which moves that run aside"
            )
        for key in changed:
            view.note(f"{key} is {now.get(key)} now: the run goes on, but no longer as it was to the last bit")
    with replacing(path) as beside:
        beside.write_text(json.dumps(run.to_json(), indent=1) + "\n", encoding="utf-8")


def leave(out: Path) -> None:
    """Takes a run's folder away that nothing has come into yet."""
    if {path.name for path in out.iterdir()} <= {MARK, "run.json"}:
        for path in out.iterdir():
            path.unlink()
        out.rmdir()


def tokenizer_of(run: Run, out: Path, view: View) -> Tokenizer:
    """The tokenizer in the run's folder, put there first where it is not."""
    folder, config = out / "tokenizer", run.tokenizer
    if folder.exists():
        tokenizer = load_tokenizer(folder)
        view.note(f"tokenizer: {tokenizer.size} ids, reused from {folder}")
        return tokenizer
    source, end = config.path or run.model.start, END if config.end else None
    if source is not None:
        tokenizer = load_tokenizer(Path(source))
    elif config.kind == "bytes":
        tokenizer = Bytes((END,) if config.end else ())
    else:
        texts = _watched(run, out, view, "reading for the tokenizer")

        def merged(stage: str, done: int, total: int | None) -> None:
            if stage == "merge":
                view.progress("joining byte pairs", done, total or 0)

        if config.kind == "bpe":
            tokenizer = train_bpe(texts, config.vocab, pattern=config.pattern, end=end, progress=merged)
        elif config.kind == "characters":
            tokenizer = Characters.train(texts, end=end)
        else:
            tokenizer = Words.train(texts, config.vocab, end=end)
    beside = out / ".tokenizer.partial"  # both of its files are there, or neither
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    tokenizer.save(beside)
    beside.rename(folder)
    view.note(f"tokenizer: {tokenizer.size} ids, {source or config.kind}")
    return load_tokenizer(folder)


def _watched(run: Run, out: Path, view: View, label: str) -> Iterator[str]:
    """The texts of all sources, but for what this run writes, with progress by bytes read."""
    sources, before = run.data.all_sources(), 0
    total = sum(measure(source.paths, without=out).bytes for source in sources)
    for source in sources:
        seen, options = Seen(), {"field": source.field, "bad_bytes": run.data.bad_bytes, "without": out}
        for document in documents(source.paths, seen=seen, **options):
            yield document.text
            view.progress(label, before + seen.bytes, total)
        before += seen.bytes
        if seen.bad:
            view.note(f"{seen.bad} places hold bytes that are not UTF-8: {BAD_BYTES[run.data.bad_bytes]}")
    view.progress(label, total, total)


def spec_of(run: Run, tokenizer: Tokenizer) -> Model:
    """The architecture, checked against the tokenizer, the rows and the objective."""
    spec = _spec_for(run, tokenizer.size)
    if spec.vocab is not None and spec.vocab < tokenizer.size:
        raise UsageError(f"tokenizer: it has {tokenizer.size} ids, and the model a table of {spec.vocab}")
    if run.model.start is not None and run.tokenizer.path is not None:
        own = Path(run.model.start) / "tokenizer.json"
        if own.exists() and fingerprint(load_tokenizer(own.parent)) != fingerprint(tokenizer):
            raise UsageError(f"tokenizer.path: {run.tokenizer.path} is not the tokenizer of {run.model.start}")
    return spec


def _spec_for(run: Run, vocab: int) -> Model:
    """The architecture with a vocabulary, checked against all but the tokenizer."""
    spec = run.model.build_spec(vocab)
    if spec.context is not None and spec.context < run.data.length:
        raise UsageError(f"data.length: {run.data.length} is more than the model's {spec.context} positions")
    if spec.decoder is None or spec.encoder is not None or spec.head is None:
        raise UsageError(f"train.objective: {run.train.objective} trains decoders with a head, and nothing else")
    sighted = next((path for path, part in _parts(spec) if isinstance(part, Attention) and not part.causal), None)
    if sighted is not None:
        raise UsageError(
            f"train.objective: {run.train.objective}, but {sighted} sees what it is to predict: not causal"
        )
    return spec


def _parts(spec: Any, path: str = "model") -> Iterator[tuple[str, Spec]]:
    """Every spec inside a spec, with where it is."""
    if isinstance(spec, tuple):
        for i, item in enumerate(spec):
            yield from _parts(item, f"{path}.{i}")
    elif isinstance(spec, Spec):
        yield path, spec
        for name in get_type_hints(type(spec)):
            yield from _parts(getattr(spec, name), f"{path}.{name}")


def tokens_of(run: Run, source: RunSource, out: Path, tokenizer: Tokenizer, view: View) -> tuple[Tokens, Tokens]:
    """A source's tokens, to train on and held out; encoded first where they are not there.

    Once there is a checkpoint they are taken as they are: the text may have changed or gone since.
    """
    folder = out / "data" / (source.name or "")
    if checkpoint.saved(out / "checkpoints"):
        train, held = Tokens.open(folder / "train"), Tokens.open(folder / "held")
        train.check(tokenizer)
        return train, held
    label = f"encoding {source.name or ''}".strip()

    def progress(made: Progress) -> None:
        if made.share is not None:
            view.progress(label, made.share, 1.0)

    return prepare(
        source.paths, tokenizer, folder, held=run.data.held, field=source.field,
        bad_bytes=run.data.bad_bytes, without=out, progress=progress, say=view.note,
    )  # fmt: skip


def _under(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _move_aside(out: Path) -> None:
    """All of a run into a folder beside it; the folder itself stays, for it is locked."""
    whole = out.resolve()
    number = next(i for i in count(1) if not whole.with_name(f"{whole.name}.{i}").exists())
    aside = whole.with_name(f"{whole.name}.{number}")
    try:
        aside.mkdir()
        (aside / MARK).touch()
        for inner in sorted(out.iterdir()):
            if inner.name != MARK:
                inner.rename(aside / inner.name)
    except OSError as error:
        raise UsageError(f"--restart: {out} cannot be moved to {aside}: {error.strerror}") from None


def _flat(data: Any, path: str = "", depth: int = 0) -> dict[str, Any]:
    """{"train.batch": 16, …}"""
    if not isinstance(data, dict) or not data or depth > 10:
        return {path: data}
    items = [_flat(value, f"{path}.{key}" if path else key, depth + 1) for key, value in data.items()]
    return {key: value for item in items for key, value in item.items()}
