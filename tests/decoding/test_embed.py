"""Vectors of texts: what a model's head makes of each, and what folders of sentence-transformers say about it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sublayer.decoding import Pooling, embed, read_pooling
from sublayer.errors import InputError, SpecError, UsageError
from sublayer.nn.head import Pooled
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import bert, t5
from sublayer.recipes.bert import TINY
from sublayer.recipes.t5 import TINY as T5_TINY
from sublayer.text import load_tokenizer
from sublayer.text.tokenizer import Tokenizer
from tests.decoding.models import SPECS, tiny
from tests.text.control import tokenizer_folder

TEXTS = ["the second is longer than the first", "a", "so", "", "so"]
BEGIN, END = 256, 257


@pytest.fixture(scope="module")
def model() -> ModelOp:
    return tiny(bert(**{**TINY, "vocab": 260}), torch.float32, 3.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), framed=True))


@torch.no_grad()
def alone(model: ModelOp, ids: list[int], pool: str) -> torch.Tensor:
    """Of one text, from the hidden vectors of its tokens."""
    hidden = model(torch.tensor([ids]), output="hidden")[0]
    return {"first": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[pool]


@pytest.mark.parametrize("batch", [1, 3, 32])
@pytest.mark.parametrize("pool", ["first", "mean", "last"])
def test_each_text_has_its_vector_in_its_place(model: ModelOp, tokenizer: Tokenizer, pool: Any, batch: int) -> None:
    done: list[tuple[int, int, float]] = []
    found = embed(
        model, tokenizer, TEXTS, Pooling(pool, normalise=False, prefix="q: "), batch=batch,
        progress=lambda *seen: done.append(seen),
    )  # fmt: skip
    rows = [[BEGIN, *tokenizer.encode("q: " + text), END] for text in TEXTS]
    torch.testing.assert_close(found, torch.stack([alone(model, row, pool) for row in rows]), rtol=0, atol=1e-5)
    assert done[-1] == (5, 5, 1.0)
    unit = embed(model, tokenizer, TEXTS, Pooling(pool, prefix="q: "), batch=batch)
    torch.testing.assert_close(unit, torch.nn.functional.normalize(found, dim=-1))


def test_a_decoder_is_read_by_its_last_token(tokenizer: Tokenizer) -> None:
    model = tiny(SPECS["llama"].override("decoder.embed.vocab=260"), torch.float32)
    found = embed(model, tokenizer, TEXTS, Pooling("last", normalise=False))
    rows = [tokenizer.encode(text, framed=True) for text in TEXTS]
    torch.testing.assert_close(found, torch.stack([alone(model, row, "last") for row in rows]), rtol=1e-4, atol=1e-5)


def test_a_model_whose_head_pools_needs_no_more(model: ModelOp, tokenizer: Tokenizer) -> None:
    own = model.with_head(Pooled("mean"))
    torch.testing.assert_close(
        embed(own, tokenizer, TEXTS), embed(model, tokenizer, TEXTS, Pooling("mean", normalise=False))
    )


def test_longer_texts_are_cut_keep_their_end_and_are_counted(model: ModelOp, tokenizer: Tokenizer) -> None:
    with pytest.warns(UserWarning, match="1 of 2 texts have more than 5 tokens: cut"):
        found = embed(model, tokenizer, ["abcdef", "abc"], Pooling("mean", length=5))
    torch.testing.assert_close(found[0], found[1])


def test_what_cannot_be_read_is_refused(model: ModelOp, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="head does not pool"):
        embed(model, tokenizer, ["a"])
    with pytest.raises(UsageError, match="an encoder alone"):
        embed(t5(**T5_TINY).build(), tokenizer, ["a"], Pooling())
    with pytest.raises(InputError, match="text 1: 72 tokens are more than the 64 positions"):
        embed(model, tokenizer, ["a", "b" * 70], Pooling())
    with pytest.raises(UsageError, match="batch is at least 1"):
        embed(model, tokenizer, ["a"], Pooling(), batch=0)


# --- folders of sentence-transformers ---

MODES = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def write(folder: Path, modules: Any = ("Transformer", "Pooling", "Normalize"), **modes: bool) -> Path:
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    listed = [{"type": f"sentence_transformers.models.{one}", "path": paths.get(one, f"2_{one}")} for one in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(MODES | modes))
    return folder


def test_what_a_folder_says(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None
    write(tmp_path)
    assert read_pooling(tmp_path) == Pooling("mean", normalise=True)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": false}')
    texts = {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "passage"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(texts))
    assert read_pooling(tmp_path) == Pooling("mean", normalise=True, length=256, prefix="passage: ")


@pytest.mark.parametrize(
    ("modes", "pool"), [("pooling_mode_cls_token", "first"), ("pooling_mode_lasttoken", "last")]
)  # fmt: skip
def test_kinds_of_pooling(modes: str, pool: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, ("Transformer", "Pooling"), **{"pooling_mode_mean_tokens": False, modes: True})
    assert read_pooling(folder) == Pooling(pool, normalise=False)


@pytest.mark.parametrize(
    ("modules", "modes", "reason"),
    [
        (("Transformer", "Pooling", "Dense"), {}, "modules.json: Dense is not modelled"),
        (("Transformer",), {}, "modules.json: it has no pooling"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True},
         "pooling_mode_mean_tokens and pooling_mode_max_tokens is not modelled"),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": False}, "no kind of pooling is not modelled"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused(modules: Any, modes: dict, reason: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=reason):
        read_pooling(write(tmp_path, modules, **modes))


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        ("[1]", "expected a list of modules"),
        ("[", "expected a list of modules"),
        ('[{"type": "a.Pooling", "path": "../elsewhere"}]', "'../elsewhere' is no folder beside it"),
    ],
)
def test_a_list_of_modules_that_is_none_is_refused(listed: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(listed)
    with pytest.raises((InputError, SpecError), match=reason):
        read_pooling(tmp_path)
