"""English–German sentence pairs from Debian packages: LibreOffice's help, GCC's messages, Battle for Wesnoth.

    python runs/translation/pairs.py [FOLDER]     # writes FOLDER/train.jsonl, judge.jsonl and test.jsonl

A document is a page of the help, or one message; whole documents are held out, by the hash of their name. Of sentences
that differ in no letter of the source, one is kept, and what has the target of a held-out one is not trained on: what
is held out stands nowhere else. Needs apt-get, dpkg-deb and tar, and downloads 280 MB (Wesnoth's pictures and music are
in its packages).
"""

import gettext
import html.parser
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

GAMES = ["data", "did", "dm", "dw", "ei", "httt", "l", "low", "nr", "sof", "sota", "sotbe", "thot", "trow", "tsg",
         "ttb", "utbs"]  # fmt: skip
PACKAGES = ("libreoffice-help-en-us", "libreoffice-help-de", "gcc-12-locales", *(f"wesnoth-1.16-{x}" for x in GAMES))
WORDS = 4, 60  # the fewest and most of a side
RATIO = 2.0  # how many times longer one side may be, in characters
PARAGRAPHS = ("p", "h1", "h2", "h3", "h4", "h5", "h6")
LETTERS = 0.85  # the least share of letters and spaces
CODE = re.compile(r"[{}\\$=|]|\w_\w|\(\)|%[^\s.,;:)]")  # formulas, names in programs, places of format strings
JUDGE, TEST = 0.015, 0.03  # shares of the documents


class Pair(NamedTuple):
    en: str
    de: str
    document: str


class Page(html.parser.HTMLParser):
    """The text of each paragraph of a page of the help, by its id, as those read it who have no Macintosh."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: dict[str, str] = {}
        self.open: list[tuple[str, str | None]] = []
        self.spans: list[bool] = []  # whether each open span is for another system

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        if tag in PARAGRAPHS:
            self.open.append((tag, about.get("id")))
            self.spans = []
        elif tag == "span":
            other = "hidden" in about and not str(about.get("id")).startswith("default")
            self.spans.append(other)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1][0] == tag:
            self.open.pop()
        elif tag == "span" and self.spans:
            self.spans.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][1] and not any(self.spans):
            name = str(self.open[-1][1])
            self.found[name] = self.found.get(name, "") + data


def help_pages(root: Path) -> Iterator[Pair]:
    """Paragraphs of LibreOffice's help that have one id in both languages."""
    folder = root / "usr/share/libreoffice/help"
    for path in sorted((folder / "en-US/text").rglob("*.html")):
        name = path.relative_to(folder / "en-US").as_posix()
        other = folder / "de" / name
        if other.exists():
            en, de = paragraphs(path), paragraphs(other)
            yield from (Pair(text, de[key], name) for key, text in en.items() if key in de)


def paragraphs(path: Path) -> dict[str, str]:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page.found


def messages(root: Path) -> Iterator[Pair]:
    """Messages of programs and games, line by line; each message is its own document."""
    for path in sorted(root.rglob("de/LC_MESSAGES/*.mo")):
        with path.open("rb") as file:
            catalogue = vars(gettext.GNUTranslations(file))["_catalog"]
        for en, de in catalogue.items():
            if isinstance(en, str) and en:
                en = en.rpartition("\x04")[2].rpartition("^")[2]  # without its context
                lines = [re.sub("%[<>]", '"', text).split("\n") for text in (en, de)]  # GCC's quotation marks
                if len(lines[0]) == len(lines[1]):
                    yield from (Pair(a, b, f"{path.name} {en}") for a, b in zip(*lines, strict=True))


def clean(pair: Pair) -> Pair | None:
    """The pair with plain spaces; None where it is no sentence, or not a translation."""
    en, de = (" ".join(re.sub(r"<[^>]*>", " ", text).split()) for text in pair[:2])
    counts = [len(text.split()) for text in (en, de)]
    lengths = sorted((len(en), len(de)))
    fits = all(WORDS[0] <= count <= WORDS[1] for count in counts) and lengths[1] <= RATIO * lengths[0]
    plain = not CODE.search(en) and not CODE.search(de)
    spoken = all(sum(c.isalpha() or c == " " for c in text) >= LETTERS * len(text) for text in (en, de))
    return Pair(en, de, pair.document) if fits and plain and spoken and letters(en) != letters(de) else None


def letters(text: str) -> str:
    """What two sentences have in common that differ in numbers, signs and capitals alone."""
    return " ".join(re.sub(r"[\W\d_]+", " ", text).split()).casefold()


def part(document: str) -> str:
    """train, judge or test: by the document's name alone."""
    share = int.from_bytes(blake2b(document.encode(), digest_size=4).digest(), "little") / 2**32
    return "test" if share < TEST else "judge" if share < TEST + JUDGE else "train"


def unpack(folder: Path) -> None:
    """Downloads the packages and takes out the texts."""
    subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=folder, check=True)
    for number, package in enumerate(sorted(folder.glob("*.deb")), 1):
        print(f"unpacking {number} of {len(PACKAGES)}: {package.name}", flush=True)
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as tar:
            wanted = ["./usr/share/libreoffice/help/*/text/*", "*/de/LC_MESSAGES/*.mo"]
            asked = ["tar", "-x", "--wildcards", "-C", str(folder), *wanted]
            subprocess.run(asked, stdin=tar.stdout, stderr=subprocess.DEVNULL, check=False)  # some have one alone


def sides(found: Iterable[Pair]) -> dict[str, list[Pair]]:
    """The clean pairs, each source once, by the side that they are on."""
    cleaned = [pair for pair in map(clean, found) if pair is not None]
    made: dict[str, list[Pair]] = {"train": [], "judge": [], "test": []}
    for pair in {letters(pair.en): pair for pair in reversed(cleaned)}.values():
        made[part(pair.document)].append(pair)
    held = {letters(pair.de) for side in ("judge", "test") for pair in made[side]}
    made["train"] = [pair for pair in made["train"] if letters(pair.de) not in held]
    return {side: pairs[::-1] for side, pairs in made.items()}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        unpack(root)
        made = sides([*help_pages(root), *messages(root)])
    for side, pairs in made.items():
        lines = [json.dumps({"en": pair.en, "de": pair.de}, ensure_ascii=False) for pair in pairs]
        (folder / f"{side}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{folder / side}.jsonl: {len(pairs):,} pairs")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "translation-data"))
