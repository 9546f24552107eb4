"""Reading the tokenizers that checkpoints bring, in whatever format they come."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import InputError, UsageError
from ..gguf_header import models_in
from .byte_pairs import BytePairs
from .bytes import Bytes
from .counted import Characters, Words
from .ending import marks, read_bytes, read_config, read_eos, read_json
from .ggml import load_gguf
from .metadata import read_metadata
from .pretrained import Pretrained
from .ranks import is_ranks, load_ranks
from .sentence_piece import Frame, SentencePiece
from .tokenizer import Tokenizer
from .vocabularies import load_byte_pairs, load_words

PAIRS = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}

# What puts special tokens around a text where a SentencePiece model's folder leaves it to the class.
BEGINS, ENDS = ("LlamaTokenizer", "GemmaTokenizer"), ("T5Tokenizer", "MT5Tokenizer")
# Their ids are not those of their SentencePiece file.
RENUMBERED = ("XLMRoberta", "Camembert", "MBart", "MBart50", "Nllb", "Xlnet", "XLNet", "BigBird", "Marian", "Pegasus")


def load_tokenizer(
    path: Path | str, *, pattern: str | None = None, specials: Mapping[str, int] | None = None
) -> Tokenizer:
    """The tokenizer of a checkpoint's folder, or in a file.

    Formats, in the order in which a folder is searched: tokenizer.json (Sublayer's, or Hugging Face's: BPE, WordPiece,
    unigram), SentencePiece's tokenizer.model and spiece.model, GPT-2's vocab.json and merges.txt, BERT's vocab.txt,
    tiktoken's ranks (*.tiktoken), GGUF (*.gguf).
    pattern and specials (name → id) are for ranks that are not a published tokenizer's: how text is cut ("gpt2",
    "cl100k", "o200k", or a regex), and the special tokens, the first of which ends a text.
    The ids that end a text come from generation_config.json, else config.json, else tokenizer_config.json, else the
    tokenizer's own file. Raises InputError where no tokenizer is found, or a file is not what its name says.
    """
    path = Path(path)
    file = _file(path) if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file}: no such file, nor a folder with a tokenizer")
    if file.suffix == ".tiktoken" or (file.suffix == ".model" and is_ranks(read_bytes(file))):
        return load_ranks(file, pattern, specials)
    if pattern is not None or specials is not None:
        raise UsageError(f"{file}: pattern and specials are for tiktoken's ranks; this format says them itself")
    for whole, half in PAIRS.items():
        if file.name in (whole, half):
            files = [file.with_name(name) for name in (whole, half)]
            missing = next((one for one in files if not one.is_file()), None)
            if missing is not None:
                raise InputError(f"{file}: one of a pair, and {missing.name} is not beside it")
            return load_byte_pairs(*files)
    loaders: dict[str, Callable[[Path], Tokenizer]] = {
        ".json": _load_json,
        ".model": _load_sentence_piece,
        ".txt": load_words,
        ".gguf": load_gguf,
    }
    if file.suffix not in loaders:
        known = ", ".join([*loaders, ".tiktoken"])
        raise InputError(f"{file}: not a tokenizer's file by its name (known: {known}; and vocab.bpe)")
    return loaders[file.suffix](file)


def has_tokenizer(path: Path) -> bool:
    """Whether there is a tokenizer to load: in a folder, or in a GGUF file."""
    if path.suffix == ".gguf" and path.is_file():
        return "tokenizer.ggml.tokens" in read_metadata(path)
    return bool(path.is_dir() and _candidates(path))


def _file(folder: Path) -> Path:
    found = _candidates(folder)
    if not found:
        raise InputError(f"{folder}: no tokenizer.json there, nor a tokenizer in another format")
    if len(found) > 1:
        raise InputError(f"{folder}: {found[0].name} or {found[1].name}? Name the file")
    return found[0]


def _candidates(folder: Path) -> list[Path]:
    """The first of the known names, or all files of the formats that have no name of their own."""
    for name in ("tokenizer.json", "tokenizer.model", "spiece.model", *PAIRS, "vocab.txt"):
        if (folder / name).is_file() and (folder / PAIRS.get(name, name)).is_file():
            return [folder / name]
    return sorted([*folder.glob("*.tiktoken"), *models_in(folder)])


def _load_json(path: Path) -> Tokenizer:
    data = read_json(path)
    for own in (Bytes, Characters, Words):
        if data.get("type") == own.__name__:
            return own.from_json(data)
    if not _prefixed(data.get("model")):
        raise InputError(f"{path}: a merge's second token does not begin with continuing_subword_prefix")
    try:
        model = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"{path}: not a tokenizer that the tokenizers library reads: {error}") from None
    kind = BytePairs if _is_byte_level(data) else Pretrained
    eos, config = read_eos(path.parent, model.token_to_id) or (), read_config(path.parent)
    try:
        return kind(model, eos=eos, unknown=_unknown(data["model"], model), config=config)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _prefixed(model: Any) -> bool:
    """Whether what goes on in a word begins as it should: the library cuts so many bytes off it, whatever they are, and
    ends the process where half a character is left."""
    if not isinstance(model, dict):
        return True  # which the library refuses, as all that is of another kind here
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return True
    for pair in merges:
        second = (
            pair.partition(" ")[2] if isinstance(pair, str) else pair[-1] if isinstance(pair, list) and pair else ""
        )
        if isinstance(second, str) and not second.startswith(prefix):
            return False
    return True


def _load_sentence_piece(path: Path) -> SentencePiece:
    config = read_config(path.parent)
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if name.removesuffix("Tokenizer") in RENUMBERED:
        raise InputError(f"{path}: the ids of {name} are not those in this file; its tokenizer.json would say them")
    try:
        model = SentencePiece(read_bytes(path), config=config)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    eos = read_eos(path.parent, model.id_of)
    begins, ends = config.get("add_bos_token", name in BEGINS), config.get("add_eos_token", name in ENDS)
    named = marks(config, model.id_of)
    begin, end = (
        (named[name],) if name in named else own[:1]
        for name, own in (("bos_token", model.bos), ("eos_token", model.eos))
    )
    frame: Frame = (begin if begins else (), end if ends else ())
    return SentencePiece(read_bytes(path), eos=eos, frame=frame, config=config)


def _is_byte_level(data: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is a BPE over bytes."""
    model, decoder, steps = data["model"], data.get("decoder") or {}, data.get("pre_tokenizer") or {}
    plain = not any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"))
    last = steps["pretokenizers"][-1] if steps.get("pretokenizers") else steps
    is_bpe = model.get("type", "BPE") == "BPE" and "merges" in model
    return is_bpe and plain and decoder.get("type") == "ByteLevel" == last.get("type")


def _unknown(data: dict[str, Any], model: tokenizers.Tokenizer) -> int | None:
    if "unk_id" in data:  # Unigram names the id, the other models the token
        return data["unk_id"]
    return model.token_to_id(data.get("unk_token") or "")
