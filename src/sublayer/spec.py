"""Spec: an architecture as data — frozen, strictly typed, compared by value, written to tagged JSON and read back.

Built on the standard library alone: reading and checking a spec must cost nothing beside importing torch.
"""

from __future__ import annotations

import json
import math
import pkgutil
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib import import_module
from itertools import groupby
from reprlib import Repr
from typing import (
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from .errors import SpecError, nearest

T = TypeVar("T")
COMPILED_KERNELS = ("flex", "triton_attention")  # they bring in compilers, and hold no spec
TAG = "spec"  # the JSON key that names a spec's class
MAX_DEPTH = 64  # of JSON; the parts have a dozen levels
MAX_PARTS = 100_000  # specs and list elements of JSON, repeats counted out: ten times the deepest published models


@dataclass_transform(frozen_default=True)
class Spec:
    """Base of every spec: `class Norm(Spec): eps: float = 1e-5` is a frozen, validated dataclass.

    Fields take positional or keyword arguments. A wrong type or a combination that `check` refuses raises SpecError in
    one line, and so does an unknown key in JSON, `replace` or `override`. Lists become tuples and ints in float fields
    become floats, so that equal specs compare, hash and print alike. Class names are the tags of the JSON form and
    therefore unique.
    """

    _tags: ClassVar[dict[str, type[Spec]]] = {}

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, repr=False)(cls)
        known = Spec._tags.setdefault(cls.__name__, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"two specs are named {cls.__name__}: in {known.__module__} and in {cls.__module__}")
        Spec._tags[cls.__name__] = cls

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            object.__setattr__(self, name, fitted(getattr(self, name), hint, f"{type(self).__name__}.{name}"))
        self.check()

    def check(self) -> None:
        """Raises SpecError for values that are well typed but do not fit together; overridden by specs."""

    def require(self, condition: bool, message: str) -> None:
        """Raises SpecError(f"{class}: {message}") unless condition holds; for use in `check`."""
        if not condition:
            raise SpecError(f"{type(self).__name__}: {message}")

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        unknown = next((key for key in changes if key not in _hints(type(self))), None)
        if unknown is not None:
            raise SpecError(f"{type(self).__name__}.{unknown}: unknown key{nearest(unknown, _hints(type(self)))}")
        return replace(cast(Any, self), **changes)

    def to_json(self) -> dict[str, Any]:
        """JSON values: {"spec": class name, every field}; runs of equal specs become {"repeat": n, "of": …}."""
        return {TAG: type(self).__name__} | {name: _encode(getattr(self, name)) for name in _hints(type(self))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The spec that `to_json` wrote. Raises SpecError naming the path of an unknown or wrong key."""
        spec = _decode(data)
        if not isinstance(spec, cls):
            raise SpecError(f"expected a {cls.__name__}, found {_say_value(data)}")
        return spec

    def override(self, *changes: str, **values: Any) -> Self:
        """A copy with dotted paths changed: `spec.override("decoder.blocks.*.attn.op.window=512")`.

        A path walks fields, indices and the names of sublayers; `*` stands for all elements that have the rest of the
        path. A value is read as JSON, and as plain text where it is not JSON. Keyword form: `override(dim=64)`.
        """
        spec = self
        for change in changes:
            path, equals, text = change.partition("=")
            if not equals:
                raise SpecError(f"{change}: an override reads path=value")
            spec = _change(spec, path.strip().split("."), 0, _read_value(text, path))
        for path, value in values.items():
            spec = _change(spec, path.split("."), 0, value)
        return spec

    def find(self, path: str) -> Any:
        """The value at a dotted path (as in `override`, without `*`)."""
        node, parts, depth = cast(Any, self), path.split("."), 0
        while depth < len(parts):
            parts, children = _step(node, parts, depth)
            node, depth = children[0][1], depth + 1
        return node

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in _changed(self))
        return f"{type(self).__name__}({shown})"

    def tree(self, width: int | None = None) -> str:
        """The architecture as indented lines; equal neighbours are shown once, values at their defaults left out.

        width: columns after which a line goes on below, where a blank allows it.
        """
        return "\n".join(_draw(self, "", "", "", width))


@cache
def _hints(cls: type[Spec]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cast(Any, cls))}


def fitted(value: Any, hint: Any, name: str) -> Any:
    """The value as the type has it: lists as tuples, whole numbers as floats. Raises SpecError for another type."""
    value = _coerce(value, hint)
    if not _matches(value, hint):
        raise SpecError(f"{name}: expected {_say(hint)}, got {_say_value(value)}")
    return value


def _coerce(value: Any, hint: Any) -> Any:
    """Lists as tuples, and whole numbers as floats where only a float is expected."""
    if isinstance(value, list | tuple):
        items = cast("list[Any] | tuple[Any, ...]", value)
        args = next((get_args(option) for option in _options(hint) if get_origin(option) is tuple), ())
        each = args[:1] * len(items) if args[1:] == (...,) else args
        return tuple(map(_coerce, items, each)) if len(each) == len(items) else tuple(items)
    if type(value) is int and not _matches(value, hint):
        try:
            wide = float(value)
        except OverflowError:
            return value
        return wide if _matches(wide, hint) else value
    return value


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _matches(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_matches(value, option) for option in args)
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        values = cast("tuple[Any, ...]", value)
        if args[1:] == (...,):
            return all(_matches(item, args[0]) for item in values)
        return len(values) == len(args) and all(map(_matches, values, args))
    if hint is float:
        return type(value) is float and math.isfinite(value)
    if hint in (int, bool, str, types.NoneType):
        return type(value) is hint
    return isinstance(value, hint)


def _say(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_say(arg) for arg in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return "None" if hint is types.NoneType else getattr(hint, "__name__", str(hint))


def _say_value(value: Any) -> str:
    if isinstance(value, Mapping) and TAG in value:
        return f"a {value[TAG]}"
    return _SHORT.repr(cast(Any, value))


_SHORT = Repr()  # bounded in depth too: repr itself would recurse into hostile JSON
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60


def _encode(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.to_json()
    if not isinstance(value, tuple):
        return value
    items: list[Any] = []
    for _, run in groupby(cast("tuple[Any, ...]", value), lambda item: item if isinstance(item, Spec) else object()):
        same = list(run)
        one = _encode(same[0])
        items.append({"repeat": len(same), "of": one} if len(same) > 1 else one)
    return items


def _decode(data: Any, path: str = "") -> Any:
    return _sized(data, path, 0)[0]


def _sized(data: Any, path: str, depth: int) -> tuple[Any, int]:
    """What JSON stands for, and of how many parts it is: bounded, since a few repeats in each other make billions."""
    if depth > MAX_DEPTH:
        raise SpecError(f"{path[:60]}…: nested deeper than {MAX_DEPTH} levels")
    if isinstance(data, list):
        items: list[Any] = []
        size = 0
        for item in cast("list[Any]", data):
            here, count, one = _join(path, len(items)), 1, item
            if isinstance(item, Mapping) and set(cast("Mapping[str, Any]", item)) == {"repeat", "of"}:
                count, one = cast(Any, item)["repeat"], cast(Any, item)["of"]
                if type(count) is not int or not 1 <= count <= MAX_PARTS:
                    raise SpecError(f"{here}.repeat: expected a count from 1 to {MAX_PARTS}, got {_say_value(count)}")
            value, parts = _sized(one, here, depth + 1)
            size += count * max(1, parts)
            if size > MAX_PARTS:
                raise SpecError(f"{here}: more than {MAX_PARTS} parts")
            items += [value] * count
        return tuple(items), size
    if not isinstance(data, Mapping):
        return data, 0
    values = dict(cast("Mapping[str, Any]", data))
    tag = values.pop(TAG, None)
    at = f"{path}: " if path else ""
    if not isinstance(tag, str):
        raise SpecError(f"{at}a spec needs the key {TAG!r} naming its class, found {_say_value(data)}")
    cls = _by_tag(tag)
    if cls is None:
        raise SpecError(f"{at}unknown spec {_say_value(tag)}{nearest(tag, Spec._tags)}")  # pyright: ignore[reportPrivateUsage]
    hints = _hints(cls)
    unknown = next((key for key in values if key not in hints), None)
    if unknown is not None:
        raise SpecError(f"{_join(path, unknown)}: unknown key of {tag}{nearest(unknown, hints)}")
    missing = [field.name for field in fields(cast(Any, cls)) if field.default is MISSING and field.name not in values]
    if missing:
        raise SpecError(f"{_join(path, missing[0])}: {tag} needs this key")
    built = {key: _sized(value, _join(path, key), depth + 1) for key, value in values.items()}
    spec = _at(path, lambda: cls(**{key: value for key, (value, _) in built.items()}))
    return spec, 1 + sum(parts for _, parts in built.values())


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _by_tag(tag: str) -> type[Spec] | None:
    """The class of a tag; the parts and the recipes are imported only when a tag is not known yet."""
    tags = Spec._tags  # pyright: ignore[reportPrivateUsage]
    for package in ("sublayer.nn", "sublayer.recipes"):
        if tag in tags:
            break
        for module in pkgutil.iter_modules(import_module(package).__path__):
            if module.name not in COMPILED_KERNELS:
                import_module(f"{package}.{module.name}")
    return tags.get(tag)


def _at(path: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except SpecError as error:
        raise SpecError(f"{path}: {error}" if path else str(error)) from None


def _read_value(text: str, path: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise SpecError(f"{path}: nested deeper than {MAX_DEPTH} levels") from None
    return _decode(value, path)


class _NoSuchPath(SpecError):
    """A dotted path that leads nowhere; under `*` such elements are passed over."""


def _step(node: Any, parts: list[str], depth: int) -> tuple[list[str], list[tuple[str, Any]]]:
    """What parts[depth] names in node: [(key, child)], all elements for `*`; an element's name gains its field."""
    part, where = parts[depth], ".".join(parts[: depth + 1])
    if isinstance(node, tuple):
        elements = cast("tuple[Any, ...]", node)
        names = [getattr(element, "name", "") for element in elements]
        chosen = [i for i, name in enumerate(names) if part in ("*", str(i), name)]
        if not chosen:
            known = f" (there are {len(names)}, from 0)" if part.isdecimal() else nearest(part, filter(None, names))
            raise _NoSuchPath(f"{where}: no such element{known}")
        return parts, [(str(i), elements[i]) for i in chosen]
    if not isinstance(node, Spec):
        raise _NoSuchPath(f"{where}: {'.'.join(parts[:depth])} is {_say_value(node)} and has no parts")
    if part in _hints(type(node)):
        return parts, [(part, getattr(node, part))]
    tuples = {
        name: cast("tuple[Any, ...]", v) for name in _hints(type(node)) if isinstance(v := getattr(node, name), tuple)
    }
    for field, elements in tuples.items():
        if any(part == getattr(element, "name", "") for element in elements):
            return [*parts[:depth], field, *parts[depth:]], [(field, elements)]
    names = [getattr(element, "name", "") for elements in tuples.values() for element in elements]
    known = nearest(part, [*_hints(type(node)), *filter(None, names)])
    raise _NoSuchPath(f"{where}: unknown key of {type(node).__name__}{known}")


def _change(node: Any, parts: list[str], depth: int, value: Any) -> Any:
    if depth == len(parts):
        return value
    parts, children = _step(node, parts, depth)
    changed: dict[str, Any] = {}
    missing: _NoSuchPath | None = None
    for key, child in children:
        try:
            changed[key] = _change(child, parts, depth + 1, value)
        except _NoSuchPath as error:
            missing = error
    if missing is not None and not changed:
        raise missing
    if isinstance(node, tuple):
        return tuple(changed.get(str(i), element) for i, element in enumerate(cast("tuple[Any, ...]", node)))
    return _at(".".join(parts[:depth]), lambda: node.replace(**changed))


def _changed(spec: Spec) -> list[tuple[str, Any]]:
    """Fields that differ from their defaults (all required ones)."""
    return [
        (field.name, getattr(spec, field.name))
        for field in fields(cast(Any, spec))
        if getattr(spec, field.name) != field.default
    ]


NARROWEST = 24  # columns that a line of the tree has at least, however deep it stands


def _draw(spec: Spec, label: str, lead: str, rest: str, width: int | None) -> list[str]:
    plain: list[str] = []
    nested: list[tuple[str, Spec]] = []
    for name, value in _changed(spec):
        if isinstance(value, Spec) and any(isinstance(v, Spec | tuple) for _, v in _changed(value)):
            nested.append((f"{name}: ", value))
        elif isinstance(value, tuple) and value and all(isinstance(v, Spec) for v in cast("tuple[Any, ...]", value)):
            start = 0
            for item, run in groupby(cast("tuple[Spec, ...]", value)):
                count = len(list(run))
                index = getattr(item, "name", None) or (f"{start}" if count == 1 else f"{start}–{start + count - 1}")
                nested.append((f"{index}: " if name != "sublayers" or count == 1 else f"{index} × {count}: ", item))
                start += count
        elif not (name == "name" and label):
            plain.append(f"{name}={value!r}")
    line = f"{lead}{label}{type(spec).__name__}" + (f"  {', '.join(plain)}" if plain else "")
    lines = [line] if width is None else _wrapped(line, rest + ("│    " if nested else "     "), width)
    for number, (name, value) in enumerate(nested):
        last = number == len(nested) - 1
        lines += _draw(value, name, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "), width)
    return lines


def _wrapped(line: str, rest: str, width: int) -> list[str]:
    width = max(width, len(rest) + NARROWEST)
    return textwrap.wrap(line, width, subsequent_indent=rest, drop_whitespace=True, break_long_words=False,
                         break_on_hyphens=False, replace_whitespace=False)  # fmt: skip
