"""Mutations that know the formats: most of what they make is well-formed but for one thing, so that a reader goes far
into it. Each takes a random generator and gives bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

HUGE = [0, 1, 7, 1 << 16, 10**9, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 0.5, 1e300, float("nan"), float("inf"), 10**9, 1 << 31, 1 << 70, "", "a", "silu",
    "../x", "\ud800", "F32", [], [0], [1, 2], [[]], [None], ["a"] * 50, {}, {"a": 1}, {"rope_type": "yarn"}, {"0": "x"},
]  # fmt: skip


def damaged(r: Random, data: bytes, reach: int) -> bytes:
    """Cut short, lengthened, or with a few bytes changed within its first `reach`."""
    raw = bytearray(data)
    way = r.randrange(4)
    if way == 0:
        return bytes(raw[: r.randrange(len(raw) + 1)])
    if way == 1:
        return bytes(raw[: r.choice([0, 1, 4, 7, 8, 9, 16, 24])])
    if way == 2:
        return bytes(raw) + r.randbytes(r.choice([1, 8, 100]))
    for _ in range(r.randint(1, 8)):
        if raw:
            raw[r.randrange(min(reach, len(raw)))] = r.randrange(256)
    return bytes(raw)


# --- JSON ---


def json_text(r: Random, value: Any) -> bytes:
    """A value as JSON, now and then damaged as text can be."""
    text = json.dumps(value)
    way = r.randrange(40)
    if way == 0:
        return damaged(r, text.encode(), len(text))
    if way == 1:
        return b"[" * r.choice([10, 2_000, 100_000])
    if way == 2:
        return b'{"a":' * r.choice([10, 2_000, 100_000])
    if way == 3:
        return text.encode(r.choice(["utf-16", "utf-32", "utf-8-sig"]))
    if way == 4:
        return text[:-1].encode() + b',"a":' + b"9" * r.choice([100, 5_000]) + b"}"
    if way == 5:
        return text.encode().replace(b"e", b"\xff", 1)
    if way == 6:
        return b"{" + b",".join(b'"%d":0' % i for i in range(r.choice([10, 100_000]))) + b"}"
    if way == 7 and isinstance(value, dict):
        return text[:-1].encode() + b"," + json.dumps({r.choice([*value, "a"]): r.choice(ODD)}).encode()[1:]
    return text.encode()


def changed(r: Random, value: Any, depth: int = 3) -> Any:
    """The same JSON value but for one thing somewhere in it."""
    if isinstance(value, dict) and value and (depth or r.random() < 0.7):
        key = r.choice(list(value))
        way = r.randrange(8)
        if way == 0:
            return {name: one for name, one in value.items() if name != key}
        if way == 1:
            return value | {r.choice(["a", key.upper(), key + "_", "quantization_config", "pruned_heads"]): value[key]}
        if way == 2:
            return value | {key: r.choice(ODD)}
        return value | {key: changed(r, value[key], depth - 1)}
    if isinstance(value, list) and value and r.random() < 0.8:
        i = r.randrange(len(value))
        return r.choice([
            lambda: [*value[:i], changed(r, value[i], depth - 1), *value[i + 1 :]],
            lambda: value[:i],
            lambda: [*value, value[i]],
            lambda: value * 1000,
        ])()  # fmt: skip
    if type(value) is int and r.random() < 0.7:
        return r.choice([value - 1, value + 1, 2 * value, value // 2, -value, 0, 1 << 20, 1 << 31, 9_999, 1 << 40])
    if isinstance(value, str) and r.random() < 0.5:
        return r.choice([value[:-1], value + "x", value.upper(), "", value * 100])
    return r.choice(ODD)


# --- safetensors ---


def safetensors(r: Random, data: bytes) -> bytes:
    begin = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:begin])
    body = data[begin:]
    way = r.randrange(14)
    if way == 0:
        return damaged(r, data, begin)
    if way == 1:
        if r.random() < 0.05:  # a header larger than any is read
            return struct.pack("<Q", (16 << 20) + 1) + data[8:] + bytes(17 << 20)
        return struct.pack("<Q", r.choice([*HUGE, begin - 9, begin - 7, 16 << 20, (16 << 20) + 1])) + data[8:]
    if way == 2:
        raw = json_text(r, header)
        return struct.pack("<Q", len(raw)) + raw + body
    if way == 3:
        header["__metadata__"] = r.choice([*ODD, {str(i): "" for i in range(r.choice([1, 50_000]))}])
    elif way == 4:
        body = r.choice([body[: r.randrange(len(body) + 1)], body + bytes(r.randint(1, 9)), b""])
    elif way == 5:  # one name twice, in JSON that no dict can hold
        raw = json.dumps(header)
        raw = (raw[:-1] + "," + json.dumps({r.choice(list(header)): r.choice(list(header.values()))})[1:]).encode()
        return struct.pack("<Q", len(raw)) + raw + body
    else:
        name = r.choice([name for name in header if name != "__metadata__"])
        entry = header[name]
        start, end = entry["data_offsets"]
        if way == 6:
            header[r.choice([name + "x", "lm_head.weight", "a", name.replace("0", "7")])] = header.pop(name)
        elif way == 7:
            other = r.choice([name for name in header if name != "__metadata__"])
            header[name], header[other] = header[other], header[name]
        elif way == 8:
            entry["dtype"] = r.choice(["F64", "F16", "BF16", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64", "F23", *ODD])
        elif way == 9:
            entry["shape"] = r.choice([
                [*entry["shape"], 1], entry["shape"][::-1], [-1], [1 << 62, 4], [1] * 1000, [True, 2], [2.0], [0],
                [1 << 70, 0], *ODD,
            ])  # fmt: skip
        elif way == 10:
            entry["data_offsets"] = r.choice([
                [end, start], [start, end + 4], [start - 4, end - 4], [start + 4, end + 4], [-4, end - start - 4],
                [0, end - start], [start, 1 << 80], [start], [start, end, end], [float(start), end], *ODD,
            ])  # fmt: skip
        elif way == 11:
            lost = r.choice(list(entry))
            header[name] = r.choice([*ODD, {key: value for key, value in entry.items() if key != lost}])
        elif way == 12:  # a tensor added, well placed
            header["a"] = {"dtype": "F32", "shape": [2], "data_offsets": [len(body), len(body) + 8]}
            body += bytes(8)
        else:  # elements of another type in as many bytes, or fewer
            size = end - start
            entry |= r.choice([
                {"dtype": "F16", "shape": [size // 2]}, {"dtype": "F8_E5M2", "shape": [size]},
                {"dtype": "I64", "shape": [size // 8]}, {"dtype": "F6_E2M3", "shape": [1 + size]},
                {"dtype": "F32", "shape": [size // 4, 1, 1]}, {"dtype": "F32", "shape": []},
            ])  # fmt: skip
    raw = json.dumps(header).encode() + b" " * r.randrange(9)
    return struct.pack("<Q", len(raw)) + raw + body


# --- GGUF ---

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


class Key(NamedTuple):
    name: bytes
    kind: int
    value: bytes


class Record(NamedTuple):
    name: bytes
    shape: list[int]
    kind: int
    offset: int


class Gguf(NamedTuple):
    keys: list[Key]
    records: list[Record]
    data: bytes

    @classmethod
    def read(cls, file: bytes) -> Gguf:
        """Of a file that the gguf package wrote."""
        tensors, count = struct.unpack_from("<QQ", file, 8)
        at, keys, records = 24, list[Key](), list[Record]()
        for _ in range(count):
            name, at = _string(file, at)
            kind = struct.unpack_from("<I", file, at)[0]
            end = _after(file, at + 4, kind)
            keys.append(Key(name, kind, file[at + 4 : end]))
            at = end
        for _ in range(tensors):
            name, at = _string(file, at)
            dims = struct.unpack_from("<I", file, at)[0]
            shape = struct.unpack_from(f"<{dims}Q", file, at + 4)
            kind, offset = struct.unpack_from("<IQ", file, at + 4 + 8 * dims)
            records.append(Record(name, list(shape), kind, offset))
            at += 16 + 8 * dims
        return cls(keys, records, file[-(-at // 32) * 32 :])

    def write(self, version: int = 3, tensors: int | None = None, count: int | None = None) -> bytes:
        parts = [b"GGUF", struct.pack("<I", version & 0xFFFFFFFF)]
        parts.append(struct.pack("<Q", len(self.records) if tensors is None else tensors))
        parts.append(struct.pack("<Q", len(self.keys) if count is None else count))
        parts += [packed(name) + struct.pack("<I", kind) + value for name, kind, value in self.keys]
        for name, shape, kind, offset in self.records:
            parts.append(packed(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
            parts.append(struct.pack("<IQ", kind, offset))
        raw = b"".join(parts)
        return raw + bytes(-len(raw) % 32) + self.data


def packed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _string(file: bytes, at: int) -> tuple[bytes, int]:
    end = at + 8 + struct.unpack_from("<Q", file, at)[0]
    return file[at + 8 : end], end


def _after(file: bytes, at: int, kind: int) -> int:
    """The byte after a value."""
    if kind == STRING:
        return _string(file, at)[1]
    if kind != ARRAY:
        return at + SIZES[kind]
    inner, count = struct.unpack_from("<IQ", file, at)
    at += 12
    if inner in SIZES:
        return at + SIZES[inner] * count
    for _ in range(count):
        at = _after(file, at, inner)
    return at


def values(r: Random, key: Key) -> Key:
    """The key with another value: of its type, of another, or longer than the file."""
    unsigned = {0: "B", 2: "H", 4: "I", 10: "Q"}
    way = r.randrange(7)
    if way == 0:
        return key._replace(kind=r.choice([*range(14), 99]))
    if way == 1:
        texts = [packed(b"x"), packed(b"\xff\xfe"), struct.pack("<Q", 1 << 60)]
        return key._replace(kind=STRING, value=r.choice(texts))
    if way == 2:
        return key._replace(kind=6, value=struct.pack("<f", r.choice([0, -1, float("nan"), float("inf"), 1e30, 0.5])))
    if way == 3:
        inner, count = r.choice([*range(13), 77]), r.choice([*HUGE, 2, 3, 3])
        return key._replace(kind=ARRAY, value=struct.pack("<IQ", inner, count) + r.randbytes(r.choice([0, 24])))
    if way == 4:
        numbers = [r.choice([0, 1, 2, 1 << 20]) for _ in range(r.choice([0, 1, 2, 50]))]
        return key._replace(kind=ARRAY, value=struct.pack(f"<IQ{len(numbers)}I", 4, len(numbers), *numbers))
    if key.kind in unsigned:
        letter = unsigned[key.kind]
        old = struct.unpack("<" + letter, key.value)[0]
        new = r.choice([*HUGE, old + 1, max(0, old - 1), 2 * old, 3])
        return key._replace(value=struct.pack("<" + letter, new % (1 << 8 * len(key.value))))
    if key.kind == STRING:
        names = [b"llama", b"gemma3", b"t5", b"bert", b"mamba", b"falcon", b"deepseek2", b"none", b"yarn", b"longrope"]
        return key._replace(value=packed(r.choice(names)))
    return key._replace(value=key.value[: r.randrange(len(key.value) + 1)])


def gguf(r: Random, file: bytes) -> bytes:
    whole = Gguf.read(file)
    keys, records = list(whole.keys), list(whole.records)
    way = r.randrange(16)
    i, j = r.randrange(len(keys)), r.randrange(len(records))
    if way == 0:
        return damaged(r, file, len(file) - len(whole.data))
    if way == 1:
        return r.choice([b"GGUF", b"GGML", b"FUGG", b""]) + file[4:]
    if way == 2:
        return whole.write(version=r.choice([0, 1, 2, 4, 3 << 24, 1 << 31]))
    if way == 3:
        return whole.write(tensors=r.choice([*HUGE, len(records) - 1, len(records) + 1]))
    if way == 4:
        return whole.write(count=r.choice([*HUGE, len(keys) - 1, len(keys) + 1]))
    if way == 5:
        keys.append(keys[i])
    elif way == 6:
        del keys[i]
    elif way == 7:
        keys[i] = keys[i]._replace(name=r.choice([b"", b"\xff", keys[i].name + b"x", b"llama.x" * 50]))
    elif way == 8:
        kind = r.choice([("<I", 4), ("<Q", 10), ("<i", 5)])
        value = r.choice([0, 1, 3, 8, 16, 64, 4096, 1 << 20, 1 << 30])
        keys.append(Key(b"general.alignment", kind[1], struct.pack(kind[0], value)))
    elif way == 9:
        texts = b"".join(packed(r.choice([b"a", b"", b"\xff", "é".encode()])) for _ in range(r.choice([1, 5, 5_000])))
        count = r.choice([1, 5, 5_000, 10**9])
        keys.append(Key(b"tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, count) + texts))
        if r.random() < 0.05:  # a longer array than any is read
            keys[-1] = Key(b"a", ARRAY, struct.pack("<IQ", 0, 9 << 20) + bytes(9 << 20))
    elif way in (10, 11):
        keys[i] = values(r, keys[i])
    elif way == 12:
        records.append(records[j])
    elif way == 13:
        del records[j]
    elif way == 14:
        more = [("split.count", 4), ("general.type", STRING), ("llama.rope.scaling.type", STRING)]
        name, kind = r.choice(more)
        value = struct.pack("<I", r.choice([0, 1, 2])) if kind == 4 else packed(r.choice([b"adapter", b"model", b"su"]))
        keys.append(Key(name.encode(), kind, value))
    else:
        records[j] = record(r, records[j], records)
    return Gguf(keys, records, whole.data).write()


def record(r: Random, one: Record, all_of_them: list[Record]) -> Record:
    way = r.randrange(6)
    if way == 0:
        names = [b"", b"\xff", b"a.weight", one.name + b"x", one.name.replace(b"0", b"9"), b"output.weight"]
        return one._replace(name=r.choice(names))
    if way == 1:
        shape = list(one.shape)
        if shape:
            shape[r.randrange(len(shape))] = r.choice([*HUGE, 3, 31])
        return one._replace(shape=shape)
    if way == 2:
        return one._replace(shape=r.choice([[], one.shape[::-1], [*one.shape, 1], [1] * 5, [1] * 1000]))
    if way == 3:
        return one._replace(kind=r.choice([*range(45), *[9] * 15, 255, 1 << 31]))
    if way == 4:
        return one._replace(offset=r.choice([*HUGE, one.offset + 1, one.offset + 32, max(0, one.offset - 32)]))
    return one._replace(offset=r.choice(all_of_them).offset)


# --- a folder's descriptions ---


def description(r: Random, data: bytes) -> bytes:
    """A config.json, or an index, with one to three things changed."""
    value = json.loads(data)
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        value = changed(r, value)
    return json_text(r, value)


def index(r: Random, data: bytes) -> bytes:
    value: dict[str, Any] = json.loads(data)
    where: dict[str, Any] = value["weight_map"]
    name = r.choice(list(where))
    way = r.randrange(8)
    if way < 3:
        return description(r, data)
    if way == 3:
        where[name] = r.choice(list(where.values()))
    elif way == 4:
        absent = ["absent.safetensors", "../model.safetensors", "/dev/zero", "a.bin", "x/y.safetensors", "", 3, None]
        where[name] = r.choice(absent)
    elif way == 5:
        del where[name]
    elif way == 6:
        where[r.choice(["a", name + "x"])] = where[name]
    else:
        where |= {f"a{i}": r.choice([where[name], f"{i}.safetensors"]) for i in range(r.choice([1, 10_000]))}
    return json_text(r, value)


MUTATORS: dict[str, Callable[[Random, bytes], bytes]] = {
    "safetensors": safetensors,
    "GGUF": gguf,
    "GGUF part": gguf,
    "config.json": description,
    "index.json": index,
}
