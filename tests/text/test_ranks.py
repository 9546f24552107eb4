import base64

import pytest
import tiktoken
from hypothesis import given

from sublayer.errors import InputError, UsageError
from sublayer.text import BytePairs, load_tokenizer
from sublayer.text import byte_pairs as module
from sublayer.text.patterns import PATTERNS
from sublayer.text.ranks import PUBLISHED
from tests.text.strings import HARD, texts

SINGLE = [bytes((byte,)) for byte in range(256)]
# "lo" before "hel" and "hello": a token that only a whole piece can be, for merges reach it from neither side.
MERGED = [b"lo", b"he", b" w", b"or", b" wor", b"ld", b"hel", b"hello", b"  ", b"\n\n", b"don't"]
RANKS = {token: rank for rank, token in enumerate([*SINGLE, *MERGED])}
SPECIALS = {"<|end|>": 300, "<|user|>": 270}


def write(path, ranks=RANKS) -> None:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> BytePairs:
    path = tmp_path_factory.mktemp("ranks") / "own.tiktoken"
    write(path)
    found = load_tokenizer(path, pattern="gpt2", specials=SPECIALS)
    assert isinstance(found, BytePairs)
    return found


THEIRS = tiktoken.Encoding("own", pat_str=PATTERNS["gpt2"], mergeable_ranks=RANKS, special_tokens=SPECIALS)


@given(text=texts)
def test_the_ids_are_tiktokens(tokenizer: BytePairs, text: str) -> None:
    ids = THEIRS.encode_ordinary(text)
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, specials="special") == THEIRS.encode(text, allowed_special="all")
    assert tokenizer.decode(ids) == text


def test_in_bulk_too(tokenizer: BytePairs) -> None:
    in_bulk = BytePairs(tokenizer._model)
    in_bulk._encoded = module.BULK
    assert in_bulk._bulk is not None
    assert [ids.tolist() for ids in in_bulk.encode_batch(HARD)] == THEIRS.encode_ordinary_batch(HARD)


def test_what_the_file_does_not_say_is_given(tokenizer: BytePairs) -> None:
    assert (tokenizer.size, tokenizer.eos) == (301, (300,))
    assert tokenizer.encode("hello world<|end|>", specials="special") == [*THEIRS.encode("hello world"), 300]


def test_it_is_saved_as_a_tokenizer_json(tokenizer: BytePairs, tmp_path) -> None:
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.eos == (300,)
    for text in [*HARD, "hello hell he don't"]:
        assert again.encode(text) == THEIRS.encode_ordinary(text)


def test_a_pattern_may_be_a_regex(tmp_path) -> None:
    write(tmp_path / "own.tiktoken")
    tokenizer = load_tokenizer(tmp_path, pattern=r"\p{L}|[^\p{L}]+", specials={})
    assert tokenizer.encode("hello  ") == [*b"hello", RANKS[b"  "]]
    assert tokenizer.eos == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "own.tiktoken: no token in it"),
        (b"YQ== 0\nYg==\n", "own.tiktoken:2: expected a token in base 64 and its rank, found b'Yg=='"),
        (b"YQ== 0\n\nY 1\n", "own.tiktoken:3: expected a token in base 64"),
        (b"YQ== -1\n", "own.tiktoken:1: expected a token in base 64"),
        (b"YQ== 0 0\n", "own.tiktoken:1: expected a token in base 64"),
        (b"YQ== 99999999999\n", "own.tiktoken:1: expected"),
        (b"YQ== 0\nYQ== 1\n", "own.tiktoken:2: b'a' has a rank already"),
        (b"YQ== 0\nYg== 0\n", "own.tiktoken: two tokens have one rank"),
        (b"YQ== 0\nYg== 1\n", "own.tiktoken: no rank for byte 0x00"),
    ],
)
def test_files_that_are_no_ranks_are_refused(text: bytes, reason: str, tmp_path) -> None:
    (tmp_path / "own.tiktoken").write_bytes(text)
    with pytest.raises(InputError, match=reason):
        load_tokenizer(tmp_path, pattern="gpt2", specials={})


def test_unknown_ranks_and_wrong_specials_are_refused(tmp_path) -> None:
    write(tmp_path / "own.tiktoken")
    for pattern, specials in ((None, None), ("gpt2", None), (None, {})):
        with pytest.raises(InputError, match="267 ranks, not those of a published tokenizer: say how it cuts text"):
            load_tokenizer(tmp_path, pattern=pattern, specials=specials)
    with pytest.raises(InputError, match=r"special token '<x>': id 104 is that of b'h'"):
        load_tokenizer(tmp_path, pattern="gpt2", specials={"<x>": 104})
    with pytest.raises(InputError, match="own.tiktoken: the tokenizers library does not take it: .*"):
        load_tokenizer(tmp_path, pattern="(", specials={})
    (tmp_path / "tokenizer.json").write_text('{"type": "Bytes"}')
    with pytest.raises(UsageError, match="pattern and specials are for tiktoken's ranks"):
        load_tokenizer(tmp_path, pattern="gpt2")


def test_the_published_tokenizers_have_ids_of_their_own() -> None:
    sizes = {count: max([count - 1, *known.specials.values()]) + 1 for count, known in PUBLISHED.items()}
    assert sizes == {50_256: 50_257, 50_280: 50_280, 100_256: 100_277, 128_000: 128_256, 199_998: 200_019}
    llama = PUBLISHED[128_000].specials
    assert (llama["<|eot_id|>"], llama["<|end_header_id|>"], llama["<|reserved_special_token_250|>"]) == (
        128_009,
        128_007,
        128_255,
    )
