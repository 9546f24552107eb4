"""State: whatever is done to its slots, each holds exactly its own tokens.

S slots, V vocabulary. The model under the state is what a user sees, so the random sequences of operations compare its
answers with those of full forward passes over plain lists of tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from sublayer.errors import InputError, StateError
from sublayer.nn.attention import Attention
from sublayer.nn.embed import Embed
from sublayer.nn.feed_forward import FeedForward
from sublayer.nn.norm import RMSNorm
from sublayer.nn.op import Context, Op, Part
from sublayer.nn.position import Learned
from sublayer.nn.rope import Rope
from sublayer.nn.sublayer import Block, Model, ModelOp, Trunk, pre_norm, repeat
from sublayer.recipes import llama, model
from sublayer.state import PerMemory, PerSlot, PerToken, State
from sublayer.step import Step
from tests.models.mamba_like import mamba_like

V, SLOTS, CAPACITY = 13, 4, 14


def attention_only() -> ModelOp:
    spec = llama(8, 2, 2, 1, 8, V, window=(3, None)).override("init.std=0.5")
    return spec.build(dtype=torch.float64).eval()


def with_recurrence() -> ModelOp:
    mixer = mamba_like(8, 1, 6, 2, 3, V).find("decoder.blocks.0.mixer")
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


class AnySequence(RuleBasedStateMachine):
    """Operations in random order against S lists of tokens. What a list cannot do must be refused."""

    build: Any = staticmethod(attention_only)
    recurrent = False

    @initialize()
    def start(self) -> None:
        torch.manual_seed(0)
        self.model = self.build()
        self.state = State.allocate(self.model, SLOTS, CAPACITY)
        self.slots: list[list[Token]] = [[] for _ in range(SLOTS)]
        self.snapshots: list[tuple[list[int], list[list[Token]], Any]] = []
        self.bytes = self.state.bytes()

    def expected(self, tokens: list[Token]) -> Tensor:
        """[L, V] of one full forward pass."""
        ids, documents = (torch.tensor(row)[None] for row in zip(*tokens, strict=True))
        return self.model(ids, Step(segment=documents))[0]

    def refused(self, call: Any, *arguments: Any) -> None:
        before = copied(self.state)
        with pytest.raises(StateError) as caught:
            call(*arguments)
        assert "\n" not in str(caught.value)
        assert_same(before, copied(self.state))

    @rule(
        rows=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True),
        length=st.integers(1, 5),
        seed=st.integers(0, 999),
        plain=st.booleans(),
    )
    @torch.no_grad()
    def append(self, rows: list[int], length: int, seed: int, plain: bool) -> None:
        """New tokens for some slots in any order; unless plain, with padding on either side and a second document."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(V, (len(rows), length), generator=generator)
        segment = torch.ones_like(ids)
        if not plain:
            a, b, c = torch.randint(length + 1, (3, len(rows), 1), generator=generator).sort(0).values
            place = torch.arange(length)
            segment = torch.where((place < a) | (place >= c), 0, torch.where(place < b, 7, 3))
        step = Step(slots=torch.tensor(rows), segment=None if plain else segment)
        longer = [list(self.slots[row]) for row in rows]
        for row, tokens in enumerate(longer):
            number, previous = (tokens[-1][1] if tokens else 1), None
            for token, kind in zip(ids[row].tolist(), segment[row].tolist(), strict=True):
                if kind:
                    number += previous not in (None, kind)
                    previous = kind
                    tokens.append((token, number))
        if max(map(len, longer)) > CAPACITY:
            return self.refused(self.model, ids, step, self.state)
        logits = self.model(ids, step, self.state)
        for row, (slot, tokens) in enumerate(zip(rows, longer, strict=True)):
            new = len(tokens) - len(self.slots[slot])
            if new:
                assert_close(logits[row][segment[row] != 0], self.expected(tokens)[-new:], rtol=0, atol=1e-12)
            self.slots[slot] = tokens
        return None

    @rule(row=st.integers(0, SLOTS - 1), length=st.integers(1, 4))
    @torch.no_grad()
    def fail(self, row: int, length: int) -> None:
        """A call that ends in an error half-way counts for nothing."""
        if len(self.slots[row]) + length <= CAPACITY:
            ids = torch.full((1, length), V)
            with pytest.raises(InputError, match=f"token id {V} is outside the vocabulary of {V}"):
                self.model(ids, Step(slots=torch.tensor([row])), self.state)

    @rule(src=st.integers(0, SLOTS - 1), dst=st.integers(0, SLOTS - 1), share=st.floats(0, 1), whole=st.booleans())
    def fork(self, src: int, dst: int, share: float, whole: bool) -> None:
        length = len(self.slots[src]) if whole else round(share * len(self.slots[src]))
        if self.recurrent and length < len(self.slots[src]):
            return self.refused(self.state.fork, src, dst, length)
        self.state.fork(src, dst, None if whole else length)
        self.slots[dst] = self.slots[src][:length]
        return None

    @rule(chosen=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS))
    def reorder(self, chosen: list[int]) -> None:
        self.state.reorder(torch.tensor(chosen) if len(chosen) % 2 else chosen)
        self.slots[: len(chosen)] = [list(self.slots[row]) for row in chosen]

    @rule(rows=st.lists(st.integers(0, SLOTS - 1), max_size=2))
    def reset(self, rows: list[int]) -> None:
        self.state.reset(rows)
        for row in rows:
            self.slots[row] = []

    @rule(rows=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=2, unique=True))
    def snapshot(self, rows: list[int]) -> None:
        self.snapshots.append((rows, [list(self.slots[row]) for row in rows], self.state.snapshot(rows)))

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 99))
    def restore(self, which: int) -> None:
        """Back to a snapshot, where the slots have only grown since; to one of longer slots never."""
        rows, held, snapshot = self.snapshots[which % len(self.snapshots)]
        lengths = [len(tokens) for tokens in held]
        if any(len(self.slots[row]) < length for row, length in zip(rows, lengths, strict=True)):
            return self.refused(self.state.truncate, rows, lengths, snapshot)
        if all(self.slots[row][: len(tokens)] == tokens for row, tokens in zip(rows, held, strict=True)):
            self.state.truncate(rows, lengths, snapshot)
            for row, tokens in zip(rows, held, strict=True):
                self.slots[row] = list(tokens)
        return None

    @rule(row=st.integers(0, SLOTS - 1), share=st.floats(0, 1))
    def truncate(self, row: int, share: float) -> None:
        length = round(share * len(self.slots[row]))
        if self.recurrent and length < len(self.slots[row]):
            return self.refused(self.state.truncate, row, length)
        self.state.truncate(row, length)
        self.slots[row] = self.slots[row][:length]
        return None

    @rule()
    def save_and_load(self) -> None:
        with TemporaryDirectory() as folder:
            self.state.save(Path(folder) / "state")
            again = State.load(Path(folder) / "state", self.model)
        assert_same(copied(self.state), copied(again))
        self.state = again

    @invariant()
    def the_books_are_right(self) -> None:
        lengths = [len(tokens) for tokens in self.slots]
        assert self.state.length.tolist() == lengths
        assert self.state.bytes() == self.bytes == sum(tensor.nbytes for tensor in tensors(self.state).values())
        for row, tokens in enumerate(self.slots):
            documents = [number for _, number in tokens]
            assert self.state.store.document[row, : len(tokens)].tolist() == documents
            places = [i - documents.index(number) for i, number in enumerate(documents)]
            assert self.state.store.pos[row, : len(tokens)].tolist() == places

    @invariant()
    def cells_without_a_token_are_zeros(self) -> None:
        for name, tensor in tensors(self.state).items():
            if name in ("pos", "document") or isinstance(self.state.store.declared.get(name), PerToken):
                for row, tokens in enumerate(self.slots):
                    assert not tensor[row, len(tokens) :].any(), (name, row)


class AnySequenceWithRecurrence(AnySequence):
    build = staticmethod(with_recurrence)
    recurrent = True


TestAttention = AnySequence.TestCase
TestRecurrence = AnySequenceWithRecurrence.TestCase
TestAttention.settings = TestRecurrence.settings = settings(max_examples=60, stateful_step_count=25)


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


# --- what is refused ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.fork(4, 0), "slot 4: the state has slots 0 to 3"),
        (lambda s: s.fork(0, -1), "slot -1: the state has slots 0 to 3"),
        (lambda s: s.fork(0, 1, 3), "slot 0 holds 2 tokens, 3 cannot be forked from it"),
        (lambda s: s.fork(0, 1, -1), "-1 cannot be forked"),
        (lambda s: s.reorder([0, 4]), "slot 4"),
        (lambda s: s.reorder([0] * 5), "5 slots do not fit a state of 4"),
        (lambda s: s.reset(-1), "slot -1"),
        (lambda s: s.reset([0, 9]), "slot 9"),
        (lambda s: s.snapshot(torch.tensor([7])), "slot 7"),
        (lambda s: s.truncate(0, 3), "slot 0 holds 2 tokens and cannot be cut to 3"),
        (lambda s: s.truncate(0, -1), "cannot be cut to -1"),
        (lambda s: s.truncate([0, 1], [1]), "give each slot once, and a length for each"),
        (lambda s: s.truncate([0, 0], [1, 2]), "give each slot once"),
        (lambda s: s.truncate(0, 2, s.snapshot(1)), "the snapshot is of slots [1] at [0] tokens, not of [0] at [2]"),
        (lambda s: s["k"], "the state has no leaf k"),
        (lambda s: s.at("decoder.blocks.0.attn.op")["key"], "no leaf decoder.blocks.0.attn.op.key (did you mean"),
        (lambda s: s.at("decoder.blocks.0.attn.op")["k"].read(Step()), "only inside a model's forward pass"),
        (lambda s: s.save("/nonexistent/folder/state"), "cannot be written"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line_and_changes_nothing(call: Any, message: str) -> None:
    made = attention_only()
    state = State.allocate(made, 4, 8)
    made(torch.tensor([[1, 2]]), None, state)
    before = copied(state)
    with pytest.raises(StateError) as caught:
        call(state)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_same(before, copied(state))


@pytest.mark.parametrize(
    ("ids", "step", "message"),
    [
        (
            (1, 9),
            Step(),
            "row 0: 9 tokens do not fit a state of length 8; allocate a longer state or shorten the prompt",
        ),
        ((5, 1), Step(), "a batch of 5 rows does not fit a state of 4 slots"),
        ((0, 1), Step(), "a batch of 0 rows"),
        ((2, 1), Step(slots=torch.tensor([0, 4])), "slot 4: the state has slots 0 to 3"),
        ((2, 1), Step(slots=torch.tensor([0, -1])), "slot -1"),
        ((2, 1), Step(slots=torch.tensor([1, 1])), "slots [1, 1]: a batch may name each slot once"),
        ((2, 1), Step(slots=torch.tensor([1])), "Step.slots is [1], the batch has 2 rows"),
        ((0, 1), Step(slots=torch.tensor([], dtype=torch.long)), "a batch has at least one row"),
        ((1, 9), Step(segment=torch.tensor([[0] * 8 + [1]])), "a call of 9 tokens, padding included, is longer"),
    ],
)
def test_a_call_that_does_not_fit_is_one_line_and_changes_nothing(
    ids: tuple[int, int], step: Step, message: str
) -> None:
    made = attention_only()
    state = State.allocate(made, 4, 8)
    before = copied(state)
    with pytest.raises(StateError) as caught:
        made(torch.ones(ids, dtype=torch.long), step, state)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_same(before, copied(state))


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4), (1, 4, -1)])
def test_a_state_without_room_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(StateError, match="a state needs slots ≥ 1 and length ≥ 1"):
        State.allocate(attention_only(), *sizes)


def test_a_recurrence_cannot_be_cut_without_its_past() -> None:
    made = with_recurrence()
    state = State.allocate(made, 2, 8)
    made(torch.tensor([[1, 2, 3]]), None, state)
    for call in (lambda: state.truncate(0, 2), lambda: state.fork(0, 1, 2)):
        with pytest.raises(StateError, match=r"mixer\.op\.conv is a recurrence, whose past is not kept"):
            call()


def test_a_learned_table_counts_on_from_what_the_state_holds() -> None:
    """Positions beyond the table are refused however the prompt was cut into calls."""
    block = Block((pre_norm("attn", Attention(2), RMSNorm()),))
    made = Model(8, decoder=Trunk(Embed(V, position=Learned(4)), repeat(block, 1))).build()
    state = State.allocate(made, 1, 8)
    made(torch.tensor([[1, 2, 3]]), None, state)
    with pytest.raises(InputError, match="position 4 is beyond the 4 learned positions"):
        made(torch.tensor([[1, 2]]), None, state)


def test_a_call_that_breaks_off_between_layers_counts_for_nothing(monkeypatch) -> None:
    """Its keys and positions lie behind the slot's end: no later call may see them, not even beside a longer row."""
    made = attention_only()
    state = State.allocate(made, 2, 8)
    ids = torch.randint(V, (2, 6))
    made(ids[:, :2], None, state)
    with monkeypatch.context() as patch:
        patch.setattr(made.get_submodule("decoder.blocks.1.ffn.op"), "forward", lambda *inputs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made(torch.randint(V, (2, 4)), None, state)
    made(ids[:1, 2:5], None, state)
    expected = torch.cat([made(ids[:1]), made(torch.cat([ids[1:, :2], ids[1:, 5:]], 1)).expand(1, -1, -1)[:, -1:]], 1)
    last = made(ids[:, 5:], None, state)
    assert_close(last[0], expected[0, 5:6], rtol=0, atol=1e-12)
    assert_close(last[1], expected[0, 6:7], rtol=0, atol=1e-12)


# --- files ---


@pytest.fixture
def written(tmp_path) -> tuple[ModelOp, Path]:
    made = attention_only()
    state = State.allocate(made, 2, 8)
    made(torch.tensor([[1, 2, 3]]), None, state)
    state.save(tmp_path / "state")
    return made, tmp_path / "state"


@pytest.mark.parametrize("share", [0, 0.001, 0.2, 0.5, 0.9, 0.999])
def test_a_state_cut_short_is_refused(written, share: float) -> None:
    made, path = written
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(StateError, match="not a saved state") as caught:
        State.load(path, made)
    assert "\n" not in str(caught.value)


def test_only_used_cells_are_written(written) -> None:
    _, path = written
    held = load_file(path)
    assert held["decoder.blocks.0.attn.op.k"].shape == (2, 3, 1, 4)
    assert held["#pos"].shape == (2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, a: t.pop("#length"), "not a saved state"),
        (lambda t, a: t.pop("#pos"), "#pos is in only one of them"),
        (lambda t, a: t.pop("decoder.blocks.1.attn.op.k"), "decoder.blocks.1.attn.op.k is in only one of them"),
        (lambda t, a: t.update(extra=torch.ones(1)), "extra is in only one of them"),
        (lambda t, a: t.update({"#length": torch.tensor([9, 0])}), r"slots of \[9, 0\] tokens do not fit 8 cells"),
        (lambda t, a: t.update({"#length": torch.tensor([-1, 0])}), "do not fit"),
        (
            lambda t, a: t.update({"#length": torch.tensor([2, 0])}),
            r"is torch.int32 \[2, 3\], the model keeps torch.int32 \[2, 2\]",
        ),
        (lambda t, a: t.update({"#length": torch.tensor([3.0, 0.0])}), "#length is torch.float32"),
        (lambda t, a: t.update({"#length": torch.tensor([3, 0, 0])}), r"the model keeps"),
        (lambda t, a: t.update({"#length": torch.tensor(3)}), "not a saved state"),
        (lambda t, a: t.update({"decoder.blocks.0.attn.op.k": torch.ones(2, 3, 4, 1).double()}), r"\[2, 3, 4, 1\]"),
        (lambda t, a: a.pop("capacity"), "not a saved state"),
        (lambda t, a: a.update(capacity="8"), "not a saved state"),
        (lambda t, a: a.update(capacity=0), "not a saved state"),
        (lambda t, a: a.update(capacity=1 << 62), "not a saved state"),
        (lambda t, a: a.update(dtype="torch.load"), "not a saved state"),
        (lambda t, a: a.update(dtype="torch.bfloat16"), "the model keeps torch.bfloat16"),
        (lambda t, a: a.update(dtype=3), "not a saved state"),
    ],
)
def test_a_file_that_holds_another_state_is_refused(written, change: Any, message: str) -> None:
    made, path = written
    held, about = load_file(path), {"capacity": 8, "memory_capacity": 0, "dtype": "torch.float64"}
    change(held, about)
    save_file(held, path, {"sublayer_state": json.dumps(about)})
    with pytest.raises(StateError, match=message) as caught:
        State.load(path, made)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("about", [None, "", "[]", "{", "[" * 100_000, "null"])
def test_a_file_without_a_states_description_is_refused(written, about: str | None) -> None:
    made, path = written
    save_file(load_file(path), path, None if about is None else {"sublayer_state": about})
    with pytest.raises(StateError, match="not a saved state"):
        State.load(path, made)


def test_the_state_of_another_model_is_refused(written) -> None:
    _, path = written
    with pytest.raises(StateError, match="the state of another model"):
        State.load(path, with_recurrence())
    with pytest.raises(StateError, match=r"the model keeps torch.float64 \[2, 3, 2, 4\]"):
        State.load(path, llama(8, 2, 2, 2, 8, V).build())
    with pytest.raises(StateError, match="not a saved state: .*No such file"):
        State.load(path.with_name("absent"), with_recurrence())


def test_the_cells_of_a_head_are_neighbours_in_memory() -> None:
    """Attention reads [B, heads, length, size]: of a whole slot that is one run of memory."""
    model = llama(16, 1, 2, 2, hidden=24, vocab=16).build()
    tensors = State.allocate(model, 2, 8).store.tensors
    assert len(tensors) == 2
    for tensor in tensors.values():
        assert tensor.shape == (2, 8, 2, 8)
        assert tensor.transpose(1, 2).is_contiguous()
