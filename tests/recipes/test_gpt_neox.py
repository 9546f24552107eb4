"""GPT-NeoX against transformers."""

import pytest
import torch
from transformers import GPTNeoXConfig

from sublayer.errors import SpecError
from sublayer.recipes import from_hf, to_hf
from sublayer.recipes.gpt_neox import TINY, gpt_neox
from tests.oracle import check_base, check_export, check_geometry, check_parity, oracle

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIG = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 97}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5, "partial_rotary_factor": 1.0}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_parallel_residual": False},
        {"attention_bias": False, "tie_word_embeddings": True},
        {"layer_norm_eps": 1e-2, "num_attention_heads": 4, "hidden_size": 64},
        {"rope_parameters": HALF},
        {"rope_parameters": LINEAR},
        *({"hidden_act": name} for name in ("gelu_new", "relu", "silu")),
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    ours = check_parity(oracle(GPTNeoXConfig, **changes), tmp_path, IDS)
    assert ours.spec.find("decoder.blocks.0.parallel") == changes.get("use_parallel_residual", True)


def test_padded_and_packed_rows_equal_theirs(tmp_path) -> None:
    check_geometry(GPTNeoXConfig, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_parallel_residual": False, "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "relu"},
     {"rope_parameters": LINEAR, "layer_norm_eps": 1e-2}],
    ids=str,
)  # fmt: skip
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(GPTNeoXConfig, tmp_path, **changes)


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    check_base(GPTNeoXConfig, tmp_path, IDS)


def test_the_older_spelling_of_rotary_positions_is_the_same_spec() -> None:
    older = {"rotary_pct": 0.5, "rotary_emb_base": 500, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    assert from_hf(CONFIG | older)[0] == from_hf(CONFIG | {"rope_parameters": HALF})[0]


def test_what_the_file_does_not_say_is_what_their_config_class_says() -> None:
    assert from_hf(CONFIG)[0] == gpt_neox(**TINY)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("made_up_key", 1),
        ("num_key_value_heads", 1),
        ("hidden_act", "swish"),
        ("rotary_pct", 1.5),
        ("rotary_pct", "all"),
        ("rotary_pct", True),
        ("rotary_emb_base", 0),
        ("rope_scaling", {"type": "spiral", "factor": 2.0}),
        ("use_parallel_residual", "yes"),
        ("hidden_dropout_prob", 0.1),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object) -> None:
    ours = {"rotary_emb_base": "theta", "use_parallel_residual": "parallel"}
    with pytest.raises(SpecError, match=ours.get(key, key)) as caught:
        from_hf(CONFIG | {key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    ["decoder.blocks.0.parallel=false", "decoder.blocks.*.attn.op.window=4", "decoder.blocks.*.attn.op.kv_heads=1",
     "decoder.blocks.*.ffn.dropout=0.1"],
)  # fmt: skip
def test_a_model_that_no_class_of_theirs_has_is_not_exported(change: str) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(gpt_neox(**TINY).override(change))


@pytest.mark.parametrize(
    ("name", "std"),
    [("embed.tokens", (2 / 1280) ** 0.5), ("blocks.1.attn.op.q", (2 / 1280) ** 0.5),
     ("blocks.1.attn.op.out", 2 / 64), ("blocks.3.ffn.op.down", 2 / 64)],
)  # fmt: skip
def test_new_models_begin_as_the_authors_configurations_say(name: str, std: float) -> None:
    model = gpt_neox(256, 4, 4, 1024, vocab=512).build()
    weight = model.get_parameter(f"decoder.{name}.weight")
    assert abs(weight.std().item() / std - 1) < 0.02
