"""`sublayer tokenizer`: what it prints, and the line and code for each mistake."""

import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from sublayer.cli import main as cli
from sublayer.cli import progress
from sublayer.recipes import llama
from sublayer.text import BytePairs, Characters, Words, load_tokenizer
from sublayer.weights import save

TEXT = "def add(first, second):\n    return first + second\n\n\ndef sub(first, second):\n    return first - second\n"


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with text in it."""
    monkeypatch.chdir(tmp_path)
    Path("code").mkdir()
    Path("code/a.py").write_text(TEXT)
    Path("code/b.md").write_text("# Adding\n\nThe first is added to the second.\n")
    return tmp_path


@pytest.fixture
def run(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """run("train code --out t") → exit code, stdout, stderr; standard input may be given."""

    def call(*arguments: str, stdin: bytes = b"") -> Said:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = cli.main(["tokenizer", *arguments])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call


@pytest.fixture
def trained(run) -> str:
    assert run("train", "code", "--vocab", "280", "--out", "t")[0] == 0
    return "t"


def test_train_writes_a_tokenizer_and_says_what_came_of_it(run) -> None:
    code, out, err = run("train", "code", "--vocab", "280", "--out", "new/t")
    assert code == 0
    assert out.startswith("new/t: 280 ids, from 2 documents (146 B) in ")
    assert "next: sublayer tokenizer encode new/t" in err
    tokenizer = load_tokenizer("new/t")
    assert isinstance(tokenizer, BytePairs)
    assert (tokenizer.size, tokenizer.eos) == (280, (279,))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(TEXT)) < len(TEXT) * 0.75


def test_the_same_text_gives_the_same_files(run, trained) -> None:
    assert run("train", "code/b.md", "code/a.py", "--vocab", "280", "--out", "u")[0] == 0
    assert Path("u/tokenizer.json").read_bytes() == Path("t/tokenizer.json").read_bytes()


def test_train_reads_fields_of_packed_lines_by_any_pattern(run) -> None:
    with gzip.open("code.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"body": line}) + "\n" for line in TEXT.splitlines() if line)
    settings = ("--vocab", "270", "--pattern", "o200k", "--end", "", "--field", "body")
    assert run("train", "*.jsonl.gz", *settings, "--out", "t")[0] == 0
    tokenizer = load_tokenizer("t")
    assert (tokenizer.size, tokenizer.eos) == (270, ())
    assert r"\p{Lu}" in Path("t/tokenizer.json").read_text()


@pytest.mark.parametrize(("kind", "wanted"), [("words", Words), ("characters", Characters)])
def test_train_other_kinds(run, kind, wanted) -> None:
    assert run("train", "code", "--kind", kind, "--vocab", "12", "--out", "t", "--end", "<end>")[0] == 0
    tokenizer = load_tokenizer("t")
    assert isinstance(tokenizer, wanted)
    assert tokenizer.eos == (tokenizer.size - 1,)
    assert kind == "characters" or tokenizer.size == 12


def test_encode_prints_a_line_a_text(run, trained) -> None:
    tokenizer = load_tokenizer("t")
    line = " ".join(map(str, tokenizer.encode("first second")))
    assert run("encode", "t", "first second") == (0, f"{line}\n", "")
    Path("x.txt").write_bytes(b"first second")
    assert run("encode", "t", "first second", "--file", "x.txt") == (0, f"{line}\n{line}\n", "")
    Path("x.txt").write_bytes(b"\xef\xbb\xbffirst second")
    assert run("encode", "t", "--file", "x.txt") == (0, f"{line}\n", "")
    assert run("encode", "t", stdin=b"first second") == (0, f"{line}\n", "")
    assert run("encode", "t", "first second", "--framed") == (0, f"279 {line}\n", "")
    assert run("encode", "bytes", "é") == (0, "195 169\n", "")
    assert run("encode", "t", "") == (0, "\n", "")


def test_encode_shows_pieces_and_follows_the_policy(run, trained) -> None:
    code, out, _ = run("encode", "t", "first é<|endoftext|>", "--json", "--specials", "special")
    shown = json.loads(out)
    assert code == 0
    assert shown["pieces"] == [*shown["pieces"][:-4], " ", "\\xc3", "\\xa9", ""]
    assert "".join(shown["pieces"][:-4]) == "first"
    assert shown["ids"][-1] == 279
    assert 279 not in json.loads(run("encode", "t", "<|endoftext|>", "--json")[1])["ids"]
    code, _, err = run("encode", "t", "é<|endoftext|>", "--specials", "error")
    assert (code, err.count("\n")) == (1, 1)
    assert "the text holds the special token '<|endoftext|>' at character 1" in err


def test_decode_prints_the_text(run, trained) -> None:
    ids = load_tokenizer("t").encode("first\n second")
    assert run("decode", "t", *map(str, ids)) == (0, "first\n second\n", "")
    assert run("decode", "t", ",".join(map(str, ids))) == (0, "first\n second\n", "")
    lines = f"{' '.join(map(str, ids))}\n104 105\n".encode()
    assert run("decode", "t", stdin=lines)[1].startswith("first\n second\n")
    assert run("decode", "bytes", stdin=b"104 105\n33\n") == (0, "hi\n!\n", "")
    assert json.loads(run("decode", "bytes", "104", "195", "--json")[1]) == {
        "ids": [104, 195],
        "pieces": ["h", "\\xc3"],
        "text": "h\ufffd",
    }


def test_audit_shows_tokenizers_side_by_side(run, trained) -> None:
    code, out, err = run("audit", "t", "bytes", "--on", "code/a.py", "--on", "code/b.md")
    assert (code, err) == (0, "")
    assert "2 documents, 146 B of text" in out
    for shown in ("Latin", "white space", ".py", ".md", "KV cache", "one text in llama3-8b"):
        assert shown in out
    total, cost = (line.split() for line in out.splitlines() if line.startswith("bytes "))
    used = len({*Path("code/a.py").read_bytes(), *Path("code/b.md").read_bytes()})
    assert total[:4] == ["bytes", "256", f"{1 - used / 256:.1%}", "1.00"]
    assert total[-1] == "none"
    longer = 146 / len([*load_tokenizer("t").encode(TEXT), *load_tokenizer("t").encode(Path("code/b.md").read_text())])
    assert cost[1] == f"{round(8192 * longer):,}"
    assert cost[-1] == f"{longer:.2f}×"
    assert max(map(len, out.splitlines())) <= 80


def test_audit_tells_what_the_length_costs(run, trained) -> None:
    code, out, _ = run("audit", "t", "bytes", "--on", "code", "--json", "--context", "1000")
    assert code == 0
    shown = json.loads(out)
    ours, bytes_ = shown["tokenizers"]["t"], shown["tokenizers"]["bytes"]
    size = sum(path.stat().st_size for path in Path("code").iterdir())
    assert (shown["bytes"], shown["documents"], shown["model"]) == (size, 2, "llama3-8b")
    assert bytes_["total"]["tokens"] == size
    assert ours["total"]["bytes_per_token"] == size / ours["total"]["tokens"]
    assert set(ours["kinds"]) == {".py", ".md"}
    # Llama 3 8B: 32 layers, 32 heads of 128, 8 of them for keys and values; 2 bytes an element.
    tokens = round(1000 * size / ours["total"]["tokens"])
    for found, count in ((ours, 1000), (bytes_, tokens)):
        assert found["cost"]["tokens"] == count
        assert found["cost"]["state_bytes"] == count * 32 * 2 * 8 * 128 * 2
        assert found["cost"]["attention_flops"] == 32 * 4 * 32 * 128 * count * (count + 1) // 2


def test_a_window_bounds_what_attention_costs(run, trained) -> None:
    spec = llama(32, 2, 4, 2, hidden=64, vocab=257).override("decoder.blocks.*.attn.op.window=10")
    save(spec.build(), "model")
    shown = json.loads(run("audit", "bytes", "--on", "code", "--model", "model", "--context", "25", "--json")[1])
    seen = sum(min(position + 1, 10) for position in range(25))
    assert shown["tokenizers"]["bytes"]["cost"]["attention_flops"] == 2 * 4 * 32 * seen


def test_audit_says_what_is_lost(run, trained) -> None:
    assert run("train", "code/a.py", "--kind", "characters", "--end", "", "--out", "c")[0] == 0
    assert run("train", "code/a.py", "--kind", "words", "--vocab", "8", "--out", "w")[0] == 0
    _, out, _ = run("audit", "t", "c", "w", "--on", "code")
    assert "c: 1 document of 2 not given back, 1 of them refused" in out
    assert "w: 2 documents of 2 not given back" in out
    assert "t: " not in out
    lost = {line.split()[0]: line.split()[-1] for line in out.splitlines()[3:6]}
    assert (lost["t"], lost["c"][-1], lost["w"][-1]) == ("none", "%", "%")


def test_tokenizers_of_one_name_are_told_apart(run, trained) -> None:
    assert run("train", "code", "--vocab", "280", "--out", "other/t")[0] == 0
    shown = json.loads(run("audit", "t", "other/t", "--on", "code", "--json")[1])
    assert list(shown["tokenizers"]) == ["t", "other/t"]


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["train", "empty", "--out", "o"], 1, "empty: the file is empty"),
        (["train", "binary", "--out", "o"], 1, "binary: a binary file"),
        (["train", "none", "--out", "o"], 1, "none: no text there (1 binary)"),
        (["train", "bad.txt", "--out", "o"], 1, "bad.txt: byte 0xFF at offset 7 is not UTF-8"),
        (["train", "missing", "--out", "o"], 1, "missing: no such file or folder"),
        (["train", "code", "--out", "o"], 1, "vocab=32000: after 285"),
        (["train", "code", "--out", "o", "--vocab", "256"], 2, "vocab=256: the smallest is 257"),
        (["train", "code", "--out", "empty"], 2, "--out empty: a file, where a folder is needed"),
        (["train", "code", "--out", "t"], 2, "--out t: there is a tokenizer.json already"),
        (["train", "code", "--out", "o", "--pattern", "gpt3"], 2, "'gpt3' is not one of 'gpt2', 'cl100k', 'o200k'"),
        (["train", "code"], 2, "Missing option '--out'"),
        (["encode", "missing", "x"], 1, "missing: no such file"),
        (["encode", "t", "x", "--specials", "all"], 2, "'all' is not one of"),
        (["encode", "t", "--file", "bad.txt"], 1, "bad.txt: byte 0xFF at offset 7 is not UTF-8"),
        (["encode", "t", "--file", "missing"], 1, "missing: No such file or directory"),
        (["decode", "t", "1", "280"], 1, "token id 280 is outside the tokenizer's vocabulary: 0 to 279"),
        (["decode", "t", "one"], 2, "expected ids, numbers with spaces or commas between them, got 'one'"),
        (["audit", "t", "--on", "empty"], 1, "empty: the file is empty"),
        (["audit", "t", "t", "--on", "code"], 2, "a tokenizer is named twice"),
        (["audit", "t", "--on", "code", "--model", "llama3-9b"], 2, "unknown model 'llama3-9b' (did you mean"),
        (["trian"], 2, "No such command 'trian'. Did you mean 'train'"),
    ],
)
def test_mistakes_give_one_line_and_a_code(run, trained, arguments, code, line) -> None:
    Path("empty").write_bytes(b"")
    Path("binary").write_bytes(b"\x7fELF\0\0\1")
    Path("none").mkdir()
    Path("none/x").write_bytes(b"\0\0\0\0")
    Path("bad.txt").write_bytes(b"bytes: \xff.")
    found, _, err = run(*arguments)
    assert line in err
    assert (found, err.count("\n")) == (code, 1)
    assert not Path("o").exists()


def test_bad_bytes_of_standard_input_are_told_with_their_place(run, trained) -> None:
    for command in ("encode", "decode"):
        code, _, err = run(command, "t", stdin=b"1 2\n\xff")
        assert (code, err) == (1, "sublayer: stdin: byte 0xFF at offset 4 is not UTF-8\n")
    assert "stdin, line 2: expected ids" in run("decode", "t", stdin=b"1\nx\n")[2]


def test_bad_bytes_may_be_replaced_and_are_counted(run) -> None:
    Path("code/bad.txt").write_bytes(b"one \xff two")
    code, _, err = run("train", "code", "--vocab", "280", "--out", "t", "--bad-bytes", "skip")
    assert code == 0
    assert "bad places in documents left out or replaced: 1" in err


def test_a_tokenizer_is_replaced_only_if_asked(run, trained) -> None:
    assert run("train", "code", "--vocab", "270", "--out", "t", "--overwrite")[0] == 0
    assert load_tokenizer("t").size == 270


def test_an_interruption_leaves_nothing_behind(run, trained, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = Path("t/tokenizer.json").read_bytes()
    monkeypatch.setattr("sublayer.text.train._learn", interrupted)
    assert run("train", "code", "--out", "o") == (130, "", "sublayer: interrupted\n")
    assert run("train", "code", "--out", "t", "--overwrite")[0] == 130
    assert not Path("o").exists()
    assert Path("t/tokenizer.json").read_bytes() == before


def test_long_jobs_tell_how_far_they_have_come(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER", 0.0)
    told = run("train", "code", "--vocab", "280", "--out", "t").err
    assert "reading text: 146 B of 146 B, " in told
    assert "merging pairs: " in told
    assert "encoding: 146 B of 146 B, " in run("audit", "bytes", "t", "--on", "code").err
