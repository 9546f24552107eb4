"""When byte pairs may be merged by tiktoken instead of the tokenizers library, with the same ids for every text.

tokenizers merges *listed* pairs: among the adjacent pairs that its file lists, the one listed first, leftmost. tiktoken
merges *any* adjacent pair that joins to a token: the one whose token has the lowest rank, leftmost. The file's order
gives the ranks. Are the results the same?

Call tiktoken's process T, the library's H.

1. Each token t has one pair in T. A boundary between two parts that is there now was there all the time, for merging
   only removes boundaries. So when the bytes of t stand between two boundaries, what was done inside was done as if t
   were the whole text (lowest rank first, leftmost: the order inside does not depend on what happens outside). Each
   step leaves one part less, so T on t alone passes at most one state of two parts, p(t). Whenever two adjacent parts
   join to t, anywhere in any text, they are p(t).
2. So H = T, step by step, if p(t) is listed for every t that has one, and if the order of pairs is that of their tokens
   (several pairs of one token stand together: two of them never compete, by 1).
3. Where every way to split t into two tokens is listed, so is p(t).
4. Else p(t) is listed if H(t) = t, by induction on length: until two parts of t are left, what joins are shorter
   tokens, whose pairs are listed, so T and H take the same steps. H's last step is a listed pair: T's two parts.
5. A whole piece that is a token: tiktoken takes the token at once. H does too if it ignores merges; else if H(t) = t.
   Tokens that H never makes are left out of tiktoken's ranks, which changes no merge: with no p(t) it never makes them.
"""

from collections.abc import Callable, Mapping, Sequence

Pair = tuple[str, str]
MOST_WORK = 1 << 28
"""Squares of all tokens' lengths, together, up to which they are taken apart; published ones have less than 2 ** 24."""


def ranked(
    vocab: Mapping[str, int],
    merges: Sequence[Pair],
    ignores_merges: bool,
    merged: Callable[[str], Sequence[object]],
) -> list[str] | None:
    """The tokens that tiktoken needs, in order of rank after the 256 single bytes; None where ids might differ, or
    where that would take long to tell.

    vocab: token → id, a character for each byte. merged: what the merges alone make of a token's characters.
    """
    if sum(len(token) ** 2 for token in vocab) > MOST_WORK:
        return None
    listed = _blocks(merges)
    if listed is None or not listed.keys() <= vocab.keys():
        return None
    known = listed.keys() | {token for token in vocab if len(token) == 1}
    unmade = set()
    for token, pairs in listed.items():
        # The cheaper question first. Where pieces are not looked up, H(t) = t is asked of every token.
        if ignores_merges and pairs.issuperset(_splits(token, known)):
            continue
        if len(merged(token)) == 1:
            continue
        if not pairs.issuperset(_splits(token, known)):
            return None
        unmade.add(token)
    if not ignores_merges:
        return [token for token in listed if token not in unmade]
    # Tokens that only whole pieces can be: they must not be what two parts join to.
    whole = sorted((token for token in vocab if token not in known), key=vocab.__getitem__)
    if any(any(_splits(token, known | set(whole))) for token in whole):
        return None
    return [*listed, *whole]


def _blocks(merges: Sequence[Pair]) -> dict[str, set[Pair]] | None:
    """Token → its listed pairs, in order; None unless the pairs of each token stand together."""
    blocks: dict[str, set[Pair]] = {}
    last = None
    for pair in merges:
        token = pair[0] + pair[1]
        if token != last and token in blocks:
            return None
        blocks.setdefault(token, set()).add(pair)
        last = token
    return blocks


def _splits(token: str, known: set[str]) -> list[Pair]:
    cuts = range(1, len(token))
    return [(token[:i], token[i:]) for i in cuts if token[:i] in known and token[i:] in known]
