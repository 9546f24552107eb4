"""Tokenizers written into GGUF as converters write them, and read back: the ids of what they were made from."""

import json
from collections.abc import Callable

import gguf
import pytest
import sentencepiece

from sublayer.errors import InputError
from sublayer.text import BytePairs, load_tokenizer
from sublayer.text.ggml import PATTERNS_OF
from sublayer.text.ggml_write import ggml_metadata
from sublayer.text.metadata import read_metadata
from sublayer.text.sentence_piece import SentencePiece
from tests.text import kinds
from tests.text.strings import HARD

SPEC = json.loads(kinds.byte_pairs().to_str())
VOCAB = SPEC["model"]["vocab"]
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def write(path, change: Callable[[dict], object] = lambda values: None, base: Callable[[], dict] | None = None) -> None:
    values = (base or byte_level)()
    change(values)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        key = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_level() -> dict:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool call>", "[PAD504]"]
    return {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [*sorted(VOCAB, key=VOCAB.__getitem__), *specials],
        "token_type": [NORMAL] * 500 + [CONTROL] * 3 + [USER, UNUSED],
        "merges": [" ".join(pair) for pair in SPEC["model"]["merges"]],
        "bos_token_id": 501,
        "eos_token_id": 502,
    }


def test_byte_pairs(tmp_path) -> None:
    write(tmp_path / "model.gguf")
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, BytePairs)
    theirs = kinds.ALL["byte pairs"]
    for text in HARD:
        assert tokenizer.encode(text) == theirs.encode(text)
        assert tokenizer.encode(text, framed=True) == [501, *theirs.encode(text)]  # Llama 3's way, unless it says no
    assert (tokenizer.size, tokenizer.eos) == (504, (502,))
    assert tokenizer.encode("<tool call>") == [503]
    assert tokenizer.encode("<|im_end|>", specials="special") == [502]
    assert tokenizer.decode([503, 502]) == "<tool call>"
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.eos == (502,)
    assert all(again.encode(text, framed=True) == tokenizer.encode(text, framed=True) for text in HARD)


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": False, "add_eos_token": True}, [], [502]),
        ({"pre": "smollm"}, [], []),
        ({"pre": "smollm", "add_bos_token": True}, [501], []),
    ],
)
def test_the_frame_is_what_the_file_says(change: dict, before: list[int], after: list[int], tmp_path) -> None:
    write(tmp_path / "model.gguf", lambda values: values.update(change))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the cat", framed=True) == [*before, *tokenizer.encode("the cat"), *after]


def test_all_ids_that_end_a_text_are_found(tmp_path) -> None:
    write(tmp_path / "model.gguf", lambda values: values.update(eot_token_id=500, eom_token_id=502))
    assert load_tokenizer(tmp_path).eos == (502, 500)


@pytest.mark.parametrize("pre", sorted(PATTERNS_OF))
def test_each_known_way_to_cut_text_gives_all_of_it_back(pre: str, tmp_path) -> None:
    write(tmp_path / "model.gguf", lambda values: values.update(pre=pre))
    tokenizer = load_tokenizer(tmp_path / "model.gguf")
    for text in HARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ways_to_cut_text_differ_where_their_families_do(tmp_path) -> None:
    def count(pre: str, text: str) -> int:
        write(tmp_path / "model.gguf", lambda values: values.update(pre=pre))
        model = load_tokenizer(tmp_path / "model.gguf")
        assert isinstance(model, BytePairs)
        return len(model._model.pre_tokenizer.pre_tokenize_str(text))

    digits = {"gpt-2": 1, "llama-bpe": 2, "qwen2": 5, "smollm": 5, "deepseek-v3": 2, "tekken": 5, "gpt-4o": 2,
              "olmo": 1, "dbrx": 2}  # fmt: skip
    assert {pre: count(pre, "12345") for pre in digits} == digits
    words = {"gpt-4o": 2, "tekken": 2, "qwen2": 1}
    assert {pre: count(pre, "camelCase") for pre in words} == words


def test_whole_pieces_come_first_where_the_family_looks_them_up(tmp_path) -> None:
    token = max((token for token in VOCAB if token.isalpha() and token.islower()), key=len)
    for pre, whole in (("llama-bpe", True), ("tekken", True), ("gpt-4o", False)):
        write(tmp_path / "model.gguf", lambda values, pre=pre: values.update(pre=pre, merges=values["merges"][:1]))
        assert (load_tokenizer(tmp_path / "model.gguf").encode(token) == [VOCAB[token]]) == whole


@pytest.mark.parametrize("pre", ["qwen2", "olmo"])
def test_a_normalized_family_is_normalized(pre: str, tmp_path) -> None:
    write(tmp_path / "model.gguf", lambda values: values.update(pre=pre))
    tokenizer = load_tokenizer(tmp_path / "model.gguf")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def sentence_piece(kind: str) -> dict:
    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(kinds.sentence_piece_model(kind))
    tokens = [model.id_to_piece(id) for id in range(model.get_piece_size())]

    def type_of(id: int) -> int:
        if model.is_unknown(id):
            return UNKNOWN
        if model.is_control(id):
            return CONTROL
        return BYTE if model.is_byte(id) else USER if tokens[id] == "<tool>" else NORMAL

    return {
        "model": "llama" if kind == "bpe" else "t5",
        "pre": "default",
        "tokens": tokens,
        "token_type": [type_of(id) for id in range(len(tokens))],
        "scores": [float(model.get_score(id)) for id in range(len(tokens))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "remove_extra_whitespaces": False,
    }


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentence_piece(kind: str, tmp_path) -> None:
    write(tmp_path / "model.gguf", base=lambda: sentence_piece(kind))
    tokenizer, theirs = load_tokenizer(tmp_path), kinds.ALL[f"sentencepiece {kind}"]
    assert isinstance(tokenizer, SentencePiece)
    assert (tokenizer.size, tokenizer.eos) == (theirs.size, (2,))
    for text in [*HARD, "a <tool>  b", "</s>"]:
        ids = theirs.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, framed=True) == ([1, *ids] if kind == "bpe" else [*ids, 2])
        assert tokenizer.decode(ids) == theirs.decode(ids)
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert all(again.encode(text, framed=True) == tokenizer.encode(text, framed=True) for text in HARD)


@pytest.mark.parametrize("base", [byte_level, lambda: sentence_piece("bpe")], ids=["byte pairs", "pieces"])
def test_the_marks_keep_their_names_on_every_way_out(base, tmp_path) -> None:
    """Gemma's is <bos>, which a SentencePiece model has to say itself, for it takes <s> for it otherwise."""

    def change(values: dict) -> None:
        first = values["tokens"].index("<|endoftext|>" if values["model"] == "gpt2" else "<unk>")
        names = ("<unk>", "<bos>", "<eos>")
        values["tokens"][first : first + 3] = names
        values |= {"bos_token_id": first + 1, "eos_token_id": first + 2, "padding_token_id": first + 2}
        values |= {"unknown_token_id": first}

    write(tmp_path / "model.gguf", change, base)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, BytePairs | SentencePiece)
    marks = {key: value for key, value in read_metadata(tmp_path / "model.gguf").items() if key.endswith("_token_id")}
    written = ggml_metadata(tokenizer, tokenizer.size)
    assert {key: value for key, value in written.items() if key.endswith("_token_id")} == marks

    tokenizer.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    named = {name: config[f"{name}_token"] for name in ("bos", "eos", "unk", "pad")}
    assert named == {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<eos>"}
    again = load_tokenizer(tmp_path / "saved")
    assert again.encode("cat", framed=True) == [marks["tokenizer.ggml.bos_token_id"], *tokenizer.encode("cat")]
    if isinstance(tokenizer, SentencePiece):
        theirs = sentencepiece.SentencePieceProcessor(str(tmp_path / "saved" / "tokenizer.model"))
        assert (theirs.unk_id(), theirs.bos_id(), theirs.eos_id()) == (0, 1, 2)


def test_the_space_before_a_text_is_the_files_choice_and_user_defined_pieces_are_text(tmp_path) -> None:
    def change(values: dict) -> None:
        values["add_space_prefix"] = False
        values["tokens"][-1] = "  x"  # as converters write "▁▁x"
        values["token_type"][-1] = USER

    write(tmp_path / "model.gguf", change, lambda: sentence_piece("bpe"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("  x") == [tokenizer.size - 1]
    assert tokenizer.decode(tokenizer.encode("cat")) == "cat"
    assert not tokenizer.token_bytes(tokenizer.encode("cat")[0]).startswith(b" ")


def test_word_pieces_are_those_of_the_vocabulary_that_they_were_made_from(tmp_path) -> None:
    words = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", ",", "cat"]
    words += ["##s", "##t", "##at", "the", "##é"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    wanted = load_tokenizer(tmp_path / "vocab.txt")
    special = [word.startswith("[") and word != "[unused0]" for word in words]
    written = [
        word if control else word[2:] if word.startswith("##") else "▁" + word
        for word, control in zip(words, special, strict=True)
    ]
    values = {"model": "bert", "tokens": written, "token_type": [CONTROL if one else NORMAL for one in special]}
    write(tmp_path / "model.gguf", base=lambda: values)
    found = load_tokenizer(tmp_path / "model.gguf")
    for text in [*HARD, "The cats, the hat: seat", "the [SEP] cats", "é"]:
        assert found.encode(text) == wanted.encode(text)
        assert found.encode(text, framed=True) == wanted.encode(text, framed=True)
    ids = found.encode("The cats", framed=True)
    assert [words[id] for id in ids] == ["[CLS]", "the", "cat", "##s", "[SEP]"]
    assert found.decode(ids) == wanted.decode(ids)


@pytest.mark.parametrize(
    ("base", "change", "reason"),
    [
        (None, {"model": "rwkv"}, r"tokenizer.ggml.model 'rwkv' is not supported \(known: bert, gpt2, llama, t5\)"),
        (None, {"model": "bert"}, r"not BERT's vocabulary: no token is \[UNK\]"),
        (None, {"pre": "smolm"}, r"tokenizer.ggml.pre 'smolm': .* is not known \(did you mean 'smollm'\?\)"),
        (None, {"pre": "default"}, "tokenizer.ggml.pre 'default': how it cuts text is not known"),
        (None, {"tokens": "abc"}, "tokenizer.ggml.tokens: expected a list of strings"),
        (None, {"tokens": [1, 2]}, "tokenizer.ggml.tokens: expected a list of strings"),
        (None, {"token_type": [1, 1]}, "tokenizer.ggml.token_type: expected 505 numbers from 1 to 6"),
        (None, {"token_type": [9] * 505}, "tokenizer.ggml.token_type: expected 505 numbers from 1 to 6"),
        (None, {"merges": ["a b", "abc"]}, r"tokenizer.ggml.merges\[1\]: expected two tokens and a space .* 'abc'"),
        (None, {"merges": ["a b c"]}, r"tokenizer.ggml.merges\[0\]: expected two tokens"),
        (None, {"merges": "a b"}, "tokenizer.ggml.merges: expected a list of strings"),
        (None, {"merges": ["a qqqq"]}, "the tokenizers library does not take it: .*qqqq"),
        (None, {"eos_token_id": 505}, "tokenizer.ggml.eos_token_id: 505 is none of the 505 ids"),
        ("bpe", {"scores": [0.5]}, "tokenizer.ggml.scores: expected 420 numbers"),
        ("bpe", {"token_type": [1] * 420}, "not a SentencePiece model: "),
        ("bpe", {"precompiled_charsmap": ["x"]}, "tokenizer.ggml.precompiled_charsmap: expected bytes"),
    ],
)  # fmt: skip
def test_what_is_not_known_or_not_whole_is_refused(base, change: dict, reason: str, tmp_path) -> None:
    values = (lambda: sentence_piece(base)) if base else None
    write(tmp_path / "model.gguf", lambda values: values.update(change), values)
    with pytest.raises(InputError, match="model.gguf: " + reason):
        load_tokenizer(tmp_path)


def test_a_file_without_a_tokenizer_is_refused(tmp_path) -> None:
    write(tmp_path / "model.gguf", dict.clear)
    with pytest.raises(InputError, match=r"model.gguf: no tokenizer in it"):
        load_tokenizer(tmp_path)
