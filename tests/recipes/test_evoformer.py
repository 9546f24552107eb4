"""Evoformer against its supplement's algorithms, index by index in fp64; triangles against transformers' ESMFold."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear
from transformers.models.esm import modeling_esmfold as esmfold
from transformers.models.esm.configuration_esm import TrunkConfig

from sublayer.errors import InputError, SpecError
from sublayer.nn.op import Context
from sublayer.nn.pairs import SharedDropout
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes.evoformer import SIZES, TINY, evoformer, to_hf
from sublayer.step import Step
from tests.case import assert_near, roughen
from tests.oracle import close

Weights = Mapping[str, Tensor]
HEADS, SIZE, REACH = TINY["heads"], TINY["head_size"], TINY["reach"]


# --- the supplement, algorithm by algorithm: m [S, L, C], z [L, L, P], there and seen bool ---


class Naive:
    """The weights of one place, by their own names."""

    def __init__(self, weights: Weights, at: str) -> None:
        self.weights, self.at = weights, at

    def __call__(self, name: str) -> "Naive":
        return Naive(self.weights, f"{self.at}.{name}")

    def linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{self.at}.{name}.weight"], self.weights.get(f"{self.at}.{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.weights[f"{self.at}.{name}.{kind}"] for kind in ("weight", "bias"))
        return layer_norm(x, x.shape[-1:], weight, bias)

    def gate(self, name: str, x: Tensor) -> Tensor:
        return self.linear(name, x).sigmoid()


def algorithms(weights: Weights, inputs: Mapping[str, Tensor], real: Tensor, layers: int) -> dict[str, Tensor]:
    """The answer to one alignment; real [L]: residues that are no padding."""
    there = inputs["present"] & real
    seen = torch.stack([torch.stack([real[i] & real[j] for j in range(len(real))]) for i in range(len(real))])
    m, z = front_end(Naive(weights, "encoder.embed"), inputs)
    for layer in range(layers):  # algorithm 6
        at = Naive(weights, f"encoder.blocks.{layer}")
        m = m + row_attention(at("row"), m, z, there)
        m = m + column_attention(at("column"), m, there)
        m = m + transition(at("transition"), m, "msa")
        z = z + outer_product_mean(at("outer"), m, there)
        z = z + triangle_multiplication(at("outgoing"), z, seen, outgoing=True)
        z = z + triangle_multiplication(at("incoming"), z, seen, outgoing=False)
        z = z + triangle_attention(at("starting"), z, seen, starting=True)
        z = z + triangle_attention(at("ending"), z, seen, starting=False)
        z = z + transition(at("pair_transition"), z, "pair")
    head, length = Naive(weights, "head"), len(z)
    half = head.linear("distogram", z)
    distogram = [torch.stack([half[i, j] + half[j, i] for j in range(length)]) for i in range(length)]
    return {"msa": head.linear("msa", m), "distogram": torch.stack(distogram)}


def front_end(at: Naive, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Algorithms 3 to 5."""
    tables = {
        name: at.weights[f"{at.at}.{name}.weight"] for name in ("msa", "target", "left", "right", "position.table")
    }
    target, ids = inputs["target"].tolist(), inputs["msa"].tolist()
    length = len(target)
    near = [[min(max(i - j, -REACH), REACH) + REACH for j in range(length)] for i in range(length)]
    z = [[tables["left"][target[i]] + tables["right"][target[j]] + tables["position.table"][near[i][j]]
          for j in range(length)] for i in range(length)]  # fmt: skip
    m = [torch.stack([tables["msa"][row[i]] + tables["target"][target[i]] for i in range(length)]) for row in ids]
    cells = torch.stack(m)
    if "features" in inputs:
        cells = cells + at.linear("features", inputs["features"])
    return cells, torch.stack([torch.stack(row) for row in z])


def weighed(scores: list[Tensor], values: list[Tensor], like: Tensor) -> Tensor:
    """What a query gets from the keys that it sees."""
    if not scores:
        return torch.zeros_like(like)
    return (torch.stack(scores).softmax(0)[:, None] * torch.stack(values)).sum(0)


def projected(at: Naive, x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (at.linear(f"op.{name}", x).unflatten(-1, (heads, SIZE)) for name in "qkv")
    return q / SIZE**0.5, k, v


def row_attention(at: Naive, m: Tensor, z: Tensor, there: Tensor) -> Tensor:
    """Algorithm 7."""
    m, bias = at.norm("pre.msa", m), at.linear("op.bias", at.norm("pre.pair", z))
    (q, k, v), out = projected(at, m, HEADS), torch.zeros(*m.shape[:2], HEADS, SIZE, dtype=m.dtype)
    for s in range(m.shape[0]):
        for i in range(m.shape[1]):
            for h in range(HEADS):
                keys = [j for j in range(m.shape[1]) if there[s, j]]
                scores = [q[s, i, h] @ k[s, j, h] + bias[i, j, h] for j in keys]
                out[s, i, h] = weighed(scores, [v[s, j, h] for j in keys], v[s, i, h])
    return at.linear("op.out", at.gate("op.gate", m) * out.flatten(2))


def column_attention(at: Naive, m: Tensor, there: Tensor) -> Tensor:
    """Algorithm 8."""
    m = at.norm("pre.msa", m)
    (q, k, v), out = projected(at, m, HEADS), torch.zeros(*m.shape[:2], HEADS, SIZE, dtype=m.dtype)
    for i in range(m.shape[1]):
        for s in range(m.shape[0]):
            for h in range(HEADS):
                keys = [t for t in range(m.shape[0]) if there[t, i]]
                out[s, i, h] = weighed([q[s, i, h] @ k[t, i, h] for t in keys], [v[t, i, h] for t in keys], v[s, i, h])
    return at.linear("op.out", at.gate("op.gate", m) * out.flatten(2))


def transition(at: Naive, x: Tensor, stream: str) -> Tensor:
    """Algorithms 9 and 15."""
    return at.linear("op.op.down", at.linear("op.op.up", at.norm(f"pre.{stream}", x)).relu())


def outer_product_mean(at: Naive, m: Tensor, there: Tensor) -> Tensor:
    """Algorithm 10."""
    m = at.norm("pre.msa", m)
    a, b = at.linear("op.left", m), at.linear("op.right", m)
    means: list[Tensor] = []
    for i in range(m.shape[1]):
        for j in range(m.shape[1]):
            outer = [torch.outer(a[s, i], b[s, j]).flatten() for s in range(len(m)) if there[s, i] and there[s, j]]
            means.append(torch.stack(outer).mean(0) if outer else torch.zeros(a.shape[-1] ** 2, dtype=m.dtype))
    return at.linear("op.out", torch.stack(means).unflatten(0, (m.shape[1], m.shape[1])))


def triangle_multiplication(at: Naive, z: Tensor, seen: Tensor, outgoing: bool) -> Tensor:
    """Algorithms 11 and 12."""
    z, length = at.norm("pre.pair", z), len(z)
    a, b = (at.gate(f"op.{side}_gate", z) * at.linear(f"op.{side}", z) for side in ("left", "right"))
    sums = torch.zeros_like(a)
    for i in range(length):
        for j in range(length):
            for k in range(length):
                one, other = ((i, k), (j, k)) if outgoing else ((k, i), (k, j))
                if seen[one] and seen[other]:
                    sums[i, j] += a[one] * b[other]
    return at.gate("op.gate", z) * at.linear("op.out", at.norm("op.norm", sums))


def triangle_attention(at: Naive, z: Tensor, seen: Tensor, starting: bool) -> Tensor:
    """Algorithms 13 and 14."""
    z, heads = at.norm("pre.pair", z), TINY["pair_heads"]
    bias, length = at.linear("op.bias", z), len(z)
    (q, k, v), out = projected(at, z, heads), torch.zeros(*z.shape[:2], heads, SIZE, dtype=z.dtype)
    for i in range(length):
        for j in range(length):
            for h in range(heads):
                edges = [(i, k) if starting else (k, j) for k in range(length)]
                beside = [(j, k) if starting else (k, i) for k in range(length)]
                keys = [n for n in range(length) if seen[edges[n]]]
                scores = [q[i, j, h] @ k[edges[n]][h] + bias[beside[n]][h] for n in keys]
                out[i, j, h] = weighed(scores, [v[edges[n]][h] for n in keys], v[i, j, h])
    return at.linear("op.out", at.gate("op.gate", z) * out.flatten(2))


# --- parity ---


def model(**changes: Any) -> ModelOp:
    built = evoformer(**TINY | changes).build(dtype=torch.float64)
    roughen(built)
    return built.eval()


def alignments(**more: Tensor) -> dict[str, Tensor]:
    """Two, of 3 sequences and 5 residues."""
    generator = torch.Generator().manual_seed(3)
    ids, target = (torch.randint(20, size, generator=generator) for size in ((2, 3, 5), (2, 5)))
    return {"msa": ids, "target": target} | more


def check_parity(ours: ModelOp, inputs: dict[str, Tensor], segment: Tensor | None = None) -> None:
    """The answer, a loss and every gradient are those of the algorithms, of real residues."""
    real = torch.ones(inputs["target"].shape, dtype=torch.bool) if segment is None else segment != 0
    weights = {name: p.detach().clone().requires_grad_() for name, p in ours.named_parameters()}
    found = ours(inputs, Step(segment=segment))
    losses = torch.zeros(2, dtype=torch.float64)
    for i, here in enumerate(real):
        one = {"present": torch.ones_like(inputs["msa"][i], dtype=torch.bool)} | {k: v[i] for k, v in inputs.items()}
        expected = algorithms(weights, one, here, TINY["layers"])
        pairs = here[:, None] & here
        for name, cells in (("msa", here.expand(expected["msa"].shape[:2])), ("distogram", pairs)):
            close(found[name][i][cells], expected[name][cells], name)
            answers = torch.stack([(answer[cells] ** 2).mean() for answer in (found[name][i], expected[name])])
            losses = losses + answers
    close(losses[0], losses[1], "loss")
    losses.sum().backward()
    for name, parameter in ours.named_parameters():
        expected, gradient = weights[name].grad, parameter.grad
        assert expected is not None
        assert gradient is not None
        if name.endswith("row.pre.pair.bias"):  # it moves all scores of a query alike, and so nothing
            assert max(gradient.abs().max(), expected.abs().max()) < 1e-11
        else:
            close(gradient, expected, f"gradient of {name}")


def test_the_answer_is_that_of_the_algorithms() -> None:
    check_parity(model(), alignments())


def test_padding_of_residues_and_sequences_is_as_the_algorithms_without_it() -> None:
    present = torch.ones(2, 3, 5, dtype=torch.bool)
    present[0, 2] = False  # a whole sequence
    present[1, 1, 3:] = False
    check_parity(model(), alignments(present=present), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))


def test_features_of_cells_are_read() -> None:
    features = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    check_parity(model(features=4), alignments(features=features))


# --- where ESMFold has the same ---

PLACES = {
    "outgoing": "tri_mul_out",
    "incoming": "tri_mul_in",
    "starting": "tri_att_start",
    "ending": "tri_att_end",
    "pair_transition": "mlp_pair",
}
THEIRS = {
    "pre.pair": ("layer_norm_in", "layer_norm", "mlp.0"),
    "op.left": ("linear_a_p",),
    "op.left_gate": ("linear_a_g",),
    "op.right": ("linear_b_p",),
    "op.right_gate": ("linear_b_g",),
    "op.norm": ("layer_norm_out",),
    "op.bias": ("linear",),
    "op.q": ("mha.linear_q",),
    "op.k": ("mha.linear_k",),
    "op.v": ("mha.linear_v",),
    "op.gate": ("linear_g", "mha.linear_g"),
    "op.out": ("linear_z", "mha.linear_o"),
    "op.op.up": ("mlp.1",),
    "op.op.down": ("mlp.3",),
}


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
def test_triangles_are_those_of_esmfold(masked: bool) -> None:
    """The pair half of a block of theirs, with its weights in ours: five places, in their order."""
    config: Any = TrunkConfig(
        sequence_state_dim=16, pairwise_state_dim=16, sequence_head_width=8, pairwise_head_width=SIZE, dropout=0.0
    )
    theirs = esmfold.EsmFoldTriangularSelfAttentionBlock(config).double().eval()
    block = model(widening=4).get_submodule("encoder.blocks.0")
    for ours, place in PLACES.items():
        known = dict(theirs.get_submodule(place).named_parameters())
        for name, parameter in block.get_submodule(ours).named_parameters():
            prefix, _, kind = name.rpartition(".")
            (found,) = [one for one in THEIRS[prefix] if f"{one}.{kind}" in known]
            known.pop(f"{found}.{kind}").copy_(parameter)
        assert not known, "a parameter of theirs has none of ours"

    generator = torch.Generator().manual_seed(5)
    pair = torch.randn(2, 6, 6, 16, generator=generator, dtype=torch.float64)
    segment = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    real = segment != 0
    pairs = real[:, :, None] & real[:, None] if masked else None
    expected = pair
    for place in list(PLACES.values())[:4]:
        expected = expected + theirs.get_submodule(place)(expected, None if pairs is None else pairs.double())
    expected = theirs.mlp_pair(expected)
    found: Any = {"pair": pair, "msa": pair}
    for name in PLACES:
        found, _ = block.get_submodule(name)(found, Step(segment=segment if masked else None))
    seen = torch.ones(2, 6, 6, dtype=torch.bool) if pairs is None else pairs
    assert_near(found["pair"][seen], expected[seen], 1e-10)
    assert found["msa"] is pair


# --- sizes and the rest ---


def test_a_block_of_the_published_size() -> None:
    """By arithmetic, with the widths of section 1.6: 1,829,952 parameters a block."""
    size = SIZES["evoformer-48"]
    one, two = (evoformer(**size | {"layers": layers}).parameters() for layers in (1, 2))
    attention, gated = 3 * 256 * 256, 2 * (256 * 256 + 256)
    msa = (512 + 256 + attention + gated + 8 * 128) + (512 + attention + gated) + 512 + 8 * 256 * 256 + 5 * 256
    outer = 512 + 2 * (256 * 32 + 32) + 32 * 32 * 128 + 128
    multiplication = 2 * 256 + 6 * (128 * 128 + 128)
    triangle = 256 + 3 * 128 * 128 + 2 * (128 * 128 + 128) + 4 * 128
    assert two - one == msa + outer + 2 * multiplication + 2 * triangle + 256 + 8 * 128 * 128 + 5 * 128
    assert two - one == 1_829_952


def test_each_branch_drops_out_as_algorithm_6_says() -> None:
    trunk = evoformer(**SIZES["evoformer-48"]).encoder
    assert trunk is not None
    dropped = {s.name: s.scale for s in trunk.blocks[0].sublayers if isinstance(s.scale, SharedDropout)}
    rows = {"row": 0.15, "outgoing": 0.25, "incoming": 0.25, "starting": 0.25}
    assert dropped == {name: SharedDropout(share, 1) for name, share in rows.items()} | {
        "ending": SharedDropout(0.25, 2)
    }
    assert [s.name for s in trunk.blocks[0].sublayers if s.name not in dropped] == [
        "column", "transition", "outer", "pair_transition"
    ]  # fmt: skip


def test_a_new_model_passes_its_streams_through_and_answers_evenly() -> None:
    inputs = alignments()
    answer = evoformer(**TINY).build()(inputs)
    assert all(not leaf.any() for leaf in answer.values())
    spec = evoformer(**TINY).replace(head=None)
    streams, (front, _) = (built := spec.build())(inputs), built.get_submodule("encoder.embed")(inputs, Step())
    assert all(torch.equal(streams[name], front[name]) for name in ("msa", "pair"))


def test_distances_are_the_same_both_ways() -> None:
    distogram = model()(alignments())["distogram"]
    assert torch.equal(distogram, distogram.transpose(1, 2))


def test_a_chain_with_a_gap_is_told_by_positions() -> None:
    ours, inputs = model(), alignments()
    near, far = (ours(inputs, Step(pos=torch.tensor([[0, 1, 2, gap, gap + 1]])))["distogram"] for gap in (3, 90))
    assert torch.equal(near, ours(inputs)["distogram"])
    assert not torch.allclose(near, far)


@pytest.mark.parametrize(("axis", "other"), [(1, 2), (2, 1)])
def test_dropout_takes_whole_lines(axis: Any, other: int) -> None:
    drop = SharedDropout(0.25, axis).build(0, Context())
    assert isinstance(drop, nn.Module)
    dropped = drop(torch.ones(2, 40, 40, 8))
    assert torch.equal(dropped, dropped.narrow(axis, 0, 1).expand_as(dropped))
    assert not torch.equal(dropped, dropped.narrow(other, 0, 1).expand_as(dropped))
    assert dropped.mean().item() == pytest.approx(1, abs=0.1)
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(drop.eval()(dropped), dropped)
    training = model(dropout=0.5).train()
    assert not torch.equal(training(alignments())["msa"], training(alignments())["msa"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": torch.zeros(2, 4, dtype=torch.long)}, r"msa is [B, S, L] and target [B, L]"),
        ({"msa": torch.full((2, 3, 5), 23)}, "msa: class 23 is none of 0 … 22"),
        ({"target": torch.full((2, 5), 21)}, "target: class 21 is none of 0 … 20"),
        ({"present": torch.ones(2, 3, dtype=torch.bool)}, "present is"),
        ({"features": torch.zeros(2, 3, 5, 4)}, "it needs ['msa', 'target']"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: dict[str, Tensor], said: str) -> None:
    with pytest.raises(InputError) as caught:
        model()(alignments() | changes)
    assert said in str(caught.value)


def test_two_alignments_in_a_row_are_refused() -> None:
    with pytest.raises(InputError, match="cannot share a row"):
        model()(alignments(), Step(segment=torch.tensor([[1, 1, 1, 2, 2]] * 2)))
    with pytest.raises(SpecError, match="no Hugging Face"):
        to_hf(evoformer(**TINY))
