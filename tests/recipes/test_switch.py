"""Switch Transformer against transformers."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

import sublayer
from sublayer.errors import SpecError
from sublayer.nn.moe import MoEOp
from sublayer.recipes import from_hf, switch
from sublayer.recipes.switch import TINY
from sublayer.step import Step
from tests.oracle import check_parity, close, export, oracle, raised, saved

SIZES: dict[str, Any] = {
    "vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 3,
    "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
}  # fmt: skip
CONFIG = {
    "architectures": ["SwitchTransformersForConditionalGeneration"], "model_type": "switch_transformers"
} | SIZES  # fmt: skip
IDS = torch.randint(61, (2, 15), generator=torch.Generator().manual_seed(1))
SOURCE = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(2))


def tiny(**changes: Any) -> PreTrainedModel:
    theirs: Any = oracle(SwitchTransformersConfig, made=SwitchTransformersForConditionalGeneration, **SIZES | changes)
    with torch.no_grad():
        theirs.shared.weight.mul_(5)  # tokens differ enough for each expert to be chosen
    return theirs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"expert_capacity": 3},  # many tokens are dropped
        {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
        {"router_bias": True, "dense_act_fn": "gelu_new", "layer_norm_epsilon": 1e-2},
        {"num_decoder_layers": 4, "num_sparse_decoder_layers": 1},
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    ours = check_parity(tiny(**changes), tmp_path, IDS, source=SOURCE)
    if "expert_capacity" in changes:
        free = ours.spec.override("encoder.blocks.1.ffn.op.router.capacity=64").empty(dtype=torch.float64)
        free.load_state_dict(ours.state_dict())
        assert (free.eval()(IDS, source=SOURCE) - ours(IDS, source=SOURCE)).abs().max() > 1e-4


def test_right_padded_sources_and_targets_equal_theirs(tmp_path) -> None:
    """Padding at the left takes room in theirs, and none in ours."""
    heard = torch.tensor([[1] * 19, [1] * 7 + [0] * 12])
    read = torch.tensor([[1] * 11 + [0] * 4, [1] * 15])
    step = Step(segment=read, memory_segment=heard)
    masks = {"attention_mask": heard, "decoder_attention_mask": read}
    check_parity(tiny(expert_capacity=4), tmp_path, IDS, step, read.bool(), SOURCE, **masks)


def test_auxiliary_losses_are_theirs_where_one_layer_of_a_trunk_has_them(tmp_path) -> None:
    """Theirs balances row by row, the paper and ours a whole call: so there is one row."""
    theirs = tiny()
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    for module in ours.modules():
        if isinstance(module, MoEOp):
            module.training = True
            module.spec = module.spec.override("router.jitter=0.0")
    with raised():
        found = theirs(SOURCE[:1], decoder_input_ids=IDS[:1], use_cache=False, output_router_logits=True)
    _, extras = ours(IDS[:1], source=SOURCE[:1])
    close(extras["balance"], 0.001 * (found.encoder_aux_loss + found.decoder_aux_loss))
    close(extras["router_z"], 0.001 * (found.encoder_z_loss + found.decoder_z_loss))


@pytest.mark.parametrize("changes", [{}, {"num_decoder_layers": 4, "router_bias": True}], ids=str)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    export(tiny(**changes), tmp_path, IDS, SOURCE, SwitchTransformersForConditionalGeneration)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("made_up_key", 1),
        ("router_dtype", "bfloat16"),
        ("dense_act_fn", "mish"),
        ("num_sparse_encoder_layers", 3),
        ("encoder_sparse_step", 1),
        ("is_gated_act", True),
        ("tie_word_embeddings", False),
        ("num_experts", 0),
        ("expert_capacity", 0),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object) -> None:
    with pytest.raises(SpecError, match=key) as caught:
        from_hf(CONFIG | {key: value})
    assert "\n" not in str(caught.value)


def test_which_layers_have_experts() -> None:
    def sparse(**changes: Any) -> list[list[int]]:
        sizes: dict[str, Any] = TINY | {"layers": 6} | changes
        spec = switch(**sizes)
        return [
            [i for i, block in enumerate(spec.find(f"{trunk}.blocks")) if hasattr(block.sublayers[-1].op, "router")]
            for trunk in ("encoder", "decoder")
        ]

    assert sparse() == [[1, 3, 5]] * 2
    assert sparse(every=1, decoder_every=3) == [[0, 1, 2, 3, 4, 5], [1, 4]]
    with pytest.raises(SpecError, match="one layer of how many"):
        sparse(every=0)
