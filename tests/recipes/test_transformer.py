"""The Transformer against Marian, and against the paper's formulas where Marian differs from it."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MarianConfig, MarianModel, MarianMTModel

import sublayer
from sublayer.errors import SpecError
from sublayer.nn.sublayer import Model
from sublayer.recipes import to_hf
from sublayer.recipes.transformer import TINY, from_hf, transformer
from sublayer.step import Step
from tests.case import assert_near, roughen
from tests.oracle import check_parity, close, export, oracle, raised, saved

SIZES: dict[str, Any] = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 60, "decoder_start_token_id": 60,
}  # fmt: skip
CONFIG = {"architectures": ["MarianMTModel"], "model_type": "marian"} | SIZES
IDS = torch.randint(60, (2, 12), generator=torch.Generator().manual_seed(1))
SOURCE = torch.randint(60, (2, 15), generator=torch.Generator().manual_seed(2))


def tiny(made: Any = MarianMTModel, **changes: Any) -> Any:
    """Theirs with its sinusoids in fp64 (they are rounded to fp32 when made), and a bias of logits that trains."""
    theirs: Any = oracle(MarianConfig, made=made, **SIZES | changes)
    table = torch.stack([sinusoid(pos, 32) for pos in range(64)])
    halves = torch.cat([table[:, 0::2], table[:, 1::2]], 1)
    for trunk in (theirs.get_encoder(), theirs.get_decoder()):
        del trunk.embed_positions.weight  # a parameter that never trains
        trunk.embed_positions.register_buffer("weight", halves.clone())
    if made is MarianMTModel:
        drawn = torch.randn(theirs.final_logits_bias.shape, generator=torch.Generator().manual_seed(3)).double()
        del theirs.final_logits_bias
        theirs.final_logits_bias = nn.Parameter(drawn)
    return theirs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scale_embedding": True, "activation_function": "swish"},
        {"decoder_layers": 1, "encoder_layers": 3, "activation_function": "relu"},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 67},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 67, "tie_word_embeddings": False},
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_marian(changes: dict, tmp_path) -> None:
    ours = check_parity(tiny(**changes), tmp_path, IDS, source=SOURCE)
    assert ours.spec.shared == ("decoder_vocab_size" not in changes)
    assert ours.spec.tied == ("tie_word_embeddings" not in changes)


def test_padded_sources_and_targets_equal_marian(tmp_path) -> None:
    heard = torch.tensor([[1] * 15, [1] * 7 + [0] * 8])
    read = torch.tensor([[1] * 9 + [0] * 3, [1] * 12])
    step = Step(segment=read, memory_segment=heard)
    masks = {"attention_mask": heard, "decoder_attention_mask": read}
    check_parity(tiny(), tmp_path, IDS, step, read.bool(), SOURCE, **masks)


@pytest.mark.parametrize("changes", [{}, {"scale_embedding": True, "activation_function": "swish"}], ids=str)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    theirs = tiny(**changes)
    export(theirs, tmp_path, IDS, SOURCE, _Reader)


class _Reader(MarianMTModel):
    """Theirs, with its sinusoids in fp64 again."""

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        found: Any = MarianMTModel.from_pretrained(*args, **options)
        (model, report), exact = found, tiny()
        for trunk, other in ((model.get_encoder(), exact.get_encoder()), (model.get_decoder(), exact.get_decoder())):
            del trunk.embed_positions.weight
            trunk.embed_positions.register_buffer("weight", other.embed_positions.weight)
        return model, report


def test_the_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    theirs = tiny(MarianModel)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    with raised():
        expected = theirs(SOURCE, decoder_input_ids=IDS, use_cache=False).last_hidden_state
    close(ours(IDS, source=SOURCE), expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder_ffn_dim", 40),
        ("decoder_attention_heads", 2),
        ("normalize_before", True),
        ("normalize_embedding", True),
        ("add_final_layer_norm", True),
        ("static_position_embeddings", False),
        ("encoder_layerdrop", 0.1),
        ("decoder_vocab_size", 60),
        ("activation_function", "mish"),
        ("tie_word_embeddings", False),
        ("is_encoder_decoder", False),
        ("rope_theta", 1e4),
        ("encoder_layers", 0),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(SpecError, match=key) as caught:
        from_hf(CONFIG | {key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"sinusoids": "interleaved"}, {"norm_first": True}, {"head_bias": False}], ids=str)
def test_the_papers_own_form_has_no_class_of_theirs(changes: dict) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(transformer(**dict[str, Any](TINY, **changes)))


# --- the paper ---


def sinusoid(pos: int, dim: int) -> Tensor:
    """Section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i / D)), PE(pos, 2i + 1) = cos of the same."""
    angles = [pos / 10000 ** (2 * i / dim) for i in range(dim // 2)]
    return torch.tensor([f(a) for a in angles for f in (math.sin, math.cos)], dtype=torch.float64)


class Naive:
    """The model of the paper for one sentence pair, head by head."""

    def __init__(self, spec: Model, weights: Mapping[str, Tensor], norm_first: bool) -> None:
        self.dim, self.weights, self.first = spec.dim, weights, norm_first
        self.layers, self.heads = len(spec.find("encoder.blocks")), spec.find("decoder.blocks.0.attn.op.heads")

    def __call__(self, ids: Tensor, source: Tensor) -> Tensor:
        memory, x = self.embed(source), self.embed(ids)
        future = torch.full((len(ids), len(ids)), -torch.inf, dtype=torch.float64).triu(1)
        for i in range(self.layers):
            at = f"encoder.blocks.{i}"
            memory = self.add(f"{at}.attn", memory, lambda x, at=at: self.attention(f"{at}.attn.op", x, x, 0.0))
            memory = self.add(f"{at}.ffn", memory, lambda x, at=at: self.feed_forward(f"{at}.ffn.op", x))
        memory = self.norm("encoder.norm", memory) if self.first else memory
        for i in range(self.layers):
            at = f"decoder.blocks.{i}"
            x = self.add(f"{at}.attn", x, lambda x, at=at: self.attention(f"{at}.attn.op", x, x, future))
            x = self.add(f"{at}.cross", x, lambda x, at=at: self.attention(f"{at}.cross.op", x, memory, 0.0))
            x = self.add(f"{at}.ffn", x, lambda x, at=at: self.feed_forward(f"{at}.ffn.op", x))
        x = self.norm("decoder.norm", x) if self.first else x
        return x @ self.weights["decoder.embed.tokens.weight"].T

    def embed(self, ids: Tensor) -> Tensor:
        waves = torch.stack([sinusoid(pos, self.dim) for pos in range(len(ids))])
        return math.sqrt(self.dim) * self.weights["decoder.embed.tokens.weight"][ids] + waves

    def add(self, at: str, x: Tensor, layer: Any) -> Tensor:
        if self.first:
            return x + layer(self.norm(f"{at}.pre", x))
        return self.norm(f"{at}.after", x + layer(x))

    def norm(self, at: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * self.weights[f"{at}.weight"] + self.weights[f"{at}.bias"]

    def linear(self, at: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{at}.weight"].T + self.weights[f"{at}.bias"]

    def attention(self, at: str, x: Tensor, memory: Tensor, hidden: Tensor | float) -> Tensor:
        q, k, v = self.linear(f"{at}.q", x), self.linear(f"{at}.k", memory), self.linear(f"{at}.v", memory)
        size = self.dim // self.heads
        heads = [slice(n * size, (n + 1) * size) for n in range(self.heads)]
        read = [(q[:, h] @ k[:, h].T / math.sqrt(size) + hidden).softmax(-1) @ v[:, h] for h in heads]
        return self.linear(f"{at}.out", torch.cat(read, -1))

    def feed_forward(self, at: str, x: Tensor) -> Tensor:
        return self.linear(f"{at}.down", self.linear(f"{at}.up", x).relu())


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [False, True])
def test_logits_equal_the_papers_formulas(norm_first: bool) -> None:
    changes = {"sinusoids": "interleaved", "head_bias": False, "norm_first": norm_first}
    model = transformer(**dict[str, Any](TINY, **changes)).build(1, dtype=torch.float64).eval()
    roughen(model)
    naive = Naive(model.spec, dict(model.named_parameters()), norm_first)
    assert_near(model(IDS[:1], source=SOURCE[:1])[0], naive(IDS[0], SOURCE[0]), 1e-10)


def test_new_tokens_are_near_one_once_scaled() -> None:
    model = transformer(256, 1, 4, 512, 1000).build(0)
    assert model.get_parameter("decoder.embed.tokens.weight").std().item() * 16 == pytest.approx(1, rel=0.05)
    assert model.get_parameter("encoder.blocks.0.ffn.op.down.weight").std().item() == pytest.approx(512**-0.5, rel=0.05)
