"""GGUF files, read as if they were folders of Hugging Face's, by the tables that say how they write an architecture.

Start at table.py; llama.py is the first of the tables. A table is read both ways: `reader` finds the one for a file,
`writer` the one for a config.json.
"""

from __future__ import annotations

from ...errors import SpecError, nearest
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .encoders import BERT, MODERN_BERT, T5
from .gemma import GEMMA, GEMMA2, GEMMA3
from .gpt import GPT2, GPT_NEOX, GPT_OSS
from .llama import LLAMA, MIXTRAL, OLMO2, PHI3, QWEN2, QWEN3, QWEN3_MOE, SMOLLM3
from .state_space import JAMBA, MAMBA, MAMBA2
from .table import Architecture, Config, Source

ARCHITECTURES = (
    LLAMA, SMOLLM3, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, OLMO2, PHI3, GEMMA, GEMMA2, GEMMA3, GPT2, GPT_NEOX, GPT_OSS,
    MAMBA, MAMBA2, JAMBA, BERT, MODERN_BERT, T5, DEEPSEEK_V3, DEEPSEEK_V2,
)  # fmt: skip

__all__ = ["ARCHITECTURES", "Architecture", "Config", "Source", "reader", "writer"]


def reader(source: Source) -> Architecture:
    """The table of a file. Raises SpecError with the nearest name for an architecture that has none."""
    found = [one for one in ARCHITECTURES if one.name == source.name and one.when(source)]
    if not found:
        known = {one.name for one in ARCHITECTURES}
        raise SpecError(f"GGUF architecture {source.name!r} cannot be read{nearest(source.name, known)}")
    return found[0]


def writer(config: Config) -> Architecture:
    """The table for a config.json. Raises SpecError for a class that GGUF has no architecture for here."""
    name = str((config.get("architectures") or [config.get("_class_name")])[0])
    found = next((one for one in ARCHITECTURES if one.hf == name), None)
    if found is not None:
        return found
    if name.startswith("Mistral"):  # without a window it is a Llama
        raise SpecError(f"GGUF's llama cannot say the window of {name}, sliding_window={config.get('sliding_window')}")
    line = {"roberta": "bert"}.get(str(config.get("model_type")), config.get("model_type"))
    body = next((one for one in ARCHITECTURES if one.headless and one.model_type == line), None)
    if body is not None:
        raise SpecError(f"GGUF's {body.name} holds an encoder's vectors, and not the head of {name}")
    whole = next((one for one in ARCHITECTURES if one.model_type == line and not one.headless), None)
    if whole is not None:
        raise SpecError(f"GGUF's {whole.name} has a head, and this model ({name}) has none")
    known = ", ".join(dict.fromkeys(one.name for one in ARCHITECTURES))
    raise SpecError(f"{name} has no GGUF architecture here; what has: {known}")
