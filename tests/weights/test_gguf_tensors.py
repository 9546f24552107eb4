"""The GGUF container: every type of tensor is read as the gguf package reads it, and files that lie are refused."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from sublayer.errors import WeightsError
from sublayer.gguf_header import read_header
from sublayer.weights.gguf import tensors
from sublayer.weights.gguf.tensors import PLAIN, UNREADABLE, Tensors

QUANTISED = [kind for kind in GGML_QUANT_SIZES if kind.name not in (*PLAIN, *UNREADABLE)]


def write(path: Path, **given: tuple[np.ndarray, GGMLQuantizationType | None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (value, kind) in given.items():
        writer.add_tensor(name, value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks(kind: GGMLQuantizationType, rows: int, width: int) -> np.ndarray:
    """Blocks of drawn values where the package can quantise, of drawn bytes where it cannot."""
    draw = np.random.default_rng(kind.value)
    try:
        return quants.quantize(draw.normal(size=(rows, width)).astype(np.float32), kind)
    except NotImplementedError:
        values, size = GGML_QUANT_SIZES[kind]
        return draw.integers(0, 256, (rows, width // values * size), dtype=np.uint8)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("chunk", [512, 1 << 17], ids=["in parts", "at once"])
def test_every_quantised_type_is_dequantised_as_the_package_does(kind, chunk, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tensors, "CHUNK", chunk)
    data = blocks(kind, 7, 768)
    found = Tensors(read_header(write(tmp_path / "x.gguf", w=(data, kind))))
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(quants.dequantize(data, kind))
        read, into = found.read("w"), torch.empty(7, 768, dtype=torch.float64)
        found.read_into("w", into)
    assert (found.dtype("w"), found.shape("w"), found.blocks) == ("F32", [7, 768], [kind.name])
    torch.testing.assert_close(read, wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(into, wanted.double(), rtol=0, atol=0, equal_nan=True)


def test_the_package_quantises_some_of_them() -> None:
    """Else the test above would compare noise alone."""
    with np.errstate(all="ignore"):
        drawn = {kind.name for kind in QUANTISED if np.isfinite(quants.dequantize(blocks(kind, 1, 768), kind)).all()}
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"} <= drawn


@pytest.mark.parametrize("name", PLAIN)
def test_plain_types_are_views_of_the_file(name: str, tmp_path) -> None:
    wanted = torch.arange(-6, 6).view(3, 4).to(PLAIN[name])
    data = wanted.view(torch.int16).numpy() if name == "BF16" else wanted.numpy()
    raw = data.view(np.uint8).reshape(3, -1)
    kind = GGMLQuantizationType[name]
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("first", np.zeros(3, np.float32))
    writer.add_tensor("w", raw if name == "BF16" else data, raw_dtype=kind if name == "BF16" else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = Tensors(read_header(path))
    assert torch.equal(found.read("w"), wanted)
    assert (found.dtype("w"), found.blocks) == (name, [])


@pytest.mark.parametrize("name", UNREADABLE)
def test_types_that_cannot_be_dequantised_are_refused_by_name(name: str, tmp_path) -> None:
    if name not in GGMLQuantizationType.__members__:
        pytest.skip(f"this gguf package does not know {name}")
    kind = GGMLQuantizationType[name]
    values, size = GGML_QUANT_SIZES[kind]
    path = write(tmp_path / "x.gguf", w=(np.zeros((2, 768 // values * size), np.uint8), kind))
    with pytest.raises(WeightsError, match=rf"x.gguf: tensor w at byte \d+: {name} cannot be dequantised"):
        Tensors(read_header(path))


# --- files that lie ---


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def record(name: bytes = b"w", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file(*records: bytes, count: int | None = None, keys: bytes = b"", key_count: int = 0, data: int = 64) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(records) if count is None else count, key_count) + keys
    head += b"".join(records)
    return head + bytes(-len(head) % 32) + bytes(data)


def alignment(value: int) -> bytes:
    return string(b"general.alignment") + struct.pack("<II", 4, value)


MANY = string(b"k") + struct.pack("<IIQ", 9, 0, 1 << 24) + bytes(1 << 24)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (file(record(offset=64)), "tensor w at byte 128: its 32 bytes reach beyond the file's 128"),
        (file(record(offset=1 << 62)), "tensor w at byte .*: its 32 bytes reach beyond the file's"),
        (file(record(dims=(1 << 40, 1 << 40))), "tensor w at byte 96: its 4835703278458516698824704 bytes"),
        (file(record(offset=4)), "tensor w at byte 68: not a multiple of 32 bytes into the data"),
        (file(record(b"a"), record(b"b")), "tensor b at byte 96: lies over tensor a, which ends at byte 128"),
        (file(record(b"a", (16,)), record(b"b", offset=32)), "tensor b at byte 128: lies over tensor a"),
        (file(record(), record()), "at byte 90: tensor w stands twice"),
        (file(record(kind=999)), "at byte 57: tensor w is of type 999, which is not known"),
        (file(record(kind=4)), "tensor w is of type 4, which is not known"),  # Q4_2, removed long ago
        (file(record(dims=(33, 2), kind=2)), r"tensor w \[2, 33\]: its rows are not whole blocks of 32"),
        (file(record(dims=(1,) * 5)), "tensor w has 5 dimensions, more than 4"),
        (file(record(dims=())[:9] + struct.pack("<I", 1 << 31)), "tensor w has 2147483648 dimensions"),
        (file(count=10**9), "1000000000 items are announced, more than the file has room for"),
        (file(count=10**18), "1000000000000000000 items are announced, more than the file has room for"),
        (file(key_count=10**9), "1000000000 items are announced, more than the file has room for"),
        (file(keys=MANY, key_count=1), "16777216 items are announced, more than 8388608"),
        (file(keys=alignment(3), key_count=1), "general.alignment=3 is not a power of two from 8 on"),
        (file(keys=alignment(0), key_count=1), "general.alignment=0 is not a power of two from 8 on"),
        (file(keys=alignment(32) * 2, key_count=2), "the key general.alignment stands twice"),
        (file(record(b"\\xff".decode("unicode_escape").encode("latin-1"))), "a string that is not UTF-8"),
    ],
)  # fmt: skip
def test_a_file_that_lies_is_refused_with_the_tensor_or_the_byte(content: bytes, reason: str, tmp_path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=reason) as caught:
        read_header(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_the_same_files_without_the_lie_are_read(tmp_path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(file(record(b"a", (4, 2)), record(b"b", offset=32), keys=alignment(16), key_count=1))
    found = read_header(path).tensors
    assert {name: (place.shape, place.kind, place.offset % 16, place.size) for name, place in found.items()} == {
        "a": ((2, 4), "F32", 0, 32),
        "b": ((8,), "F32", 0, 32),
    }
    path.write_bytes(file(record(b"b", (0,)), record(b"a", (8,))))
    assert Tensors(read_header(path)).read("b").shape == (0,)


def test_a_big_endian_file_is_told(tmp_path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(WeightsError, match="of a big-endian machine"):
        read_header(path)
