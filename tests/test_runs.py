"""The runs of the repository in small: their data is read, each trains, and is judged."""

import importlib.util
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from sublayer.train import read_run, train
from sublayer.train.examples import TextToText

RUNS = Path(__file__).parents[1] / "runs"
TRANSLATION = RUNS / "translation"


def script(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


# --- pairs of sentences ---


@pytest.fixture(scope="module")
def pairs() -> ModuleType:
    return script(TRANSLATION / "pairs.py")


def page(paragraphs: Mapping[str, str]) -> str:
    return "<html><body><div>{}</div></body></html>".format(
        "".join(f'<p id="{name}" dir="auto">{text}</p>' for name, text in paragraphs.items())
    )


def catalogue(path: Path, messages: Mapping[str, str]) -> None:
    """A .mo file: tables of (length, offset), and the texts in the order of their ids."""
    path.parent.mkdir(parents=True)
    texts = [("", "Content-Type: text/plain; charset=UTF-8\n"), *sorted(messages.items())]
    sides = [[pair[side].encode() for pair in texts] for side in (0, 1)]
    place, tables, data = 28 + 16 * len(texts), b"", b""
    for text in (text for side in sides for text in side):
        tables += struct.pack("<2I", len(text), place + len(data))
        data += text + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(texts), 28, 28 + 8 * len(texts), 0, place)
    path.write_bytes(head + tables + data)


def test_paragraphs_of_the_help_are_paired_by_their_id(pairs: ModuleType, tmp_path: Path) -> None:
    system = (
        '<span class="switchinline"><span hidden="true" id="MAC1" class="MAC"><span>Preferences</span></span>'
        '<span hidden="true" id="default1"><span class="emph">Tools</span></span></span>'
    )
    written = {
        "en-US": {
            "a": "Opens the <b>first</b>\n  dialog &amp; no other.",
            "b": "Only here.",
            "c": f"Choose {system} now.",
        },
        "de": {"c": "Wählen Sie jetzt Extras.", "a": "Öffnet den ersten Dialog."},
    }
    for language, paragraphs in written.items():
        folder = tmp_path / "usr/share/libreoffice/help" / language / "text/shared"
        folder.mkdir(parents=True)
        (folder / "x.html").write_text(page(paragraphs), encoding="utf-8")
        (folder / f"{language}.html").write_text(page({"a": "A page without its like."}), encoding="utf-8")
    found = [tuple(pairs.clean(pair) or ()) for pair in pairs.help_pages(tmp_path)]
    name = "text/shared/x.html"
    assert found == [
        ("Opens the first dialog & no other.", "Öffnet den ersten Dialog.", name),
        (),  # three words are no sentence
    ]
    assert next(pair.en for pair in pairs.help_pages(tmp_path) if pair.de.startswith("W")) == "Choose Tools now."


def test_messages_are_paired_line_by_line(pairs: ModuleType, tmp_path: Path) -> None:
    messages = {
        "context\x04I will not yield.\nNot to you, orc!": "Ich werde nicht weichen.\nNicht vor dir, Ork!",
        "one line": "zwei\nZeilen",
        "expected a %<clause%> behind it": "hier wird eine %<Klausel%> erwartet",
    }
    catalogue(tmp_path / "usr/share/locale/de/LC_MESSAGES/game.mo", messages)
    assert [pair[:2] for pair in pairs.messages(tmp_path)] == [
        ("I will not yield.", "Ich werde nicht weichen."),
        ("Not to you, orc!", "Nicht vor dir, Ork!"),
        ('expected a "clause" behind it', 'hier wird eine "Klausel" erwartet'),
    ]


@pytest.mark.parametrize(
    ("en", "de"),
    [
        ("too few words", "es sind zu wenige"),
        ("the same as it was before", "The same as it was before!"),
        ("four words and no more", "das hier ist aber um sehr vieles länger als es eine Übersetzung wäre"),
        ("a value of x_y is not known", "ein Wert von x_y ist nicht bekannt"),
        ("the type %qT is not known", "der Typ %qT ist nicht bekannt"),
        ("1 + 2 + 3 + 4 are ten", "1 + 2 + 3 + 4 sind zehn"),
    ],
)
def test_what_is_no_translation_is_left_out(pairs: ModuleType, en: str, de: str) -> None:
    assert pairs.clean(pairs.Pair(en, de, "x")) is None


def test_what_is_held_out_stands_nowhere_else(pairs: ModuleType) -> None:
    def named(side: str, number: int) -> str:
        names = (f"page {i}" for i in range(10_000))
        return [name for name in names if pairs.part(name) == side][number]

    found = [
        pairs.Pair("This is the first one.", "Dies ist das erste.", named("test", 0)),
        pairs.Pair("This is the FIRST one!", "Das ist das erste.", named("train", 0)),  # its source is held out
        pairs.Pair("Here is the first one.", "Dies ist das erste!", named("train", 1)),  # its target is
        pairs.Pair("Nobody has seen 12 of them.", "Zwölf davon hat niemand gesehen.", named("train", 2)),
        pairs.Pair("Judge this by its length.", "Beurteile dies nach der Länge.", named("judge", 0)),
    ]
    made = pairs.sides(found)
    assert {side: [pair.en for pair in some] for side, some in made.items()} == {
        "train": ["Nobody has seen 12 of them."],
        "judge": ["Judge this by its length."],
        "test": ["This is the first one."],
    }


# --- training and judging ---

WHO = {"dog": "Hund", "king": "König", "orc": "Ork", "elf": "Elf", "wolf": "Wolf"}
DOES = {"sees": "sieht", "hears": "hört", "fears": "fürchtet", "knows": "kennt"}


def sentences() -> Iterable[tuple[str, str]]:
    for a in WHO:
        for verb in DOES:
            for b in WHO:
                for tail, ende in (("", ""), (" and the old wolf in the dark woods", " und den alten Wolf im Wald")):
                    yield f"The {a} {verb} the {b}{tail}.", f"Der {WHO[a]} {DOES[verb]} den {WHO[b]}{ende}."


SMALL = ["steps=20", "batch=4", "eval.tokens=200", "save.every=4", "schedule.warmup=10", "tokenizer.vocab=300"]
SIZES = {
    "transformer": ["model.dim=16", "model.heads=2", "model.layers=1", "model.hidden=32"],
    "gru": ["model.dim=16", "model.hidden=24"],
    "gru-attention": ["model.dim=16", "model.hidden=16"],
}


def test_translation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("translation-data").mkdir()
    made = list(sentences())
    for side, some in (("test", made[::20]), ("judge", made[1::20]), ("train", made[2::4] + made[3::4])):
        lines = [json.dumps({"en": en, "de": de}) for en, de in some]
        Path(f"translation-data/{side}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, sizes in SIZES.items():
        run = read_run(TRANSLATION / f"{name}.toml")
        assert (run.train.seconds, run.save.average, run.objective) == (1680, 5, TextToText(smoothing=0.1))
        small = [change for change in SMALL if name == "transformer" or "tokenizer" not in change]
        result = train(read_run(TRANSLATION / f"{name}.toml", [*small, *sizes]))
        assert result.step == 20
        assert result.folder == Path(f"translation-{name}/model")

    judge = script(TRANSLATION / "judge.py")
    judge.main([])
    found = json.loads(Path("translation-result/result.json").read_text())
    assert [*found["models"]] == [*SIZES]
    for name, one in found["models"].items():
        assert 0 <= one["bleu"] <= 100
        assert "tok:13a" in one["bleu_signature"]
        assert sum(group["sentences"] for group in one["by_length"]) == found["sentences"] == len(made[::20])
        assert len(Path(f"translation-result/{name}.de").read_text().splitlines()) == len(made[::20])
    assert capsys.readouterr().out.startswith("| model | parameters |")
    for picture in ("bleu", "attention"):
        assert Path(f"translation-result/{picture}.png").read_bytes()[1:4] == b"PNG"


def test_the_models_of_the_translation_have_as_many_parameters() -> None:
    counts = [
        read_run(TRANSLATION / f"{name}.toml").model.build_spec(vocab=4000).parameters()
        for name in ("transformer", "gru", "gru-attention")
    ]
    assert max(counts) <= 1.02 * min(counts)


def test_bleu_is_that_of_sacrebleu_and_of_the_right_sentences() -> None:
    judge = script(TRANSLATION / "judge.py")
    sources = ["a dog sees the king", " ".join(["the old wolf in the dark woods"] * 3)]
    targets = ["ein Hund sieht den König", "gar nichts davon"]
    found = judge.scores(sources, targets, [targets[0], "der alte Wolf im Wald"])
    groups = [(group["from"], group["sentences"], round(group["bleu"])) for group in found["by_length"]]
    assert groups == [(0, 1, 100), (19, 1, 0)]
    assert 0 < found["bleu"] < 100


# --- a vision transformer on clothes ---


def test_fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fashion-mnist").mkdir()
    for split, count in (("train", 60), ("t10k", 20)):
        pixels = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for name, kind, array in (("images-idx3", 3, pixels), ("labels-idx1", 1, labels)):
            head = bytes([0, 0, 8, kind]) + struct.pack(f">{kind}I", *array.shape)
            Path(f"fashion-mnist/{split}-{name}-ubyte").write_bytes(head + array.tobytes())
    whole = read_run(RUNS / "fashion.toml")
    assert 0.5e6 < whole.model.build_spec(classes=10, image=(28, 28), channels=1).parameters() < 0.7e6
    small = ["train.steps=6", "train.batch=8", "eval.every=3", "eval.tokens=20", "save.every=3", "schedule.warmup=2"]
    result = train(read_run(RUNS / "fashion.toml", [*small, "model.dim=16", "model.layers=1", "model.hidden=32"]))
    assert (result.step, result.score.tokens, result.folder) == (6, 20, Path("fashion/model"))
    assert 0 <= result.score.accuracy <= 1
