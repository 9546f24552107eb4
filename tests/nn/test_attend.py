"""Every kernel computes the same function, forward and backward, and the function is the one in the docstring."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sublayer.errors import InputError, MaskError
from sublayer.nn.attend import KERNELS, attend, choose
from sublayer.nn.mask import Layout, Mask
from sublayer.nn.reference import Options
from tests.nn.allocated import Allocated
from tests.nn.attention import MASKS, SCALE, agree, close, inputs, outcome, present


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    """So that a dozen tokens are several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sublayer.nn.tiled.TILE", 4)
        patch.setattr("sublayer.nn.sdpa.LEAST_BLOCK", 2)
        yield


@pytest.fixture
def _real_blocks(monkeypatch):
    monkeypatch.setattr("sublayer.nn.tiled.TILE", 128)
    monkeypatch.setattr("sublayer.nn.sdpa.LEAST_BLOCK", 64)


# ----------------------------------------------------------------------------------------- the reference itself


def by_loops(q, k, v, visible, bias, softcap, sinks):
    """Attention one query, one key, one number at a time."""
    (B, N, L, H), (K, M), Hv = q.shape, k.shape[1:3], v.shape[3]
    out = torch.zeros(B, N, L, Hv, dtype=torch.float64)
    for b in range(B):
        for n in range(N):
            head = n // (N // K)
            for i in range(L):
                terms = {}
                for j in range(M):
                    if not visible[b, n, i, j]:
                        continue
                    score = SCALE * sum(q[b, n, i, h].item() * k[b, head, j, h].item() for h in range(H))
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    terms[j] = math.exp(score + float(bias[b, n, i, j]))
                total = sum(terms.values()) + (math.exp(float(sinks[n])) if sinks is not None else 0.0)
                for j, term in terms.items():
                    for h in range(Hv):
                        out[b, n, i, h] += term / total * v[b, head, j, h].item()
    return out


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", ["cross", "causal, more queries than keys", "kept first in documents", "allowed"])
def test_reference_is_the_formula(name, softcap, sinks):
    mask, L, M = MASKS[name]
    q, k, v = inputs(L, M, H=3, Hv=2)
    bias = torch.randn(2, 4, L, M, dtype=torch.float64)
    sink_logits = torch.randn(4, dtype=torch.float64) if sinks else None
    visible = mask.materialise(L, M, "cpu")
    visible = torch.ones(2, 4, L, M, dtype=torch.bool) if visible is None else visible.expand(2, 4, L, M)
    options = {"bias": bias, "softcap": softcap, "sink_logits": sink_logits}
    out, weights = attend(q, k, v, mask, scale=SCALE, weights=True, kernel="reference", **options)
    close([out], [by_loops(q, k, v, visible, bias, softcap, sink_logits)], 1e-13)
    repeated = v.repeat_interleave(2, dim=1)
    close([weights @ repeated], [out], 1e-13)
    assert weights[~visible].eq(0).all()
    if not sinks:
        torch.testing.assert_close(weights.sum(-1), visible.any(-1).double(), rtol=0, atol=1e-13)


def test_reference_gradients_are_those_of_finite_differences():
    q, k, v = inputs(4, 5, B=1, N=2, K=1, H=3, Hv=2)
    bias = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, bias, sinks):
        options = {"bias": bias, "softcap": 2.0, "sink_logits": sinks}
        return attend(q, k, v, Mask(causal=True, window=2), scale=SCALE, kernel="reference", **options)

    assert torch.autograd.gradcheck(function, (q, k, v, bias, sinks))


# ------------------------------------------------------------------------------------- kernels agree with it

PLAIN = ["sdpa", "tiled"]
HEADS = {"many": (4, 4), "grouped": (4, 2), "one key head": (4, 1)}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kernel", [*PLAIN, "auto"])
def test_kernels_agree_in_fp64(kernel, name, heads):
    mask, L, M = MASKS[name]
    N, K = HEADS[heads]
    agree(kernel, inputs(L, M, N=N, K=K), mask, 1e-10)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kernel", [*PLAIN, "auto"])
def test_kernels_agree_in_fp32(kernel, name):
    mask, L, M = MASKS[name]
    agree(kernel, inputs(L, M, dtype=torch.float32), mask, 1e-5)


@pytest.mark.parametrize("name", ["causal", "window in documents", "torn documents", "ragged decoding"])
@pytest.mark.parametrize("kernel", ["reference", *PLAIN, "auto"])
def test_bfloat16_in_and_out_loses_what_its_rounding_loses(kernel, name):
    """Against the same numbers in fp64: within two of bfloat16's steps, 2 · 2⁻⁷."""
    mask, L, M = MASKS[name]
    rounded = [x.detach().bfloat16().requires_grad_() for x in inputs(L, M)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    ours = outcome(kernel, rounded, mask)
    assert all(x.dtype == torch.bfloat16 for x in ours)
    close([x.double() for x in ours], outcome("reference", exact, mask), 2**-6)


@pytest.mark.parametrize("Hv", [3, 12])
@pytest.mark.parametrize("name", ["causal", "window", "causal documents", "ragged decoding", "cross"])
@pytest.mark.parametrize("kernel", PLAIN)
def test_values_may_have_their_own_size(kernel, name, Hv):
    mask, L, M = MASKS[name]
    agree(kernel, inputs(L, M, Hv=Hv), mask, 1e-10)


@pytest.mark.parametrize("shape", [(2, 4, 13, 13), (1, 4, 13, 13), (1, 1, 13, 13), (2, 1, 1, 13), (4, 13, 1)])
@pytest.mark.parametrize("name", ["window", "causal documents", "torn documents", "kept first"])
@pytest.mark.parametrize("kernel", [*PLAIN, "auto"])
def test_bias_is_added_and_learns(kernel, name, shape):
    mask, L, M = MASKS[name]
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    q, k, v = inputs(L, M)

    def with_bias(kernel):
        out = attend(q, k, v, mask, scale=SCALE, bias=bias, kernel=kernel)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))]

    close(with_bias(kernel), with_bias("reference"), 1e-10)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kernel", ["tiled", "auto"])
def test_softcap_and_sinks(kernel, name, softcap, sinks):
    mask, L, M = MASKS[name]
    q, k, v = inputs(L, M)
    logits = torch.randn(4, generator=torch.Generator().manual_seed(4), dtype=torch.float64, requires_grad=True)

    def capped(kernel):
        out = attend(q, k, v, mask, scale=SCALE, softcap=softcap, sink_logits=logits if sinks else None, kernel=kernel)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v, *([logits] if sinks else [])))]

    close(capped(kernel), capped("reference"), 1e-10)


@settings(max_examples=60, deadline=None)
@given(
    kernel=st.sampled_from(PLAIN),
    L=st.integers(1, 40),
    M=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (2, 2)]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 45),
    keep_first=st.integers(0, 3),
    prefix=st.none() | st.integers(0, 40),
    lengths=st.none() | st.lists(st.integers(1, 15), min_size=1, max_size=8),
)
def test_kernels_agree_anywhere(kernel, L, M, heads, causal, window, keep_first, prefix, lengths):
    layout = None
    if lengths is not None:
        M = L = sum(lengths)
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
        layout = Layout(q_segment=numbers, k_segment=numbers)  # the first document is padding
    mask = Mask(causal, window, keep_first, prefix, layout=layout)
    agree(kernel, inputs(L, M, N=heads[0], K=heads[1], H=4, Hv=4), mask, 1e-10)


def test_a_window_one_too_wide_is_caught(monkeypatch):
    """The comparison above has teeth: a kernel with the commonest fault fails it."""

    def off_by_one(q, k, v, mask, options: Options):
        wider = Mask(mask.causal, mask.window + 1, mask.keep_first, mask.prefix, mask.allowed, mask.layout)
        return KERNELS["reference"](q, k, v, wider, options)

    monkeypatch.setitem(KERNELS, "off by one", off_by_one)
    mask, L, M = MASKS["window"]
    with pytest.raises(AssertionError, match="not close"):
        agree("off by one", inputs(L, M), mask, 1e-5)


# ------------------------------------------------------------------------------------------------ hidden things


@pytest.mark.parametrize("kernel", ["reference", *PLAIN, "auto"])
@pytest.mark.parametrize(
    "name",
    ["causal, more queries than keys", "causal documents", "prefix in documents", "torn documents", "cross documents"],
)
def test_a_query_that_sees_nothing_returns_zeros(kernel, name):
    mask, L, M = MASKS[name]
    leaves = inputs(L, M)
    out, dq, dk, dv = outcome(kernel, leaves, mask)
    blind = ~present(mask.materialise(L, M, "cpu")).any(-1).expand(2, 4, L)
    assert blind.any()
    assert out[blind].eq(0).all()
    assert dq[blind].eq(0).all()
    assert all(gradient.isfinite().all() for gradient in (dq, dk, dv))


@pytest.mark.parametrize("kernel", ["reference", "tiled"])
def test_a_query_with_nothing_but_a_sink_returns_zeros(kernel):
    leaves = [*inputs(9, 4), torch.zeros(4, dtype=torch.float64, requires_grad=True)]
    out, *gradients = outcome(kernel, leaves, Mask(causal=True), sink_logits=leaves[3])
    assert out[:, :, :5].eq(0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kernel", ["reference", *PLAIN, "auto"])
@pytest.mark.parametrize(
    "name",
    [
        "causal documents",
        "window in documents",
        "padded memory",
        "ragged decoding",
        "cross documents",
        "torn documents",
        "window, chunk",
        "window, decoding",
        "allowed, broadcast",
    ],
)
def test_what_no_query_sees_reaches_nothing(kernel, name, value):
    """pytorch#101967: a weight of 0 times NaN is NaN."""
    mask, L, M = MASKS[name]
    clean, dirty = inputs(L, M), inputs(L, M)
    unseen = present(mask.cells(L, M, "cpu")[1]).expand(2, M)
    assert unseen.any()
    with torch.no_grad():
        for x in dirty[1:]:
            x.masked_fill_(unseen[:, None, :, None], value)
    out, dq, dk, dv = outcome(kernel, dirty, mask)
    close([out, dq, dk, dv], outcome(kernel, clean, mask), 1e-12)
    assert dk.isfinite().all()
    assert dv.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("kernel", ["reference", "tiled"])
def test_the_future_reaches_nothing(kernel, where, value):
    q, k, v = inputs(9, 9)
    expected = outcome(kernel, [q, k, v], Mask(causal=True))[0]
    with torch.no_grad():
        (k if where == "k" else v)[:, :, 6, 3] = value
    out = outcome(kernel, [q, k, v], Mask(causal=True))[0]
    close([out[:, :, :6]], [expected[:, :, :6]], 1e-12)
    assert out[:, :, 6:].isnan().any(-1).all()  # who sees it learns of it
    # and no gradient comes back from it where the loss does not look at those who saw it
    out = attend(q, k, v, Mask(causal=True), scale=SCALE, kernel=kernel)
    dq = torch.autograd.grad(out[:, :, :6].sum(), q)[0]
    assert dq[:, :, :6].isfinite().all()


def test_a_clean_layout_is_taken_at_its_word():
    """The decoding state keeps zeros where nothing is written, and spares a pass over all keys."""
    mask, L, M = MASKS["ragged decoding"]
    layout = present(mask.layout)
    vouched = Layout(layout.q_pos, layout.k_pos, layout.q_segment, layout.k_segment, clean=True)
    q, k, v = (x.detach() for x in inputs(L, M))
    with Allocated() as plain:
        attend(q, k, v, mask, scale=SCALE, kernel="sdpa")
    with Allocated() as spared:
        out = attend(q, k, v, Mask(causal=True, layout=vouched), scale=SCALE, kernel="sdpa")
    close([out], [attend(q, k, v, mask, scale=SCALE, kernel="reference")], 1e-10)
    assert "masked_fill" in plain.names
    assert "masked_fill" not in spared.names


# ------------------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("kernel", ["reference", "sdpa", "tiled", "auto"])
def test_dropout_drops_its_share_and_keeps_the_mean(kernel):
    torch.manual_seed(0)
    q, k = torch.zeros(1, 2, 64, 4), torch.zeros(1, 2, 500, 4)
    v = torch.ones(1, 2, 500, 1)
    out = attend(q, k, v, scale=1.0, dropout=0.3, kernel=kernel)
    # each output is a mean of 500 draws of 0 or 1/0.7: variance 0.3/0.7/500 each
    torch.testing.assert_close(out.mean(), torch.tensor(1.0), rtol=0, atol=5 * (0.3 / 0.7 / 500 / 128) ** 0.5)
    torch.testing.assert_close(out.std(), torch.tensor((0.3 / 0.7 / 500) ** 0.5), rtol=0.3, atol=0)
    assert not torch.equal(out, attend(q, k, v, scale=1.0, dropout=0.3, kernel=kernel))


@pytest.mark.parametrize("kernel", ["reference", "sdpa", "tiled"])
def test_dropout_of_the_forward_is_that_of_the_backward(kernel):
    """The output is linear in v for one seed: its gradient must be the weights that were used."""
    q, k, v = inputs(7, 7, B=1, N=2, K=1, H=2, Hv=2)

    def run(v):
        torch.manual_seed(5)
        return attend(q, k, v, Mask(causal=True), scale=SCALE, dropout=0.4, kernel=kernel)

    dv = torch.autograd.grad(run(v).sum(), v)[0]
    close([(dv * v).sum()], [run(v).sum()], 1e-12)
    assert torch.autograd.gradcheck(run, (v,))

    def through_scores(q, k):
        torch.manual_seed(5)
        return attend(q, k, v, Mask(causal=True), scale=SCALE, dropout=0.4, kernel=kernel)

    assert torch.autograd.gradcheck(through_scores, (q, k))


@pytest.mark.parametrize("kernel", ["reference", "sdpa", "tiled", "auto"])
def test_without_dropout_two_calls_are_identical(kernel):
    leaves = inputs(9, 9)
    torch.testing.assert_close(
        outcome(kernel, leaves, Mask(causal=True)), outcome(kernel, leaves, Mask(causal=True)), rtol=0, atol=0
    )


# ------------------------------------------------------------------------------------------------------- memory


def largest_and_saved(kernel, mask, L, **options):
    q, k, v = inputs(L, L, B=1, N=2, K=1, dtype=torch.float32)
    saved = []
    with Allocated() as made, torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = attend(q, k, v, mask, scale=SCALE, kernel=kernel, **options)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    return made.largest, sum(storages.values())


def packed(L):
    numbers = torch.arange(L)[None] // 96 + 1
    return Layout(q_segment=numbers, k_segment=numbers)


@pytest.mark.parametrize("kernel", ["sdpa", "tiled", "auto"])
@pytest.mark.parametrize(
    "make",
    [
        lambda L: Mask(causal=True),
        lambda L: Mask(causal=True, window=64),
        lambda L: Mask(window=64),
        lambda L: Mask(causal=True, layout=packed(L)),
        lambda L: Mask(layout=packed(L)),
        lambda L: Mask(causal=True, window=64, layout=packed(L)),
        lambda L: Mask(prefix=100),
        lambda L: Mask(prefix=20, layout=packed(L)),
    ],
    ids=[
        "causal",
        "window",
        "window both ways",
        "packed",
        "packed both ways",
        "packed window",
        "prefix",
        "packed prefix",
    ],
)
@pytest.mark.usefixtures("_real_blocks")
def test_memory_is_linear_in_length(kernel, make):
    """The exponent of memory in length is at most 1.1: of what is kept for the backward, and of the largest tensor."""
    short, long = (largest_and_saved(kernel, make(L), L) for L in (1024, 2048))
    assert long[0] <= 2**1.1 * max(short[0], 2 * 1024 * 8)
    assert long[1] <= 2**1.1 * short[1]
    assert long[0] < 2048 * 2048 // 4  # nothing near L × M


@pytest.mark.parametrize("options", ["softcap", "sinks", "dropout", "kept first"])
@pytest.mark.usefixtures("_real_blocks")
def test_tiled_memory_is_linear_with_everything(options):
    given = {
        "softcap": {"softcap": 5.0},
        "sinks": {"sink_logits": torch.zeros(2)},
        "dropout": {"dropout": 0.1},
        "kept first": {},
    }[options]
    mask = Mask(causal=True, window=64, keep_first=4) if options == "kept first" else Mask(causal=True)
    for kernel in ("tiled", "auto"):
        assert largest_and_saved(kernel, mask, 2048, **given)[0] < 2048 * 2048 // 4


@pytest.mark.parametrize("kernel", ["sdpa", "auto", "tiled"])
@pytest.mark.usefixtures("_real_blocks")
def test_a_chunk_of_a_prefill_needs_no_mask(kernel):
    q, k, v = inputs(600, 3000, B=1, N=1, K=1, H=8, dtype=torch.float32)
    for layout in (None, Layout(torch.arange(2400, 3000)[None], torch.arange(3000)[None])):
        with Allocated() as made:
            attend(q, k, v, Mask(causal=True, layout=layout), scale=SCALE, kernel=kernel)
        assert made.largest < 600 * 3000 // 8


def test_the_reference_does_build_all_scores():
    """The measure above has teeth."""
    assert largest_and_saved("reference", Mask(causal=True), 1024)[0] >= 1024 * 1024


# -------------------------------------------------------------------------------------------------- the rule of auto

AUTO = [
    ("sdpa", Mask(causal=True), 2048, {}),
    ("sdpa", Mask(causal=True, window=64), 2048, {}),
    ("sdpa", Mask(prefix=100), 2048, {}),
    ("sdpa", Mask(causal=True, layout=packed(2048)), 2048, {}),
    ("sdpa", Mask(allowed=torch.ones(2048, dtype=torch.bool)), 2048, {}),
    ("sdpa", Mask(causal=True), 2048, {"bias": torch.zeros(1)}),
    ("tiled", Mask(causal=True), 2048, {"bias": torch.zeros(1, requires_grad=True)}),
    ("tiled", Mask(causal=True), 2048, {"dropout": 0.1}),
    ("sdpa", Mask(causal=True), 128, {"dropout": 0.1}),
    ("tiled", Mask(causal=True, window=64, keep_first=4), 2048, {}),
    ("sdpa", Mask(causal=True, window=64, keep_first=4), 128, {}),
    ("tiled", Mask(causal=True), 2048, {"softcap": 5.0}),
    ("reference", Mask(causal=True), 128, {"softcap": 5.0}),
    ("tiled", Mask(causal=True), 2048, {"sink_logits": torch.zeros(2)}),
    ("reference", Mask(causal=True), 2048, {"weights": True}),
]


@pytest.mark.parametrize(("chosen", "mask", "length", "options"), AUTO)
def test_auto_follows_its_rule(chosen, mask, length, options):
    q, k, _ = inputs(length, length, B=1, N=2, K=1)
    assert choose(q, k, mask, Options(SCALE, **options)) == chosen


def test_auto_decodes_by_few_large_operations():
    q, k, _ = inputs(1, 300_000, B=1, N=2, K=1, H=1)
    layout = Layout(torch.tensor([[299_999]]), torch.arange(300_000)[None])
    assert choose(q, k, Mask(causal=True, layout=layout), Options(SCALE)) == "sdpa"
    assert choose(q, k, Mask(causal=True, layout=layout), Options(SCALE, softcap=5.0)) == "reference"


# ----------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("kernel", "options", "line"),
    [
        ("sdpa", {"softcap": 1.0}, "the sdpa kernel has no softcap: reference and tiled can, and auto picks one"),
        ("sdpa", {"weights": True}, "the sdpa kernel has no weights: reference can, and auto picks one"),
        ("tiled", {"weights": True}, "the tiled kernel has no weights: reference can, and auto picks one"),
        ("tilde", {}, "no attention kernel 'tilde' (did you mean 'tiled'?)"),
    ],
)
def test_what_a_kernel_cannot_do_is_one_line(kernel, options, line):
    q, k, v = inputs(3, 3)
    with pytest.raises(MaskError) as error:
        attend(q, k, v, scale=SCALE, kernel=kernel, **options)
    assert str(error.value) == line


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = inputs(3, 3)
    with pytest.raises(InputError, match=r"N a multiple of K; got q \[2, 3, 3, 8\]"):
        attend(q[:, :3], k, v, scale=SCALE)
    with pytest.raises(InputError, match="one a query head"):
        attend(q, k, v, scale=SCALE, sink_logits=torch.zeros(2))


def test_no_keys_is_zeros():
    q, k, v = inputs(3, 4)
    out, weights = attend(q, k[:, :, :0], v[:, :, :0], scale=SCALE, weights=True)
    assert out.shape == (2, 4, 3, 8)
    assert weights.shape == (2, 4, 3, 0)
    assert out.eq(0).all()


def test_the_gradient_of_a_cut_is_one_copy_however_many_pieces() -> None:
    """A slice's gradient is as large as what it was cut from: rows and documents would cost their number squared."""
    segment = torch.tensor([[1] * 5 + [2] * 7, [1] * 12, [1] * 3 + [2] * 2 + [0] * 7])
    q, k, v = (x.requires_grad_() for x in inputs(12, 12, B=3))
    out = attend(q, k, v, Mask(causal=True, layout=Layout(q_segment=segment, k_segment=segment)), scale=SCALE)
    left, seen = [out.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    kinds = [type(node).__name__ for node in seen]
    assert kinds.count("ScaledDotProductFlashAttentionForCpuBackward0") == 5
    assert "SliceBackward0" not in kinds
    assert "SelectBackward0" not in kinds


# ------------------------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"weights": True}])
def test_decoding_is_one_graph_as_keys_grow(options):
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, q_pos, k_pos, k_segment):
        mask = Mask(causal=True, window=6, layout=Layout(q_pos, k_pos, None, k_segment))
        out = attend(q, k, v, mask, scale=SCALE, **options)
        return out[0] if isinstance(out, tuple) else out

    compiled = torch.compile(step, backend=count, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for M in (5, 9, 17):
            q, k, v = inputs(1, M)
            where = torch.tensor([[M - 1], [M - 2]]), torch.arange(M).expand(2, -1), torch.ones(2, M).long()
            close([compiled(q, k, v, *where)], [step(q, k, v, *where)], 1e-10)
    assert len(graphs) == 1


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(causal=True, window=5), Mask(prefix=3)])
def test_training_compiles_to_one_graph(mask):
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, mask, scale=SCALE), backend="aot_eager", fullgraph=True)
    q, k, v = inputs(16, 16)
    close([compiled(q, k, v)], [attend(q, k, v, mask, scale=SCALE, kernel="reference")], 1e-10)


@pytest.mark.parametrize("kernel", ["reference", "sdpa", "tiled", "auto"])
@pytest.mark.parametrize("shape", [(9,), (1, 9), (4, 1, 9)])
def test_a_bias_of_fewer_axes_is_broadcast(kernel: Any, shape: tuple[int, ...]) -> None:
    """One query and grouped heads, as in decoding."""
    q, k, v = (torch.randn(2, n, length, 8, dtype=torch.float64) for n, length in ((4, 1), (2, 9), (2, 9)))
    bias = torch.randn(shape, dtype=torch.float64)
    whole = bias.expand(2, 4, 1, 9)
    torch.testing.assert_close(
        attend(q, k, v, scale=0.3, bias=bias, kernel=kernel), attend(q, k, v, scale=0.3, bias=whole, kernel="reference")
    )
