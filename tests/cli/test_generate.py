import json
from pathlib import Path

import pytest

from sublayer.cli.main import main
from sublayer.decoding import generate
from sublayer.decoding.generate import Stream
from sublayer.recipes import t5
from sublayer.text import Bytes
from sublayer.weights import load, save
from tests.decoding.models import SPECS, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(tiny(SPECS["gpt2"]), folder)
    Bytes().save(folder)
    return folder


@pytest.fixture
def run(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        return main(["generate", *map(str, arguments)]), *capsys.readouterr()

    return call


def test_text_goes_to_stdout_and_speed_and_seed_to_stderr(folder, run) -> None:
    code, out, err = run(folder, "--prompt", "So", "--max-tokens", 9, "--seed", 5)
    (expected,) = generate(load(folder), "So", tokenizer=Bytes(), max_tokens=9, seed=5)
    assert (code, out) == (0, f"{expected.text}\n")
    assert err.startswith("9 tokens; the first after ")
    assert err.endswith(" tokens/s, seed 5\n")


def test_every_option_reaches_the_generation(folder, run) -> None:
    asked = {
        "max_tokens": 15, "temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.5,
        "seed": 3, "logprobs": 2, "slots": 1,
    }  # fmt: skip
    flags = [part for name, value in asked.items() for part in (f"--{name.replace('_', '-')}", value)]
    code, out, _ = run(folder, "--prompt", "So", "--ids", "1,2", "--stop", "@@", "--json", *flags)
    rows = generate(load(folder), ["So", [1, 2]], tokenizer=Bytes(), stop=["@@"], **asked)
    assert code == 0
    for index, (line, row) in enumerate(zip(out.splitlines(), rows, strict=True)):
        shown = json.loads(line)
        assert shown.pop("top_logprobs") == [
            [{"id": token, "logprob": value} for token, value in top.items()] for top in row.top_logprobs or ()
        ]
        assert shown == {
            "row": index, "prompt_ids": list(row.prompt), "ids": list(row.ids), "text": row.text,
            "finish": "length", "seed": row.seed, "logprobs": list(row.logprobs or ()),
        }  # fmt: skip


def test_beams(folder, run) -> None:
    code, out, err = run(folder, "--prompt", "So", "--max-tokens", 6, "--beams", 3, "--length-penalty", 0.6, "--json")
    (row,) = generate(load(folder), "So", tokenizer=Bytes(), max_tokens=6, beams=3, length_penalty=0.6)
    assert code == 0
    assert [(beam["ids"], beam["score"]) for beam in json.loads(out)["beams"]] == [
        (list(beam.ids), beam.score) for beam in row.beams
    ]
    assert "seed" not in err


def test_several_prompts_are_titled_and_files_are_read(folder, run, tmp_path) -> None:
    (tmp_path / "one.txt").write_text("So\n", encoding="utf-8")
    (tmp_path / "more.jsonl").write_text('{"prompt": "é"}\n\n{"prompt": [1, 2]}\n', encoding="utf-8")
    files = [part for name in ("one.txt", "more.jsonl") for part in ("--prompt-file", tmp_path / name)]
    code, out, _ = run(folder.parent / folder.name, *files, "--max-tokens", 4, "--temperature", 0, "--json")
    assert code == 1  # é is beyond this model
    assert [json.loads(line)["prompt_ids"] for line in out.splitlines()] == [[83, 111, 10], [1, 2]]
    (tmp_path / "more.jsonl").write_text('{"prompt": "e"}\n\n{"prompt": [1, 2]}\n', encoding="utf-8")
    code, out, _ = run(folder, *files, "--max-tokens", 4, "--temperature", 0)
    rows = generate(load(folder), ["So\n", "e", [1, 2]], tokenizer=Bytes(), max_tokens=4, temperature=0.0)
    assert (code, out) == (0, "".join(f"--- {i} ---\n{row.text}\n" for i, row in enumerate(rows)))


def test_without_a_tokenizer_ids_go_in_and_out(tmp_path, run) -> None:
    save(tiny(SPECS["llama"]), tmp_path)
    code, out, _ = run(tmp_path, "--ids", "1,2,3", "--max-tokens", 4, "--temperature", 0)
    (row,) = generate(load(tmp_path), [1, 2, 3], max_tokens=4, temperature=0.0)
    assert (code, out) == (0, " ".join(map(str, row.ids)) + "\n")
    code, out, err = run(tmp_path, "--prompt", "So")
    assert (code, out) == (1, "")
    assert err == f"sublayer: {tmp_path}: no tokenizer.json there, nor a tokenizer in another format\n"


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ([], 2, "nothing to continue: give --prompt (- reads stdin), --prompt-file or --ids"),
        (["--ids", "1,x"], 2, "--ids '1,x': expected numbers with commas between them, as in 1,2,3"),
        (["--prompt", "So", "--top-p", 2], 2, "Sampling: top_p is a probability from 0 to 1, got 2.0"),
        (["--prompt", "So", "--logprobs", 2], 2, "--logprobs is shown with --json only"),
        (["--ids", "1,999"], 1, "row 0: token id 999 at place 1 is outside the vocabulary of 128"),
        (
            ["--prompt", ""],
            1,
            "row 0: the prompt is empty; give at least one token, such as the one that begins a text",
        ),
    ],
)
def test_a_mistake_is_one_line(folder, run, arguments, code, line) -> None:
    assert run(folder, *arguments) == (code, "", f"sublayer: {line}\n")


def test_a_file_that_is_no_text_names_the_byte(folder, run, tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"ab\xff")
    assert run(folder, "--prompt-file", path) == (1, "", f"sublayer: {path}: byte 2 is not UTF-8\n")


@pytest.mark.parametrize("several", [False, True])
def test_ctrl_c_prints_what_there_is_and_exits_with_130(folder, run, monkeypatch, several) -> None:
    advance, events = Stream.__next__, []

    def interrupted(self: Stream):
        if len(events) == 5:
            raise KeyboardInterrupt
        events.append(advance(self))
        return events[-1]

    monkeypatch.setattr(Stream, "__next__", interrupted)
    prompts = ["--prompt", "So", "--prompt", "ab"] if several else ["--prompt", "So"]
    code, out, err = run(folder, *prompts, "--max-tokens", 9, "--temperature", 0)
    texts = ["".join(event.text for event in events if event.row == row) for row in range(2)]
    assert all(texts[: 1 + several])
    assert out == (f"--- 0 ---\n{texts[0]}\n--- 1 ---\n{texts[1]}\n" if several else texts[0] + "\n")
    assert code == 130
    assert err.startswith("5 tokens; ")
    assert err.endswith("sublayer: interrupted\n")


def test_an_encoder_decoder_asks_for_sources(run, tmp_path) -> None:
    save(t5(16, 1, 2, 16, vocab=256, head_size=8).build(seed=0), tmp_path)
    Bytes().save(tmp_path)
    code, _, err = run(tmp_path, "--prompt", "So")
    assert code == 2
    assert "give a --source a prompt, or use sublayer translate" in err
    assert run(tmp_path, "--prompt", "So", "--source", "a", "--max-tokens", 2)[0] == 0
