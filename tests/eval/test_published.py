"""A published model's code length of texts, beside transformers on the same dequantised weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import sublayer
from sublayer.eval import Texts, begin_token, score
from sublayer.text import load_tokenizer
from sublayer.weights.context import trained_length
from tests.assets.gguf_files import smollm2
from tests.eval.slow import code_length
from tests.oracle import raised

TEXTS = (
    "The river rises in the hills and falls to the sea. Along it lie towns that lived by the mill and by the ferry.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "Größe ist keine Frage der Länge.",
)


@pytest.mark.assets
@pytest.mark.filterwarnings("ignore:.*are dequantised")
def test_a_published_model_has_the_code_length_that_transformers_finds() -> None:
    path = smollm2()
    tokenizer = load_tokenizer(path)
    begin = begin_token(path, tokenizer)
    assert begin == 1
    model = sublayer.load(path, dtype=torch.float64)
    assert trained_length(path, model.spec) == 8192
    found = score(model, Texts.encode(TEXTS, tokenizer, begin), length=24, stride=12)
    del model
    with raised():
        theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        theirs = theirs.double().eval()
        nats, tokens = code_length(theirs, [[begin, *tokenizer.encode(text)] for text in TEXTS], 24, 12)
    assert (found.nats, found.tokens) == (pytest.approx(nats, rel=1e-6), tokens)
    assert found.bytes == sum(len(text.encode()) for text in TEXTS)
    print(f"\n{found.bits_per_byte:.4f} bits per byte, {found.nats / nats - 1:.1e} of the code length apart")
