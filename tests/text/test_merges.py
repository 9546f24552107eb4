"""That tiktoken may merge for the tokenizers library, checked against both ways to merge, written out."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from sublayer.text.merges import Pair, ranked


def by_pair(text: str, merges: Sequence[Pair]) -> list[str]:
    """As the tokenizers library: the listed pair that comes first, leftmost."""
    order = {pair: i for i, pair in reversed(list(enumerate(merges)))}
    return merged(text, lambda left, right: order.get((left, right)))


def by_token(text: str, tokens: Sequence[str]) -> list[str]:
    """As tiktoken: the token with the lowest rank that any two neighbours join to, leftmost."""
    rank = {token: i for i, token in enumerate(tokens)}
    return [text] if text in rank else merged(text, lambda left, right: rank.get(left + right))


def merged(text: str, rank_of) -> list[str]:
    parts = list(text)
    while True:
        ranks = [(rank, i) for i in range(len(parts) - 1) if (rank := rank_of(parts[i], parts[i + 1])) is not None]
        if not ranks:
            return parts
        _, i = min(ranks)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@st.composite
def vocabularies(draw: st.DrawFn) -> tuple[list[str], list[Pair]]:
    """Tokens and merges in which each part exists, mostly before what is made of it; some tokens have several pairs."""
    tokens, merges = list("abc"), []
    for _ in range(draw(st.integers(1, 8))):
        left, right = draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens))
        if (left, right) in merges or len(left + right) > 8:
            continue
        merges.append((left, right))
        if left + right not in tokens:
            tokens.append(left + right)
    return tokens, draw(st.sampled_from([merges, merges[::-1]]))


@settings(max_examples=400)
@given(vocabularies(), st.booleans(), st.lists(st.text("abc", max_size=14), max_size=6))
def test_what_is_accepted_merges_alike(vocabulary, whole: bool, texts: list[str]) -> None:
    tokens, merges = vocabulary
    order = ranked({token: i for i, token in enumerate(tokens)}, merges, whole, lambda token: by_pair(token, merges))
    if order is None:
        return
    for text in [*texts, *tokens]:
        theirs = [text] if whole and text in tokens else by_pair(text, merges)
        if text:
            assert by_token(text, [*"abc", *order]) == theirs


def rank(merges: list[Pair], whole: bool = False, more: tuple[str, ...] = ()) -> list[str] | None:
    vocab = dict.fromkeys([*"abc", *(left + right for left, right in merges), *more])
    return ranked(
        {token: i for i, token in enumerate(vocab)}, merges, whole, lambda token: by_pair(token, merges)
    )  # fmt: skip


def test_merges_as_they_are_trained_are_accepted() -> None:
    assert rank([("a", "b"), ("b", "c"), ("ab", "c"), ("abc", "abc")]) == ["ab", "bc", "abc", "abcabc"]


def test_all_ways_to_split_each_token_are_accepted() -> None:
    """As in Llama 3's file, where some tokens can only be whole pieces."""
    merges = [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]
    assert rank(merges, whole=True) == ["bc", "ab", "abc"]
    assert by_pair("abc", merges) == by_token("abc", ["a", "b", "c", "bc", "ab", "abc"]) == ["abc"]


def test_a_pair_that_tiktoken_would_merge_unasked_is_refused() -> None:
    merges = [("b", "c"), ("a", "b"), ("ab", "c")]
    assert by_pair("abcc", merges) == ["a", "bc", "c"]
    assert by_token("abcc", ["a", "b", "c", "bc", "ab", "abc"]) == ["abc", "c"]
    assert rank(merges) is None
    assert rank(merges, whole=True) is None


def test_pairs_of_one_token_that_do_not_stand_together_are_refused() -> None:
    assert rank([("a", "bc"), ("b", "c"), ("a", "b"), ("ab", "c")]) is None


def test_a_token_that_only_a_whole_piece_can_be_is_ranked_only_where_pieces_are_looked_up() -> None:
    assert rank([("a", "b")], whole=True, more=("cca",)) == ["ab", "cca"]
    assert rank([("a", "b")], whole=False, more=("cca",)) == ["ab"]
    # tiktoken would also make it of its two halves.
    assert rank([("a", "b")], whole=True, more=("abc",)) is None


def test_a_token_that_merges_never_reach_is_left_out() -> None:
    """Of a b a b, the merges make b a first, and nothing joins what is left; tiktoken would take the piece whole."""
    merges = [("b", "a"), ("a", "b"), ("ab", "ab")]
    assert by_pair("abab", merges) == ["a", "ba", "b"]
    assert rank(merges) == ["ba", "ab"]
    assert rank(merges, whole=True) == ["ba", "ab", "abab"]


def test_tokens_that_would_take_long_to_take_apart_are_left_to_the_library() -> None:
    """A file of a megabyte has room for one whose halves are tokens, and theirs, each with as many ways to split it."""
    tokens = ["a" * (1 << n) for n in range(15)]
    merges = [(token, token) for token in tokens[:-1]]
    for whole in (True, False):
        assert ranked({token: i for i, token in enumerate(tokens)}, merges, whole, lambda token: [token]) is None
        short = {token: i for i, token in enumerate(tokens[:10])}
        assert ranked(short, merges[:9], whole, lambda token: [token]) == tokens[1:10]
