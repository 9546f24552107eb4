import lzma
import random

import pytest

from sublayer.errors import InputError
from sublayer.inspect.compress import xz_bits

HELD = ["def add(a, b):\n    return a + b\n" * 3, "import os\n", "ümlaut"]
TRAIN = ["def add(a, b):\n    return a + b\n" * 40]


def test_alone_it_is_the_size_of_the_packed_file() -> None:
    data = b"".join(text.encode() + b"\0" for text in HELD)
    packed = lzma.LZMACompressor(preset=9)
    size = len(packed.compress(data) + packed.flush())
    assert xz_bits(iter(HELD)) == 8 * size / (len(data) - len(HELD))


def test_after_the_training_text_only_what_it_adds_counts() -> None:
    alone, after = xz_bits(HELD), xz_bits(HELD, given=iter(TRAIN))
    assert after < alone / 2
    assert xz_bits([TRAIN[0]], given=TRAIN) < 0.2  # it is all there already


def test_it_looks_back_further_than_a_lesser_xz_would() -> None:
    """What stood 9 MB before is found again; xz without -9 looks back 8."""
    text = "".join(random.Random(1).choices([chr(c) for c in range(128)], k=20_000))
    assert xz_bits([text], given=[text, "a" * 9_000_000]) < 0.5


def test_what_cannot_be_packed_takes_its_own_size() -> None:
    text = "".join(random.Random(0).choices([chr(c) for c in range(128)], k=100_000))
    assert xz_bits([text]) == pytest.approx(7, rel=0.02)


def test_documents_without_text_count_for_nothing() -> None:
    assert xz_bits(["", *HELD, ""]) == xz_bits(HELD)
    with pytest.raises(InputError, match="no held-out text"):
        xz_bits([""], given=TRAIN)
