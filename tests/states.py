"""Models whose states differ in kind, and what the tests of State compare. S slots, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from sublayer.nn.attention import Attention
from sublayer.nn.embed import Embed
from sublayer.nn.feed_forward import FeedForward
from sublayer.nn.norm import RMSNorm
from sublayer.nn.rope import Rope
from sublayer.nn.sublayer import Block, Model, ModelOp, Trunk, pre_norm
from sublayer.recipes import llama, mamba
from sublayer.state import State

V, SLOTS, CAPACITY = 13, 4, 14


def attention_only() -> ModelOp:
    spec = llama(8, 2, 2, 1, 8, V, window=(3, None)).override("init.std=0.5")
    return spec.build(dtype=torch.float64).eval()


def with_recurrence() -> ModelOp:
    mixer = mamba(8, 1, V, inner=6, state_size=2, kernel=3).find("decoder.blocks.0.mixer")
    block = Block((pre_norm("attn", Attention(2, position=Rope()), RMSNorm()), mixer))
    spec = Model(8, decoder=Trunk(Embed(V), (block,), RMSNorm())).override("init.std=0.5")
    return spec.build(dtype=torch.float64).eval()


def with_memory() -> ModelOp:
    read = Block((pre_norm("attn", Attention(2, causal=False, position=Rope()), RMSNorm()),))
    sublayers = (pre_norm("attn", Attention(2, position=Rope()), RMSNorm()),
                 pre_norm("cross", Attention(2, cross=True), RMSNorm()),
                 pre_norm("ffn", FeedForward(8), RMSNorm()))  # fmt: skip
    spec = Model(8, Trunk(Embed(V), (Block(sublayers),)), Trunk(Embed(V), (read,))).override("init.std=0.5")
    return spec.build(dtype=torch.float64).eval()


def tensors(state: State) -> dict[str, Tensor]:
    """Everything that is stored, bookkeeping too."""
    store = state.store
    return store.tensors | {"length": store.length, "pos": store.pos, "document": store.document,
                            "memory_segment": store.memory_segment}  # fmt: skip


def copied(state: State) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors(state).items()}


def assert_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


Token = tuple[int, int]  # id, number of its document in the slot
