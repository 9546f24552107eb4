"""Where two specs differ in the function that they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..nn.mamba import step_rank
from ..nn.sublayer import Model
from ..spec import TAG


class Difference(NamedTuple):
    path: str
    """As `Spec.find` takes it."""
    one: Any
    other: Any


def differences(one: Model, other: Model) -> list[Difference]:
    """Empty for two specs of one function: how new weights would be drawn, which a config.json does not say, and how
    sizes are spelled count for nothing."""
    a, b = one.replace(init=other.init), other
    if a == b:
        return []
    return list(_differ("", _spelled_out(a.to_json(), a.dim), _spelled_out(b.to_json(), b.dim)))


def _differ(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, dict) and isinstance(b, dict) and a.get(TAG) == b.get(TAG):
        for key in a:
            named = all(isinstance(item, dict) and "name" in item for side in (a, b) for item in _list(side[key]))
            # An element's name does without that of the field that holds it.
            yield from _differ(path if named and _list(a[key]) else _join(path, key), a[key], b[key])
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            names = {item["name"] if isinstance(item, dict) and "name" in item else str(i) for item in (x, y)}
            yield from _differ(_join(path, names.pop() if len(names) == 1 else str(i)), x, y)
    elif a != b:
        yield Difference(path, _short(a), _short(b))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _short(value: Any) -> Any:
    """A part by its kind, several by their number: enough to tell them apart by."""
    if isinstance(value, dict):
        return value.get(TAG)
    return f"{len(value)} parts" if isinstance(value, list) and any(isinstance(one, dict) for one in value) else value


def _spelled_out(data: Any, dim: int) -> Any:
    """A spec's JSON with repeats written out, and the sizes that attention and Mamba take from others."""
    if isinstance(data, list):
        items: list[Any] = []
        for item in data:
            several = isinstance(item, dict) and item.keys() == {"repeat", "of"}
            items += [_spelled_out(item["of"] if several else item, dim)] * (item["repeat"] if several else 1)
        return items
    if not isinstance(data, dict):
        return data
    found = {key: _spelled_out(value, dim) for key, value in data.items()}
    if found.get(TAG) == "Attention":
        sizes = {"kv_heads": found["heads"], "head_size": dim // found["heads"], "out_bias": found["bias"],
                 "k_bias": found["bias"]}  # fmt: skip
        found |= {key: size for key, size in sizes.items() if found[key] is None}
    if found.get(TAG) == "Mamba" and found["rank"] is None:
        found["rank"] = step_rank(dim)
    return found
