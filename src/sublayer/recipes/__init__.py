"""Recipes: one module a family, each a function from sizes to a spec: `sublayer.recipes.llama(dim=…, …)`.

A family's module also holds its published SIZES, a TINY one for tests, NAMES (its checkpoint table, or a function from
a spec to it), PREFIX (which the names of a base class lack), IGNORED (names that hold nothing of the model, or a
function too), HF (how to read config.json, by architecture), `to_hf`, and EXEMPT: the contracts without meaning for it,
each with the reason; where no architecture of Hugging Face's is the family, alone.py says the rest. If need be,
PREFIXES (what stands in its place where a model has more parts), RENAMED (endings of names that older files spell
otherwise), and FILE (the file of weights where it is not called model.safetensors).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import SpecError, UsageError, nearest
from ..names import Row
from ..nn.sublayer import Model
from .difference import Difference, differences

if TYPE_CHECKING:
    from .actions import actions
    from .bamba import bamba
    from .bert import bert
    from .convolution import convolution
    from .deberta import deberta
    from .deepseek_v3 import deepseek_v3
    from .dinov2 import dinov2
    from .dit import dit
    from .evoformer import evoformer
    from .gemma import gemma
    from .gemma4 import gemma4
    from .gpt2 import gpt2
    from .gpt_neox import gpt_neox
    from .gpt_oss import gpt_oss
    from .grok import grok
    from .jamba import jamba
    from .linear_transformer import linear_transformer
    from .llama import llama
    from .mamba import mamba
    from .mamba2 import mamba2
    from .mixtral import mixtral
    from .mixture import mixture
    from .modernbert import modernbert
    from .multiscale import multiscale
    from .olmo2 import olmo2
    from .phi3 import phi3
    from .qwen3_5 import qwen3_5
    from .qwen3_moe import qwen3_moe
    from .qwen3_next import qwen3_next
    from .rnn import rnn
    from .s4 import s4
    from .seq2seq import seq2seq
    from .switch import switch
    from .t5 import t5
    from .transformer import transformer
    from .vit import vit
    from .whisper import whisper

FAMILIES = (
    "actions",
    "bamba",
    "bert",
    "deberta",
    "convolution",
    "deepseek_v3",
    "dinov2",
    "dit",
    "evoformer",
    "gemma",
    "gemma4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "grok",
    "jamba",
    "linear_transformer",
    "llama",
    "mamba",
    "mamba2",
    "mixtral",
    "mixture",
    "modernbert",
    "multiscale",
    "olmo2",
    "phi3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "rnn",
    "s4",
    "seq2seq",
    "switch",
    "t5",
    "transformer",
    "vit",
    "whisper",
)
CONTRACTS = ("parity", "size", "incremental", "packing", "padding", "kernels", "round trip", "compile", "learning")

__all__ = [
    "CONTRACTS",
    "FAMILIES",
    "actions",
    "bamba",
    "bert",
    "convolution",
    "deberta",
    "deepseek_v3",
    "dinov2",
    "dit",
    "evoformer",
    "family",
    "from_hf",
    "gemma",
    "gemma4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "grok",
    "ignored",
    "jamba",
    "linear_transformer",
    "llama",
    "mamba",
    "mamba2",
    "mixtral",
    "mixture",
    "model",
    "modernbert",
    "multiscale",
    "names",
    "names_of_sizes",
    "olmo2",
    "phi3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "rnn",
    "s4",
    "seq2seq",
    "switch",
    "t5",
    "to_hf",
    "transformer",
    "vit",
    "whisper",
]


class _Recipes(ModuleType):
    """This package: a family's name is its function, though the import system would bind it to the family's module."""

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in FAMILIES and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if own else value)


sys.modules[__name__].__class__ = _Recipes


def __getattr__(name: str) -> Any:
    if name not in FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{nearest(name, __all__)}")
    return getattr(family(name), name)  # families are imported when they are asked for


def family(name: str) -> Any:
    """The module of a family. Raises UsageError with the nearest name for an unknown one."""
    if name not in FAMILIES:
        raise UsageError(f"unknown family {name!r}{nearest(name, FAMILIES)}")
    return import_module(f"{__name__}.{name}")


def names(module: Any, spec: Model) -> list[Row]:
    """The checkpoint table of a family's module for a spec: its NAMES, which may depend on it (heads of many kinds)."""
    table: list[Row] | Callable[[Model], list[Row]] = module.NAMES
    return table if isinstance(table, list) else table(spec)


def ignored(module: Any, spec: Model) -> tuple[str, ...]:
    """The names in a checkpoint that hold nothing of the model: a family's IGNORED, which may depend on the spec."""
    found: tuple[str, ...] | Callable[[Model], tuple[str, ...]] = module.IGNORED
    return found(spec) if callable(found) else found


def names_of_sizes() -> dict[str, str]:
    """{published size: family}, in the order of the families."""
    return {size: name for name in FAMILIES for size in family(name).SIZES}


def model(name: str) -> Model:
    """The spec of a published size, such as "llama3-8b". Raises UsageError with the nearest name for an unknown one."""
    sizes = names_of_sizes()
    if name not in sizes:
        raise UsageError(f"unknown model {name!r}{nearest(name, sizes)}")
    module = family(sizes[name])
    return getattr(module, sizes[name])(**module.SIZES[name])


def from_hf(config: Mapping[str, Any]) -> tuple[Model, Any]:
    """(spec, family module) of a config.json. Raises SpecError for an architecture or a value that is not modelled."""
    readers = {name: (module.HF[name], module) for module in map(family, FAMILIES) for name in module.HF}
    architectures = config.get(
        "architectures", [config["_class_name"]] if "_class_name" in config else None
    )  # diffusers
    if not isinstance(architectures, list) or not architectures:
        kind = str(config.get("model_type", ""))
        raise SpecError(f"config.json names no architecture: it needs architectures=[…]{_of_type(kind, readers)}")
    name = str(architectures[0])
    if name not in readers:
        raise SpecError(f"architecture {name!r} has no recipe{_nearest(name, readers)}")
    read, module = readers[name]
    try:
        return read(config), module
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as error:
        # A recipe reads keys as if they were well typed; the spec refuses the rest by name.
        raise SpecError(f"config.json holds a value of the wrong type: {error}") from None


def _nearest(name: str, known: Iterable[str]) -> str:
    """For the end of an error line: a near miss of spelling, else other heads of the same model. BART is no BERT,
    however much their names agree."""
    line = sorted(_line(name))
    alike = [one for one in known if sorted(_line(one)) == line]  # letters may have changed places
    close = get_close_matches(name, alike, n=1, cutoff=0.9)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f"; of that line, these have: {', '.join(alike)}" if alike else "; sublayer recipes lists those that have"


def _of_type(kind: str, known: Iterable[str]) -> str:
    alike = [one for one in known if _line(one) == "".join(filter(str.isalnum, kind.casefold()))]
    if alike:
        return f", one of {', '.join(alike)} for model_type {kind!r}"
    return f"; model_type {kind!r} has no recipe" if kind else ""


def _line(name: str) -> str:
    """What the names of a model's classes have in common: "qwen3" of Qwen3ForCausalLM."""
    return re.sub(r"(For[A-Z].*|LMHead.*|Model)$", "", name).casefold()


def to_hf(spec: Model) -> tuple[dict[str, Any], Any]:
    """(config.json, family module) that reads back as this very spec.

    Raises SpecError where no family has one, naming the nearest and the parts in which it differs, and where a family's
    class would not take a value (its `check_hf`).
    """
    near: tuple[str, list[Difference]] | None = None
    for name in FAMILIES:
        module = family(name)
        for config in _configs(module, spec):
            try:
                back, _ = from_hf(config)
            except (SpecError, LookupError, StopIteration):
                continue
            found = differences(spec, back)
            if not found:
                getattr(module, "check_hf", lambda spec: None)(spec)
                return config, module
            if near is None or len(found) < len(near[1]):
                near = config["architectures"][0] if "architectures" in config else name, found
    if near is None:
        able = [name for name in FAMILIES if family(name).HF]
        raise SpecError(f"no Hugging Face architecture expresses this model; families that have one: {', '.join(able)}")
    name, ((path, mine, theirs), *more) = near
    others = f", and {len(more)} more parts differ" if len(more) > 1 else ", and one more differs" if more else ""
    raise SpecError(
        f"no Hugging Face architecture expresses this model; the nearest is {name}, in which {path} is {theirs!r},"
        f" not {mine!r}{others}"
    )


def _configs(module: Any, spec: Model) -> Iterator[dict[str, Any]]:
    """What may express a spec in a family: its own to_hf's, and of a model without a head that of each base class,
    some of which know one value only of what ties a head."""
    try:
        config = module.to_hf(spec)
    except (SpecError, AttributeError, LookupError, TypeError, ValueError, StopIteration):  # of another shape
        return
    yield config
    for base in (name for name in module.HF if name.endswith("Model") and spec.head is None):
        yield config | {"architectures": [base]}
        yield config | {"architectures": [base], "tie_word_embeddings": True}
