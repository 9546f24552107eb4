"""A byte-level tokenizer with control tokens and a chat template, as small as they can be."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from sublayer.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NAMES = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def tokenizer_folder(folder: Path, template: str | None = None, *, framed: bool = False) -> Path:
    """A byte-level tokenizer with control tokens, in a folder as checkpoints have it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(NAMES)
    if framed:
        model.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 256), ("</s>", 257)])
    folder.mkdir(exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def named(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Ids as text, with the names of special tokens in braces."""
    parts: list[bytes] = []
    for token in ids:
        data = tokenizer.token_bytes(token)
        parts.append(data or f"{{{NAMES[token - 256]}}}".encode())
    return b"".join(parts).decode()
