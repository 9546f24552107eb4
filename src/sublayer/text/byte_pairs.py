"""Byte-level BPE, as GPT-2 introduced it: whatever the text, its bytes are in the vocabulary."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from ..errors import InputError
from .build import byte_level
from .bulk import BYTE_OF, Bulk, to_bytes
from .bytes import ByteStream
from .difference import streamed
from .pretrained import Pretrained
from .tokenizer import Ids, Policy, check_id, check_policy, utf8

BULK = 200_000
"""Characters after which preparing the way for bulk pays: it takes up to a second for the largest vocabularies."""


class BytePairs(Pretrained):
    """A byte-level BPE. See Tokenizer for what the methods promise; decode(encode(text)) == text.

    (But not where its file asks for another form of the text, such as NFC, or lacks one of the 256 bytes.) Much text is
    encoded through tiktoken where that gives the same ids, which `bulk` and `merges` see to; little text, and what is
    left, by the tokenizers library.
    """

    _encoded = 0  # characters so far

    @classmethod
    def from_ranks(
        cls,
        ranks: Mapping[bytes, int],
        pattern: str,
        specials: Mapping[str, int],
        *,
        eos: tuple[int, ...] = (),
        before: Sequence[str] = (),
    ) -> "BytePairs":
        """From tiktoken's form: ranks that are ids, and pairs that merge wherever they join to a token.

        pattern cuts the text into pieces; before: the special tokens that begin a framed text. Raises InputError where
        a byte has no rank.
        """
        character = {byte: character for character, byte in BYTE_OF.items()}
        if (lacking := next((byte for byte in range(256) if bytes((byte,)) not in ranks), None)) is not None:
            raise InputError(f"no rank for byte 0x{lacking:02X}: every byte has one")
        vocab = {"".join(map(character.__getitem__, token)): rank for token, rank in ranks.items()}
        # All ways to split each token: with them, the tokenizers library merges what tiktoken does (see merges.py).
        by_rank = sorted(vocab, key=vocab.__getitem__)
        merges = [
            (token[:i], token[i:])
            for token in by_rank
            for i in range(1, len(token))
            if token[:i] in vocab and token[i:] in vocab
        ]
        # The library numbers added tokens without a gap, unless the vocabulary has their names.
        model = byte_level(vocab, merges, [pattern], specials=specials, frame=(before, ()), ignore_merges=True)
        return cls(model, eos=eos)

    def encode(self, text: str, *, framed: bool = False, specials: Policy = "text") -> list[int]:
        bulk = self._bulk_for((text,), specials)
        if bulk is None:
            return super().encode(text, framed=framed, specials=specials)
        ids = self._encode_bulk(bulk, (text,), specials)[0].tolist()
        return [*self._frame[0], *ids, *self._frame[1]] if framed else ids

    def encode_batch(self, texts: Sequence[str], *, specials: Policy = "text") -> list[Ids]:
        bulk = self._bulk_for(texts, specials)
        return (
            super().encode_batch(texts, specials=specials) if bulk is None else self._encode_bulk(bulk, texts, specials)
        )

    def _encode_bulk(self, bulk: Bulk, texts: Sequence[str], specials: Policy) -> list[Ids]:
        if specials == "error":
            for text in texts:
                self._special_names.refuse(text)
        try:
            return bulk.encode(texts)
        except UnicodeEncodeError:
            for text in texts:
                utf8(text)
            raise

    def _bulk_for(self, texts: Sequence[str], specials: Policy) -> Bulk | None:
        check_policy(specials)
        self._encoded += sum(map(len, texts))
        return self._bulk if self._encoded >= BULK and specials != "special" else None

    def decode(self, ids: Sequence[int]) -> str:
        for extreme in (min(ids, default=0), max(ids, default=0)):
            check_id(extreme, self.size)
        pieces = [self._pieces[token] for token in ids]
        # Nothing is joined across a token without bytes: it ends whatever character stood before it.
        return b"".join(pieces).decode("utf-8", "replace") if all(pieces) else streamed(self, ids)

    def stream(self) -> ByteStream:
        return ByteStream(self.token_bytes)

    def token_bytes(self, token: int) -> bytes:
        check_id(token, self.size)
        return self._pieces[token]

    @cached_property
    def _pieces(self) -> list[bytes]:
        """Bytes of each id; none for special tokens."""
        pieces = [b""] * self.size
        for piece, id in self._model.get_vocab(with_added_tokens=False).items():
            pieces[id] = to_bytes(piece) or b""
        for id, token in self._added.items():
            pieces[id] = b"" if token.special else token.content.encode("utf-8")
        return pieces

    @cached_property
    def _bulk(self) -> Bulk | None:
        return Bulk.of(self._model)

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """What stands before and after a text that is framed."""
        bare = self._model.encode("a", add_special_tokens=False)
        framed = self._model.post_process(bare).ids
        at = next(i for i in range(len(framed)) if framed[i : i + len(bare.ids)] == bare.ids)
        return framed[:at], framed[at + len(bare.ids) :]
