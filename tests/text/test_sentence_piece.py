import json

import pytest
import sentencepiece
from hypothesis import example, given

from sublayer.errors import InputError
from sublayer.text import load_tokenizer
from sublayer.text.sentence_piece import SentencePiece
from tests.text.kinds import sentence_piece_model
from tests.text.strings import HARD, texts

KINDS = ("bpe", "unigram")


def library(kind: str) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(sentence_piece_model(kind))
    return processor


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
@example(text="<s>hi</s> <tool> <0x0A> <unk>")
def test_the_ids_are_the_librarys(kind: str, text: str) -> None:
    tokenizer, theirs = SentencePiece(sentence_piece_model(kind)), library(kind)
    ids = theirs.encode(text)
    assert tokenizer.encode(text) == ids
    assert not {1, 2} & set(ids)  # control pieces are never found in text
    assert tokenizer.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_piece_stands_for(kind: str) -> None:
    tokenizer, theirs = SentencePiece(sentence_piece_model(kind)), library(kind)
    assert [tokenizer.token_bytes(id) for id in (0, 1, 2)] == [b"", b"", b""]
    assert tokenizer.token_bytes(theirs.piece_to_id("<0xE2>")) == b"\xe2"
    assert tokenizer.token_bytes(theirs.piece_to_id("<tool>")) == b"<tool>"
    assert tokenizer.token_bytes(theirs.piece_to_id("▁")) == b" "
    assert (tokenizer.id_of("</s>"), tokenizer.id_of("<unk>"), tokenizer.id_of("no such piece")) == (2, 0, None)


def test_special_pieces_end_what_is_encoded() -> None:
    tokenizer, theirs = SentencePiece(sentence_piece_model("bpe")), library("bpe")
    asked = tokenizer.encode("<s>the cat</s>sat", specials="special")
    assert asked == [1, *theirs.encode("the cat"), 2, *theirs.encode("sat")]


def save(folder, **config) -> None:
    (folder / "tokenizer.model").write_bytes(sentence_piece_model("bpe"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        ({}, [], []),
        ({"tokenizer_class": "LlamaTokenizer"}, [1], []),
        ({"tokenizer_class": "T5TokenizerFast"}, [], [2]),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"add_bos_token": True}, [1], []),
        ({"add_bos_token": True, "bos_token": {"content": "<tool>"}}, [3], []),
        ({"add_eos_token": True, "eos_token": "<tool>"}, [], [3]),
    ],
)
def test_the_frame_is_what_the_folder_says(config: dict, before: list[int], after: list[int], tmp_path) -> None:
    save(tmp_path, **config)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the cat", framed=True) == [*before, *tokenizer.encode("the cat"), *after]
    tokenizer.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert again.encode("the cat", framed=True) == tokenizer.encode("the cat", framed=True)


@pytest.mark.parametrize(
    ("config", "eos"), [({}, (2,)), ({"eos_token": None}, ()), ({"eos_token": "<tool>"}, (3,))]
)  # fmt: skip
def test_the_end_of_a_text_is_what_the_folder_says_or_the_models_own(config: dict, eos, tmp_path) -> None:
    save(tmp_path, **config)
    assert load_tokenizer(tmp_path).eos == eos
    assert load_tokenizer(tmp_path / "tokenizer.model").eos == eos


def test_models_whose_ids_are_others_and_files_that_are_no_models_are_refused(tmp_path) -> None:
    save(tmp_path, tokenizer_class="XLMRobertaTokenizer")
    with pytest.raises(InputError, match="tokenizer.model: the ids of XLMRobertaTokenizer are not those in this file"):
        load_tokenizer(tmp_path)
    for content in (b"", b"\x0a\x05hello", b"not a model", sentence_piece_model("bpe")[:-200]):
        (tmp_path / "spiece.model").write_bytes(content)
        (tmp_path / "tokenizer_config.json").write_text("{}")
        with pytest.raises(InputError, match="spiece.model: not a SentencePiece model: ") as raised:
            load_tokenizer(tmp_path / "spiece.model")
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_not_utf8_do_not_take_back_what_was_shown(kind: str) -> None:
    tokenizer, theirs = SentencePiece(sentence_piece_model(kind)), library(kind)
    byte = [theirs.piece_to_id(f"<0x{byte:02X}>") for byte in (0xE2, 0x82, 0xAC, 0xE2, 0x82)]
    stream = tokenizer.stream()
    shown = "".join([stream.push(id) for id in byte]) + stream.finish()
    assert shown == tokenizer.decode(byte)
    assert shown.startswith("€\ufffd")


def test_long_texts_without_a_gap_are_encoded() -> None:
    for kind in KINDS:
        tokenizer = SentencePiece(sentence_piece_model(kind))
        for text in ("a" * 100_000, "^" * 100_000, " " * 100_000):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_batch_is_each_text_alone() -> None:
    tokenizer = SentencePiece(sentence_piece_model("unigram"))
    assert [ids.tolist() for ids in tokenizer.encode_batch(HARD)] == [tokenizer.encode(text) for text in HARD]
    assert tokenizer.encode_batch([]) == []


def test_a_piece_that_is_no_text_is_refused_when_the_model_is_read(tmp_path) -> None:
    model = sentence_piece_model("bpe").replace(b"<tool>", b"<to\xf5l>")
    (tmp_path / "tokenizer.model").write_bytes(model)
    with pytest.raises(InputError, match=r"tokenizer\.model: not a SentencePiece model: .* can't decode byte 0xf5"):
        load_tokenizer(tmp_path)
