import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sublayer.decoding
from sublayer.cli.main import main
from sublayer.cli.terminal import harmless
from sublayer.decoding import generate
from sublayer.decoding.conversation import RunningText, Turns
from sublayer.decoding.generate import Stream
from sublayer.errors import InputError
from sublayer.nn.sublayer import ModelOp
from sublayer.text import Bytes, load_tokenizer
from sublayer.text.chat import ChatTemplate
from sublayer.weights import load, save
from tests.decoding.models import SPECS, tiny
from tests.text.control import CHATML, named, tokenizer_folder
from tests.tiny import tiny as tiny_llama

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that continues text; 128 ids, of which 127 ends a text."""
    folder = tmp_path_factory.mktemp("plain")
    save(tiny(SPECS["gpt2"]), folder)
    Bytes().save(folder)
    return folder


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    folder = tmp_path_factory.mktemp("turns")
    save(tiny(tiny_llama(vocab=260)), folder)
    return tokenizer_folder(folder, CHATML)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """sublayer chat, with what is typed given beforehand, and with the same draws each time."""

    def call(folder: Path, typed: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        code = main(["chat", str(folder), "--seed", "0", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], dict[str, Any]]]:
    """What the model is given, answer by answer."""
    seen: list[tuple[list[int], dict[str, Any]]] = []
    stream = sublayer.decoding.stream

    def watched(model: Any, given: Any, **options: Any) -> Stream:
        seen.append((given[0], options))
        return stream(model, given, **options)

    monkeypatch.setattr(sublayer.decoding, "stream", watched)
    return seen


def answers(folder: Path, prompt: str, **options: Any) -> str:
    (row,) = generate(load(folder), [prompt], tokenizer=load_tokenizer(folder), **options)
    assert row.text is not None
    return row.text


OPTIONS: dict[str, Any] = {"max_tokens": 6, "temperature": 0.7, "top_p": 0.95}


def test_what_is_typed_is_continued_and_goes_on_from_there(plain: Path, run: Run) -> None:
    code, out, err = run(plain, "So\n\nand\n", "--max-tokens", 6, "--seed", 5)
    first = answers(plain, "So", seed=5, **OPTIONS)
    second = answers(plain, f"So{first}", seed=6, **OPTIONS)  # an empty line: on
    third = answers(plain, f"So{first}{second}and", seed=7, **OPTIONS)
    assert (code, out) == (0, f"{first}\n{second}\n{third}\n")
    lines = err.splitlines()
    assert lines[0] == f"{plain}: it continues what you type; /help lists commands"
    assert lines[1].startswith("(6 tokens; the first after ")
    assert lines[1].endswith(" tokens/s; context 8 of 80; an empty line goes on)")
    assert lines[3].endswith("context 23 of 80; an empty line goes on)")


def test_it_works_through_a_pipe(plain: Path) -> None:
    command = [sys.executable, "-m", "sublayer", "chat", str(plain), "--max-tokens", "6", "--seed", "5"]
    done = subprocess.run(command, input="So\n", capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == answers(plain, "So", seed=5, **OPTIONS) + "\n"


def test_a_line_that_is_no_text_is_told_and_the_next_one_is_read(
    plain: Path, run: Run, prompts: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\nSo\n")))
    assert main(["chat", str(plain), "--max-tokens", "2"]) == 1
    assert "no UTF-8 has it" in capsys.readouterr().err
    assert prompts[0][0] == list(b"So")


def test_turns_are_rendered_and_the_answer_ends_with_its_turn(turns: Path, run: Run, prompts: list[Any]) -> None:
    code, out, _ = run(turns, "Hi<|im_end|>\n\nBye\n", "--max-tokens", 6, "--temperature", 0, "--system", "Be good.")
    assert code == 0
    tokenizer = load_tokenizer(turns)
    assert named(prompts[0][0], tokenizer) == (
        "{<|im_start|>}system\nBe good.{<|im_end|>}\n{<|im_start|>}user\nHi<|im_end|>{<|im_end|>}\n"
        "{<|im_start|>}assistant\n"
    )
    assert named(prompts[1][0], tokenizer).endswith("{<|im_start|>}user\nBye{<|im_end|>}\n{<|im_start|>}assistant\n")
    assert len(prompts) == 2  # an empty line is nothing said
    assert prompts[0][1]["stop_ids"] == (257, 259)  # </s>, <|im_end|>
    (first, second) = (
        row.text
        for ids, _ in prompts
        for row in generate(load(turns), [ids], tokenizer=tokenizer, stop_ids=(257, 259), max_tokens=6, temperature=0)
    )
    assert out == f"{first}\n{second}\n"
    assert f"assistant\n{first}" in named(prompts[1][0], tokenizer)


def test_plain_continues_text_though_there_is_a_template(turns: Path, run: Run, prompts: list[Any]) -> None:
    run(turns, "Hi\n", "--plain", "--max-tokens", 3)
    assert named(prompts[0][0], load_tokenizer(turns)) == "Hi"


def test_every_option_and_setting_reaches_the_generation(plain: Path, run: Run, prompts: list[Any]) -> None:
    flags = {"top-k": 30, "top-p": 0.9, "min-p": 0.02, "repetition-penalty": 1.5, "max-tokens": 5, "temperature": 1.2}
    typed = (
        "So\n/top-k none\n/top-p 0.8\n/min-p 0.1\n/repetition-penalty 1\n/max-tokens 4\n/temperature 0\n/seed 9\nand\n"
    )
    arguments = [part for name, value in flags.items() for part in (f"--{name}", value)]
    code, _, err = run(plain, typed, *arguments, "--seed", 3, "--stop", "@@", "--stop", "##")
    assert code == 0
    both = [{name: options[name.replace("-", "_")] for name in (*flags, "seed", "stop")} for _, options in prompts]
    assert both[0] == flags | {"seed": 3, "stop": ("@@", "##")}
    assert both[1] == {
        "top-k": None, "top-p": 0.8, "min-p": 0.1, "repetition-penalty": 1.0, "max-tokens": 4, "temperature": 0.0,
        "seed": 10, "stop": ("@@", "##"),
    }  # fmt: skip
    assert "(top-k is none)" in err


def test_several_lines_and_a_line_that_begins_with_a_slash(plain: Path, run: Run, prompts: list[Any]) -> None:
    run(plain, '"""\na\n\n/b\n"""\n/reset\n//c\n', "--max-tokens", 1)
    assert [bytes(ids).decode() for ids, _ in prompts] == ["a\n\n/b", "/c"]


def test_again_gives_another_answer_to_the_same(plain: Path, run: Run, prompts: list[Any]) -> None:
    code, out, _ = run(plain, "So\n/again\nx\n", "--max-tokens", 6, "--seed", 5)
    assert code == 0
    assert prompts[0][0] == prompts[1][0] == list(b"So")
    assert [options["seed"] for _, options in prompts] == [5, 6, 7]
    again = answers(plain, "So", seed=6, **OPTIONS)
    assert prompts[2][0] == list(f"So{again}x".encode())
    assert out.startswith(f"{answers(plain, 'So', seed=5, **OPTIONS)}\n{again}\n")


def test_again_is_told_what_is_told_now(turns: Path, run: Run, prompts: list[Any]) -> None:
    run(turns, "/system Be bad.\nHi\n/system Be good.\n/again\n", "--max-tokens", 2)
    assert "Be good." in named(prompts[1][0], load_tokenizer(turns))


def test_an_answer_that_cannot_be_given_again_leaves_what_was_said(
    turns: Path, run: Run, prompts: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    said = f"Hi\n/system {'x' * 90}\n/again\n/save {path}\n"
    code, _, err = run(turns, said, "--max-tokens", 2, "--context", 80)
    assert code == 1
    assert "the last message takes" in err
    assert [one["role"] for one in json.loads(path.read_text(encoding="utf-8"))["messages"]] == ["user", "assistant"]


def test_what_was_said_is_saved_and_loaded(turns: Path, run: Run, prompts: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    run(turns, f"/system Be good.\nHi\n/save {path}\n", "--max-tokens", 4, "--seed", 1)
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["system"] == "Be good."
    assert [message["role"] for message in kept["messages"]] == ["user", "assistant"]
    run(turns, f"/load {path}\nBye\n", "--max-tokens", 4)
    tokenizer = load_tokenizer(turns)
    assert named(prompts[1][0], tokenizer).startswith(
        f"{named(prompts[0][0], tokenizer)}{kept['messages'][1]['content']}".rstrip()
    )


def test_a_running_text_is_saved_and_loaded(plain: Path, run: Run, prompts: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    run(plain, f"So\n/save {path}\n", "--max-tokens", 4, "--seed", 1)
    run(plain, f"/load {path}\n and\n", "--max-tokens", 4)
    assert bytes(prompts[1][0]).decode() == json.loads(path.read_text(encoding="utf-8"))["text"] + " and"


def test_the_oldest_is_left_out_when_the_context_is_full(
    plain: Path, turns: Path, run: Run, prompts: list[Any]
) -> None:
    code, _, err = run(plain, "abcdefghij\n/reset\n0123456789ABCDEFGHIJ\n", "--context", 16, "--max-tokens", 4)
    assert code == 0
    assert bytes(prompts[1][0]).decode() == "BCDEFGHIJ"  # three quarters of what there is room for
    assert "(the context of 16 tokens is full: the oldest 11 tokens are left out)" in err
    prompts.clear()
    code, _, err = run(
        turns, "one\ntwo\nthree\n", "--context", 70, "--max-tokens", 5, "--system", "Be good.", "--seed", 1
    )
    assert code == 0
    last = named(prompts[2][0], load_tokenizer(turns))
    assert last.startswith("{<|im_start|>}system\nBe good.{<|im_end|>}\n{<|im_start|>}user\nthree{<|im_end|>}")
    assert "(the context of 70 tokens is full: the oldest 2 messages are left out)" in err
    assert all(len(ids) <= 65 for ids, _ in prompts)


def test_an_answer_never_leaves_the_context(plain: Path, run: Run, prompts: list[Any]) -> None:
    run(plain, "So\n" + "\n" * 5, "--context", 20, "--max-tokens", 400, "--temperature", 0)
    assert all(len(ids) + options["max_tokens"] <= 20 for ids, options in prompts)
    assert len(prompts) == 6


def test_a_message_that_does_not_fit_was_never_said(turns: Path, run: Run, prompts: list[Any]) -> None:
    code, _, err = run(turns, f"{'x' * 90}\nHi\n", "--context", 80, "--max-tokens", 5)
    assert code == 1
    assert "the last message takes 109 tokens, and there is room for 75" in err
    assert len(prompts) == 1
    assert "xxx" not in named(prompts[0][0], load_tokenizer(turns))
    assert "left out" not in err


def test_ctrl_c_stops_the_answer_and_not_the_program(
    plain: Path, run: Run, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, count = Stream.__next__, iter(range(100))

    def interrupted(self: Stream) -> Any:
        if next(count) == 3:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    code, out, err = run(plain, "So\nx\n", "--max-tokens", 6, "--seed", 5)
    first = answers(plain, "So", seed=5, **OPTIONS | {"max_tokens": 3})
    assert code == 0
    assert out.startswith(f"{first}\n")
    assert "(stopped after 3 tokens; " in err
    assert prompts[1][0] == list(f"So{first}x".encode())


def test_at_a_terminal_ctrl_c_clears_the_line_and_ctrl_d_ends(
    plain: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    typed = iter([KeyboardInterrupt, "So", "/nothing", EOFError])

    def read(mark: str) -> str:
        assert mark == "> "
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(io, "StringIO", Terminal)
    code, out, err = run(plain, "", "--max-tokens", 6, "--seed", 5)
    assert (code, out) == (0, harmless(answers(plain, "So", seed=5, **OPTIONS)) + "\n")
    assert "Ctrl-D or /quit ends" in err
    assert "no command /nothing" in err


def test_a_text_that_ended_is_over(plain: Path, run: Run, prompts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = generate(load(plain), [list(b"So")], max_tokens=6, temperature=0.0)
    monkeypatch.setattr(Bytes, "eos", (row.ids[3],))
    code, _, err = run(plain, "So\nnew\n", "--max-tokens", 6, "--temperature", 0)
    assert code == 0
    assert "; the text has ended, the next one is new)" in err
    assert bytes(prompts[1][0]) == bytes((row.ids[3], *b"new"))  # behind the mark that a text begins with


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("/tempratur 1", "no command /tempratur (did you mean 'temperature'?); // begins a line with a slash"),
        ("/temperature hot", "/temperature takes a number, got 'hot'"),
        ("/temperature none", "only top-k and seed can be none"),
        ("/top-p 2", "Sampling: top_p is a probability from 0 to 1, got 2.0"),
        ("/seed -1", "seed is a whole number from 0 to below 2^62, got -1"),
        ("/save", "/save takes the name of a file"),
        ("/save nowhere/x", "nowhere/x: cannot be written: No such file or directory"),
        ("/load nowhere", "nowhere: No such file or directory"),
        ("/again", "there is no answer yet to give again"),
        ("/system x", "no command /system"),
        ("", "there is nothing to continue: type something"),
        ("é", "row 0: token id 195 at place 0 is outside the vocabulary of 128"),
    ],
)
def test_a_mistake_is_told_and_the_next_line_is_read(
    plain: Path, run: Run, prompts: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(plain, f"{typed}\nSo\n", "--max-tokens", 6, "--seed", 5)
    assert (code, out) == (1, answers(plain, "So", seed=5, **OPTIONS) + "\n")
    assert message in err
    assert "Traceback" not in err
    assert prompts[-1][0] == list(b"So")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not JSON"),
        ("[]", 'this model continues a text: expected {"text": "…"}'),
        ('{"text": 1}', 'this model continues a text: expected {"text": "…"}'),
        ('{"messages": []}', 'this model continues a text: expected {"text": "…"}'),
    ],
)
def test_a_file_of_something_else_is_not_loaded(
    plain: Path, run: Run, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "x.json").write_text(content, encoding="utf-8")
    code, _, err = run(plain, f"/load {tmp_path / 'x.json'}\n")
    assert code == 1
    assert f"{tmp_path / 'x.json'}: {message}" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--temperature", -1], 2, "Sampling: temperature is 0 (take the best token) or above, got -1.0"),
        (["--max-tokens", 0], 2, "Options: max_tokens is at least 1, got 0"),
        (["--system", "x"], 2, "has no chat template"),
        (["--context", 99], 2, "--context 99: the model has learned 80 positions"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(
    plain: Path, run: Run, arguments: Any, code: int, message: str
) -> None:
    found, out, err = run(plain, "So\n", *arguments)
    assert (found, out) == (code, "")
    assert message in err


def test_the_context_is_the_models_own(turns: Path, run: Run, tmp_path: Path) -> None:
    assert "of 2,048; cut" in run(turns, "Hi\n", "--max-tokens", 1)[2]
    save(load(turns), tmp_path, layout="hf")
    tokenizer_folder(tmp_path, CHATML)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 300}), encoding="utf-8")
    assert "of 300; cut" in run(tmp_path, "Hi\n", "--max-tokens", 1)[2]
    assert "of 99; cut" in run(tmp_path, "Hi\n", "--max-tokens", 1, "--context", 99)[2]
    assert "trained on" not in run(tmp_path, "Hi\n", "--max-tokens", 1, "--context", 300)[2]
    assert "(the model was trained on 300 tokens: beyond" in run(tmp_path, "", "--context", 301)[2]


def test_a_model_says_how_it_is_best_sampled(turns: Path, run: Run, prompts: list[Any], tmp_path: Path) -> None:
    folder = shutil.copytree(turns, tmp_path / "advised")
    said = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "max_new_tokens": 3,
        "eos_token_id": [257],
    }
    (folder / "generation_config.json").write_text(json.dumps(said), encoding="utf-8")
    _, _, err = run(folder, "Hi\nBye\n", "--top-p", 0.5)
    assert {name: prompts[0][1][name] for name in ("temperature", "top_k", "top_p", "max_tokens")} == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.5, "max_tokens": 3
    }  # fmt: skip
    assert err.count("(temperature 0.6, top-k 20, max-tokens 3: as generation_config.json has it)") == 1
    (folder / "generation_config.json").write_text('{"do_sample": false, "eos_token_id": 257}', encoding="utf-8")
    _, _, err = run(folder, "Hi\n", "--max-tokens", 1)
    assert "(temperature 0.0: as generation_config.json has it)" in err
    (folder / "generation_config.json").write_text('{"top_p": 7}', encoding="utf-8")
    code, _, err = run(folder, "Hi\n")
    assert code == 1
    assert f"{folder}/generation_config.json: Sampling: top_p is a probability from 0 to 1, got 7.0" in err


def test_what_was_read_is_not_read_again(turns: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    forward = ModelOp.forward

    def counted(self: ModelOp, inputs: Any, *arguments: Any, **options: Any) -> Any:
        lengths.append(inputs.shape[1])
        return forward(self, inputs, *arguments, **options)

    monkeypatch.setattr(ModelOp, "forward", counted)
    run(turns, "x" * 500 + "\nHi\n/again\n", "--max-tokens", 2, "--temperature", 0)
    first, *rest = [length for length in lengths if length > 1]
    assert first == 512  # tokens a call
    assert max(rest) < 60


def test_a_file_that_is_no_conversation_is_not_overwritten(plain: Path, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine", encoding="utf-8")
    code, _, err = run(plain, f"So\n/save {path}\n/save {path}.json\n/save {path}.json\n", "--max-tokens", 1)
    assert code == 1
    assert path.read_text(encoding="utf-8") == "mine"
    assert "holds something else than a conversation" in err
    assert err.count(f"({path}.json written)") == 2


def test_an_answer_that_was_cut_says_so(turns: Path, run: Run) -> None:
    assert "of 99; cut short: /max-tokens allows more" in run(turns, "Hi\n", "--max-tokens", 3, "--context", 99)[2]
    assert "46 of 46; cut short: the context is full" in run(turns, "Hi\n", "--max-tokens", 30, "--context", 46)[2]


def test_what_a_model_writes_does_not_reach_into_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\r\x07\u202ec\n\té👩\u200d🔬\u00a0") == "a\\x1b[2Jb\\r\\x07\\u202ec\n\té👩\u200d🔬\u00a0"


def test_a_running_text_keeps_the_token_that_begins_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path, framed=True))
    text = RunningText(tokenizer)
    text.say("abcdef")
    assert named(text.prompt(99).ids, tokenizer) == "{<s>}abcdef"  # and not the one that ends it
    ids, dropped = text.prompt(4)
    assert (named(ids, tokenizer), dropped) == ("{<s>}ef", 4)
    text.heard("g", ended=False)
    ids, dropped = text.prompt(4)
    assert (named(ids, tokenizer), dropped) == ("{<s>}efg", 0)
    text.heard("h", ended=False)
    ids, dropped = text.prompt(4)
    assert (named(ids, tokenizer), dropped) == ("{<s>}gh", 2)


@pytest.mark.parametrize("kind", [RunningText, lambda tokenizer: Turns(tokenizer, ChatTemplate(CHATML))])
def test_most_prompts_of_a_full_context_begin_as_the_one_before(kind: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path))
    said, before, anew = kind(tokenizer), list[int](), 0
    for turn in range(16):
        said.say(f"line {turn}\n")
        ids = said.prompt(200).ids
        assert len(ids) <= 200
        assert f"line {turn}" in tokenizer.decode(ids)
        anew += ids[: len(before)] != before
        before = ids
        said.heard("an answer, " * (1 + turn % 2), ended=False)
    assert 1 <= anew <= 5


def test_a_long_conversation_is_cut_in_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path))
    template, rendered = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"), list[int]()

    def encode(messages: Any, *_: Any) -> list[int]:
        rendered.append(len(messages))
        return list("".join(message["content"] for message in messages).encode())

    said = Turns(tokenizer, template)
    monkeypatch.setattr(template, "encode", encode)
    for turn in range(100, 200):
        said.say(f"line {turn}\n")
        said.heard(f"answer {turn}\n", ended=True)
    said.say("?")
    ids, dropped = said.prompt(202)  # of which three quarters are filled: seven turns of 20 and the question
    assert (bytes(ids).decode().split()[1], dropped, len(ids)) == ("193", 186, 141)
    assert len(rendered) <= 9
    assert said.prompt(202) == (ids, 0)


def test_turns_that_are_not_turns_are_not_read(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path))
    turns = Turns(tokenizer, ChatTemplate(CHATML))
    turns.say("kept")
    for wrong in (
        {},
        {"messages": 1},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user"}]},
    ):
        with pytest.raises(InputError, match="this model takes turns"):
            turns.read(wrong)
    assert turns.messages == [{"role": "user", "content": "kept"}]
