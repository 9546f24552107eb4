"""Strings of many kinds, more than 10,000: from real files, and what no file has, drawn with a fixed seed."""

import gettext
import json
import os
import random
import unicodedata
from functools import cache
from itertools import islice
from pathlib import Path

from tests import assets
from tests.text.strings import HARD, PARTS

LIBRARY = Path(os.__file__).parent


@cache
def strings() -> tuple[str, ...]:
    """No two alike."""
    made = [*HARD, *PARTS, *code(), *names(), *other_encodings(), *letters(), *mixtures(), *broken()]
    return tuple(dict.fromkeys(made))


def code() -> list[str]:
    """Pieces of one to twelve lines of Python's standard library."""
    draw, found = random.Random(1), list[str]()
    for path in sorted(LIBRARY.glob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        while lines and len(found) < 2000:
            count = draw.randint(1, 12)
            found.append("".join(lines[:count]))
            lines = lines[count * 3 :]
    return found


def names() -> list[str]:
    """Names of countries and languages in some 150 languages, and where they are listed, one by one and together."""
    folder, found = assets.debian("iso-codes") / "usr" / "share", list[str]()
    for kind, key in (("iso_3166-1", "3166-1"), ("iso_639-2", "639-2")):
        english = [one["name"] for one in json.loads((folder / "iso-codes/json" / f"{kind}.json").read_text())[key]]
        for i, path in enumerate(sorted((folder / "locale").glob(f"*/LC_MESSAGES/{kind}.mo"))):
            with path.open("rb") as file:
                translation = gettext.GNUTranslations(file)
            own = [translation.gettext(name) for name in english[i % 12 :: 12]]
            found += [*own, ", ".join(own)]
    return found


def other_encodings() -> list[str]:
    """Chinese, Japanese and Korean, read as UTF-8 whether they are or not; not every Python brings them."""
    paths = sorted((LIBRARY / "test" / "cjkencodings").glob("*.txt"))
    return [line for path in paths for line in path.read_text(encoding="utf-8", errors="replace").splitlines(True)]


def letters() -> list[str]:
    """Words from the characters of each 128 that Unicode has beside each other: all scripts, signs, private ones."""
    draw, found = random.Random(2), list[str]()
    for start in [*range(0, 0x20000, 128), *range(0xE0000, 0xE0200, 128)]:
        known = [c for c in map(chr, range(start, start + 128)) if unicodedata.category(c) not in ("Cn", "Cs")]
        words = ["".join(draw.choices(known, k=draw.randint(1, 8))) for _ in range(12)] if known else []
        found += [" ".join(words[i : i + 4]) for i in range(0, len(words), 4)]
    return found


def mixtures() -> list[str]:
    draw = random.Random(3)
    return ["".join(draw.choices(PARTS, k=draw.randint(2, 24))) for _ in range(2500)]


def broken() -> list[str]:
    """Bytes that are no UTF-8, as readers that replace them hand them on."""
    draw = random.Random(4)
    noise = (draw.randbytes(draw.randint(1, 40)) for _ in range(500))
    cut = (text.encode()[draw.randint(1, 3) : -1] for text in islice(names(), 0, None, 11))
    return [data.decode("utf-8", "replace") for data in (*noise, *cut)]
