"""Code lengths of texts against transformers on the same windows, and against one token at a time."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import sublayer
from sublayer.errors import InputError, UsageError
from sublayer.eval import Texts, begin_token, score
from sublayer.nn.sublayer import Model
from sublayer.recipes import bert, gpt2, llama, mamba, t5
from sublayer.text import Bytes, Characters, load_tokenizer, train_bpe
from sublayer.train.evaluate import Score
from sublayer.weights.context import trained_length
from tests.eval.slow import code_length

LENGTH = 16
MODELS = {
    "gpt2": gpt2(32, 2, 4, vocab=257, context=LENGTH),
    "llama": llama(32, 2, 4, 2, hidden=64, vocab=257),
}
TEXTS = [
    "One.",
    "Größe",
    "",
    "a longer text, which takes several windows: " * 2,
    "x",
    "the last one is not short either",
]
BYTES = Bytes(("<|end|>",))
END = BYTES.eos[0]


def ours(model: torch.nn.Module, **windows: int) -> Score:
    return score(model, Texts.encode(TEXTS, BYTES, END), **windows)  # pyright: ignore[reportArgumentType]


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    sublayer.save(MODELS[request.param].build(seed=1), tmp_path, layout="hf")
    return tmp_path


@torch.no_grad()
@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 8), (13, 3), (5, 2)])
def test_code_lengths_are_those_of_transformers_on_the_same_windows(folder: Path, length: int, stride: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    documents = [[END, *text.encode()] for text in TEXTS if text]
    nats, tokens = code_length(model, documents, length, stride)
    found = ours(sublayer.load(folder, dtype=torch.float64), length=length, stride=stride)
    assert found.nats == pytest.approx(nats, rel=1e-6)
    assert found.tokens == tokens == sum(len(text.encode()) for text in TEXTS)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / tokens, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("spec", [*MODELS.values(), mamba(32, 2, vocab=257)], ids=["gpt2", "llama", "mamba"])
def test_a_stride_of_one_is_one_token_at_a_time(spec: Model) -> None:
    model, nats = spec.build(seed=1, dtype=torch.float64), 0.0
    for text in filter(None, TEXTS):
        ids = [END, *text.encode()]
        for i in range(1, len(ids)):
            logits = model(torch.tensor([ids[max(0, i - 7) : i]]))[0, -1]
            nats -= float(logits.log_softmax(-1)[ids[i]])
    assert ours(model, length=7, stride=1).nats == pytest.approx(nats, rel=1e-9)


def test_bits_per_byte_are_of_bytes_and_bits_per_token_of_tokens() -> None:
    tokenizer = train_bpe(["größer und größer und größer"] * 8, 265, end="<|end|>")
    texts = Texts.encode(["größer und größer"], tokenizer, tokenizer.eos[0])
    found = score(llama(32, 1, 4, 2, hidden=64, vocab=tokenizer.size).build(), texts, length=8)
    ids = tokenizer.encode("größer und größer")
    assert (found.bytes, found.tokens) == (len("größer und größer".encode()), len(ids))
    assert found.tokens < found.bytes
    assert found.bits * found.tokens == pytest.approx(found.bits_per_byte * found.bytes)
    assert found.bits == pytest.approx(found.nats / found.tokens / math.log(2))


def test_without_a_token_that_begins_texts_their_first_tokens_are_not_asked_and_not_counted() -> None:
    tokenizer = Characters.train(["äbc"])
    texts = Texts.encode(["äb", "cb", "ä"], tokenizer, begin_token(Path("nowhere"), tokenizer))
    found = score(llama(32, 1, 4, 2, hidden=64, vocab=tokenizer.size).build(), texts, length=4)
    assert (found.tokens, found.bytes) == (2, 2)
    with pytest.raises(InputError, match="no token of text"):
        Texts.encode(["ä", ""], tokenizer, None)


def test_a_model_is_in_its_former_mode_afterwards() -> None:
    model = MODELS["llama"].build().train()
    model.get_submodule("decoder.blocks.0.ffn").eval()  # as a part that is not trained
    before = [module.training for module in model.modules()]
    ours(model, length=16)
    assert [module.training for module in model.modules()] == before


def test_progress_ends_with_all(folder: Path) -> None:
    told: list[tuple[int, int, float]] = []
    texts = Texts.encode(["abc " * 5000], BYTES, END)
    score(sublayer.load(folder), texts, length=16, progress=lambda *what: told.append(what))
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == (20_000, 20_000, 1.0)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (t5(32, 1, 4, hidden=64, vocab=257), "given its source"),
        (bert(32, 1, 4, vocab=257), "from both sides"),
        (MODELS["llama"].replace(head=None), "no head"),
        (MODELS["llama"].override("decoder.blocks.0.attn.op.causal=false"), "not causal"),
    ],
    ids=["encoder-decoder", "encoder", "headless", "sighted"],
)
def test_models_that_give_no_probability_are_refused_with_the_reason(spec: Model, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        ours(spec.build(), length=8)


def test_windows_that_cannot_be_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="stride"):
        ours(sublayer.load(folder), length=8, stride=9)
    with pytest.raises(UsageError, match="16 positions"):
        ours(MODELS["gpt2"].build(), length=17)
    with pytest.raises(UsageError, match="id 256 is beyond the model's 200 ids"):
        ours(llama(32, 1, 4, 2, hidden=64, vocab=200).build(), length=8)


def test_texts_begin_with_what_frames_them_else_the_bos_token_else_the_one_that_ends_them(tmp_path: Path) -> None:
    train_bpe(["some text " * 8], 261, end="<|end|>", specials=("<|start|>",)).save(tmp_path)
    framed = load_tokenizer(tmp_path)
    (end,), (start,) = framed.eos, framed.encode("<|start|>", specials="special")
    path, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": "<|start|>", "eos_token": "<|end|>"}))
    assert begin_token(tmp_path, load_tokenizer(tmp_path)) == end  # before each text, by itself
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    assert begin_token(tmp_path, load_tokenizer(tmp_path)) == start
    config.write_text(json.dumps({"eos_token": "<|end|>"}))
    assert begin_token(tmp_path, load_tokenizer(tmp_path)) == end
    assert begin_token(tmp_path, Bytes()) is None


def test_how_long_a_text_a_model_was_made_for(folder: Path, tmp_path: Path) -> None:
    spec = sublayer.load(folder).spec
    assert trained_length(folder, spec) == spec.context
    if spec.context is None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131_072}))
        assert trained_length(folder, spec) == 131_072
    own = tmp_path / "run" / "model"
    sublayer.save(MODELS["llama"].build(), own)
    assert trained_length(own, MODELS["llama"]) is None
    (tmp_path / "run" / "run.json").write_text('{"data": {"length": 77}}')
    assert trained_length(own, MODELS["llama"]) == 77
