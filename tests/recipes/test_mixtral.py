"""Mixtral against transformers."""

import pytest
import torch
from transformers import MixtralConfig

import sublayer
from sublayer.errors import SpecError
from sublayer.recipes import from_hf, mixtral, to_hf
from sublayer.recipes.mixtral import TINY
from sublayer.step import Step
from tests.oracle import (
    PADDED,
    check_base,
    check_export,
    check_geometry,
    check_parity,
    close,
    oracle,
    positions,
    raised,
    saved,
)

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))


def config(**changes: object) -> dict:
    return {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 97, "hidden_size": 32,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_local_experts": 4,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts_per_tok": 4},
        {"sliding_window": 5},
        {"head_dim": 12, "tie_word_embeddings": True, "rms_norm_eps": 1e-2, "hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(MixtralConfig, **changes), tmp_path, IDS)


def test_with_one_expert_a_token_the_answers_are_theirs(tmp_path) -> None:
    """Its weight is divided by itself, so that no gradient but rounding reaches the router on either side."""
    theirs = oracle(MixtralConfig, num_experts_per_tok=1)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    with raised():
        close(ours(IDS), theirs(IDS, use_cache=False).logits)


@pytest.mark.parametrize("padded", [False, True])
def test_the_balance_loss_is_theirs_where_one_layer_has_it(padded: bool, tmp_path) -> None:
    """Theirs takes means over all layers at once, the paper and ours layer by layer."""
    theirs = oracle(MixtralConfig, num_hidden_layers=1, router_aux_loss_coef=0.5, output_router_logits=True)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64).train()
    mask = {"attention_mask": PADDED, "position_ids": positions(PADDED)} if padded else {}
    with raised():
        expected = 0.5 * theirs(IDS, use_cache=False, **mask).aux_loss
    _, extras = ours(IDS, Step(segment=PADDED) if padded else None)
    assert extras.keys() == {"balance"}
    close(extras["balance"], expected)
    expected.backward()
    extras["balance"].backward()
    found = ours.get_parameter("decoder.blocks.0.ffn.op.router.weight").grad
    wanted = theirs.get_parameter("model.layers.0.mlp.gate.weight").grad
    assert found is not None
    assert wanted is not None
    close(found, wanted)


def test_the_balance_loss_weighs_as_much_as_theirs_over_three_layers(tmp_path) -> None:
    """Where every layer spreads the tokens alike, the loss of all is that of each: theirs is a mean, ours a sum."""
    theirs = oracle(MixtralConfig, num_hidden_layers=3, router_aux_loss_coef=0.5, output_router_logits=True)
    for name, weight in theirs.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight.data.zero_()
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64).train()
    with raised():
        expected = 0.5 * theirs(IDS, use_cache=False).aux_loss
    close(ours(IDS)[1]["balance"], expected)


def test_padded_and_packed_rows_equal_theirs(tmp_path) -> None:
    check_geometry(MixtralConfig, tmp_path)


@pytest.mark.parametrize("changes", [{}, {"head_dim": 12, "tie_word_embeddings": True, "sliding_window": 4}], ids=str)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(MixtralConfig, tmp_path, **changes)


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    check_base(MixtralConfig, tmp_path, IDS)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("made_up_key", 1, "made_up_key"),
        ("router_jitter_noise", 0.1, "router_jitter_noise"),
        ("num_local_experts", 0, "num_local_experts"),
        ("num_experts_per_tok", 5, "router.active=5 is above the 4 to choose from"),
        ("num_experts_per_tok", 2.0, "num_experts_per_tok"),
        ("hidden_act", "swish_beta", "hidden_act"),
        ("router_aux_loss_coef", -1.0, "balance_loss must be at least 0"),
        ("attention_bias", True, "attention_bias"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        from_hf(config(**{key: value}))
    assert "\n" not in str(caught.value)


def test_absent_keys_mean_what_their_config_class_says() -> None:
    spec = from_hf(config() | {"num_key_value_heads": None})[0]
    assert spec.find("decoder.blocks.0.attn.op.kv_heads") == 4
    assert spec.find("decoder.blocks.0.attn.op.position.theta") == MixtralConfig.default_theta
    assert spec.find("decoder.blocks.0.ffn.op.router.active") == MixtralConfig().num_experts_per_tok
    assert spec.find("decoder.blocks.0.ffn.op.router.balance_loss") == MixtralConfig().router_aux_loss_coef / 2


@pytest.mark.parametrize("change", ["router.renormalise=false", "router.z_loss=0.1", "router.capacity=4",
                                    'shared={"spec": "FeedForward", "hidden": 4}', "expert.bias=true"])  # fmt: skip
def test_a_model_that_no_class_of_theirs_has_is_not_exported(change: str) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(mixtral(**TINY).override(f"decoder.blocks.*.ffn.op.{change}"))
