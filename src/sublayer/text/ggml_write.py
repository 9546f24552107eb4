"""A tokenizer as the metadata of a GGUF file, so that llama.cpp gives the same ids."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from ..errors import InputError
from .byte_pairs import BytePairs
from .cuts import steps
from .ggml import BYTE, CONTROL, MARKS, NFC, NORMAL, PATTERNS_OF, UNUSED, USER_DEFINED, WHOLE_PIECES_FIRST
from .patterns import GPT2, PATTERNS
from .portable import portable
from .pretrained import Pretrained
from .sentence_piece import SentencePiece
from .tokenizer import Tokenizer, frame

# Of several names for one pattern, that of the family it comes from.
PREFERRED = ("gpt-2", "llama-bpe", "qwen2", "smollm")
# What llama.cpp leaves out of the ways to cut text that it knows by these names.
INEXACT = {
    **dict.fromkeys(NFC, "brings no text to NFC first: ids of a text in another form differ"),
    **dict.fromkeys(("gpt-4o", "llama4"), "takes capitals beyond ASCII for small letters: ids of some words differ"),
}  # fmt: skip
UNIGRAM, BPE = 1, 2  # SentencePiece's kinds of models


def ggml_metadata(tokenizer: Tokenizer, size: int, note: Callable[[str], object] = lambda line: None) -> dict[str, Any]:
    """The keys under tokenizer.ggml: tokens, merges, how text is cut, what begins and ends it. Ids up to `size`, that
    of the model's table, are filled with tokens that no text has. note: told, in a line, where llama.cpp's ids differ.

    Raises InputError for a tokenizer that the format cannot express, with the reason.
    """
    if tokenizer.size > size:
        raise InputError(f"the tokenizer has {tokenizer.size} ids, more than the {size} rows of the model's embedding")
    same = portable(tokenizer)
    if isinstance(same, BytePairs):
        found, marks = _byte_pairs(same), _marks(same)
    elif isinstance(same, SentencePiece):
        found, marks = _sentence_piece(same), _marks(same)
    elif same.to_json()["model"]["type"] == "WordPiece":
        found, marks = _words(same), _frame_of_words(same)
    else:
        kind, way = (
            (f"{same.to_json()['model']['type']} of a tokenizer.json", "the tokenizer.model it was made from beside it")
            if isinstance(tokenizer, Pretrained)
            else (f"table of {type(tokenizer).__name__.lower()}", "a tokenizer of kind bytes or bpe")
        )
        raise InputError(
            f"GGUF holds byte-level BPE, bytes, SentencePiece and WordPiece, and no {kind}: with {way} a model can be"
            " written; as hf it goes along as it is"
        )
    if found["pre"] in INEXACT:
        note(f"llama.cpp cuts text as {found['pre']}, but {INEXACT[found['pre']]}")
    if found["model"] == "bert":
        note("llama.cpp takes no Hangul apart and knows no longest word: ids of Korean, and of 100 letters, differ")
    if found["model"] == "t5" and BYTE in found["token_type"]:
        note("llama.cpp makes <unk> of characters that a unigram model lacks, and not their bytes: such ids differ")
    lacking = range(len(found["tokens"]), size)
    found["tokens"] += [f"[PAD{id}]" for id in lacking]
    found["token_type"] += [UNUSED] * len(lacking)
    if "scores" in found:
        found["scores"] += [-1000.0] * len(lacking)
    return {f"tokenizer.ggml.{key}": value for key, value in (found | marks).items()}


def _byte_pairs(tokenizer: BytePairs) -> dict[str, Any]:
    data = tokenizer.to_json()
    model, added = data["model"], data["added_tokens"]
    tokens, types = [f"[PAD{id}]" for id in range(tokenizer.size)], [UNUSED] * tokenizer.size
    for token, id in model["vocab"].items():
        tokens[id], types[id] = token, NORMAL
    for token in added:
        tokens[token["id"]], types[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    return {
        "model": "gpt2",
        "pre": _pre(data),
        "tokens": tokens,
        "token_type": types,
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
    }


def _pre(data: Mapping[str, Any]) -> str:
    """llama.cpp's name for how a tokenizer.json cuts text."""
    normalizer, model = data["normalizer"], data["model"]
    if normalizer not in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        raise InputError(f"GGUF cannot say the tokenizer's normalizer {normalizer['type']}")
    *patterns, last = steps(data["pre_tokenizer"] or {})
    cut = tuple(GPT2 if one == PATTERNS["gpt2"] else one for one in patterns)
    found = [pre for pre, known in PATTERNS_OF.items() if known == cut and last == "bytes"]
    if not found:
        known = ", ".join(sorted(PATTERNS))
        raise InputError(
            f"llama.cpp has no name for how this tokenizer cuts text; the nearest is {_nearest(cut)}. Tokenizers"
            f" trained with a pattern of these can be written: {known}"
        )
    nfc = normalizer == {"type": "NFC"}
    fitting = [pre for pre in found if (pre in NFC) == nfc]
    if not fitting:
        raise InputError(
            f"GGUF cannot say that text is {'' if nfc else 'not '}brought to NFC before {found[0]} cuts it"
        )
    # Where a name looks up whole pieces first, or not, against the tokenizer: does it come to the same?
    as_is = [pre for pre in fitting if (pre in WHOLE_PIECES_FIRST) == bool(model.get("ignore_merges"))]
    if not as_is and not _merges_make_all(model):
        raise InputError(
            f"{fitting[0]} would look up whole pieces, and this tokenizer's merges do not make all of them"
        )
    usable = as_is or fitting
    return next((pre for pre in PREFERRED if pre in usable), usable[0])


def _merges_make_all(model: Mapping[str, Any]) -> bool:
    pairs = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    merging = tokenizers.models.BPE(vocab=model["vocab"], merges=pairs)
    made = {left + right for left, right in pairs}
    return all(len(merging.tokenize(token)) == 1 for token in model["vocab"] if token in made)


def _nearest(cut: Sequence[str | None]) -> str:
    """The name whose patterns share the longest beginning."""

    def shared(pre: str) -> int:
        one, other = "|".join(map(str, cut)), "|".join(PATTERNS_OF[pre])
        return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

    return max(PATTERNS_OF, key=shared)


# --- SentencePiece ---


class _Piece(NamedTuple):
    text: str
    score: float
    kind: int


def _sentence_piece(tokenizer: SentencePiece) -> dict[str, Any]:
    model = list(_fields(tokenizer.to_bytes()))
    pieces = [_piece(value) for number, value in model if number == 1]
    trainer, normalizer = (dict(_fields(_last(model, number))) for number in (2, 3))
    kind = trainer.get(3, UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        raise InputError("GGUF holds SentencePiece's unigram and BPE models, and none of words or characters")
    found = {
        "model": "llama" if kind == BPE else "t5",
        "pre": "default",
        "tokens": [one.text.replace("▁", " ") if one.kind == USER_DEFINED else one.text for one in pieces],
        "scores": [one.score for one in pieces],
        "token_type": [one.kind for one in pieces],
        "add_space_prefix": bool(normalizer.get(3, 1)),
        "remove_extra_whitespaces": bool(normalizer.get(4, 1)),
    }
    charsmap = normalizer.get(2, b"")
    if charsmap and kind == UNIGRAM:  # of the other, llama.cpp has none
        found["precompiled_charsmap"] = charsmap
    return found


def _piece(data: bytes) -> _Piece:
    fields = dict(_fields(data))
    return _Piece(fields[1].decode("utf-8"), fields.get(2, 0.0), fields.get(3, NORMAL))


def _last(fields: Sequence[tuple[int, Any]], number: int) -> bytes:
    return next((value for found, value in reversed(fields) if found == number), b"")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protocol buffer: bytes, whole numbers and floats."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = varint()
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            yield number, varint()
        elif wire == 2:
            size = varint()
            yield number, data[at : at + size]
            at += size
        else:
            size = 4 if wire == 5 else 8
            yield number, struct.unpack("<f" if wire == 5 else "<d", data[at : at + size])[0]
            at += size


# --- WordPiece ---

# llama.cpp cuts text in one way: lowercased, without accents, at Chinese characters.
PARTS = {"CLS": "bos", "SEP": "seperator", "PAD": "padding", "UNK": "unknown", "MASK": "mask"}


def _words(tokenizer: Pretrained) -> dict[str, Any]:
    """A piece that begins a word has "▁" before it, and others are bare, where a vocabulary has "##" before these."""
    data = tokenizer.to_json()
    model, added = data["model"], data["added_tokens"]
    wanted = {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
    }
    for part, how in wanted.items():
        said = data[part] or {}
        other = next((key for key, value in how.items() if said.get(key) != value), None)
        other = "strip_accents" if said.get("strip_accents") is False else other
        if other is not None:
            raise InputError(f"GGUF cannot say the tokenizer's {part} with {other}={said.get(other)!r}")
    prefix = model["continuing_subword_prefix"]
    ordinary = next((token["content"] for token in added if not token["special"]), None)
    if ordinary is not None:
        raise InputError(f"GGUF cannot say that {ordinary!r} is cut out of a text before its words are")
    tokens, types = [f"[PAD{id}]" for id in range(tokenizer.size)], [UNUSED] * tokenizer.size
    for token, id in model["vocab"].items():
        inner = token.startswith(prefix)
        tokens[id], types[id] = token.removeprefix(prefix) if inner else f"▁{token}", NORMAL
        if inner and tokens[id].startswith("▁"):
            raise InputError(f"GGUF cannot tell the token {token!r} from one that begins a word")
    for token in added:
        tokens[token["id"]], types[token["id"]] = token["content"], CONTROL
    return {"model": "bert", "pre": "default", "tokens": tokens, "token_type": types}


def _frame_of_words(tokenizer: Pretrained) -> dict[str, Any]:
    """The special tokens; a text stands between [CLS] and [SEP]."""
    named = {part: tokenizer.library.token_to_id(f"[{part}]") for part in PARTS}
    lacking = next((part for part in ("CLS", "SEP", "UNK") if named[part] is None), None)
    if lacking is not None:
        raise InputError(f"GGUF names a token [{lacking}], and this tokenizer has none: train it with an end")
    if frame(tokenizer) != ([named["CLS"]], [named["SEP"]]):
        raise InputError("GGUF puts a text between [CLS] and [SEP], and this tokenizer does not")
    ids = {f"{PARTS[part]}_token_id": id for part, id in named.items() if id is not None}
    return ids | {"cls_token_id": named["CLS"]} | ({"eos_token_id": tokenizer.eos[0]} if tokenizer.eos else {})


# --- what begins and ends a text ---


def _marks(tokenizer: BytePairs | SentencePiece) -> dict[str, Any]:
    """What begins and ends a text, and what else has a name of its own."""
    before, after = frame(tokenizer)
    if len(before) > 1 or len(after) > 1:
        raise InputError("GGUF frames a text by one token on a side, and this tokenizer by several")
    if not tokenizer.eos:
        raise InputError("GGUF names a token that ends a text, and this tokenizer has none: train it with an end")
    ends = dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), tokenizer.eos, strict=False))
    if after and after != [tokenizer.eos[0]]:
        raise InputError("GGUF ends a framed text with the token that ends texts, and this tokenizer with another")
    named = {key: tokenizer.marks[name] for name, key in MARKS.items() if name in tokenizer.marks}
    begins = {"bos_token_id": before[0]} if before else {}
    return named | ends | begins | {"add_bos_token": bool(before), "add_eos_token": bool(after)}
