"""Checkpoint tables: rows, their changes, and how they meet a model's parameters."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sublayer.errors import WeightsError
from sublayer.names import (
    SAME,
    STACKED,
    TRANSPOSED,
    Change,
    Row,
    cut,
    expand,
    in_turn,
    interleaved,
    matches,
    rows,
    stacked,
)
from sublayer.recipes import FAMILIES, family, names

CHANGES = {"same": (SAME, 1), "transposed": (TRANSPOSED, 1)} | {
    f"{n} stacked{' transposed' * transposed}": (stacked(n, transposed), n)
    for n in (1, 2, 3)
    for transposed in (False, True)
}


@pytest.mark.parametrize("name", CHANGES)
@given(height=st.integers(1, 4), width=st.integers(1, 4))
def test_changes_are_inverse_both_ways(name: str, height: int, width: int) -> None:
    change, parts = CHANGES[name]
    ours = [torch.randn(height, width) for _ in range(parts)]
    theirs = change.back(ours)
    assert len(theirs) == 1
    for one, other in zip(change.into(theirs), ours, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(change.back(change.into(theirs)), theirs, strict=True):
        assert torch.equal(one, other)


def test_stacked_puts_the_first_on_top_and_beside_when_transposed() -> None:
    q, k = torch.zeros(2, 3), torch.ones(2, 3)
    assert torch.equal(stacked(2).back([q, k])[0], torch.cat([q, k]))
    assert torch.equal(stacked(2, transposed=True).back([q, k])[0], torch.cat([q.t(), k.t()], 1))


def test_matrices_of_different_heights_lie_one_above_the_other() -> None:
    whole = torch.arange(14.0).view(7, 2)
    q, k, v = cut(4, 1, 2).into([whole])
    assert torch.equal(q, whole[:4])
    assert torch.equal(k, whole[4:5])
    assert torch.equal(cut(4, 1, 2).back([q, k, v])[0], whole)


@pytest.mark.parametrize("shape", [(12,), (12, 2)])
def test_interleaved_matrices_take_turns(shape: tuple[int, ...]) -> None:
    """Two heads of size 2: the first head's q, k, v, then the second's."""
    whole = torch.arange(12.0).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    q, k, v = interleaved(3, 2).into([whole])
    assert [part.flatten(1)[:, 0].tolist() if part.dim() > 1 else part.tolist() for part in (q, k, v)] == [
        [0, 1, 6, 7],
        [2, 3, 8, 9],
        [4, 5, 10, 11],
    ]
    assert torch.equal(interleaved(3, 2).back([q, k, v])[0], whole)


def test_matrices_of_different_heights_take_turns() -> None:
    """Two groups, each a row of the first and two of the second."""
    whole = torch.arange(12.0).view(6, 2)
    a, b = in_turn(1, 2).into([whole])
    assert torch.equal(a, whole[[0, 3]])
    assert torch.equal(b, whole[[1, 2, 4, 5]])
    assert torch.equal(in_turn(1, 2).back([a, b])[0], whole)


def test_a_change_may_depend_on_the_module_that_holds_all_of_ours() -> None:
    def linear(height: int) -> nn.Linear:
        return nn.Linear(2, height, bias=False)

    layers = [nn.ModuleDict({"q": linear(height), "k": linear(1), "out": linear(3)}) for height in (4, 2)]
    model = nn.ModuleDict({"blocks": nn.ModuleList(layers)})
    held: list[nn.Module] = []

    def change(module: Any) -> Change:
        held.append(module)
        return cut(module["q"].out_features, 1)

    table = [
        Row("h.{}.qk", ("blocks.{}.q.weight", "blocks.{}.k.weight"), sized=change),
        Row("h.{}.o", "blocks.{}.out.weight", sized=lambda module: held.append(module) or SAME),
    ]
    found = expand(table, model)
    assert held == [*layers, *(layer["out"] for layer in layers)]
    heights = [[len(part) for part in row.change.into([torch.zeros(5, 2)])] for row in found[:1]]
    assert heights == [[4, 1]]
    assert len(found[1].change.into([torch.zeros(3, 2)])) == 2


def test_only_changes_that_move_whole_rows_say_so() -> None:
    """What moves whole rows gives the same for each row as if it were alone; the others do not."""
    whole = torch.arange(12.0).view(6, 2)
    for change, parts in CHANGES.values():
        if change.whole_rows:
            assert {tuple(row) for t in change.into([whole]) for row in t.tolist()} == set(map(tuple, whole.tolist()))
        else:
            assert {len(row) for t in change.into([whole]) for row in t.tolist()} != {2}, parts


def test_rows_expand_to_the_numbers_that_occur_in_order() -> None:
    table = [Row("h.{}.w", "blocks.{}.w"), Row("e.{}.{}.w", "blocks.{}.experts.{}.w"), Row("n", "norm")]
    names = ["blocks.10.w", "blocks.2.w", "blocks.2.experts.0.w", "blocks.2.experts.11.w", "norm"]
    found = [(row.their_names, row.our_names) for row in expand(table, names)]
    assert found == [
        (("h.2.w",), ("blocks.2.w",)),
        (("h.10.w",), ("blocks.10.w",)),
        (("e.2.0.w",), ("blocks.2.experts.0.w",)),
        (("e.2.11.w",), ("blocks.2.experts.11.w",)),
        (("n",), ("norm",)),
    ]


@pytest.mark.parametrize(
    ("table", "names", "message"),
    [
        ([Row("a", "a")], ["a", "b"], "b: no row of the checkpoint table names this parameter"),
        ([Row("a", "a"), Row("b", "a")], ["a"], "a: the model has no such parameter, or two rows name it"),
        ([Row("qkv", ("q", "k"))], ["q"], "k: the model has no such parameter"),
        ([Row("qkv", ("q", "k"))], ["k"], "k: no row"),
        ([Row("h.{}", "b.{}")], ["b.x"], "b.x: no row"),
        ([Row("h.{}", "b.{}")], ["bx1"], "bx1: no row"),
        ([Row("h.{}", "b.{}")], ["b.1.w"], "b.1.w: no row"),
    ],
)
def test_a_table_that_does_not_fit_the_model_is_refused(table, names, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        expand(table, names)


def test_a_star_stands_for_each_expert_that_one_of_ours_holds() -> None:
    model = nn.Module()
    model.w, model.p, model.q = (nn.Parameter(torch.empty(shape)) for shape in ((3, 4, 5), (2,), (2,)))
    table = [Row("e.*.w", "w", STACKED), Row(("e.*.p", "e.*.q"), ("p", "q"))]
    first, second = expand(table, model)
    assert first.their_names == ("e.0.w", "e.1.w", "e.2.w")
    assert second.their_names == ("e.0.p", "e.1.p", "e.0.q", "e.1.q")
    experts = [torch.full((4, 5), float(i)) for i in range(3)]
    (ours,) = first.change.into(experts)
    assert ours.shape == (3, 4, 5)
    assert all(map(torch.equal, first.change.back([ours]), experts))


def test_a_row_for_what_the_model_lacks_is_left_out() -> None:
    assert [row.our_names for row in expand([Row("a", "a"), Row("b", "b")], ["a"])] == [("a",)]


def test_a_row_has_the_same_holes_on_both_sides() -> None:
    with pytest.raises(ValueError, match="different numbers"):
        Row("h.{}.w", "w")
    with pytest.raises(ValueError, match="different numbers"):
        Row("h.{}.w", ("b.{}.q", "k"))


def test_rows_of_modules_name_weight_and_bias() -> None:
    found = [(row.theirs, row.ours) for row in rows([("a", "b")])]
    assert found == [("a.weight", "b.weight"), ("a.bias", "b.bias")]


def test_patterns_match_whole_names_and_numbers_only() -> None:
    patterns = ("h.{}.attn.bias",)
    assert matches(patterns, "h.12.attn.bias")
    assert not any(
        matches(patterns, name) for name in ("h.a.attn.bias", "h.1.attn.bias.x", "xh.1.attn.bias", "h.1.attnxbias")
    )


@pytest.mark.parametrize("name", [name for name in FAMILIES if family(name).NAMES])
def test_a_familys_table_names_each_tensor_of_its_tiny_model_once(name: str) -> None:
    module = family(name)
    model = getattr(module, name)(**module.TINY).empty(device="meta")
    shapes = {key: value.shape for key, value in model.named_parameters()}
    found = expand(names(module, model.spec), model)
    theirs = [key for row in found for key in row.their_names]
    ours = [key for row in found for key in row.our_names]
    assert len(set(theirs)) == len(theirs)
    assert sorted(ours) == sorted(shapes)


def test_a_change_is_data() -> None:
    """A family may write its own: here theirs stores the distance from 1, as Gemma's norms do."""
    plus_one = Change(lambda ts: [t + 1 for t in ts], lambda ts: [t - 1 for t in ts], whole_rows=False)
    row = expand([Row("w", "w", plus_one)], ["w"])[0]
    assert torch.equal(row.change.into([torch.zeros(2)])[0], torch.ones(2))
