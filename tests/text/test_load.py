"""Which file of a folder is its tokenizer, and what is refused."""

import json

import pytest

from sublayer.errors import InputError
from sublayer.text import BytePairs, Bytes, Pretrained, ending, load_tokenizer
from sublayer.text.sentence_piece import SentencePiece
from tests.text import kinds
from tests.text.test_ranks import write as write_ranks
from tests.text.test_vocabularies import write_pair, write_words


def fill(folder) -> list[tuple[str, type]]:
    """A folder with a tokenizer of every format, and their files in the order in which they are looked for."""
    Bytes().save(folder)
    (folder / "tokenizer.model").write_bytes(kinds.sentence_piece_model("bpe"))
    (folder / "spiece.model").write_bytes(kinds.sentence_piece_model("unigram"))
    write_pair(folder)
    write_words(folder)
    write_ranks(folder / "own.tiktoken")
    order = [("tokenizer.json", Bytes), ("tokenizer.model", SentencePiece), ("spiece.model", SentencePiece)]
    return [*order, ("vocab.json", BytePairs), ("vocab.txt", Pretrained)]


def test_a_folders_first_format_is_its_tokenizer(tmp_path) -> None:
    for name, kind in fill(tmp_path):
        assert type(load_tokenizer(tmp_path)) is kind
        assert type(load_tokenizer(tmp_path / name)) is kind
        assert type(load_tokenizer(str(tmp_path / name))) is kind
        (tmp_path / name).unlink()
    assert type(load_tokenizer(tmp_path, pattern="gpt2", specials={})) is BytePairs


def test_byte_level_is_told_by_how_text_becomes_bytes(tmp_path) -> None:
    spec = json.loads(kinds.byte_pairs().to_str())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    assert type(load_tokenizer(path)) is BytePairs
    for change in (
        {"decoder": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"model": spec["model"] | {"end_of_word_suffix": "</w>"}},
        {"model": spec["model"] | {"byte_fallback": True}},
    ):
        path.write_text(json.dumps(spec | change))
        assert type(load_tokenizer(path)) is Pretrained


def test_ranks_under_sentence_pieces_name_are_told_from_it(tmp_path) -> None:
    write_ranks(tmp_path / "tokenizer.model")
    assert type(load_tokenizer(tmp_path, pattern="cl100k", specials={"<|end|>": 300})) is BytePairs


def test_folders_and_files_that_hold_no_tokenizer_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="nowhere: no such file, nor a folder with a tokenizer"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no tokenizer\.json there, nor a tokenizer in another format"):
        load_tokenizer(tmp_path)
    (tmp_path / "notes.md").write_text("hello")
    with pytest.raises(InputError, match=r"notes.md: not a tokenizer's file by its name \(known: .*\.json"):
        load_tokenizer(tmp_path / "notes.md")
    write_ranks(tmp_path / "a.tiktoken")
    write_ranks(tmp_path / "b.tiktoken")
    with pytest.raises(InputError, match=r"a\.tiktoken or b\.tiktoken\? Name the file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.txt", "own.tiktoken", "vocab.json"])
def test_files_larger_than_any_tokenizer_are_not_read(name: str, tmp_path, monkeypatch) -> None:
    fill(tmp_path)
    monkeypatch.setattr(ending, "LARGEST", 10)
    with pytest.raises(InputError, match=rf"{name}: cannot be read: \d+ bytes, more than 10$"):
        load_tokenizer(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is a token id or a list of them, got 'x'"),
        ("config.json", '{"eos_token_id": [1, -1]}', r"eos_token_id is a token id or a list of them, got \[1, -1\]"),
        ("config.json", '{"eos_token_id": 1099511627776}', "eos_token_id is a token id or a list of them, got 1099511"),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}', "holds U\\+D800, half a character"),
        ("config.json", '{"eos_token_id": true}', "eos_token_id is a token id or a list of them, got True"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token is the text of a token, got 3"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', "eos_token '<end>' is not in the vocabulary"),
        ("tokenizer_config.json", "[]", "expected a JSON object, found list"),
    ],
)
@pytest.mark.parametrize("of", ["tokenizer.model", "vocab.json", "vocab.txt"])
def test_a_wrong_end_of_text_is_refused_in_every_format(
    of: str, name: str, content: str, reason: str, tmp_path
) -> None:
    fill(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=f"{name}: {reason}"):
        load_tokenizer(tmp_path / of)
