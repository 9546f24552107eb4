"""State: what is refused, in one line and with nothing changed; and its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from sublayer.errors import InputError, StateError
from sublayer.nn.attention import Attention
from sublayer.nn.embed import Embed
from sublayer.nn.norm import RMSNorm
from sublayer.nn.position import Learned
from sublayer.nn.sublayer import Block, Model, ModelOp, Trunk, pre_norm, repeat
from sublayer.recipes import llama
from sublayer.state import State
from sublayer.step import Step
from tests.states import V, assert_same, attention_only, copied, with_recurrence

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
        with pytest.raises(StateError, match=r"mixer\.op\.scan is a recurrence, whose past is not kept"):
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
