"""The tokenizer in a GGUF file's metadata, with the ids of the tokenizer it was made from."""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError, nearest
from .build import byte_level
from .byte_pairs import BytePairs
from .merges import Pair
from .metadata import read_metadata
from .patterns import DEEPSEEK_CODER, DEEPSEEK_V3, DIGIT, GPT2, PATTERNS, QWEN2, QWEN35, TEKKEN
from .pretrained import Pretrained
from .sentence_piece import SentencePiece
from .tokenizer import Tokenizer
from .vocabularies import word_pieces

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# tokenizer.ggml.pre: the patterns of that family's tokenizer.json. What is not listed is refused, for a wrong pattern
# gives wrong ids without a word. Source of the names: llama.cpp's convert_hf_to_gguf.py.
PATTERNS_OF = {
    **dict.fromkeys(("gpt-2", "phi-2", "roberta-bpe", "olmo"), (GPT2,)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "chatglm-bpe", "glm4", "dbrx"), (PATTERNS["cl100k"],)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (QWEN2,)),
    "qwen35": (QWEN35,),
    "modern-bert": (GPT2,),
    **dict.fromkeys(("gpt-4o", "llama4"), (PATTERNS["o200k"],)),
    "tekken": (TEKKEN,),
    **dict.fromkeys(("smollm", "starcoder", "refact"), (DIGIT, GPT2)),
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-coder": DEEPSEEK_CODER,
}
# GGUF does not say that a text is normalized first. "olmo" is GPT-NeoX's, with which Pythia and Mamba are written too.
NFC = ("qwen2", "deepseek-r1-qwen", "qwen35", "olmo")
WHOLE_PIECES_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")
BEGIN_BY_DEFAULT = (*WHOLE_PIECES_FIRST,)
# What tokenizer_config.json calls the marks that GGUF names by id.
MARKS = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip
PIECES = {"unk_token": 45, "bos_token": 46, "eos_token": 47, "pad_token": 48}  # fields of SentencePiece's trainer


def load_gguf(path: Path) -> Tokenizer:
    """Byte-level BPE ("gpt2"), SentencePiece's BPE ("llama") and unigram ("t5") models, BERT's word pieces ("bert").

    Raises InputError for metadata that is not whole, and for a kind or a way to cut text that is not known.
    """
    metadata = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in read_metadata(path).items()
        if key.startswith("tokenizer.ggml.")
    }
    builders = {"gpt2": _byte_pairs, "llama": _sentence_piece, "t5": _sentence_piece, "bert": _words}
    kind = metadata.get("model")
    if kind is None:
        raise InputError(f"{path}: no tokenizer in it")
    if not isinstance(kind, str) or kind not in builders:
        raise InputError(f"{path}: tokenizer.ggml.model {kind!r} is not supported{nearest(str(kind), builders)}")
    try:
        return builders[kind](metadata)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _byte_pairs(metadata: Mapping[str, Any]) -> BytePairs:
    pre = metadata.get("pre")
    if not isinstance(pre, str) or pre not in PATTERNS_OF:
        raise InputError(f"tokenizer.ggml.pre {pre!r}: how it cuts text is not known{nearest(str(pre), PATTERNS_OF)}")
    tokens, types = _tokens(metadata)
    by_type: dict[int, dict[str, int]] = {}
    for id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        by_type.setdefault(kind, {})[token] = id
    normal = by_type.get(NORMAL, {})
    specials = by_type.get(CONTROL, {}) | by_type.get(UNKNOWN, {})
    before = _mark(metadata, tokens, "bos", default=pre in BEGIN_BY_DEFAULT)
    after = _mark(metadata, tokens, "eos", default=False)
    model = byte_level(
        normal,
        _merges(metadata.get("merges")),
        PATTERNS_OF[pre],
        specials=specials | {tokens[id]: id for id in (*before, *after)},
        ordinary=by_type.get(USER_DEFINED, {}),
        frame=([tokens[id] for id in before], [tokens[id] for id in after]),
        nfc=pre in NFC,
        ignore_merges=pre in WHOLE_PIECES_FIRST,
    )
    return BytePairs(model, eos=_eos(metadata, tokens), config=_named(metadata, tokens))


def _sentence_piece(metadata: Mapping[str, Any]) -> SentencePiece:
    tokens, types = _tokens(metadata)
    scores = metadata.get("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(isinstance(one, float) for one in scores):
        raise InputError(f"tokenizer.ggml.scores: expected {len(tokens)} numbers")
    llama = metadata["model"] == "llama"
    charsmap = metadata.get("precompiled_charsmap", [])
    if not isinstance(charsmap, list) or not all(isinstance(one, int) for one in charsmap):
        raise InputError("tokenizer.ggml.precompiled_charsmap: expected bytes")
    config = _named(metadata, tokens)
    proto = b"".join([
        *(
            _field(1, _field(1, _piece(token, kind)) + _field(2, score) + _field(3, kind))
            for token, score, kind in zip(tokens, scores, types, strict=True)
        ),
        _field(
            2,  # trainer: the model's type, and what its marks are called
            _field(3, 2 if llama else 1)
            + _field(35, int(BYTE in types))
            + b"".join(_field(PIECES[name], token.encode("utf-8")) for name, token in config.items()),
        ),
        _field(
            3,  # normalizer
            _field(2, bytes(one & 0xFF for one in charsmap))
            + _field(3, int(bool(metadata.get("add_space_prefix", True))))
            + _field(4, int(bool(metadata.get("remove_extra_whitespaces", not llama)))),
        ),
    ])  # fmt: skip
    before = _mark(metadata, tokens, "bos", default=llama)
    after = _mark(metadata, tokens, "eos", default=not llama)
    return SentencePiece(proto, eos=_eos(metadata, tokens), frame=(before, after), config=config)


def _words(metadata: Mapping[str, Any]) -> Pretrained:
    """GGUF writes "▁" before a piece that begins a word, others bare; in a vocabulary, others have "##" there.
    Text is lowercased where no word has a capital letter, for GGUF says nothing of it."""
    tokens, types = _tokens(metadata)
    vocab: dict[str, int] = {}
    for id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        inner = kind == NORMAL and not token.startswith("▁")
        vocab[f"##{token}" if inner else token.removeprefix("▁") if kind == NORMAL else token] = id
    words = (token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL and "[unused" not in token)
    model = word_pieces(vocab, {"do_lower_case": all(token == token.lower() for token in words)})
    return Pretrained(model, eos=_eos(metadata, tokens), unknown=vocab["[UNK]"], config=_named(metadata, tokens))


def _piece(token: str, kind: int) -> bytes:
    """A user-defined piece is written in GGUF as the text it stands for; in the model a space is "▁", as in others."""
    return (token.replace(" ", "▁") if kind == USER_DEFINED else token).encode("utf-8")


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise InputError("tokenizer.ggml.tokens: expected a list of strings")
    types = metadata.get("token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or not set(types) <= {*range(1, 7)}:
        raise InputError(f"tokenizer.ggml.token_type: expected {len(tokens)} numbers from 1 to 6")
    return tokens, types


def _merges(found: Any) -> list[Pair]:
    if not isinstance(found, list) or not all(isinstance(pair, str) for pair in found):
        raise InputError("tokenizer.ggml.merges: expected a list of strings")
    merges = []
    for i, pair in enumerate(found):
        left, space, right = pair.partition(" ")
        if not (left and space and right) or " " in right:
            raise InputError(f"tokenizer.ggml.merges[{i}]: expected two tokens and a space between them, got {pair!r}")
        merges.append((left, right))
    return merges


def _mark(metadata: Mapping[str, Any], tokens: list[str], name: str, default: bool) -> tuple[int, ...]:
    """The id that is put at a text's begin (bos) or end (eos), if one is."""
    return _known(metadata, tokens, [f"{name}_token_id"]) if metadata.get(f"add_{name}_token", default) else ()


def _named(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """The names of the marks, as in tokenizer_config.json."""
    return {name: tokens[id] for name, key in MARKS.items() for id in _known(metadata, tokens, [key])}


def _eos(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_known(metadata, tokens, ["eos_token_id", "eot_token_id", "eom_token_id"])))


def _known(metadata: Mapping[str, Any], tokens: list[str], keys: Iterable[str]) -> tuple[int, ...]:
    ids = {key: metadata[key] for key in keys if key in metadata}
    for key, id in ids.items():
        if type(id) is not int or not 0 <= id < len(tokens):
            raise InputError(f"tokenizer.ggml.{key}: {id!r} is none of the {len(tokens)} ids")
    return tuple(ids.values())


def _field(number: int, value: bytes | int | float) -> bytes:
    """One field of a protocol buffer. Field numbers are those of SentencePiece's sentencepiece_model.proto."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
