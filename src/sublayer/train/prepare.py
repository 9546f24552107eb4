"""What stands before the first step: the run's folder, its tokenizer, its architecture, its tokens.

All of it is found again by whoever comes later: a resumed run, and the other ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from ..data.readers import measure
from ..data.tokens import fingerprint
from ..errors import SublayerError, UsageError
from ..files import write_json
from ..nn.sublayer import Model
from ..text import Bytes, Characters, Tokenizer, Words, load_tokenizer
from ..text.train import train_bpe
from ..weights.load import read_json, read_spec
from . import checkpoint
from .config import LOOSE, Run, free
from .language import END
from .process import MARK
from .view import View


def look(run: Run, out: Path) -> None:
    """Raises, before anything is made or read, what can be told from the configuration and the names of files."""
    kept = checkpoint.saved(out / "checkpoints")
    for paths in [source.paths for source in run.data.all_sources()] + [run.data.judge] if not kept else ():
        if paths:
            measure(paths)
        for path in (paths,) if isinstance(paths, str) else paths:
            if Path(path).is_dir() and out.exists() and Path(path).samefile(out):
                raise UsageError(f"out: {out} is the folder of the text; choose another")
    if run.model.start is not None and not kept:
        try:
            read_spec(Path(run.model.start))
        except SublayerError as error:
            raise UsageError(f"model.start: {error}") from None
    if run.model.start is None and run.objective.reads not in ("images", "episodes"):  # which say how large they are
        _spec_for(run, {"vocab": run.tokenizer.vocab, "classes": 2}).empty(device="meta")  # they may still be others


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
        if not checkpoint.saved(out / "checkpoints"):  # it has not begun, and the text is still there
            changed = []
            if bound is not None:
                shutil.rmtree(out / "tokenizer", ignore_errors=True)
        elif bound is not None:
            raise UsageError(
                f"out: {out} holds another run, with {bound} = {before.get(bound)} and not {now.get(bound)}; "
                "choose another out, or --restart, which moves that run aside"
            )
        if not checkpoint.saved(out / "checkpoints"):  # the data may have changed as well
            (out / "labels.json").unlink(missing_ok=True)
        for key in changed:
            view.note(f"{key} is {now.get(key)} now: the run goes on, but no longer as it was to the last bit")
    write_json(path, run.to_json())


def leave(out: Path) -> None:
    """Takes a run's folder away that nothing has come into yet."""
    if {path.name for path in out.iterdir()} <= {MARK, "run.json"}:
        for path in out.iterdir():
            path.unlink()
        out.rmdir()


def tokenizer_of(run: Run, out: Path, view: View, texts: Callable[[], Iterator[str]]) -> Tokenizer:
    """The tokenizer in the run's folder, put there first where it is not; `texts` is what it may be trained on."""
    folder, config = out / "tokenizer", run.tokenizer
    if folder.exists():
        tokenizer = load_tokenizer(folder)
        view.note(f"tokenizer: {tokenizer.size} ids, reused from {folder}")
        return tokenizer
    source, end, specials = config.path or run.model.start, END if config.end else None, run.objective.specials
    if source is not None:
        tokenizer = load_tokenizer(Path(source))
    elif specials and (config.kind not in ("bpe", "bytes") or end is None):
        raise UsageError(f"tokenizer: the objective {run.objective.kind} needs kind bpe or bytes, with end = true")
    elif config.kind == "bytes":
        tokenizer = Bytes((END, *specials) if config.end else ())
    else:

        def merged(stage: str, done: int, total: int | None) -> None:
            if stage == "merge":
                view.progress("joining byte pairs", done, total or 0)

        if config.kind == "bpe":
            options = {"pattern": config.pattern, "end": end, "specials": specials}
            tokenizer = train_bpe(texts(), config.vocab, **options, progress=merged)
        elif config.kind == "characters":
            tokenizer = Characters.train(texts(), end=end)
        else:
            tokenizer = Words.train(texts(), config.vocab, end=end)
    beside = out / ".tokenizer.partial"  # both of its files are there, or neither
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    tokenizer.save(beside)
    beside.rename(folder)
    view.note(f"tokenizer: {tokenizer.size} ids, {source or config.kind}")
    return load_tokenizer(folder)


def spec_of(run: Run, tokenizer: Tokenizer | None, sizes: Mapping[str, Any]) -> Model:
    """The architecture, checked against what its data decides (`vocab`, `classes`), the rows and the objective."""
    spec = _spec_for(run, sizes)
    vocab, classes = sizes.get("vocab", 0), sizes.get("classes", 0)
    if spec.vocab is not None and spec.vocab < vocab:
        raise UsageError(f"tokenizer: it has {vocab} ids, and the model a table of {spec.vocab}")
    if classes > getattr(spec.head, "classes", classes):
        raise UsageError(
            f"model: the labels are {classes}, and its head has {getattr(spec.head, 'classes', 0)} classes"
        )
    told = getattr(spec.embedding, "classes", classes)
    if classes and told != classes:
        raise UsageError(f"model.classes: the labels are {classes}, and the model is told {told}: leave it out")
    if run.model.start is not None and run.tokenizer.path is not None and tokenizer is not None:
        own = Path(run.model.start) / "tokenizer.json"
        if own.exists() and fingerprint(load_tokenizer(own.parent)) != fingerprint(tokenizer):
            raise UsageError(f"tokenizer.path: {run.tokenizer.path} is not the tokenizer of {run.model.start}")
    return spec


def _spec_for(run: Run, sizes: Mapping[str, Any]) -> Model:
    """The architecture of some sizes, checked against all but the tokenizer."""
    spec = run.objective.adapt(run.model.build_spec(**sizes), sizes.get("classes", 0))
    if spec.context is not None and spec.context < run.data.length:
        raise UsageError(f"data.length: {run.data.length} is more than the model's {spec.context} positions")
    run.objective.fits(spec)
    return spec


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
