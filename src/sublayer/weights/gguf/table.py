"""How GGUF writes an architecture: one table each, read forward to load and backward to export.

A GGUF file is read as if it were a folder of Hugging Face's. An `Architecture` says, for one general.architecture,
which keys of the metadata are which of config.json (`entries`), and which tensors are which of theirs (`rows`):

    to load      arch.config(source)      a config.json for recipes.from_hf
                 arch.rows(config)        Row(Hugging Face's names, GGUF's names); row.change.back: GGUF's to theirs
    to export    arch.metadata(config)    from a config.json, as recipes.to_hf gives it, to metadata
                 arch.rows(config)        row.change.into: Hugging Face's tensors to GGUF's
                 arch.computed(config)    tensors of GGUF that follow from the config (divisors of rotary frequencies)

What a table cannot say shows in reading back: an exported file stands for the model only if `arch.config` of what was
written gives the same spec again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ...errors import SpecError, nearest
from ...gguf_header import Header
from ...names import Change, Row, rows
from ...nn.rope import repair
from ...recipes.config import MAX_LAYERS
from .tensors import Tensors

Config = Mapping[str, Any]
"""A config.json."""

# Keys under an architecture's name that change nothing of what a loaded model computes.
IRRELEVANT = frozenset(
    {
        "vocab_size",  # the embedding's rows say it
        "pooling_type",  # what is made of the vectors afterwards
        "tensor_data_layout",  # Meta's own order of q and k, or Hugging Face's; files of today hold one
        "rope.scaling.finetuned",
    }
)


class Source:
    """A GGUF file being read: `source("block_count")` is a key under the architecture's name, and marked as used."""

    def __init__(self, header: Header, tensors: Tensors | None = None) -> None:
        """tensors None: those of the header, opened where a value is asked for."""
        self.path = header.path
        self.name = _architecture(header)
        self.header = header
        prefix = f"{self.name}."
        self.values = {key.removeprefix(prefix): v for key, v in header.metadata.items() if key.startswith(prefix)}
        self.used: set[str] = set()
        self.consumed: set[str] = set()
        self._tensors = tensors

    def __call__(self, key: str, *default: Any) -> Any:
        """The value of a key, or the default. Raises SpecError where there is neither."""
        self.used.add(key)
        if key in self.values:
            return _shortest(self.values[key])
        if not default:
            raise SpecError(f"the metadata has no {self.name}.{key}{nearest(key, self.values)}")
        return default[0]

    def count(self, key: str, *default: int) -> int:
        value = self(key, *default)
        if type(value) is not int or value < 0:
            raise SpecError(f"{self.name}.{key}={value!r} is not a whole number")
        return value

    def layers(self) -> int:
        """How many: bounded, for each becomes a part of the spec."""
        count = self.count("block_count")
        if count > MAX_LAYERS:
            raise SpecError(f"{self.name}.block_count={count} is more than {MAX_LAYERS}")
        return count

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.header.tensors:
            raise SpecError(f"the file has no tensor {tensor}, which says how large the model is")
        return self.header.tensors[tensor].shape

    def rows(self, tensor: str) -> int:
        """The slowest of a tensor's sizes. Raises SpecError for one that is a single number."""
        shape = self.shape(tensor)
        if not shape:
            raise SpecError(f"the file's tensor {tensor} is a single number, and says no size")
        return shape[0]

    def tensor(self, name: str) -> Tensor:
        """A tensor that stands for keys of the config, and has no other place in the model."""
        self.consumed.add(name)
        return self.tensors.read(name)

    @property
    def tensors(self) -> Tensors:
        if self._tensors is None:
            self._tensors = Tensors(self.header)
        return self._tensors

    def done(self, irrelevant: Iterable[str]) -> None:
        """Refuses every key that nobody asked for and that may matter."""
        for key in sorted(self.values.keys() - self.used - IRRELEVANT - set(irrelevant)):
            shown = repr(self.values[key])[:60]
            raise SpecError(f"the metadata sets {self.name}.{key}={shown}, which is not modelled")


@dataclass(frozen=True)
class Entry:
    """Some keys of config.json, and the metadata that says the same."""

    read: Callable[[Source], dict[str, Any]]
    """Metadata to config.json."""
    write: Callable[[Config], dict[str, Any]]
    """config.json to metadata, its keys without the architecture's name; raises SpecError for what GGUF cannot say."""
    tensors: Callable[[Config], dict[str, Tensor]] = lambda config: {}
    """The tensors among what it writes."""


@dataclass(frozen=True)
class Architecture:
    """One value of general.architecture, and the class of Hugging Face's that it is read as and written from."""

    name: str
    hf: str
    model_type: str
    entries: tuple[Entry, ...]
    rows: Callable[[Config], list[Row]]
    """From a config.json: Hugging Face's tensors (theirs) and GGUF's (ours)."""
    when: Callable[[Source], bool] = lambda source: True
    """Which of several classes under one name a file is of."""
    irrelevant: frozenset[str] = field(default=frozenset())
    """Keys that change nothing in this architecture, beside those of every one."""
    ignored: tuple[str, ...] = ()
    """Tensors that hold nothing of the model."""
    headless: bool = False
    """GGUF holds the body alone, without the head that a class of that name has."""

    def config(self, source: Source) -> dict[str, Any]:
        """The config.json that says what the metadata says. Raises SpecError for what is missing or not known."""
        config: dict[str, Any] = {"architectures": [self.hf], "model_type": self.model_type}
        for entry in self.entries:
            config |= entry.read(source)
        source.done(self.irrelevant)
        return config

    def metadata(self, config: Config) -> dict[str, Any]:
        """The metadata that says what a config.json says, under full keys; of the tokenizer it says nothing."""
        found = {key: value for entry in self.entries for key, value in entry.write(config).items()}
        return {"general.architecture": self.name, **{f"{self.name}.{key}": value for key, value in found.items()}}

    def computed(self, config: Config) -> dict[str, Tensor]:
        """The tensors of GGUF that come from the config."""
        return {name: tensor for entry in self.entries for name, tensor in entry.tensors(config).items()}


def _architecture(header: Header) -> str:
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise SpecError(f"general.type is {kind!r}: a part of a model or none; only whole models can be read")
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise SpecError("the metadata has no general.architecture")
    return name


def _shortest(value: Any) -> Any:
    """Of the numbers that are one float32, the one with the fewest digits: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) and np.isfinite(value) else value


# --- entries ---


def key(theirs: str, ours: str, *default: Any) -> Entry:
    """One key of the metadata that is one of config.json; where it is absent, the default is meant."""
    return Entry(lambda source: {ours: source(theirs, *default)}, lambda config: _given(config, {theirs: ours}))


def fixed(**values: Any) -> Entry:
    """What an architecture always means, and GGUF need not say."""

    def write(config: Config) -> dict[str, Any]:
        for name, value in values.items():
            if config.get(name, value) != value:
                raise SpecError(f"GGUF cannot say {name}={config[name]!r} of this architecture, only {value!r}")
        return {}

    return Entry(lambda source: dict(values), write)


def constant(name: str, value: Any, *, written: bool = True) -> Entry:
    """A key of the metadata that has one value, whether it is there or not."""

    def read(source: Source) -> dict[str, Any]:
        if source(name, value) != value:
            raise SpecError(f"{source.name}.{name}={source(name)!r} is not modelled (only {value!r})")
        return {}

    return Entry(read, lambda config: {name: value} if written else {})


def present(tensor: str, ours: str) -> Entry:
    """A switch of config.json that a tensor is there or not."""
    return Entry(lambda source: {ours: source.has(tensor)}, lambda config: {})


def vocabulary(tensor: str = "token_embd.weight") -> Entry:
    return Entry(
        lambda source: {"vocab_size": source.rows(tensor)},
        lambda config: _given(config, {"vocab_size": "vocab_size"}),
    )


def tying() -> Entry:
    """A head of its own is there, and is not the embedding's table again."""

    def read(source: Source) -> dict[str, Any]:
        head, table = "output.weight", "token_embd.weight"
        if not source.has(head) or not source.has(table):
            return {"tie_word_embeddings": not source.has(head)}
        return {"tie_word_embeddings": source.tensors.same(head, table)}

    return Entry(read, lambda config: {})


def heads(*, size: bool = True) -> Entry:
    """Attention heads; size: with head_dim, where it is not a head's share of the width."""

    def read(source: Source) -> dict[str, Any]:
        count = source.count("attention.head_count")
        found = {"num_attention_heads": count, "num_key_value_heads": source("attention.head_count_kv", count)}
        if size:
            found["head_dim"] = head_size(source)
        return found

    def write(config: Config) -> dict[str, Any]:
        found = _given(config, {"attention.head_count": "num_attention_heads",
                                "attention.head_count_kv": "num_key_value_heads"})  # fmt: skip
        if size:
            found |= {f"attention.{kind}_length": head_size_of(config) for kind in ("key", "value")}
        return found

    return Entry(read, write)


def head_size(source: Source) -> int:
    share = source.count("embedding_length") // max(1, source.count("attention.head_count"))
    size = source.count("attention.key_length", share)
    if source.count("attention.value_length", size) != size:
        raise SpecError(f"{source.name}.attention.value_length: not modelled where it differs from key_length")
    return size


def head_size_of(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _given(config: Config, pairs: Mapping[str, str]) -> dict[str, Any]:
    return {theirs: config[ours] for theirs, ours in pairs.items() if config.get(ours) is not None}


# --- changes, from Hugging Face's tensors to GGUF's ---


def turned(head_size: int) -> Change:
    """Rows of each head from rotary pairs that lie half a head apart to neighbouring ones. It takes the size of a head
    and no number of them, for keys have their own."""
    return Change(
        lambda ts: [repair(ts[0], head_size, to="interleaved")], lambda ts: [repair(ts[0], head_size, to="half")]
    )


PLUS_ONE = Change(lambda ts: [ts[0] + 1], lambda ts: [ts[0] - 1], whole_rows=False)
MINUS_EXP = Change(lambda ts: [-ts[0].exp()], lambda ts: [(-ts[0]).log()], whole_rows=False)
"""A of state-space models, stored as it is used and not as its logarithm."""
FLAT = Change(lambda ts: [ts[0].squeeze(1)], lambda ts: [ts[0].unsqueeze(1)])
"""A convolution of each channel alone, without the axis of one."""
COLUMN = Change(lambda ts: [ts[0].unsqueeze(1)], lambda ts: [ts[0].squeeze(1)])


def layers(theirs: str, ours: str, *pairs: tuple[str, str]) -> list[Row]:
    """Rows for modules inside layers: ("self_attn.v_proj", "attn_v") under "model.layers" and "blk"."""
    return rows([(f"{theirs}.{{}}.{one}", f"{ours}.{{}}.{other}") for one, other in pairs])


def changed(rows: Iterable[Row], changes: Mapping[str, Change]) -> list[Row]:
    """The rows, those of GGUF's tensors whose module is named with a change each."""
    return [
        Row(row.theirs, row.ours, changes.get(row.our_names[0].split(".")[-2], row.change), row.sized) for row in rows
    ]
