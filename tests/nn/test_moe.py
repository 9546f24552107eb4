"""Mixture of experts against its formulas, token by token and expert by expert."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

from sublayer.errors import SpecError
from sublayer.nn import experts
from sublayer.nn.embed import Embed
from sublayer.nn.experts import grouped
from sublayer.nn.feed_forward import ACTIVATIONS, FeedForward
from sublayer.nn.initialise import Init
from sublayer.nn.moe import MoE, MoEOp, Router, Routing, balance
from sublayer.nn.norm import RMSNorm
from sublayer.nn.op import Context
from sublayer.nn.sublayer import Block, Model, ModelOp, Trunk, pre_norm
from sublayer.step import Shared, Step
from sublayer.train.language import next_token
from sublayer.train.objectives import Batch
from sublayer.train.optim import kinds
from sublayer.train.recompute import recompute

EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-11}


def drawn(spec: MoE, dim: int = 8, seed: int = 0) -> MoEOp:
    op = spec.build(dim, Context()).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.normal_(generator=generator)
    return op


def moe(number: int = 6, **router: Any) -> MoE:
    return MoE(number, FeedForward(5, "silu", gated=True), Router(**router))


def model(layers: int = 1, **router: Any) -> ModelOp:
    block = Block((pre_norm("ffn", moe(4, **router), RMSNorm()),))
    return Model(8, decoder=Trunk(Embed(11), (block,) * layers), init=Init(0.5)).build(dtype=torch.float64).train()


def tokens(*shape: int, dim: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(net: ModelOp) -> Any:
    """The experts of its first block."""
    return net.get_submodule("decoder.blocks.0.ffn.op")


def sent(op: MoEOp, x: Tensor, step: Step | None = None) -> list[list[bool]]:
    """[B, L]: which tokens reach their first expert."""
    found = op.route(x, Step() if step is None else step).sent
    assert found is not None
    return found[..., 0].tolist()


def expert(op: MoEOp, e: int, x: Tensor) -> Tensor:
    """One expert on one vector."""
    inner = op.experts

    def product(matrix: Tensor, bias: Tensor | None, v: Tensor) -> Tensor:
        return matrix[e] @ v if bias is None else matrix[e] @ v + bias[e]

    up, activation = product(inner.up, inner.up_bias, x), ACTIVATIONS[op.spec.expert.activation]
    hidden = activation(up) if inner.gate is None else activation(product(inner.gate, inner.gate_bias, x)) * up
    return product(inner.down, inner.down_bias, hidden)


def naive(op: MoEOp, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """[B, L, D]: the sum over a token's experts, one after the other."""
    rows = [
        torch.stack([w * expert(op, int(e), v) for e, w in zip(es, ws, strict=True)]).sum(0)
        for v, es, ws in zip(x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1), strict=True)
    ]
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("active", [1, 2, 6])
def test_values_and_gradients_are_those_of_the_sum_over_experts(active: int, gated: bool, bias: bool) -> None:
    spec = MoE(6, FeedForward(5, "silu", gated=gated, bias=bias), Router(active, renormalise=False, bias=bias))
    op = drawn(spec)
    x = tokens(2, 5).requires_grad_()
    logits = F.linear(x, op.router.weight, op.router.bias)
    weights, chosen = logits.softmax(-1).topk(active, -1)
    found, expected = op(x, Step()), naive(op, x, chosen, weights)
    assert_close(found, expected, **EXACT)
    inputs = [x, *op.parameters()]
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected)), strict=True):
        assert_close(one, other, rtol=0, atol=1e-11 * max(1.0, float(other.abs().max())))


def routed(logits: list[float], **router: Any) -> tuple[list[int], list[float]]:
    """(experts, weights) of one token with these logits."""
    op = MoE(len(logits), FeedForward(2), Router(**router)).build(1, Context()).double().eval()
    with torch.no_grad():
        op.router.weight.copy_(torch.tensor(logits)[:, None])
        routing = op.route(torch.ones(1, 1, 1, dtype=torch.float64), Step())
    return routing.chosen[0, 0].tolist(), routing.weights[0, 0].tolist()


@pytest.mark.parametrize(
    ("router", "weights"),
    [
        ({}, [0.7311, 0.2689]),  # the softmax of the two alone
        ({"renormalise": False}, [0.6439, 0.2369]),
        ({"renormalise": False, "scale": 2.5}, [1.60975, 0.59225]),
        ({"scores": "sigmoid", "renormalise": False}, [0.8808, 0.7311]),
        ({"scores": "sigmoid", "scale": 10.0}, [5.46447, 4.53553]),
        ({"active": 1}, [1.0]),
        ({"active": 1, "renormalise": False}, [0.6439]),
    ],
    ids=str,
)
def test_weights_of_the_chosen(router: dict, weights: list[float]) -> None:
    chosen, found = routed([2, 1, 0, -1], **router)
    assert chosen == [0, 1][: len(weights)]
    assert found == pytest.approx(weights, abs=1e-4)


def test_experts_come_from_the_groups_with_the_best_pairs() -> None:
    """The best expert of all stands in a group whose second is poor."""
    logits = [3.0, -9, -9, 1, 0.9, -9, 0.5, 0.4, -9]
    assert routed(logits, active=3, groups=3, active_groups=1, scores="sigmoid")[0] == [3, 4, 5]
    assert sorted(routed(logits, active=3, groups=3, active_groups=2, scores="sigmoid")[0]) == [3, 4, 6]
    assert routed(logits, active=3, groups=3, active_groups=3, scores="sigmoid")[0] == [0, 3, 4]


def test_groups_may_count_as_much_as_their_best_expert_or_best_three() -> None:
    logits = [3.0, -9, -9, 1, 0.9, -9, 0.5, 0.4, 0.3]
    groups: dict[str, Any] = {"active": 3, "groups": 3, "active_groups": 1}
    assert routed(logits, group_votes=1, **groups)[0] == [0, 1, 2]
    assert routed(logits, group_votes=3, scores="sigmoid", **groups)[0] == [6, 7, 8]


def test_the_selection_bias_changes_the_choice_and_not_the_weights() -> None:
    op = drawn(moe(active=2, scores="sigmoid", balance_rate=0.1))
    x = tokens(2, 3)
    assert op.selection_bias is not None
    with torch.no_grad():
        op.selection_bias.zero_()[5] = 10.0
        routing = op.route(x, Step())
    scores = F.linear(x, op.router.weight).sigmoid()
    assert (routing.chosen[..., 0] == 5).all()
    picked = scores.gather(-1, routing.chosen)
    assert_close(routing.weights, picked / picked.sum(-1, keepdim=True), **EXACT)


@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_expert_serves_every_token(gated: bool) -> None:
    spec = moe().replace(shared=FeedForward(7, "gelu"), shared_gated=gated)
    op, x = drawn(spec), tokens(2, 3)
    assert op.shared is not None
    shared = op.shared(x)
    if op.shared_gate is not None:
        shared = torch.sigmoid(x @ op.shared_gate.weight.t()) * shared
    alone = drawn(moe())
    alone.load_state_dict({k: v for k, v in op.state_dict().items() if not k.startswith("shared")})
    assert_close(op(x, Step()), alone(x, Step()) + shared, **EXACT)


# --- padding, packing, capacity ---


def test_padding_goes_to_no_expert_and_costs_none() -> None:
    op, x = drawn(MoE(6, FeedForward(5, bias=True), Router(2))), tokens(2, 4)
    segment = torch.tensor([[1, 1, 0, 0], [0, 2, 2, 2]])
    real = segment != 0
    seen: list[Tensor] = []
    op.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    found = op(x, Step(segment=segment))
    assert int(seen[0][-1]) == 2 * int(real.sum())
    assert_close(found[real], op(x, Step())[real], **EXACT)
    assert not found[~real].any()


def test_a_full_expert_drops_later_tokens_of_its_document() -> None:
    """Switch's top-1 with room for two: by rows, and by packed documents."""
    op = drawn(moe(2, active=1, renormalise=False, capacity=2))
    with torch.no_grad():
        op.router.weight.zero_()[0, 0] = 1.0
    x = tokens(2, 5)
    x[..., 0] = torch.tensor([[1, 1, -1, 1, 1], [-1, -1, -1, 1, 1]])  # above 0: expert 0
    routing, y = op.route(x, Step()), op(x, Step())
    assert sent(op, x) == [[True, True, True, False, False], [True, True, False, True, True]]
    assert not y[0, 3:].any()
    assert not y[1, 2].any()
    assert_close(y[0, :3], naive(op, x, routing.chosen, routing.weights)[0, :3], **EXACT)
    document = torch.tensor([[1, 1, 1, 2, 2], [1, 1, 0, 2, 2]])
    packed = Step(segment=document, shared=Shared(document=document))
    assert sent(op, x, packed) == [[True] * 5, [True, True, False, True, True]]


def test_a_capacity_factor_shares_the_calls_real_tokens_among_experts() -> None:
    """c · k · tokens / E, rounded up: earlier tokens first, over the whole call; padding takes no room."""
    op = drawn(moe(2, active=1, renormalise=False, capacity_factor=1.5))
    with torch.no_grad():
        op.router.weight.zero_()[0, 0] = 1.0
    x = tokens(2, 3).abs()  # all want expert 0, which takes ceil(1.5 · 6 / 2) = 5
    assert sent(op, x) == [[True] * 3, [True, True, False]]
    segment = torch.tensor([[0, 0, 1], [1, 1, 1]])  # four are real: ceil(1.5 · 4 / 2) = 3
    assert sent(op, x, Step(segment=segment)) == [[False, False, True], [True, True, False]]
    assert sent(op, x[:1, :1]) == [[True]]  # a single token never overflows
    y = op(x.requires_grad_(), Step(segment=segment)).sum()
    assert torch.autograd.grad(y, x)[0].isfinite().all()


# --- auxiliary losses ---


def test_auxiliary_losses_are_means_over_real_tokens() -> None:
    op = drawn(moe(active=2, balance_loss=0.5, z_loss=0.25)).train()
    x, segment = tokens(2, 4), torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    _, extras = op(x, Step(segment=segment))
    logits = F.linear(x, op.router.weight)[segment != 0]
    chosen = logits.topk(2, -1).indices
    load = torch.stack([(chosen == e).sum() for e in range(6)]) / 5
    expected = 0.5 * 6 * (load * logits.softmax(-1).mean(0)).sum()
    assert_close(extras["balance"], expected, rtol=1e-6, atol=0)
    assert_close(extras["router_z"], 0.25 * logits.exp().sum(-1).log().square().mean(), **EXACT)
    assert isinstance(op.eval()(x, Step()), Tensor)  # losses belong to training


def test_the_least_balance_loss_is_that_of_equal_loads() -> None:
    """α where every expert gets as much (arXiv 2101.03961, section 2.2), times k."""
    op = drawn(moe(4, active=1, balance_loss=0.01)).train()
    with torch.no_grad():
        op.router.weight.copy_(torch.eye(4, 8))
    x = 1e-3 * torch.eye(4, 8, dtype=torch.float64)[None]  # each wants another expert, by a hair
    _, extras = op(x, Step())
    assert float(extras["balance"]) == pytest.approx(0.01, rel=1e-5)


def test_padding_alone_has_no_auxiliary_loss() -> None:
    op = drawn(moe(active=2, balance_loss=0.5, z_loss=0.25)).train()
    _, extras = op(tokens(1, 3), Step(segment=torch.zeros(1, 3, dtype=torch.long)))
    assert [float(value) for value in extras.values()] == [0.0, 0.0]


@pytest.mark.parametrize("only", ["balance_loss", "z_loss"])
def test_the_routers_gradient_does_not_depend_on_micro_batches(only: str) -> None:
    """One batch of four equal rows, or four micro-batches of one: the same, and not zero."""
    ids = torch.randint(11, (1, 7), generator=torch.Generator().manual_seed(3)).expand(4, 7).contiguous()
    found: dict[tuple[int, float], Tensor] = {}
    for parts in (1, 4):
        for coefficient in (0.0, 0.5):
            net, tokens_seen = model(2, active=2, **{only: coefficient}), 0
            for part in ids.chunk(parts):
                loss = next_token(net, Batch(part[:, :-1], part[:, 1:], Step()))
                loss.sum.backward()
                tokens_seen += int(loss.tokens)
            weight = net.get_parameter("decoder.blocks.1.ffn.op.router.weight")
            assert weight.grad is not None
            found[parts, coefficient] = weight.grad / tokens_seen
    for coefficient in (0.0, 0.5):
        assert_close(found[4, coefficient], found[1, coefficient], **EXACT)
    assert (found[1, 0.5] - found[1, 0.0]).abs().max() > 1e-3


# --- balancing without a loss ---


def test_balance_moves_the_bias_against_the_load_of_all_micro_batches() -> None:
    net = model(active=2, balance_rate=0.01)
    op = layer(net)
    ids = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(4))
    segment = torch.ones_like(ids)
    segment[0, :3] = 0
    seen: list[Routing] = []
    op.watch = seen.append
    for part, own in zip(ids.chunk(2), segment.chunk(2), strict=True):
        net(part, Step(segment=own))
    net.eval()(ids)
    with torch.no_grad():
        net.train()(ids)  # no step comes of these two
    chosen = torch.cat([r.chosen[r.real] for r in seen[:2]])
    load = torch.stack([(chosen == e).sum() for e in range(4)])
    assert torch.equal(op.load, load)
    assert int(load.sum()) == 2 * 21
    balance(net)
    assert_close(op.selection_bias.data, 0.01 * torch.sign(load.double().mean() - load))
    assert not op.load.any()
    before = op.selection_bias.clone()
    balance(net)  # without a pass between there is nothing to balance
    assert torch.equal(op.selection_bias, before)
    net(ids)
    balance(net, move=False)
    assert torch.equal(op.selection_bias, before)
    assert not op.load.any()


def test_ranks_balance_alike() -> None:
    """Each adds the other's load before it moves."""
    ids = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(5))
    whole, *ranks = (model(active=2, balance_rate=0.01) for _ in range(3))
    whole(ids)
    for rank, part in zip(ranks, ids.chunk(2), strict=True):
        rank(part)
    loads = [layer(rank).load.clone() for rank in ranks]
    balance(whole)
    for rank, other in zip(ranks, loads[::-1], strict=True):
        balance(rank, lambda load, other=other: load.add_(other))
    name = "decoder.blocks.0.ffn.op.selection_bias"
    assert whole.get_parameter(name).any()
    for rank in ranks:
        assert torch.equal(rank.get_parameter(name), whole.get_parameter(name))


def test_what_is_computed_again_in_the_backward_pass_is_counted_once() -> None:
    ids = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(6))
    net = model(active=2, balance_rate=0.01)
    recompute(net)
    net(ids).sum().backward()
    assert int(layer(net).load.sum()) == 2 * ids.numel()


# --- jitter, kernels, the rest ---


def test_jitter_shakes_the_routers_input_in_training_alone() -> None:
    op, x = drawn(moe(6, active=6, jitter=0.3)), tokens(1, 400)
    assert torch.equal(op.route(x, Step()).logits, F.linear(x, op.router.weight))
    op.train()
    torch.manual_seed(0)
    with torch.no_grad():
        op.router.weight.copy_(torch.eye(6, 8))
    factor = op.route(x, Step()).logits / x[..., :6]
    assert 0.7 <= float(factor.min()) < 0.71
    assert 1.29 < float(factor.max()) <= 1.3
    assert float(factor.mean()) == pytest.approx(1.0, abs=0.02)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = grouped(x, weight, ends)
    return [y, *torch.autograd.grad((y * y.detach().cos()).sum(), [x, weight])]


def test_torchs_kernel_gives_what_the_loop_gives(monkeypatch) -> None:
    """It is used on a GPU; its form for the CPU takes the same arguments. Rows after the last end may hold anything."""
    generator = torch.Generator().manual_seed(7)
    x, weight = torch.randn(20, 16, generator=generator), torch.randn(5, 12, 16, generator=generator)
    ends = torch.tensor([3, 3, 9, 16, 17])
    loop = _grouped(x, weight, ends)
    assert not loop[0][17:].any()
    x[17:] = torch.nan
    monkeypatch.setattr(experts, "_has_kernel", lambda x, weight: True)
    for one, other in zip(_grouped(x, weight, ends), loop, strict=True):
        assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


def test_an_expert_without_rows_costs_nothing(monkeypatch) -> None:
    products: list[tuple[int, ...]] = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: products.append(tuple(a.shape)) or mm(a, b, out=out))
    grouped(torch.randn(4, 3), torch.randn(100, 2, 3), torch.tensor([0] * 50 + [3] * 30 + [4] * 20))
    assert products == [(3, 3), (1, 3)]


def test_it_compiles_to_one_graph_forward_and_backward() -> None:
    op = drawn(MoE(6, FeedForward(5, "silu", gated=True, bias=True), Router(2, balance_loss=0.1, capacity_factor=1.0)))
    op.train()
    torch._dynamo.reset()
    counter = CompileCounter()
    fast = torch.compile(op, fullgraph=True, dynamic=False, backend=counter)
    inputs = list(op.parameters())
    for seed in (1, 2, 3):
        x = tokens(2, 5, seed=seed)
        (found, extras), (expected, wanted) = fast(x, Step()), op(x, Step())
        assert_close(found, expected, **EXACT)
        assert_close(extras, wanted, **EXACT)
        gradients = [torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected)]
        for one, other in zip(*gradients, strict=True):
            assert_close(one, other, **EXACT)
    assert counter.frame_count == 1


def test_under_autocast_experts_multiply_in_its_dtype_and_the_router_in_fp32() -> None:
    op, x = drawn(moe()).float(), tokens(2, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        routing, y = op.route(x, Step()), op(x, Step())
    assert_close(routing.logits, F.linear(x, op.router.weight))
    assert_close(y, op(x, Step()), rtol=0, atol=0.05 * float(y.abs().max()))
    assert not torch.equal(y, op(x, Step()))


def test_experts_decay_as_matrices_and_the_selection_bias_does_not_train() -> None:
    net = model(active=2, balance_rate=0.1)
    found = kinds(net)
    where = "decoder.blocks.0.ffn.op"
    assert {found[f"{where}.experts.{name}"] for name in ("gate", "up", "down")} == {"matrix"}
    assert found[f"{where}.router.weight"] == "matrix"
    assert f"{where}.selection_bias" not in found
    op = net.get_submodule(where)
    assert op.idle == 2 * 3 * 5 * 8  # two of four experts, of three matrices


def test_matrices_that_write_into_the_residual_stream_begin_smaller() -> None:
    block = Block((pre_norm("ffn", MoE(8, FeedForward(64), Router()), RMSNorm()),))
    net = Model(64, decoder=Trunk(Embed(3), (block,) * 4), init=Init(0.1, residual="depth")).build()
    for name, std in (("up", 0.1), ("down", 0.05)):
        assert float(net.get_parameter(f"decoder.blocks.2.ffn.op.experts.{name}").std()) == pytest.approx(std, rel=0.03)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"active": 0}, "active must be above 0"),
        ({"active": 7}, "router.active=7 is above the 6 to choose from"),
        ({"active": 4, "groups": 3, "active_groups": 1}, "router.active=4 is above the 2 to choose from"),
        ({"groups": 4}, "router.groups=4 do not divide experts=6"),
        ({"active": 1, "groups": 6}, "a group is judged by its best router.group_votes=2"),
        ({"group_votes": 0}, "group_votes must be above 0"),
        ({"active_groups": 2}, "active_groups=2 must be from 1 to groups=1"),
        ({"capacity": 0}, "capacity must be above 0"),
        ({"capacity_factor": 0.0}, "capacity_factor must be above 0"),
        ({"capacity": 3, "capacity_factor": 1.0}, "give capacity or capacity_factor"),
        ({"jitter": 1.0}, "jitter is from 0 to below 1"),
        ({"z_loss": -1.0}, "z_loss must be at least 0"),
        ({"scores": "relu"}, "'softmax' or 'sigmoid'"),
    ],
    ids=str,
)
def test_what_describes_no_router_is_refused(values: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        moe(**values)


def test_a_gate_needs_a_shared_expert() -> None:
    with pytest.raises(SpecError, match="shared_gated needs a shared expert"):
        moe().replace(shared_gated=True)
