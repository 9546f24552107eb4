"""State: what it takes, what its handles give, what it keeps of memory."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from sublayer.errors import StateError
from sublayer.nn.embed import Embed
from sublayer.nn.norm import RMSNorm
from sublayer.nn.op import Context, Op, Part
from sublayer.nn.sublayer import Block, Model, Trunk, pre_norm
from sublayer.recipes import llama, model
from sublayer.state import PerMemory, PerSlot, PerToken, State
from sublayer.step import Step
from tests.states import V, assert_same, attention_only, tensors, with_memory, with_recurrence

# --- sizes ---


def test_bytes_are_what_is_allocated_and_the_same_on_meta() -> None:
    for build in (attention_only, with_recurrence, with_memory):
        real = build()
        state = State.allocate(real, 3, 10, 5)
        shapes = State.allocate(real.spec.build(device="meta", dtype=torch.float64), 3, 10, 5)
        assert shapes.store.length.is_meta
        assert state.bytes() == shapes.bytes() == sum(tensor.nbytes for tensor in tensors(state).values())
        for kind in ("token", "slot", "memory"):
            assert state.bytes_per(kind) == shapes.bytes_per(kind)


def test_bytes_grow_by_what_a_token_a_slot_and_a_memory_vector_take() -> None:
    def leaves(slots: int, length: int, memory: int) -> int:
        state = State.allocate(with_memory(), slots, length, memory)
        return sum(tensor.nbytes for tensor in state.store.tensors.values())

    state = State.allocate(with_memory(), 1, 8, 4)
    assert leaves(1, 9, 4) - leaves(1, 8, 4) == state.bytes_per("token") == 2 * 8 * 8
    assert leaves(1, 8, 5) - leaves(1, 8, 4) == state.bytes_per("memory") == 2 * 8 * 8
    hybrid = State.allocate(with_recurrence(), 2, 8)
    assert hybrid.bytes_per("slot") == (2 * 6 + 6 * 2) * 8
    assert hybrid.bytes_per("memory") == 0


def test_bytes_needed_counts_a_windowed_layer_by_its_window() -> None:
    mistral = State.allocate(model("mistral-7b").build(device="meta", dtype=torch.bfloat16), 2, 8192)
    assert mistral.bytes_needed() == 2 * 4096 * 128 * 1024
    assert mistral.bytes_per("token") * 2 * 8192 == 2 * mistral.bytes_needed()
    short = State.allocate(model("mistral-7b").build(device="meta", dtype=torch.bfloat16), 1, 100)
    assert short.bytes_needed() == 100 * 128 * 1024
    some = llama(8, 4, 2, 1, 8, V, window=(None, 3, None, 3)).build(device="meta")
    a_cell = 2 * 4 * 4  # k and v of 4 fp32 numbers
    assert State.allocate(some, 1, 10).bytes_needed() == (10 + 3 + 10 + 3) * a_cell
    kept = llama(8, 1, 2, 1, 8, V, window=3).override("decoder.blocks.*.attn.op.keep_first=2").build(device="meta")
    assert State.allocate(kept, 1, 10).bytes_needed() == 5 * a_cell


def test_the_published_70b_figure() -> None:
    """80 layers, width 8,192, batch 16, length 8,192, fp16: 42.9 GB with 8 key heads, 343.6 GB with 64."""
    for kv_heads, gigabytes in ((8, 42.9), (64, 343.6)):
        spec = model("llama2-70b").override(f"decoder.blocks.*.attn.op.kv_heads={kv_heads}")
        state = State.allocate(spec.build(device="meta", dtype=torch.float16), 16, 8192)
        assert round(state.bytes_needed() / 1e9, 1) == gigabytes


# --- what a handle gives ---


class Probe(Part):
    def build(self, dim: int, context: Context) -> ProbeOp:
        return ProbeOp()


class ProbeOp(Op):
    """Keeps its input, and remembers what it read last."""

    def state(self) -> dict[str, PerToken]:
        return {"kept": PerToken((4,))}

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        assert state is not None
        state["kept"].write(x, step)
        self.read = state["kept"].read(step)
        return x


def probe() -> tuple[nn.Module, ProbeOp]:
    made = Model(4, decoder=Trunk(Embed(V), (Block((pre_norm("probe", Probe(), RMSNorm()),)),)), tied=True).build()
    return made, next(op for op in made.modules() if isinstance(op, ProbeOp))


def test_neighbouring_slots_are_read_as_a_view_and_others_gathered() -> None:
    made, op = probe()
    state = State.allocate(made, 4, 6)
    kept = state.at("decoder").at("blocks").at("0").at("probe").at("op")["kept"].tensor

    def reads_a_view(slots: list[int] | None, batch: int = 2) -> bool:
        made(torch.ones(batch, 1, dtype=torch.long), Step(slots=None if slots is None else torch.tensor(slots)), state)
        assert op.read.shape == (batch, int(state.length[slots if slots is not None else slice(batch)].max()), 4)
        rows = kept[torch.tensor(slots)] if slots is not None else kept[:batch]
        assert torch.equal(op.read, rows[:, : op.read.shape[1]])
        return op.read.untyped_storage().data_ptr() == kept.untyped_storage().data_ptr()

    assert reads_a_view(None)
    assert reads_a_view([1, 2])
    assert reads_a_view([3], batch=1)
    assert not reads_a_view([2, 1])
    assert not reads_a_view([0, 2])


def test_a_fork_shares_nothing() -> None:
    made = attention_only()
    state = State.allocate(made, 2, 8)
    made(torch.tensor([[1, 2, 3]]), None, state)
    state.fork(0, 1)
    before = {name: tensor[0].clone() for name, tensor in tensors(state).items()}
    made(torch.tensor([[4, 5]]), Step(slots=torch.tensor([1])), state)
    for name, tensor in tensors(state).items():
        assert torch.equal(tensor[0], before[name]), name
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.store.tensors.values()}) == len(
        state.store.tensors
    )


def test_a_snapshot_does_not_follow_the_state() -> None:
    made = with_recurrence()
    state = State.allocate(made, 1, 8)
    made(torch.tensor([[1, 2, 3]]), None, state)
    snapshot = state.snapshot(0)
    kept = {name: tensor.clone() for name, tensor in snapshot.leaves.items()}
    made(torch.tensor([[4, 5]]), None, state)
    assert_same(kept, snapshot.leaves)
    state.truncate(0, 3, snapshot)
    made(torch.tensor([[6]]), None, state)
    assert_same(kept, snapshot.leaves)


def test_a_leaf_with_its_own_dtype_keeps_it() -> None:
    class Counting(ProbeOp):
        def state(self) -> dict[str, Any]:
            return {"kept": PerToken((4,), torch.float64), "count": PerSlot((), torch.int64), "free": PerSlot((2,))}

    made = nn.ModuleDict({"a": Counting(), "z": nn.Linear(1, 1)}).bfloat16()
    state = State.allocate(made, 2, 3)
    assert {name: t.dtype for name, t in state.store.tensors.items()} == {
        "a.kept": torch.float64, "a.count": torch.int64, "a.free": torch.bfloat16}  # fmt: skip
    with TemporaryDirectory() as folder:
        state.save(Path(folder) / "s")
        again = State.load(Path(folder) / "s", made)
    assert {name: t.dtype for name, t in again.store.tensors.items()} == {
        name: t.dtype for name, t in state.store.tensors.items()}  # fmt: skip


def test_a_state_is_a_pytree_that_compiled_calls_can_take() -> None:
    state = State.allocate(attention_only(), 2, 4)
    leaves, how = pytree.tree_flatten(state)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, how)
    assert isinstance(again, State)
    for name, tensor in tensors(again).items():
        assert tensor is tensors(state)[name]
    assert (again.store.capacity, again.store.declared, again.store.dtype) == (4, state.store.declared, torch.float64)


# --- memory ---


@torch.no_grad()
def test_memory_is_kept_for_each_slot_and_follows_it() -> None:
    made = with_memory()
    state = State.allocate(made, 3, 8, 5)
    sources = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]])
    source_segment = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    ids = torch.randint(V, (2, 6))
    expected = torch.cat([made(ids[:1], None, None, sources[:1, :3]), made(ids[1:], None, None, sources[1:])])
    first = made(ids[:, :2], Step(memory_segment=source_segment), state, sources)
    assert_close(first, expected[:, :2])
    assert state.memory_segment.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0] * 5]
    assert_close(made(ids[:, 2:4], None, state), expected[:, 2:4])
    state.fork(0, 2)
    state.reorder([2, 1])  # slot 0 is its own copy now
    assert_close(made(ids[:, 4:], None, state), expected[:, 4:])
    assert_close(made(ids[:1, 4:], Step(slots=torch.tensor([2])), state), expected[:1, 4:])
    state.truncate([0, 1], 4)
    assert_close(made(ids[:, 4:], None, state), expected[:, 4:])
    state.reset([0, 1, 2])
    assert not any(tensor.any() for tensor in tensors(state).values())
    assert all(isinstance(leaf, PerMemory | PerToken) for leaf in state.store.declared.values())


def test_memory_that_does_not_fit_or_has_no_room_is_refused() -> None:
    made = with_memory()
    ids, source = torch.ones(1, 2, dtype=torch.long), torch.ones(1, 6, dtype=torch.long)
    with pytest.raises(StateError, match="memory of 6 vectors does not fit memory_length=5"):
        made(ids, None, State.allocate(made, 1, 8, 5), source)
    with pytest.raises(StateError, match="allocate it with memory_length"):
        made(ids, None, State.allocate(made, 1, 8), source)


def test_the_cells_of_a_head_are_neighbours_in_memory() -> None:
    """Attention reads [B, heads, length, size]: of a whole slot that is one run of memory."""
    model = llama(16, 1, 2, 2, hidden=24, vocab=16).build()
    tensors = State.allocate(model, 2, 8).store.tensors
    assert len(tensors) == 2
    for tensor in tensors.values():
        assert tensor.shape == (2, 8, 2, 8)
        assert tensor.transpose(1, 2).is_contiguous()
