from collections.abc import Sequence

from sublayer.text.difference import DifferenceStream


def test_only_the_ids_shown_last_are_decoded_again() -> None:
    """Or a long text would take time that grows with its square."""
    lengths = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return "".join(map(chr, ids))

    stream = DifferenceStream(decode)
    assert "".join([stream.push(ord(character)) for character in "some text"]) + stream.finish() == "some text"
    assert max(lengths) == 2


def test_what_ends_in_a_replacement_waits() -> None:
    stream = DifferenceStream(lambda ids: bytes(ids).decode("utf-8", "replace"))
    assert [stream.push(byte) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]
