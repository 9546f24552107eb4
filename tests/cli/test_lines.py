"""Batch work: lines of JSON in and out, resumed where they were left."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sublayer.cli import job
from sublayer.cli.lines import Answers
from sublayer.cli.main import main
from sublayer.decoding import generate
from sublayer.decoding.generate import Stream
from sublayer.recipes import t5
from sublayer.text import Bytes
from sublayer.weights import load, save
from tests.decoding.models import SPECS, tiny

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(tiny(SPECS["gpt2"]), folder)
    Bytes().save(folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["generate", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    """A file of lines; what is no text is written as JSON."""

    def write(*lines: Any) -> Path:
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
        return path

    return write


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def alone(folder: Path, prompt: Any, **options: Any) -> dict[str, Any]:
    """What one prompt gives by itself."""
    (row,) = generate(load(folder), [prompt], tokenizer=Bytes(), slots=1, **options)
    return {"ids": list(row.ids), "text": row.text, "finish": row.finish, "seed": row.seed}


def test_a_line_has_options_of_its_own_and_what_else_it_says_is_in_its_answer(
    folder: Path, run: Run, lines: Any, tmp_path: Path
) -> None:
    first = alone(folder, "So", max_tokens=9, temperature=0)
    stop = first["text"][3:5]
    prompts = lines(
        {"prompt": "So", "id": "a", "about": {"n": [1, None]}},
        {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 77},
        {"prompt": "So", "stop": [stop]},
        {"prompt": "So", "temperature": 0.7},
        {"prompt": "So", "repetition_penalty": 3.0, "stop": "no such"},
    )
    out = tmp_path / "answers.jsonl"
    code, said, err = run(folder, "--prompt-file", prompts, "--output", out, "--max-tokens", 9, "--temperature", 0,
                          "--seed", 5, "--slots", 1)  # fmt: skip
    assert (code, said) == (0, "")
    assert f"{out}: 5 answers\n" in err
    own = {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 77, "max_tokens": 3}
    base = {"max_tokens": 9, "temperature": 0}
    expected = [
        {"row": 0, "id": "a", "about": {"n": [1, None]}, "prompt_ids": [83, 111], **first},
        {"row": 1, "prompt_ids": [1, 2, 3], **alone(folder, [1, 2, 3], **own)},
        {"row": 2, "prompt_ids": [83, 111], **alone(folder, "So", stop=[stop], **base)},
        {"row": 3, "prompt_ids": [83, 111], **alone(folder, "So", max_tokens=9, temperature=0.7, seed=8)},
        {"row": 4, "prompt_ids": [83, 111], **alone(folder, "So", repetition_penalty=3.0, **base)},
    ]
    assert read(out) == expected
    assert [row["finish"] for row in expected[:3]] == ["length", "length", "stop_string"]


def test_half_a_character_in_what_a_line_says_stays_as_it_is(
    folder: Path, run: Run, lines: Any, tmp_path: Path
) -> None:
    out, prompts = tmp_path / "out.jsonl", lines('{"prompt": "So", "id": "\\ud83d", "ü": 1}', '{"prompt": "\\ud83d"}')
    code, _, err = run(folder, "--prompt-file", prompts, "--output", out, "--max-tokens", 2)
    assert code == 1
    assert f"{prompts}, line 2: the prompt: character 0 of the text is U+D83D, a lone surrogate" in err
    (row,) = read(out)
    assert (row["id"], row["ü"]) == ("\ud83d", 1)


def test_a_bad_line_is_told_and_the_rest_is_answered(folder: Path, run: Run, lines: Any, tmp_path: Path) -> None:
    wrong = {
        "no": "not JSON: Expecting value: line 1 column 1 (char 0)",
        "[1]": 'expected {"prompt": text or ids, …}, found [1]',
        '{"prompt": 3}': 'expected {"prompt": text or ids, …}, found {"prompt": 3}',
        '{"prompt": "a", "text": "b"}': "key 'text' is one that the answer is written under; call it otherwise",
        '{"prompt": "a", "Max-Tokens": 3}': "key 'Max-Tokens' is no option (did you mean 'max_tokens'?)",
        '{"prompt": "a", "temprature": 3}': "key 'temprature' is no option (did you mean 'temperature'?)",
        '{"prompt": "a", "seed": "x"}': "seed is a whole number, got 'x'",
        '{"prompt": "a", "source": "x"}': "a source, but no encoder that reads it",
        '{"prompt": "a", "temperature": -1}': "Sampling: temperature is 0 (take the best token) or above, got -1.0",
        '{"prompt": "a", "stop": [""]}': "Options: an empty stop string would stop before any text",
        '{"prompt": ""}': "the prompt is empty; give at least one token, such as the one that begins a text",
        '{"prompt": [1, 999]}': "token id 999 at place 1 is outside the vocabulary of 128",
        '{"prompt": [1, "x"]}': "the prompt is neither text nor a list of token ids: [1, 'x']",
        '{"prompt": "' + "a" * 90 + '"}': "the prompt of 90 tokens is longer than the 80 positions",
    }  # fmt: skip
    prompts = lines({"prompt": "So"}, "", *wrong, {"prompt": "ab"})
    out = tmp_path / "out.jsonl"
    code, _, err = run(folder, "--prompt-file", prompts, "--output", out, "--max-tokens", 2)
    assert code == 1
    told = err.splitlines()
    for number, message in enumerate(wrong.values(), 3):
        assert any(line.startswith(f"sublayer: {prompts}, line {number}: {message}") for line in told)
    assert told[-1] == f"sublayer: lines that were left out: {len(wrong)}"
    assert [row["row"] for row in read(out)] == [0, 1 + len(wrong)]


def test_a_prompt_of_the_command_line_is_refused_before_any_work(
    folder: Path, run: Run, lines: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    code, _, err = run(folder, "--prompt-file", lines({"prompt": "So"}), "--ids", "1,999", "--output", out)
    assert code == 1
    assert "row 1: token id 999 at place 1 is outside the vocabulary of 128" in err
    assert read(out) == []


def test_an_interrupted_job_goes_on_with_what_is_left(
    folder: Path, run: Run, lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = lines(*({"prompt": f"{n}"} for n in range(9)))
    arguments = (folder, "--prompt-file", prompts, "--max-tokens", 4, "--seed", 3, "--slots", 2)
    run(*arguments, "--output", tmp_path / "whole.jsonl")
    advance, count = Stream.__next__, iter(range(1000))

    def interrupted(self: Stream) -> Any:
        if next(count) == 14:
            raise KeyboardInterrupt
        return advance(self)

    out = tmp_path / "parts.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "__next__", interrupted)
        code, _, err = run(*arguments, "--output", out)
    assert code == 130
    done = read(out)
    assert 0 < len(done) < 9
    assert all(row["finish"] == "length" for row in done)
    assert f"{out}: {len(done)} answers; {9 - len(done)} are left: the same command goes on" in err
    code, _, err = run(*arguments, "--output", out)
    assert code == 0
    assert f"{out}: 9 answers ({len(done)} of them before)" in err
    in_order = sorted(read(out), key=lambda row: row["row"])
    assert in_order == sorted(read(tmp_path / "whole.jsonl"), key=lambda row: row["row"])
    before = out.read_bytes()
    assert run(*arguments, "--output", out)[0] == 0
    assert out.read_bytes() == before


def test_half_a_line_is_cut_off_and_answered_again(folder: Path, run: Run, lines: Any, tmp_path: Path) -> None:
    prompts, out = lines({"prompt": "a"}, {"prompt": "b"}), tmp_path / "out.jsonl"
    arguments = (folder, "--prompt-file", prompts, "--output", out, "--temperature", 0, "--max-tokens", 3)
    run(*arguments)
    whole = out.read_bytes()
    for left in (whole[:-1], whole[:-20], whole[:30], whole[:5]):
        out.write_bytes(left)
        assert run(*arguments)[0] == 0
        assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize(
    "content",
    ["notes of mine\n", "notes", '{"row": 1, "mine": 2}', '{"row": [], "prompt_ids": []}\n', '{"a": 1}\n', "[]\n"],
)
def test_a_file_of_something_else_is_left_as_it_is(
    folder: Path, run: Run, lines: Any, tmp_path: Path, content: str
) -> None:
    out = tmp_path / "notes"
    out.write_text(content, encoding="utf-8")
    code, _, err = run(folder, "--prompt-file", lines({"prompt": "a"}), "--output", out)
    assert code == 2
    assert "name another --output" in err
    assert out.read_text(encoding="utf-8") == content


def test_answers_to_other_prompts_are_not_gone_on_from(folder: Path, run: Run, lines: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(folder, "--prompt-file", lines({"prompt": "a"}), "--output", out, "--max-tokens", 2)
    before = out.read_bytes()
    code, _, err = run(folder, "--prompt-file", lines({"prompt": "b"}), "--output", out, "--max-tokens", 2)
    assert (code, out.read_bytes()) == (2, before)
    assert "row 0 answers another prompt than this one's" in err


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = '{"row": 0, "prompt_ids": [1]}'

    def fill() -> None:
        with Answers.open(path) as answers:
            answers.write(0, (1,), whole)
            file = answers._file

            def full(data: bytes) -> int:
                if len(data) < 20:
                    raise OSError(28, "No space left on device")
                return file.write(data[:5])

            answers._file = cast(Any, SimpleNamespace(write=full))
            answers.write(1, (2,), '{"row": 1, "prompt_ids": [2]}')

    with pytest.raises(OSError, match="No space") as caught:
        fill()
    assert caught.value.filename == str(path)
    assert path.read_text(encoding="utf-8") == f"{whole}\n"


def test_stdin_is_a_prompt_or_lines(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    options = {"max_tokens": 3, "temperature": 0}
    flags = ("--max-tokens", 3, "--temperature", 0)
    typed("So")
    assert run(folder, "--prompt", "-", *flags)[1] == alone(folder, "So", **options)["text"] + "\n"
    typed('{"prompt": "So", "id": 7}\n{"prompt": "ab"}')
    found = [json.loads(line) for line in run(folder, "--prompt-file", "-", "--json", *flags)[1].splitlines()]
    assert [row["text"] for row in found] == [alone(folder, prompt, **options)["text"] for prompt in ("So", "ab")]
    assert found[0]["id"] == 7
    typed("no\n")
    assert "stdin, line 1: not JSON" in run(folder, "--prompt-file", "-")[2]


def test_a_file_that_windows_wrote_is_read(folder: Path, run: Run, tmp_path: Path) -> None:
    path, text = tmp_path / "prompts.jsonl", tmp_path / "prompt.txt"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "So"}\r\n\r\n{"prompt": "ab"}\r\n')
    text.write_bytes(b"\xef\xbb\xbfSo")
    code, out, err = run(folder, "--prompt-file", path, "--prompt-file", text, "--json", "--max-tokens", 2)
    assert (code, "left out" in err) == (0, False)
    assert [json.loads(line)["prompt_ids"] for line in out.splitlines()] == [[*b"So"], [*b"ab"], [*b"So"]]


def test_many_lines_are_read_in_parts(
    folder: Path, run: Run, lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "WINDOW", 3)
    out = tmp_path / "out.jsonl"
    prompts = lines(*({"prompt": f"{n}"} for n in range(8)))
    run(folder, "--prompt-file", prompts, "--output", out, "--max-tokens", 2, "--seed", 3)
    assert sorted((row["row"], row["seed"]) for row in read(out)) == [(n, n + 3) for n in range(8)]


def test_sources_stand_in_the_lines(run: Run, lines: Any, tmp_path: Path) -> None:
    model = t5(16, 1, 2, 16, vocab=256, head_size=8).build(seed=0)
    save(model, tmp_path / "t5")
    Bytes().save(tmp_path / "t5")
    prompts = lines({"prompt": [0], "source": "abc"}, {"prompt": [0]})
    code, out, err = run(tmp_path / "t5", "--prompt-file", prompts, "--json", "--max-tokens", 3, "--temperature", 0)
    assert code == 1
    assert f"{prompts}, line 2: no source" in err
    (row,) = generate(model, [[0]], sources=["abc"], tokenizer=Bytes(), max_tokens=3, temperature=0)
    assert json.loads(out)["ids"] == list(row.ids)
