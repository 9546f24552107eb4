"""The older formats of vocabularies: GPT-2's pair of files, and BERT's list of words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import InputError
from .build import added_tokens, byte_level, from_json
from .bulk import BYTE_OF
from .byte_pairs import BytePairs
from .ending import read_bytes, read_config, read_eos, read_json
from .merges import Pair
from .patterns import GPT2, QWEN2
from .pretrained import Pretrained
from .tokenizer import MAX_SIZE

END = "<|endoftext|>"

# Which pattern goes with the pair of files, as far as a folder's tokenizer_config.json says whose it is.
BY_CLASS = {
    **dict.fromkeys(("GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer", "CodeGenTokenizer", None), (GPT2, False)),
    "Qwen2Tokenizer": (QWEN2, True),
}


def load_byte_pairs(vocab_path: Path, merges_path: Path) -> BytePairs:
    """GPT-2's vocab.json and merges.txt (encoder.json and vocab.bpe), byte-level.

    Tokens that no merge makes are special. Raises InputError for files of another kind.
    """
    config = read_config(vocab_path.parent)
    name = str(config.get("tokenizer_class")).removesuffix("Fast") if "tokenizer_class" in config else None
    if name not in BY_CLASS:
        raise InputError(
            f"{vocab_path}: how {name} cuts text is known only from its tokenizer.json, which is not there"
        )
    pattern, nfc = BY_CLASS[name]
    vocab = read_json(vocab_path)
    for token, id in vocab.items():
        if type(id) is not int or not 0 <= id < MAX_SIZE:
            raise InputError(f"{vocab_path}: {token!r}: expected its id, found {id!r}")
    if len(set(vocab.values())) != len(vocab):
        raise InputError(f"{vocab_path}: two tokens have one id")
    if not BYTE_OF.keys() <= vocab.keys() or any(token.endswith("</w>") for token in vocab):
        raise InputError(f"{vocab_path}: not a byte-level vocabulary as GPT-2's")
    merges = _merges(merges_path, vocab)
    made = {left + right for left, right in merges}
    specials = {token: id for token, id in vocab.items() if token not in made and token not in BYTE_OF}
    model = byte_level(vocab, merges, [pattern], specials=specials, nfc=nfc)
    eos = read_eos(vocab_path.parent, vocab.get)
    if eos is None:
        eos = (vocab[END],) if END in specials else ()
    return BytePairs(model, eos=eos, config=config)


def _merges(path: Path, vocab: dict[str, int]) -> list[Pair]:
    merges = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise InputError(f"{path}:{number}: expected two tokens and a space between them, found {line[:60]!r}")
        missing = next((token for token in (*parts, "".join(parts)) if token not in vocab), None)
        if missing is not None:
            raise InputError(f"{path}:{number}: {missing!r} is not in the vocabulary")
        merges.append((parts[0], parts[1]))
    return merges


def load_words(path: Path) -> Pretrained:
    """BERT's vocab.txt: a piece of a word on each line, its id the number of the line, from 0.

    Text is lowercased where tokenizer_config.json says so or, without it, where no word has a capital letter.
    """
    lines = _text(path).removesuffix("\n").split("\n")
    vocab = {line.removesuffix("\r"): id for id, line in enumerate(lines)}
    config = read_config(path.parent)
    try:
        model = word_pieces(vocab, config)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return Pretrained(model, eos=read_eos(path.parent, vocab.get) or (), unknown=vocab["[UNK]"], config=config)


def word_pieces(vocab: Mapping[str, int], config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """BERT's model of a vocabulary, with what a tokenizer_config.json says of its text. Raises InputError for a
    vocabulary without the tokens that frame a text."""
    specials = {name: vocab[name] for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in vocab}
    lacking = [name for name in ("[UNK]", "[CLS]", "[SEP]") if name not in specials]
    if lacking:
        raise InputError(f"not BERT's vocabulary: no token is {lacking[0]}")
    capital = any(
        token != token.lower() for token in vocab if token not in specials and not token.startswith("[unused")
    )
    return from_json(
        {
            "version": "1.0",
            "added_tokens": added_tokens(specials, {}),
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": bool(config.get("tokenize_chinese_chars", True)),
                "strip_accents": config.get("strip_accents"),
                "lowercase": bool(config.get("do_lower_case", not capital)),
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": {
                "type": "BertProcessing",
                "sep": ["[SEP]", vocab["[SEP]"]],
                "cls": ["[CLS]", vocab["[CLS]"]],
            },
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece",
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": dict(vocab),
            },
        }
    )


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
