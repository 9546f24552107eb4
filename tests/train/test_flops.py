"""FLOPs a token against counts by hand and against torch's own counter; the machine's rate."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sublayer import recipes
from sublayer.nn.attention import AttentionOp
from sublayer.train.flops import flops_per_token, gemm_rate
from tests.tiny import tiny


def test_gpt2_in_the_form_of_palm() -> None:
    """Its smallest: 12 layers of width 768, 12 heads, a tied table of 50,257."""
    model = recipes.gpt2(768, 12, 12).build(device="meta")
    weights = 12 * 12 * 768**2 + 50257 * 768
    assert flops_per_token(model, 1024) == 6 * weights + 12 * 12 * 768 * 1024


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_what_torch_counts_in_a_step(tied: bool) -> None:
    """Forward and backward with the kernel that makes all scores, no mask: three times the forward products."""
    model = tiny(vocab=11).replace(tied=tied).build()
    for module in model.modules():
        if isinstance(module, AttentionOp):
            module.kernel = "reference"
    ids = torch.zeros(2, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    assert counter.get_total_flops() == 2 * 16 * flops_per_token(model, 16)


def test_experts_count_as_far_as_a_token_is_sent_to_them() -> None:
    """Mixtral 8x7B: its active weights, but for the table and the norms."""
    spec = recipes.model("mixtral-8x7b")
    weights = spec.active_parameters() - 32000 * 4096 - 65 * 4096
    assert flops_per_token(spec.build(device="meta"), 1024) == 6 * weights + 32 * 12 * 4096 * 1024


def test_a_window_shortens_what_is_seen() -> None:
    spec = tiny()
    whole, short = (flops_per_token(spec.build(device="meta"), length) for length in (64, 8))
    narrow = spec.override("decoder.blocks.*.attn.op.window=6", "decoder.blocks.*.attn.op.keep_first=2")
    assert flops_per_token(narrow.build(device="meta"), 64) == short < whole
    assert flops_per_token(narrow.build(device="meta"), 4) == flops_per_token(spec.build(device="meta"), 4)


def test_frozen_weights_need_no_gradient_of_their_own() -> None:
    model = tiny().build(device="meta")
    before, weight = flops_per_token(model, 8), model.get_parameter("decoder.blocks.0.attn.op.q.weight")
    weight.requires_grad_(False)
    assert flops_per_token(model, 8) == before - 2 * weight.numel()


def test_the_rate_of_this_machine_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    rate = gemm_rate("cpu", torch.float32, seconds=0.0)
    assert 1e6 < rate < 1e16
    assert math.isfinite(rate)
    assert torch.equal(torch.get_rng_state(), before)
