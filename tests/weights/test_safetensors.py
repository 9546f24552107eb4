"""The safetensors reader: what the library writes is read to the bit, and what is no such file is refused by name."""

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from sublayer.errors import WeightsError
from sublayer.weights.safetensors import DTYPES, MAX_HEADER, SCALED, SafeTensors

READ = [dtype for _, dtype in DTYPES.values() if dtype is not None]


def tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Of any bits at all, for a reader has no business with values."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), generator=generator)
    return raw.byte().view(dtype).squeeze(-1)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*raw)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.tuples(st.sampled_from(READ), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 9)),
        max_size=5,
    ),
    st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)
def test_what_the_library_writes_is_read_to_the_bit(tmp_path_factory, parts, metadata) -> None:
    assume(parts or metadata != {})  # of nothing at all the library, 0.8.0, writes a header that is no JSON
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    wanted = {name: tensor(*part) for name, part in parts.items()}
    save_file(wanted, path, metadata)
    found = SafeTensors(path)
    assert set(found.names) == wanted.keys()
    for name, value in wanted.items():
        assert equal(found.read(name), value)
        assert found.shape(name) == list(value.shape)
        found.release(name)
        assert equal(found.read(name), value)  # it comes back from the file
    with safe_open(path, "pt") as theirs:
        assert [theirs.get_slice(name).get_dtype() for name in found.names] == [*map(found.dtype, found.names)]


def test_a_tensor_outlives_its_file_object_and_its_file(tmp_path) -> None:
    wanted = torch.randn(300, 70)
    save_file({"a": wanted}, tmp_path / "a.safetensors")
    found = SafeTensors(tmp_path / "a.safetensors").read("a")
    (tmp_path / "a.safetensors").unlink()
    assert equal(found, wanted)


def test_writing_to_what_was_read_leaves_the_file_as_it_was(tmp_path) -> None:
    wanted = torch.randn(8)
    save_file({"a": wanted}, tmp_path / "a.safetensors")
    SafeTensors(tmp_path / "a.safetensors").read("a").zero_()
    assert equal(load_file(tmp_path / "a.safetensors")["a"], wanted)


A = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
B = {"dtype": "F16", "shape": [4], "data_offsets": [16, 24]}


def packed(header: Any, data: int = 24, spaces: int = 0) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * spaces
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def entry(**changes: Any) -> bytes:
    return packed({"a": A | changes, "b": B})


@pytest.mark.parametrize("spaces", range(1, 9))
def test_data_at_any_byte_is_read(spaces: int, tmp_path) -> None:
    """Older writers did not align it."""
    file = bytearray(packed({"a": A, "b": B}, spaces=spaces))
    file[-24:] = struct.pack("<4f4e", 1, 2, 3, 4, 5, 6, 7, 8)
    (tmp_path / "a.safetensors").write_bytes(file)
    found = SafeTensors(tmp_path / "a.safetensors")
    assert found.read("a").tolist() == [[1, 2], [3, 4]]
    assert found.read("b").tolist() == [5, 6, 7, 8]


WRONG = {
    "nothing": (b"", "0 bytes, fewer than the 8"),
    "seven bytes": (bytes(7), "7 bytes, fewer than the 8"),
    "a header beyond the file": (struct.pack("<Q", 1 << 62) + b"{}", f"the header has {1 << 62} bytes; 2 follow"),
    "no object": (packed(b"[]", 0), "byte 8, where its header begins"),
    "an empty header": (packed(b"", 0), "byte 8, where its header begins"),
    "not UTF-8": (packed(b'{"\xff":1}'), "byte 10, in the header, is not UTF-8"),
    "UTF-16": (packed('{"a":1}'.encode("utf-16-le")), "is not JSON from byte 9 on"),
    "no JSON": (packed(b'{"\xc3\xa9": 1,}'), "the header is not JSON from byte 17 on"),
    "more than one object": (packed(b"{}{}", 0), "not JSON from byte 10 on: Extra data"),
    "a deep one": (packed(b'{"a":' * 10_000), "is no JSON that can be read"),
    "a long number": (packed(b'{"a":' + b"1" * 5_000 + b"}"), "is no JSON that can be read"),
    "a name twice": (packed(b'{"a":%b,"a":%b}' % ((json.dumps(A).encode(),) * 2), 16), "the header says a twice"),
    "a key twice": (packed(b'{"a":{"dtype":"F32","dtype":"F32"}}'), "the header says dtype twice"),
    "metadata that is a list": (packed({"__metadata__": [], "a": A, "b": B}), "__metadata__ of the header is not"),
    "metadata of numbers": (packed({"__metadata__": {"x": 1}, "a": A, "b": B}), "__metadata__ of the header is not"),
    "no entry": (packed({"a": 1}), "tensor a: its entry in the header is not an object"),
    "no offsets": (packed({"a": {"dtype": "F32", "shape": [2]}}), "tensor a: its entry in the header is not an object"),
    "another dtype": (entry(dtype="F23"), "tensor a: unknown dtype 'F23' (did you mean 'F32'?)"),
    "a dtype that is none": (entry(dtype=["F32"]), "tensor a: unknown dtype ['F32']"),
    "no shape": (entry(shape=4), "tensor a: shape 4 is not a list"),
    "too many axes": (entry(shape=[1] * 100), "is not a list of at most 32 sizes"),
    "a size below 0": (entry(shape=[-2, -2]), "-2 is not a whole number"),
    "a size of a half": (entry(shape=[2.0, 2]), "2.0 is not a whole number"),
    "a size that is true": (entry(shape=[True, 4]), "True is not a whole number"),
    "a size beyond counting": (entry(shape=[1 << 70, 0], data_offsets=[0, 0]), "is not a whole number from 0 to"),
    "a huge shape": (entry(shape=[1 << 40, 1 << 40]), "its range from byte"),
    "one offset": (entry(data_offsets=[0]), "data_offsets [0] are not two whole numbers"),
    "offsets of halves": (entry(data_offsets=[0, 16.0]), "are not two whole numbers"),
    "offsets backwards": (entry(data_offsets=[16, 0]), "do not lie one after the other"),
    "an offset below 0": (entry(data_offsets=[-8, 8]), "do not lie one after the other"),
    "an offset outside": (entry(data_offsets=[0, 1 << 80]), "not a whole safetensors file: tensor a ends at byte"),
    "another size": (entry(shape=[2, 3]), "tensor a: F32 [2, 3] needs 24 bytes, its range from byte"),
    "half a byte": (packed({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, 1), "F4 [3] needs 1.5 bytes"),
    "an overlap": (packed({"a": A, "b": B | {"data_offsets": [8, 16]}}, 16), "tensor b begins at byte"),
    "the same range": (packed({"a": A, "b": A}, 16), "tensor b begins at byte"),
    "a gap": (packed({"a": A, "b": B | {"data_offsets": [17, 25]}}, 25), "no tensor holds what lies between"),
    "a gap before all": (packed({"b": B}), "but the header ends at byte"),
    "bytes after all": (packed({"a": A, "b": B}, 25), "no tensor holds the rest"),
    "bytes and no tensor": (packed({}, 1), "the header ends at byte 10, the file at byte 11"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_such_file_is_refused_by_name(name: str, tmp_path) -> None:
    data, message = WRONG[name]
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    if name != "a name twice":  # of which the library takes the last
        with pytest.raises(SafetensorError), safe_open(path, "pt") as theirs:
            theirs.keys()
    with pytest.raises(WeightsError, match=re.escape(message)) as caught:
        SafeTensors(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 400 + len(str(path))


def test_a_header_larger_than_any_real_one_is_not_read(tmp_path) -> None:
    with open(tmp_path / "a.safetensors", "wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER + 1))
        file.truncate(MAX_HEADER + 100)
    with pytest.raises(WeightsError, match=f"the header has {MAX_HEADER + 1} bytes, more than {MAX_HEADER}"):
        SafeTensors(tmp_path / "a.safetensors")


def test_what_is_no_file_is_not_waited_for(tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(WeightsError, match="No such file"):
        SafeTensors(path)
    os.mkfifo(path)
    with pytest.raises(WeightsError, match="a pipe or a device, not a file"):
        SafeTensors(path)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(WeightsError, match="cannot be read: Too many levels of symbolic links"):
        SafeTensors(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(WeightsError, match="a folder, not a file"):
        SafeTensors(path)


@pytest.mark.parametrize("dtype", sorted(SCALED))
def test_weights_that_need_scales_are_refused_with_advice(dtype: str, tmp_path: Path) -> None:
    import sublayer
    from tests.tiny import tiny

    sublayer.save(tiny().build(), tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    bits, start = DTYPES[dtype][0], header[last]["data_offsets"][0]
    header[last] |= {"dtype": dtype, "shape": [64], "data_offsets": [start, start + 8 * bits]}
    path.write_bytes(packed(header, 0) + data[8 + length :][: start + 8 * bits])
    with pytest.raises(WeightsError, match=f"{re.escape(last)} holds {dtype}, which needs scales .* release in BF16"):
        sublayer.load(tmp_path)
