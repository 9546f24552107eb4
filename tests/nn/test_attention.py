"""Attention as an op: every option against a plain loop over queries and keys, then while decoding.

B batch, L length, D width, N heads, K kv heads, H head size.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from sublayer.errors import InputError, SpecError, StateError
from sublayer.nn.attention import Attention, AttentionOp
from sublayer.nn.embed import Embed
from sublayer.nn.norm import RMSNorm
from sublayer.nn.op import Context
from sublayer.nn.position import Shaw
from sublayer.nn.rope import Rope, rotate
from sublayer.nn.rope_scaling import DynamicNtk
from sublayer.nn.sublayer import Block, Model, ModelOp, Trunk, pre_norm, repeat
from sublayer.state import PerMemory, PerToken, State
from sublayer.step import Step

B, L, D = 2, 7, 12

OPTIONS: dict[str, dict[str, Any]] = {
    "single-head": {"heads": 1},
    "multi-head": {"heads": 4},
    "multi-query": {"heads": 4, "kv_heads": 1},
    "grouped-query": {"heads": 4, "kv_heads": 2},
    "head size": {"heads": 2, "head_size": 10},
    "window": {"heads": 2, "window": 3},
    "window of one": {"heads": 2, "window": 1},
    "kept first": {"heads": 2, "window": 2, "keep_first": 2},
    "both ways": {"heads": 2, "causal": False},
    "window both ways": {"heads": 2, "causal": False, "window": 2},
    "rope": {"heads": 2, "position": Rope(100.0)},
    "part of a head": {"heads": 2, "position": Rope(100.0, size=2, pairing="interleaved")},
    "dynamic rope": {"heads": 2, "position": Rope(100.0, scaling=DynamicNtk(2.0, 4))},
    "Shaw": {"heads": 2, "position": Shaw(2)},
    "Shaw, keys only": {"heads": 2, "position": Shaw(2, values=False)},
    "qk norm": {"heads": 2, "qk_norm": RMSNorm(0.1), "position": Rope(100.0)},
    "joint qk norm": {"heads": 4, "kv_heads": 2, "qk_norm": RMSNorm(0.1), "qk_norm_joint": True, "bias": True},
    "value norm": {"heads": 4, "kv_heads": 2, "v_norm": RMSNorm(0.1, weight=False), "bias": True},
    "keys as values": {"heads": 2, "qk_norm": RMSNorm(0.1), "v_norm": RMSNorm(0.1), "tied_values": True,
                       "position": Rope(100.0)},
    "softcap": {"heads": 2, "softcap": 1.5},
    "sinks": {"heads": 2, "sinks": True},
    "scale": {"heads": 2, "scale": 0.9},
    "biases": {"heads": 2, "bias": True},
    "bias of the output alone": {"heads": 2, "out_bias": True},
    "biases but of the output": {"heads": 2, "bias": True, "out_bias": False},
    "all at once": {"heads": 4, "kv_heads": 2, "head_size": 4, "window": 4, "keep_first": 1, "position": Rope(50.0),
                    "qk_norm": RMSNorm(0.1), "softcap": 2.0, "sinks": True, "scale": 0.7, "bias": True},
}  # fmt: skip


def built(attention: Attention, layers: int = 1) -> ModelOp:
    block = Block((pre_norm("attn", attention, RMSNorm()),))
    model = Model(D, decoder=Trunk(Embed(17), repeat(block, layers)), head=None).build(dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.2, 0.6)
    return model


def op_of(model: ModelOp) -> AttentionOp:
    return next(op for op in model.modules() if isinstance(op, AttentionOp))


def run(model: ModelOp, ids: Tensor, step: Step | None = None) -> tuple[Tensor, Tensor]:
    """What went into the attention and what came out."""
    seen: list[Any] = []
    handle = op_of(model).register_forward_hook(lambda op, inputs, y: seen.extend([inputs[0], y]))
    model(ids, step)
    handle.remove()
    return seen[0], seen[1]


def plain(op: AttentionOp, x: Tensor, prefix: int = 0) -> Tensor:
    """One row, [L, D]: a loop for each head, query and key, as the formulas are written."""
    spec, length = op.spec, len(x)
    kv_heads, H = spec.kv_heads or spec.heads, op.head_size

    def heads(layer: nn.Linear, count: int, norm: nn.Module | None = None) -> Tensor:
        y = x @ layer.weight.t() + (0 if layer.bias is None else layer.bias)
        if norm is not None:
            y = norm(y) if spec.qk_norm_joint else norm(y.view(length, count, H))
        return y.view(length, count, H)

    assert op.k is not None
    q, k, v = heads(op.q, spec.heads, op.q_norm), heads(op.k, kv_heads, op.k_norm), heads(op.v or op.k, kv_heads)
    v = v if op.v_norm is None else op.v_norm(v)
    if isinstance(spec.position, Rope):
        places = torch.arange(length)[None]
        lengths = torch.full((1, length), length) if spec.position.dynamic else None
        table = spec.position.tables(places, H, lengths=lengths, dtype=torch.float64)
        q, k = (rotate(y.transpose(0, 1)[None], *table, spec.position.pairing)[0].transpose(0, 1) for y in (q, k))
    scale = H**-0.5 if spec.scale is None else spec.scale
    rows = []
    for i in range(length):
        row = []
        for n in range(spec.heads):
            kv = n // (spec.heads // kv_heads)
            scores, values = [], []
            for j in range(length):
                seen = j <= i or j < prefix or not spec.causal
                if spec.window is not None:
                    seen = seen and (abs(i - j) < spec.window or j < spec.keep_first)
                if not seen:
                    continue
                key, value = k[j, kv], v[j, kv]
                if op.shaw is not None:
                    distance = max(-op.shaw.spec.distance, min(op.shaw.spec.distance, j - i)) + op.shaw.spec.distance
                    key = key + op.shaw.key[distance]
                    value = value if op.shaw.value is None else value + op.shaw.value[distance]
                score = scale * q[i, n] @ key
                scores.append(score if spec.softcap is None else spec.softcap * torch.tanh(score / spec.softcap))
                values.append(value)
            sink = [] if op.sink_logits is None else [op.sink_logits[n]]
            shares = torch.softmax(torch.stack([*scores, *sink]), 0)[: len(scores)]
            row.append(shares @ torch.stack(values))
        rows.append(torch.cat(row))
    y = torch.stack(rows) @ op.out.weight.t()
    return y if op.out.bias is None else y + op.out.bias


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_those_of_the_plain_loop(name: str) -> None:
    model = built(Attention(**OPTIONS[name]))
    x, y = run(model, torch.randint(17, (B, L)))
    wanted = torch.stack([plain(op_of(model), row) for row in x])
    assert_close(y, wanted, rtol=0, atol=1e-12)
    weights = torch.randn_like(y)
    of = [x, *op_of(model).parameters()]
    ours, theirs = (
        torch.autograd.grad((z * weights).sum(), of, retain_graph=True, allow_unused=True) for z in (y, wanted)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None) or name == "window of one"  # whose only weight is 1 whatever the score
        if one is not None and other is not None:
            assert_close(one, other, rtol=0, atol=1e-10)


def test_a_prefix_is_seen_by_every_query() -> None:
    model = built(Attention(2, position=Rope(100.0)))
    x, y = run(model, torch.randint(17, (B, L)), Step(prefix=torch.tensor([3, 0])))
    wanted = torch.stack([plain(op_of(model), x[0], prefix=3), plain(op_of(model), x[1])])
    assert_close(y, wanted, rtol=0, atol=1e-12)


def test_an_explicit_mask_and_a_bias_join_the_layers_own() -> None:
    model = built(Attention(2))
    op = op_of(model)
    ids = torch.randint(17, (1, L))
    allowed = torch.rand(1, 1, L, L) > 0.4
    allowed |= torch.eye(L, dtype=torch.bool)
    x, y = run(model, ids, Step(mask=allowed))
    shifted = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -1e300)
    assert_close(run(model, ids, Step(bias=shifted))[1], y, rtol=0, atol=1e-12)
    assert not torch.equal(y, plain(op, x[0])[None])


CAUSAL = [name for name, options in OPTIONS.items() if options.get("causal", True)]


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_token_by_token_and_in_chunks_equals_the_full_forward(name: str) -> None:
    model = built(Attention(**OPTIONS[name]), layers=2)
    ids = torch.randint(17, (B, L))
    for sizes in ([1] * L, [3, 1, 3], [L]):
        state = State.allocate(model, B, L)
        pieces = [model(piece, None, state) for piece in ids.split(sizes, 1)]
        if name == "dynamic rope":  # its base follows the length so far, so only the last call has seen it all
            assert_close(pieces[-1][:, -1], model(ids)[:, -1], rtol=0, atol=1e-12) if len(sizes) == 1 else None
        else:
            assert_close(torch.cat(pieces, 1), model(ids), rtol=0, atol=1e-12)


@torch.no_grad()
def test_dynamic_rope_rotates_what_is_cached_anew() -> None:
    """One layer: each step's answer is that of a full forward over what there is by then."""
    model = built(Attention(2, position=Rope(100.0, scaling=DynamicNtk(2.0, 3))))
    ids = torch.randint(17, (B, L))
    state = State.allocate(model, B, L)
    for i in range(L):
        assert_close(model(ids[:, i : i + 1], None, state)[:, 0], model(ids[:, : i + 1])[:, -1], rtol=0, atol=1e-12)


def test_what_is_kept_while_decoding_is_declared() -> None:
    shape = (2, 6)

    def state(**options: Any) -> dict:
        return Attention(2, **options).build(12, Context()).state()

    assert state() == {"k": PerToken(shape), "v": PerToken(shape)}
    assert state(window=3, keep_first=2) == {"k": PerToken(shape, window=5), "v": PerToken(shape, window=5)}
    assert state(cross=True) == {"k": PerMemory(shape), "v": PerMemory(shape)}
    assert state(causal=False) == {}
    assert state(kv_heads=1, head_size=4)["k"] == PerToken((1, 4))


@torch.no_grad()
def test_cross_attention_sees_all_of_its_memory_and_its_padding_never() -> None:
    reads = pre_norm("cross", Attention(2, cross=True), RMSNorm())
    spec = Model(D, Trunk(Embed(17), (Block((reads,)),)), Trunk(Embed(17), ()), head=None)
    model = spec.build(dtype=torch.float64).eval()
    op = op_of(model)
    ids, source = torch.randint(17, (1, 3)), torch.randint(17, (1, 5))
    seen: list[Any] = []
    op.register_forward_hook(lambda op, inputs, y: seen.extend([inputs[0], y]))
    model(ids, None, None, source)
    memory, _ = model.encode(source)
    inputs = {"q": seen[0], "k": memory, "v": memory}
    q, k, v = ((x @ op.get_parameter(f"{name}.weight").t()).view(-1, 2, 6) for name, x in inputs.items())
    shares = torch.softmax(torch.einsum("lnh,mnh->nlm", q, k) / math.sqrt(6), -1)
    wanted = torch.einsum("nlm,mnh->lnh", shares, v).reshape(1, 3, D) @ op.out.weight.t()
    assert_close(seen[1], wanted, rtol=0, atol=1e-12)

    longer = torch.cat([source, torch.randint(17, (1, 4))], 1)
    padded = model(ids, Step(memory_segment=torch.tensor([[1] * 5 + [0] * 4])), None, longer)
    assert_close(padded, model(ids, None, None, source), rtol=0, atol=1e-12)
    with pytest.raises(InputError, match="cross-attention needs Step.memory"):
        model(ids)


@torch.no_grad()
def test_documents_of_a_packed_row_read_the_memory_of_their_number() -> None:
    reads = pre_norm("cross", Attention(2, cross=True), RMSNorm())
    spec = Model(D, Trunk(Embed(17), (Block((reads,)),)), Trunk(Embed(17), ()), head=None)
    model = spec.build(dtype=torch.float64).eval()
    ids, source = torch.randint(17, (1, 6)), torch.randint(17, (1, 5))
    packed = model(
        ids,
        Step(segment=torch.tensor([[1, 1, 2, 2, 2, 0]]), memory_segment=torch.tensor([[1, 1, 1, 2, 2]])),
        None,
        source,
    )
    assert_close(packed[:, :2], model(ids[:, :2], None, None, source[:, :3]), rtol=0, atol=1e-12)
    assert_close(packed[:, 2:5], model(ids[:, 2:5], None, None, source[:, 3:]), rtol=0, atol=1e-12)


def test_attention_both_ways_cannot_be_continued() -> None:
    """A second call would see only itself: a wrong answer without a word."""
    model = built(Attention(2, causal=False))
    with pytest.raises(StateError, match="attention that sees both ways cannot be continued"):
        model(torch.ones(1, 2, dtype=torch.long), None, State.allocate(model, 1, 8))


def test_dropout_acts_in_training_only() -> None:
    model = built(Attention(2, dropout=0.5))
    ids = torch.randint(17, (B, L))
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


@pytest.mark.parametrize("kernel", ["reference", "sdpa", "tiled"])
def test_a_kernel_asked_for_is_the_one_that_runs(kernel, monkeypatch) -> None:
    from sublayer.nn import attend

    model = built(Attention(2))
    ids = torch.randint(17, (B, L))
    wanted, called = model(ids), []
    real = attend.KERNELS[kernel]
    monkeypatch.setitem(attend.KERNELS, kernel, lambda *inputs: called.append(kernel) or real(*inputs))
    op_of(model).kernel = kernel
    assert_close(model(ids), wanted, rtol=0, atol=1e-12)
    assert called == [kernel]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, "heads and kv_heads must be above 0"),
        ({"heads": 4, "kv_heads": 0}, "heads and kv_heads must be above 0"),
        ({"heads": 4, "kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"heads": 2, "kv_heads": 4}, "heads=2 is not a multiple of kv_heads=4"),
        ({"heads": 2, "head_size": 0}, "head_size must be above 0, got 0"),
        ({"heads": 2, "window": 0}, "window=0 hides everything; use None for no window"),
        ({"heads": 2, "window": -1}, "window=-1 hides everything"),
        ({"heads": 2, "keep_first": -1}, "keep_first=-1"),
        ({"heads": 2, "softcap": 0.0}, "softcap must be above 0"),
        ({"heads": 2, "cross": True, "window": 3}, "cross-attention has no window"),
        ({"heads": 2, "dropout": 1.0}, "dropout is a share"),
        ({"heads": 2, "qk_norm_joint": True}, "qk_norm_joint says how qk_norm is"),
        ({"heads": 2, "reads": "a", "keeps": "b"}, "reads='a': such attention makes no keys and values of its own"),
        ({"heads": 2, "reads": "a", "cross": True}, "reads='a'"),
        ({"heads": 2, "keeps": "a", "cross": True}, "cross-attention keeps nothing"),
    ],
)
def test_what_describes_no_attention_is_refused(options: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Attention(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "heads=5 do not divide the width 12: choose a divisor, or give head_size"),
        ({"heads": 4, "position": Rope()}, "the head size 3 is odd"),
        ({"heads": 2, "position": Rope(size=8)}, "8 rotated dims do not fit a head of size 6"),
    ],
)
def test_sizes_that_do_not_fit_the_width_are_refused_at_build(options: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        built(Attention(**options))


def test_keys_may_be_without_bias_beside_queries_and_values() -> None:
    """It would move all scores of a query alike; Whisper has none."""
    built = Attention(2, bias=True, k_bias=False).build(8, Context())
    assert [name for name, _ in built.named_parameters() if name.endswith("bias")] == ["q.bias", "v.bias", "out.bias"]
    assert "k.bias" in dict(Attention(2, bias=True).build(8, Context()).named_parameters())


def test_a_layer_reads_the_keys_and_values_of_another() -> None:
    """It equals a layer that has the other's projections and is given the other's input for them."""
    first = Attention(2, 1, position=Rope(100.0), keeps="a")
    second = Attention(2, 1, position=Rope(100.0), reads="a", window=3)
    blocks = tuple(Block((pre_norm("attn", attention, RMSNorm()),)) for attention in (first, second))
    model = Model(D, decoder=Trunk(Embed(17), blocks), head=None).build(dtype=torch.float64).eval()
    writer, reader = (op for op in model.modules() if isinstance(op, AttentionOp))
    assert {name for name, _ in reader.named_parameters()} == {"q.weight", "out.weight"}
    assert reader.state() == {}
    whole = Attention(2, 1, position=Rope(100.0), window=3).build(D, Context()).double()
    whole.load_state_dict(writer.state_dict() | reader.state_dict())
    seen: list[Any] = []
    for op in (writer, reader):
        op.register_forward_hook(lambda op, inputs, y: seen.extend([inputs[0], inputs[1], y]))
    model(torch.randint(17, (B, L)))
    (of_writer, _, _), (of_reader, step, y) = seen[:3], seen[3:]
    q = whole.q(of_reader)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole.q, "forward", lambda x: q)
        assert_close(whole(of_writer, step), y, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (Attention(2), "reads='a' for .* no earlier layer keeps that"),
        (Attention(2, keeps="b"), "reads='a' for .* no earlier layer keeps that"),
        (Attention(4, keeps="a"), r"reads='a' for .*\(2, 4\), but an earlier layer keeps \(4, 2\)"),
    ],
)
def test_a_layer_that_reads_what_none_keeps_is_refused(first: Attention, message: str) -> None:
    blocks = tuple(Block((pre_norm("attn", attention, RMSNorm()),)) for attention in (first, Attention(2, reads="a")))
    with pytest.raises(SpecError, match=message):
        Model(8, decoder=Trunk(Embed(17), blocks)).build(device="meta")
