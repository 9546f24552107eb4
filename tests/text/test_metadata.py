import struct
from contextlib import suppress

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublayer.errors import InputError
from sublayer.text.metadata import read_metadata

SCALARS = {
    "uint8": 200,
    "int8": -3,
    "uint16": 60_000,
    "int16": -30_000,
    "uint32": 4_000_000_000,
    "int32": -5,
    "float32": 0.5,
    "bool": True,
    "uint64": 2**63,
    "int64": -(2**40),
    "float64": 1e-300,
}


def test_what_another_writer_wrote_is_read(tmp_path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, value in SCALARS.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.add_string("text", "naïve\n日本")
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("reals", [0.5, 1.5])
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_tensor("w", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_metadata(tmp_path / "x.gguf") == {
        "general.architecture": "llama",
        **SCALARS,
        "text": "naïve\n日本",
        "numbers": [1, -2, 3],
        "reals": [0.5, 1.5],
        "texts": ["a", "", "ü"],
    }


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def head(count: int = 1, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, count)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read as GGUF"),
        (b"GGU", "at byte 0: 4 bytes are announced, but the file ends after 3 more"),
        (b"PK\x03\x04" + bytes(20), "not a GGUF file: it does not begin with GGUF"),
        (head(0, version=1), "GGUF version 1; versions 2 and 3, little-endian, can be read"),
        (head(0, version=3 << 24), "GGUF version 50331648"),  # big-endian
        (head(10**18), "at byte 24: 1000000000000000000 items are announced, more than the file has room for"),
        (head(1) + struct.pack("<Q", 2**63) + bytes(9), "9223372036854775808 bytes are announced, but the file ends"),
        (head(1) + string(b"k") + struct.pack("<I", 13) + bytes(9), "at byte 37: type 13 is none of GGUF's"),
        (head(1) + string(b"\xff") + struct.pack("<I", 4) + bytes(4), "at byte 33: a string that is not UTF-8"),
        (head(1) + string(b"k") + struct.pack("<II", 9, 9) + bytes(9), "an array of type 9 is not supported"),
        (head(1) + string(b"k") + struct.pack("<IIQ", 9, 12, 2**61) + bytes(9), "2305843009213693952 items"),
        (head(1) + string(b"k") + struct.pack("<IIQ", 9, 8, 2**50) + bytes(9), "1125899906842624 items"),
    ],
)  # fmt: skip
def test_files_that_are_not_whole_are_refused_with_the_byte(content: bytes, reason: str, tmp_path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as raised:
        read_metadata(path)
    assert str(raised.value).startswith(str(path))


def test_a_missing_file_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="x.gguf: cannot be read as GGUF: .*No such file"):
        read_metadata(tmp_path / "x.gguf")


@given(st.binary(max_size=200), st.integers(0, 4))
def test_nothing_but_input_errors_come_of_random_bytes(tmp_path_factory, tail: bytes, count: int) -> None:
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    path.write_bytes(head(count) + string(b"key") + tail)
    with suppress(InputError):
        read_metadata(path)
