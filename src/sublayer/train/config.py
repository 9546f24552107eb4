"""A training run as data: what `sublayer train runs/NAME.toml key=value…` reads, strictly.

What changes the computed function is the model's spec; everything else of a run is here.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from .. import recipes
from ..data.images import Augment
from ..errors import SpecError, SublayerError, UsageError, nearest
from ..nn.sublayer import Model
from ..spec import Spec, fitted
from ..weights.load import read_json, read_spec
from .actions import BehaviourCloning
from .examples import Classification, Contrastive, Tagging, TextToText
from .language import Masked, NextToken, SpanCorruption
from .optim import AdamW, Muon
from .protein import MaskedAlignment
from .schedule import Schedule
from .vision import Diffusion, ImageClassification

S = TypeVar("S", bound=Spec)
Objectives = (
    NextToken
    | Masked
    | SpanCorruption
    | TextToText
    | Classification
    | Tagging
    | Contrastive
    | ImageClassification
    | Diffusion
    | MaskedAlignment
    | BehaviourCloning
)
MAX_BYTES = 1 << 20  # of a configuration file


class RunModel(Spec):
    """Which model is trained: a recipe and its sizes, a published size, a spec's file, or a trained model."""

    recipe: str | None = None
    """A family, such as "llama"; its sizes (dim, layers, …) stand beside it. The tokenizer gives the vocabulary."""
    size: str | None = None
    """A published size, such as "gpt2-124m", with its vocabulary replaced by the tokenizer's."""
    file: str | None = None
    """A spec.json, taken as it is."""
    start: str | None = None
    """A model's folder, whose weights, spec and tokenizer the run starts from."""
    change: str | tuple[str, ...] = ()
    """Overrides of the spec, such as "decoder.blocks.*.attn.op.window=256"."""
    sizes: tuple[tuple[str, Any], ...] = ()
    """Arguments of the recipe, by name. In the file they stand in [model] itself."""

    def check(self) -> None:
        given = [name for name in ("recipe", "size", "file", "start") if getattr(self, name) is not None]
        self.require(len(given) == 1, f"needs one of recipe, size, file and start, got {' and '.join(given) or 'none'}")
        named = ", ".join(name for name, _ in self.sizes)
        self.require(self.recipe is not None or not named, f"{named}: unknown, or a size that only a recipe takes")

    def build_spec(self, **known: Any) -> Model:
        """The architecture for what the data decides: `vocab`, the tokenizer's ids; `classes`, how many labels there
        are; `image` and `channels`, the size of images.

        Raises SpecError or UsageError for what cannot be built.
        """
        if self.recipe is not None:
            spec = _of_recipe(self.recipe, dict(self.sizes), known)
        elif self.size is not None:
            recipes.model(self.size)  # raises UsageError with the nearest name
            name = recipes.names_of_sizes()[self.size]
            sizes = {key: size for key, size in recipes.family(name).SIZES[self.size].items() if key not in known}
            spec = _of_recipe(name, sizes, known)
        elif self.file is not None:
            spec = Model.from_json(read_json(Path(self.file)))
        else:
            spec = read_spec(Path(str(self.start)))[0]
        return spec.override(*_listed(self.change))


def _of_recipe(name: str, sizes: dict[str, Any], known: Mapping[str, Any]) -> Model:
    family = getattr(recipes.family(name), name)
    taken = inspect.signature(family).parameters
    unknown = next((key for key in sizes if key not in taken), None)
    if unknown is not None:
        raise UsageError(f"model.{unknown}: the recipe {name} has no such size{nearest(unknown, taken)}")
    sizes = {key: value for key, value in known.items() if key in taken} | sizes
    needed = [key for key, p in taken.items() if p.default is p.empty and key not in sizes]
    if needed:
        raise UsageError(f"model: the recipe {name} needs {', '.join(needed)}")
    hints = get_type_hints(family)
    return family(**{key: _size(value, hints[key], f"model.{key}") for key, value in sizes.items()})


def _size(value: Any, hint: Any, name: str) -> Any:
    """A recipe's argument: a part is a table with the key "spec", as in spec.json."""
    if isinstance(value, dict):
        try:
            value = Spec.from_json(cast("dict[str, Any]", value))
        except SpecError as error:
            raise SpecError(f"{name}: {error}") from None
    return fitted(value, hint, name)


class RunTokenizer(Spec):
    """Where the tokenizer comes from: trained on the run's own text, or a file."""

    kind: Literal["bpe", "bytes", "characters", "words"] = "bpe"
    """What is trained; "bytes" needs no training."""
    vocab: int = 4096
    """Ids of a BPE or word tokenizer."""
    pattern: Literal["gpt2", "cl100k", "o200k"] = "gpt2"
    """How text is cut before byte pairs are merged: gpt2, cl100k or o200k."""
    end: bool = True
    """Whether a token stands between documents; only bytes and characters can do without."""
    path: str | None = None
    """A tokenizer's file or folder: nothing is trained then."""


class RunSource(Spec):
    """One source of text among several."""

    paths: str | tuple[str, ...]
    """Files, folders, globs; "stdlib:" is Python's own library."""
    weight: float = 1.0
    """Its share of the rows, relative to the other sources."""
    field: str = "text"
    """Which field of JSONL and Parquet files is the text."""
    target: str = "target"
    """Which field of an example is its second value: the target text, the class, the tags, the other text."""
    prefix: str = ""
    """What each text of examples begins with, such as "translate English to German: "."""
    name: str | None = None
    """What it is called; by default, its number."""

    def check(self) -> None:
        self.require(bool(self.paths), "paths is empty")
        self.require(self.weight > 0, f"weight must be above 0, got {self.weight}")
        plain = self.name is None or re.fullmatch(r"[A-Za-z0-9_-]*", self.name)
        self.require(bool(plain), f"name is a word of letters, digits, - and _, got {self.name!r}")


class RunData(Spec):
    """What is read, and how it is cut into rows."""

    paths: str | tuple[str, ...] = ()
    """Files, folders, globs of the only source; "stdlib:" is Python's own library."""
    sources: tuple[RunSource, ...] = ()
    """Several weighted sources, instead of `paths`."""
    field: str = "text"
    """Which field of JSONL and Parquet files is the text."""
    target: str = "target"
    """Which field of an example is its second value: the target text, the class, the tags, the other text."""
    prefix: str = ""
    """What each text of examples begins with."""
    judge: str | tuple[str, ...] = ()
    """Files, folders, globs that are held out, instead of a share of the rest; not for running text."""
    size: int | None = None
    """Pixels high and wide that the images of a folder are made; None: all have one size. IDX files have their own."""
    channels: Literal[1, 3] = 3
    """Of the images of a folder: 1 grey, 3 colours."""
    augment: Augment = Augment()
    """What training changes in images: `shift` in pixels, `flip` left and right."""
    bad_bytes: Literal["error", "replace", "skip"] = "error"
    """What happens to a file that is not UTF-8: the run stops, the bytes become U+FFFD, or the file is left out."""
    length: int = 256
    """Tokens of a row that are predicted; residues of an alignment's crop."""
    depth: int = 64
    """Sequences of an alignment's crop, the target among them."""
    held: float = 0.05
    """Share of the documents that is held out, to judge by; at most 0.5."""
    segments: bool = True
    """Whether documents in a row are kept apart. False: rows are one running text, as nanoGPT has them."""

    def check(self) -> None:
        self.require(bool(self.paths) != bool(self.sources), "needs paths or sources, and not both")
        self.require(self.length >= 2, f"length is at least 2, got {self.length}")
        self.require(self.depth >= 2, f"depth is at least 2, got {self.depth}")
        self.require(0 < self.held <= 0.5, f"held is a share above 0 and up to 0.5, got {self.held}")

        names = [source.name for source in self.all_sources()]
        self.require(len(set(names)) == len(names), f"two sources are named {max(names, key=names.count)!r}")

    def all_sources(self) -> tuple[RunSource, ...]:
        """The sources with names; an only one has none."""
        if not self.sources:
            return (RunSource(self.paths, field=self.field, target=self.target, prefix=self.prefix, name=""),)
        return tuple(s if s.name is not None else s.replace(name=f"source-{i}") for i, s in enumerate(self.sources))


class RunTrain(Spec):
    """How long, how much at once, and on what."""

    steps: int | None = None
    """Optimiser steps; or give `tokens` or `seconds`."""
    tokens: int | None = None
    """Tokens to predict in all; rounded up to whole steps."""
    seconds: float | None = None
    """Seconds of steps and of the evaluations between them, over all parts of a run; the step in which they end is the
    last. How far a run comes is then up to the machine."""
    batch: int = 16
    """Rows of one optimiser step, over all ranks."""
    micro: int | None = None
    """Rows of one forward pass on one rank; None: all of them at once."""
    clip: float | None = 1.0
    """Global gradient norm to clip at; None: no clipping."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, which is then judged and kept as the result."""
    device: str = "auto"
    """Where to train, as torch names it; "auto": cuda where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of matrix products; weights stay fp32. "auto": fp32 on a CPU, bf16 on a GPU that has it, else fp16."""
    recompute: bool = False
    """Whether a block's activations are computed again in the backward pass instead of kept."""
    compile: bool = False
    """Whether torch.compile is used."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is NaN or infinite does, after it has been reported."""

    def check(self) -> None:
        given = [name for name in ("steps", "tokens", "seconds") if getattr(self, name) is not None]
        self.require(len(given) == 1, f"needs steps, tokens or seconds, got {' and '.join(given) or 'none of them'}")
        for name in ("steps", "tokens", "batch", "micro"):
            value = getattr(self, name)
            self.require(value is None or value >= 1, f"{name} is at least 1, got {value}")
        self.require(self.seconds is None or self.seconds > 0, f"seconds must be above 0, got {self.seconds}")
        self.require(self.clip is None or self.clip > 0, f"clip must be above 0, got {self.clip}")
        self.require(self.ema is None or 0 < self.ema < 1, f"ema is a decay between 0 and 1, got {self.ema}")


class RunEval(Spec):
    """When and how the model is judged."""

    every: int = 200
    """Steps between evaluations; the last step is always judged."""
    tokens: int = 50_000
    """Held-out tokens judged at each of them; the last judges `final` of them."""
    final: int | None = None
    """Held-out tokens judged at the end; None: all."""
    stride: int | None = None
    """Tokens the window moves by in the last evaluation; None: a quarter of the length."""
    sample: str = ""
    """What a sample of text starts with; "": the beginning of a document."""
    sample_tokens: int = 64
    """Tokens of a sample; 0: none is written."""

    def check(self) -> None:
        for name, least in (("every", 1), ("tokens", 1), ("final", 1), ("stride", 1), ("sample_tokens", 0)):
            value = getattr(self, name)
            self.require(value is None or value >= least, f"{name} is at least {least}, got {value}")


class RunSave(Spec):
    """When checkpoints are written, and which are kept."""

    every: int = 200
    """Steps between checkpoints; the last step is always kept."""
    keep: int = 2
    """How many of the newest are kept, beside the best."""
    average: int = 1
    """The result is the average of so many of the newest checkpoints (5 in 2017); at most `keep`."""
    best: bool = False
    """Whether the result is the checkpoint with the lowest held-out loss, and not the last."""
    tensorboard: bool = False
    """Whether curves are written for TensorBoard too (needs the extra)."""

    def check(self) -> None:
        for name in ("every", "keep", "average"):
            self.require(getattr(self, name) >= 1, f"{name} is at least 1, got {getattr(self, name)}")
        self.require(self.average <= self.keep, f"average={self.average} needs keep of at least that, got {self.keep}")
        self.require(not (self.best and self.average > 1), "best and average exclude each other")


class Run(Spec):
    """A whole run. Every key has a section of the file; `out` and `seed` stand above the sections."""

    out: str
    """The folder that everything is written into."""
    model: RunModel
    data: RunData
    train: RunTrain
    seed: int = 0
    """Of first weights, order, split and dropout."""
    objective: Objectives = NextToken()
    tokenizer: RunTokenizer = RunTokenizer()
    optimizer: AdamW | Muon = AdamW()
    schedule: Schedule = Schedule()
    eval: RunEval = RunEval()
    save: RunSave = RunSave()

    def check(self) -> None:
        self.require(0 <= self.seed < 2**62, f"seed is from 0 to 2**62, got {self.seed}")
        chosen = self.save.best or self.save.average > 1
        self.require(self.train.ema is None or not chosen, "train.ema, save.best and save.average exclude one another")
        endless = self.schedule.shape in ("constant", "inverse_sqrt")
        self.require(
            self.train.seconds is None or endless,
            f"schedule.shape={self.schedule.shape!r} falls towards the last step, which train.seconds does not tell: "
            "take constant or inverse_sqrt",
        )
        self._refuse_idle()

    def _refuse_idle(self) -> None:
        """Raises SpecError for a key that says nothing to this objective, or that the sources' own replace."""
        objective, data = self.objective, self.data
        for at, table in (("data", data), *((f"data.sources.{i}", source) for i, source in enumerate(data.sources))):
            for key in _hints(type(table)).keys() - {"paths", "sources", "weight", "name"}:
                if getattr(table, key) != getattr(type(table), key):
                    self.require(key in objective.uses, f"{at}.{key}: the objective {objective.kind} has no use for it")
                    own = table is data and data.sources and key in _hints(RunSource)
                    self.require(not own, f"data.{key}: with data.sources, each of them has its own")
        following = isinstance(objective, NextToken)
        for key, idle in {
            "tokenizer": objective.reads in ("images", "alignments") and self.tokenizer != RunTokenizer(),
            "train.tokens": objective.reads not in ("text", "examples") and self.train.tokens is not None,
            "eval.stride": self.eval.stride is not None and not following,
            "eval.sample": bool(self.eval.sample) and not following,
        }.items():
            self.require(not idle, f"{key}: the objective {objective.kind} has no use for it")

    @property
    def steps(self) -> int | None:
        """Optimiser steps in all; None where time ends the run."""
        train = self.train
        if train.seconds is not None:
            return None
        return train.steps or -(-(train.tokens or 0) // (train.batch * self.data.length))


# Keys that may change while a run is interrupted: the first leave its weights as they are to the last bit, the others
# but for rounding and for what dropout draws.
FREE = ("out", "eval", "save.keep", "save.tensorboard", "train.recompute", "train.non_finite")
LOOSE = ("train.device", "train.micro", "train.compile")


def free(run: Run) -> tuple[str, ...]:
    """The keys that may change without any trace in the result of this run."""
    return FREE if run.save.best or run.save.average > 1 else (*FREE, "save")


def read_run(path: Path | str, changes: Iterable[str] = ()) -> Run:
    """The run of a TOML file, with changes such as "train.steps=100".

    A bare "steps=100" means [train]'s key, else that of the one section that has it.

    Raises UsageError naming file and key for an unknown key, a wrong type, or values that do not fit.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path}: more than {MAX_BYTES} bytes is no configuration")
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    changes = list(changes)
    for change in changes:
        _apply(table, change)
    try:
        return run_of(table)
    except SublayerError as error:
        key = str(error).partition(":")[0]
        typed = any(key.endswith(change.partition("=")[0].strip()) for change in changes)
        raise UsageError(str(error) if typed else f"{path}: {error}") from None


def run_of(table: Mapping[str, Any]) -> Run:
    """The run of a nested mapping, as TOML gives it. Raises UsageError naming the key."""
    table = dict(table)
    if isinstance(table.get("model"), dict):  # a recipe's sizes stand beside its name
        model = dict(table["model"])
        sizes = [(key, model.pop(key)) for key in list(model) if key not in _hints(RunModel)]
        table["model"] = model | {"sizes": [(key, size) for key, size in sizes if size != "none"]}
    return _read(Run, table, "")


BEGINNINGS = ("recipe", "size", "file", "start")
ALTERNATIVES: dict[str, tuple[str, ...]] = {
    "train.steps": ("tokens", "seconds"),
    "train.tokens": ("steps", "seconds"),
    "train.seconds": ("steps", "tokens"),
    "data.paths": ("sources",),
    "data.sources": ("paths",),
}


def _apply(table: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise UsageError(f"{change}: a change reads key=value, such as train.steps=100")
    if len(keys) == 1 and keys[0] not in _hints(Run):
        sections = sorted({section for section, cls in _sections() if keys[0] in _hints(cls)})
        sections = ["train"] if "train" in sections else sections
        sections = [one for one in sections if one != "objective"] or sections
        if len(sections) != 1:
            known = {*_hints(Run), *(key for _, cls in _sections() for key in _hints(cls))}
            why = f" is in {' and '.join(sections)}: say which" if sections else f": unknown key{nearest(name, known)}"
            raise UsageError(f"{name}{why}")
        keys = [sections[0], keys[0]]
    for i, key in enumerate(keys[:-1], 1):
        if isinstance(table.get(key), str) and key in ("objective", "optimizer"):
            table[key] = {"kind": table[key]}
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise UsageError(f"{name}: {'.'.join(keys[:i])} has no keys")
    before = table.get(keys[-1])
    for key in ALTERNATIVES.get(".".join(keys), ()) if text != "none" else ():  # the other one is not meant any more
        table.pop(key, None)
    if keys[0] == "model" and keys[-1] in BEGINNINGS and keys[-1] not in table:
        table.clear()  # another model, of other sizes
    try:
        table[keys[-1]] = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        table[keys[-1]] = text
    if keys[-1] == "kind" and keys[0] != "model":  # another kind has other keys
        for key in [key for key in table if key != "kind" and before != table["kind"]]:
            del table[key]


def _sections() -> list[tuple[str, type[Spec]]]:
    return [(name, cls) for name, hint in _hints(Run).items() for cls in _specs(hint)]


def _specs(hint: Any) -> list[type[Spec]]:
    """The spec classes that a field may hold."""
    options = get_args(hint) if not isinstance(hint, type) else (hint,)
    return [option for option in options if isinstance(option, type) and issubclass(option, Spec)]


def _hints(cls: type[Spec]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cast(Any, cls))}


def _read(cls: type[S], table: Mapping[str, Any], path: str) -> S:
    hints = _hints(cls)
    unknown = next((key for key in table if key not in hints), None)
    if unknown is not None:
        raise UsageError(f"{_join(path, unknown)}: unknown key{nearest(unknown, hints)}")
    values = {
        key: _value(hints[key], value, _join(path, key))
        for key, value in table.items()
        if value != "none" or type(None) in get_args(hints[key])
    }
    missing = next((key for key in hints if key not in values and not hasattr(cls, key)), None)
    if missing is not None:
        raise UsageError(f"{_join(path, missing)}: this key is needed")
    try:
        return cls(**values)
    except SublayerError as error:
        said = str(error).removeprefix(f"{cls.__name__}.").removeprefix(f"{cls.__name__}: ")
        between = "." if str(error).startswith(f"{cls.__name__}.") else ": "
        raise UsageError(f"{path}{between if path else ''}{said}") from None


def _value(hint: Any, value: Any, path: str) -> Any:
    if isinstance(value, list) and get_origin(hint) is tuple and _specs(get_args(hint)[0]):
        return tuple(_value(get_args(hint)[0], item, f"{path}.{i}") for i, item in enumerate(value))
    if value == "none":
        return None
    choices = _specs(hint)
    if len(choices) > 1 and isinstance(value, str):  # its kind alone
        value = {"kind": value}
    if not choices or not isinstance(value, dict):
        return value
    if len(choices) == 1:
        return _read(choices[0], value, path)
    kinds = {getattr(choice, "kind", choice.__name__.lower()): choice for choice in choices}
    kind = value.get("kind", next(iter(kinds)))
    if kind not in kinds:
        raise UsageError(f"{path}.kind: unknown: {kind!r}{nearest(str(kind), kinds)}")
    return _read(kinds[kind], {key: item for key, item in value.items() if key != "kind"}, path)


def _listed(given: str | tuple[str, ...]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else given


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
