"""Published GGUF files: the logits of transformers on the same dequantised weights, and llama.cpp beside them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import sublayer
from sublayer.decoding import generate
from sublayer.text import load_tokenizer
from tests.assets.gguf_files import gemma3, smollm2
from tests.llama_cpp import LlamaCpp
from tests.oracle import raised

FILES = {"SmolLM2-135M": smollm2, "Gemma 3 270M": gemma3}
TEXTS = (
    "The river rises in the hills and falls to the sea. Along it lie towns that lived by the mill, by the tannery and "
    "by the ferry, and every one of them still holds a market in the square before its church on the first of May.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total / len(",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils earlier, because the air there is",
)

pytestmark = [pytest.mark.assets, pytest.mark.filterwarnings("ignore:.*are dequantised")]


@pytest.fixture(scope="module", params=FILES)
def path(request: pytest.FixtureRequest) -> Path:
    return FILES[request.param]()


def test_a_published_gguf_file_has_the_logits_of_transformers(path: Path) -> None:
    ids = torch.tensor([load_tokenizer(path).encode("The capital of France is Paris, on the Seine.", framed=True)])
    given = load_gguf_checkpoint(str(path))["config"]
    config = AutoConfig.for_model(**given)
    config._attn_implementation = "eager"
    with raised():
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)["tensors"]
    report = theirs.load_state_dict(tensors, strict=False, assign=True)
    assert (report.missing_keys, report.unexpected_keys) == (["lm_head.weight"], [])
    theirs.tie_weights()
    theirs.double()
    with torch.no_grad(), raised():
        expected = theirs(ids).logits
    del theirs, tensors
    with torch.no_grad():
        found = sublayer.load(path, dtype=torch.float64)(ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_llama_cpp_predicts_much_the_same(path: Path) -> None:
    """It rounds activations to 8 bits before a product with quantised weights, so the two cannot agree to the bit."""
    model, tokenizer, theirs = sublayer.load(path), load_tokenizer(path), LlamaCpp(path)
    asked = tokenizer.encode("The capital of France is", framed=True)
    (said,) = generate(model, [asked], tokenizer=tokenizer, temperature=0, max_tokens=2)
    assert list(said.ids) == theirs.greedy(asked, 2)
    assert said.text == {"S": " Paris.", "g": " the capital"}[path.name[0]]
    divergences, agreements = [], []
    for text in TEXTS:
        ids = tokenizer.encode(text, framed=True)
        with torch.no_grad():
            ours = model(torch.tensor([ids]))[0].double().log_softmax(-1)
        for end in range(4, len(ids)):
            other = theirs.log_probabilities(ids[:end], len(ours[0]), best=200)
            divergences.append(divergence(other, ours[end - 1]))
            agreements.append(float(other.nan_to_num(-torch.inf).argmax() == ours[end - 1].argmax()))
    mean, same = sum(divergences) / len(divergences), sum(agreements) / len(agreements)
    print(f"\n{path.name}: {len(divergences)} tokens, mean KL {mean:.5f}, top-1 {same:.1%}")
    assert mean < 0.02
    assert same > 0.93


def divergence(some: Tensor, every: Tensor) -> float:
    """KL from a distribution of which only the best are known, the rest being one event more; that makes it smaller,
    if at all."""
    known = ~some.isnan()
    p, q = ([*one[known].exp().tolist()] for one in (some, every))
    p, q = ([*one, max(1 - sum(one), 1e-12)] for one in (p, q))
    return float(sum(a * torch.tensor(a / b).log() for a, b in zip(p, q, strict=True)))
