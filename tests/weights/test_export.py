"""What `export` writes opens in transformers and in llama.cpp, with the same ids, logits and greedy text."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from gguf import GGUFReader
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import sublayer
from sublayer import recipes
from sublayer.cli import main as cli
from sublayer.cli.chat import _context
from sublayer.cli.quickstart import CONFIG
from sublayer.errors import InputError, SpecError, UsageError, WeightsError
from sublayer.nn.rope import Rope
from sublayer.nn.rope_scaling import DynamicNtk
from sublayer.recipes import FAMILIES, family
from sublayer.text import Bytes, Characters, SentencePiece, Tokenizer, Words, load_tokenizer, train_bpe
from sublayer.train import read_run, train
from sublayer.weights.context import trained_length, write_trained_length
from sublayer.weights.exports import export
from sublayer.weights.load import read_spec
from tests.assets.gguf_files import gemma3, smollm2
from tests.llama_cpp import LlamaCpp
from tests.text.kinds import sentence_piece_model
from tests.text.strings import HARD
from tests.tiny import tiny

CORPUS = ["def word(s):\n    return  s\n", *HARD, "The first of many words, and others, too. " * 20]
TEXTS = ["def f(x):\n    return 1", "  leading, and   more \t\n", "Größe 漢字 🙂 e\u0301", "hello ! x != y 1234", ""]
END = "<|end|>"
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: Bytes((END, "<|other|>")),
    "bytes, endless": Bytes,
    "characters": lambda: Characters.train([*CORPUS, *TEXTS], end=END),
    "words": lambda: Words.train(CORPUS, 40, end=END),
    "bpe": lambda: train_bpe(CORPUS, 300, end=END, specials=("<|im_start|>",)),
    "bpe, cl100k": lambda: train_bpe(CORPUS, 300, pattern="cl100k", end=END),
    "bpe, endless": lambda: train_bpe(CORPUS, 300, end=None),
}


def folder(path: Path, tokenizer: Tokenizer | None, template: str | None = None, **changes) -> Path:
    """A model of Sublayer's layout, with logits of some size."""
    vocab = 97 if tokenizer is None else tokenizer.size
    sublayer.save(tiny(vocab=vocab, **changes).override("init.std=0.3").build(seed=1), path)
    if tokenizer is not None:
        tokenizer.save(path)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> Path:
    """The quickstart's own run, cut short."""
    out = tmp_path_factory.mktemp("quickstart")
    docs = Path(__file__).parents[2] / "docs"
    changes = [f"out={out / 'run'}", f"data.paths={docs}", "tokenizer.vocab=400", "train.tokens=8000",
               "data.held=0.1", "eval.tokens=500"]  # fmt: skip
    return train(read_run(CONFIG, changes)).folder


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, framed=True) for text in TEXTS]


def logits(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]))


def greedy(model, ids: list[int], tokens: int) -> list[int]:
    return list(model.generate([ids], max_tokens=tokens, temperature=0)[0].ids)


# --- transformers ---


def test_the_quickstarts_model_opens_in_transformers(quickstart: Path, tmp_path: Path) -> None:
    export(quickstart, tmp_path / "hf", to="hf", shard_size=1 << 20)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    ours, tokenizer = sublayer.load(quickstart), load_tokenizer(quickstart)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    named = AutoTokenizer.from_pretrained(tmp_path / "hf")
    trained = trained_length(quickstart, ours.spec)
    assert trained is not None
    assert theirs.config.max_position_embeddings == named.model_max_length == trained
    assert (named.bos_token_id, named.eos_token_id) == (tokenizer.eos[0], tokenizer.eos[0])
    for text, ids in zip(TEXTS, prompts(tokenizer), strict=True):
        assert named(text)["input_ids"] == ids
        found = theirs(torch.tensor([ids])).logits
        wanted = logits(ours, ids)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
        made = theirs.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False, pad_token_id=0)
        assert made[0, len(ids) :].tolist() == [
            *ours.generate([ids], max_tokens=32, temperature=0, tokenizer=tokenizer)[0].ids
        ]
        assert named.decode(made[0], skip_special_tokens=True) == tokenizer.decode(made[0].tolist())


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_kind_of_tokenizer_goes_along_to_transformers(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]()
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    export(folder(tmp_path / "a", tokenizer, template), tmp_path / "b", to="hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "b")
    for text in (*TEXTS, *HARD):
        try:
            wanted = tokenizer.encode(text, framed=True)
        except InputError:  # of a character or word that was not counted
            continue
        assert theirs(text, split_special_tokens=True)["input_ids"] == wanted, ascii(text)
    end = tokenizer.eos[0] if tokenizer.eos else None
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    told = (theirs.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id)
    assert told == (end, end, end)
    assert (theirs.bos_token_id, model.generation_config.bos_token_id) == (end, end)
    assert theirs.chat_template == template
    if end is not None:
        said = theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert said == f"user: Hi{END}"


@pytest.mark.parametrize("name", [one for one in FAMILIES if family(one).HF])
def test_the_tokenizer_is_read_as_it_is_whatever_the_family(name: str, tmp_path: Path) -> None:
    """Their classes of some families would cut text in ways of their own."""
    module = family(name)
    spec = getattr(module, name)(**module.TINY)
    if spec.vocab is None:
        pytest.skip("it reads no tokens")
    tokenizer = train_bpe(CORPUS, 300, end=END)
    spec = getattr(module, name)(**module.TINY | {"vocab": 300})
    sublayer.save(spec.build(), tmp_path / "a")
    tokenizer.save(tmp_path / "a")
    export(tmp_path / "a", tmp_path / "b", to="hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "b")
    for text in TEXTS:
        assert theirs(text)["input_ids"] == tokenizer.encode(text, framed=True)


def test_a_folder_of_theirs_keeps_its_files_and_what_no_spec_says(tmp_path: Path) -> None:
    export(folder(tmp_path / "a", Bytes((END,))), tmp_path / "b", to="hf")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 77, "pad_token_id": 3}))
    (tmp_path / "b" / "special_tokens_map.json").write_text('{"mine": 1}')
    export(tmp_path / "b", tmp_path / "c", to="hf", dtype=torch.bfloat16)
    again = json.loads((tmp_path / "c" / "config.json").read_text())
    assert (again["max_position_embeddings"], again["pad_token_id"], again["dtype"]) == (77, 3, "bfloat16")
    for name in ("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "bc")
    assert all(torch.equal(value.bfloat16(), other[name]) for name, value in one.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_stay_as_they_are_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    sublayer.save(tiny().build(seed=1), tmp_path / "a", dtype=dtype)
    export(tmp_path / "a", tmp_path / "b", to="hf")
    assert {tensor.dtype for tensor in load_file(tmp_path / "b" / "model.safetensors").values()} == {dtype}
    one, other = (sublayer.load(tmp_path / name, dtype=dtype) for name in "ab")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# --- the trained length ---


def shown(model: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str, str]:
    """What `show`, `generate` and `chat` say of the length that a model was trained on."""
    capsys.readouterr()
    assert cli.main(["show", str(model)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  context ")]
    assert cli.main(["generate", str(model), "--prompt", "word", "--max-tokens", "60", "--temperature", "0"]) == 0
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "trained on" in line]
    return line, told, str(_context(trained_length(model, read_spec(model)[0]), None, None))


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_the_trained_length_goes_along(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model without learned positions, which has it beside the spec alone."""
    tokenizer = TOKENIZERS["bpe"]()
    spec = getattr(recipes, name)(**family(name).TINY | {"vocab": tokenizer.size})
    sublayer.save(spec.build(seed=1), tmp_path / "a")
    tokenizer.save(tmp_path / "a")
    write_trained_length(tmp_path / "a", 48)
    told: list[str] = []
    export(tmp_path / "a", tmp_path / "hf", to="hf")
    export(tmp_path / "a", tmp_path / "x.gguf", to="gguf", note=told.append)
    export(tmp_path / "hf", tmp_path / "y.gguf", to="gguf", note=told.append)
    export(tmp_path / "x.gguf", tmp_path / "again", to="hf")
    export(tmp_path / "hf", tmp_path / "other", to="hf")
    made = [tmp_path / one for one in ("hf", "x.gguf", "y.gguf", "again", "other")]
    assert [trained_length(one, spec) for one in made] == [48] * 5
    assert not any("trained on" in line for line in told)
    assert LlamaCpp(tmp_path / "x.gguf").trained_length() == 48
    for folder in ("hf", "again", "other"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder).model_max_length == 48
        if name == "llama":  # the other's config class knows no such key
            assert AutoConfig.from_pretrained(tmp_path / folder).max_position_embeddings == 48
    said = {shown(one, capsys) for one in (tmp_path / "a", *made)}
    assert len(said) == 1
    assert "48 tokens" in said.pop()[0]


@pytest.mark.parametrize(("name", "written"), [("llama", 2048), ("mamba", None)])
def test_a_trained_length_that_nobody_knows_is_not_made_up(name: str, written: int | None, tmp_path: Path) -> None:
    """GGUF asks for one: which it is, is said; where nothing ends a text, it is the number that means so."""
    spec = getattr(recipes, name)(**family(name).TINY)
    sublayer.save(spec.build(seed=1), tmp_path / "a")
    told: list[str] = []
    export(tmp_path / "a", tmp_path / "hf", to="hf")
    export(tmp_path / "a", tmp_path / "x.gguf", to="gguf", note=told.append)
    assert "max_position_embeddings" not in (tmp_path / "hf" / "config.json").read_text()
    assert trained_length(tmp_path / "hf", spec) is None
    assert trained_length(tmp_path / "x.gguf", spec) == written
    assert [f"{written or 1 << 20:,} is written" in line for line in told if "trained on" in line] == [True]


def test_a_length_that_positions_depend_on_is_theirs(tmp_path: Path) -> None:
    """Dynamic NTK stretches from max_position_embeddings on: what rows were long in training is not that."""
    spec = tiny(rope=Rope(scaling=DynamicNtk(2.0, trained_length=16)))
    sublayer.save(spec.build(), tmp_path / "a")
    write_trained_length(tmp_path / "a", 48)
    export(tmp_path / "a", tmp_path / "hf", to="hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["max_position_embeddings"] == 16
    assert read_spec(tmp_path / "hf")[0].find("decoder.blocks.0.attn.op.position") == Rope(
        scaling=DynamicNtk(2.0, trained_length=16)
    )


# --- llama.cpp ---


def test_the_quickstarts_model_opens_in_llama_cpp(quickstart: Path, tmp_path: Path) -> None:
    export(quickstart, tmp_path / "x.gguf", to="gguf")
    ours, tokenizer = sublayer.load(quickstart), load_tokenizer(quickstart)
    theirs = LlamaCpp(tmp_path / "x.gguf")
    assert theirs.trained_length() == trained_length(quickstart, ours.spec)
    for text, ids in zip(TEXTS, prompts(tokenizer), strict=True):
        assert theirs.tokenize(text) == ids
        assert theirs.greedy(ids, 32) == [
            *ours.generate([ids], max_tokens=32, temperature=0, tokenizer=tokenizer)[0].ids
        ]
    again = load_tokenizer(tmp_path / "x.gguf")
    assert (again.size, again.eos, prompts(again)) == (tokenizer.size, tokenizer.eos, prompts(tokenizer))


@pytest.mark.parametrize("name", ["bytes", "bpe", "bpe, cl100k"])
def test_tokenizers_go_along_to_llama_cpp(name: str, tmp_path: Path) -> None:
    """Of larger logits than a model has after a few steps, so that no two tokens are near."""
    tokenizer = TOKENIZERS[name]()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    source = folder(tmp_path / "a", tokenizer, template)
    export(source, tmp_path / "x.gguf", to="gguf")
    theirs, ours = LlamaCpp(tmp_path / "x.gguf"), sublayer.load(source)
    for text in (*TEXTS, *HARD):
        ids = tokenizer.encode(text, framed=True)
        if "\0" not in text and len(ids) < 4000:  # at which C's texts end
            assert theirs.tokenize(text) == ids, ascii(text)
    for ids in prompts(tokenizer):
        wanted = greedy(ours, ids, 32)
        end = next((i + 1 for i, token in enumerate(wanted) if token in tokenizer.eos), len(wanted))
        assert theirs.greedy(ids, 32) == wanted[:end]
    export(tmp_path / "x.gguf", tmp_path / "b", to="hf")
    assert (tmp_path / "b" / "chat_template.jinja").read_text() == template


def test_pieces_beside_a_tokenizer_json_go_along_to_llama_cpp(tmp_path: Path) -> None:
    """As folders of Llama 2 and Gemma hold both; GGUF has no BPE over characters."""
    pieces = SentencePiece(sentence_piece_model("bpe"), frame=((1,), ()))
    source = folder(tmp_path / "a", pieces)
    vocab = {piece: id for id in range(pieces.size) if (piece := pieces.name_of(id)) is not None}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    library.save(str(source / "tokenizer.json"))
    assert not isinstance(load_tokenizer(source), SentencePiece)
    export(source, tmp_path / "x.gguf", to="gguf")
    again = load_tokenizer(tmp_path / "x.gguf")
    assert [again.encode(text, framed=True) for text in TEXTS] == [pieces.encode(text, framed=True) for text in TEXTS]
    (source / "tokenizer.model").unlink()
    with pytest.raises(InputError, match="no BPE of a tokenizer.json: with the tokenizer.model"):
        export(source, tmp_path / "y.gguf", to="gguf")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "characters",
            "a: GGUF holds .* and no table of characters: with a tokenizer of kind bytes or bpe a model can",
        ),
        ("words", "and no table of words: with a tokenizer of kind bytes or bpe a model can be written; as hf it goes"),
        ("bpe, endless", "GGUF names a token that ends a text, and this tokenizer has none"),
    ],
)
def test_a_tokenizer_that_gguf_cannot_hold_is_refused_with_the_reason(name: str, said: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "a", TOKENIZERS[name]())
    with pytest.raises(InputError, match=said):
        export(source, tmp_path / "x.gguf", to="gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_place_that_is_not_for_writing_is_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(tmp_path / "a", None)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    for to in ("hf", "gguf"):
        out = tmp_path / "new" / "x.gguf"
        with pytest.raises(WeightsError, match=re.escape(f"{out}: cannot be written: {tmp_path} is not for writing")):
            export(source, out, to=to, progress=lambda *_: pytest.fail("it was read"))


def test_a_full_disk_is_told_by_the_name_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = folder(tmp_path / "a", None)
    monkeypatch.setattr(sys.modules["sublayer.weights.save"], "stream_tensors", full)
    with pytest.raises(WeightsError) as caught:
        export(source, tmp_path / "x", to="hf")
    assert str(caught.value) == f"{tmp_path}/x/model.safetensors: cannot be written: No space left on device"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_the_licence_goes_along(tmp_path: Path) -> None:
    source = folder(tmp_path / "a", None)
    (source / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# A model\n")
    export(source, tmp_path / "hf", to="hf")
    export(tmp_path / "hf", tmp_path / "again", to="hf")
    export(tmp_path / "again", tmp_path / "x.gguf", to="gguf")
    export(tmp_path / "x.gguf", tmp_path / "y.gguf", to="gguf")
    export(tmp_path / "y.gguf", tmp_path / "back", to="hf")
    cards = [ModelCard.load(tmp_path / name / "README.md") for name in ("hf", "again", "back")]
    assert [card.data.to_dict()["license"] for card in cards] == 3 * ["mit"]
    stated = [GGUFReader(tmp_path / name).get_field("general.license") for name in ("x.gguf", "y.gguf")]
    assert [field and field.contents() for field in stated] == 2 * ["mit"]
    export(source, tmp_path / "back", to="hf", force=True)


def test_a_model_without_a_tokenizer_is_written_and_it_is_said(tmp_path: Path) -> None:
    told: list[str] = []
    export(folder(tmp_path / "a", None), tmp_path / "x.gguf", to="gguf", note=told.append)
    assert "no tokenizer there" in told[0]
    ids = [5, 6, 7]
    assert greedy(sublayer.load(tmp_path / "x.gguf"), ids, 8) == greedy(sublayer.load(tmp_path / "a"), ids, 8)


@pytest.mark.assets
@pytest.mark.parametrize("published", [smollm2, gemma3])
def test_published_models_written_anew_write_what_llama_cpp_does(published: Callable[[], Path], tmp_path: Path) -> None:
    """The shipped quantised file, dequantised into F32: 64 greedy tokens of five prompts, llama.cpp's cache in F32."""
    with pytest.warns(UserWarning, match="are dequantised"):
        export(published(), tmp_path / "x.gguf", to="gguf")
    ours, theirs = sublayer.load(tmp_path / "x.gguf"), LlamaCpp(tmp_path / "x.gguf")
    tokenizer = load_tokenizer(tmp_path / "x.gguf")
    asked = [
        "The capital of France is",
        "def fibonacci(n):\n",
        "Once upon a time, in a small village,",
        "Water boils at 100 degrees because",
        "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
    ]
    rows = ours.generate([tokenizer.encode(text, framed=True, specials="special") for text in asked],
                         max_tokens=64, temperature=0, tokenizer=tokenizer)  # fmt: skip
    for text, row in zip(asked, rows, strict=True):
        assert theirs.greedy(row.prompt, 64) == [*row.ids], text


# --- what stands there already ---


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_nothing_is_overwritten_unless_it_is_asked_for(to, tmp_path: Path) -> None:
    source, out = folder(tmp_path / "a", Bytes((END,))), tmp_path / f"out.{to}"
    export(source, out, to=to)
    with pytest.raises(UsageError, match="is there already; --force replaces it"):
        export(source, out, to=to)
    other = folder(tmp_path / "other", Bytes((END,)), layers=1)
    export(other, out, to=to, force=True)
    assert len(sublayer.load(out).spec.find("decoder.blocks")) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "other", f"out.{to}"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    source, out = folder(tmp_path / "a", None), tmp_path / "home"
    out.mkdir()
    export(source, out, to="hf")  # an empty one may be filled
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds thesis.txt, which belongs to no checkpoint"):
        export(source, out, to="hf", force=True)
    assert (out / "thesis.txt").read_text() == "mine"


def test_a_model_is_not_written_over_itself(tmp_path: Path) -> None:
    source = folder(tmp_path / "a", None)
    with pytest.raises(UsageError, match="is what is exported"):
        export(source, source, to="hf", force=True)


@pytest.mark.parametrize("to", ["hf", "gguf"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_export_that_is_interrupted_leaves_what_was_there(to, error: type[BaseException], tmp_path: Path) -> None:
    source, out = folder(tmp_path / "a", Bytes((END,))), tmp_path / "out.gguf"

    def stop(what: str, done: int, total: int) -> None:
        if what == "writing" and done > total / 2:
            raise error

    with pytest.raises(error):
        export(source, out, to=to, progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    export(source, out, to=to)
    with pytest.raises(error):
        export(source, out, to=to, progress=stop, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "out.gguf"]
    sublayer.load(out if to == "hf" else out.rename(tmp_path / "out.gguf"))


@pytest.mark.parametrize(("to", "cut"), [("hf", None), ("gguf", None), ("gguf", 30_000)])
def test_what_a_killed_export_left_goes_with_the_next(to, cut: int | None, tmp_path: Path) -> None:
    """The next may be of another number of parts."""
    source, out = folder(tmp_path / "a", Bytes((END,))), tmp_path / "out.gguf"
    code = f"""
import os, signal
from sublayer.weights.context import trained_length, write_trained_length
from sublayer.weights.exports import export
from sublayer.weights.load import read_spec

def kill(what, done, total):
    if what == "writing":
        os.kill(os.getpid(), signal.SIGKILL)

export({str(source)!r}, {str(out)!r}, to={to!r}, shard_size={cut!r}, progress=kill)
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    assert len(list(tmp_path.iterdir())) == 2  # with the half of one
    export(source, out, to=to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "out.gguf"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "onnx"}, 'to=.onnx.: "hf" or "gguf"'),
        ({"to": "hf", "quantize": "q8_0"}, "for gguf"),
        ({"to": "gguf", "shard_size": 0}, "shard_size=0: a number of bytes above 0"),
        ({"to": "gguf", "quantize": "q4_k"}, "one of q8_0, q4_0, .*, q4_k_m, "),
        ({"to": "gguf", "quantize": "f16"}, "f32, f16 and bf16 are chosen as dtype"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        export(folder(tmp_path / "a", None), tmp_path / "out.gguf", **options)


def test_what_no_format_expresses_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    sublayer.save(tiny().override("decoder.blocks.*.attn.op.softcap=30.0").build(), tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").write_bytes(b"")
    for to in ("hf", "gguf"):
        with pytest.raises(SpecError, match="softcap is None, not 30.0"):
            export(tmp_path / "a", tmp_path / "out.gguf", to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
