"""Positions that are not rotary, each against its formula, an independent implementation and its reported faults."""

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from sublayer.errors import InputError, SpecError
from sublayer.nn import position, rope, rope_scaling
from sublayer.nn.initialise import Init, initialise
from sublayer.nn.op import Context
from sublayer.nn.position import Alibi, Learned, Shaw, Sinusoidal, T5Buckets, alibi_slopes
from tests.nn.allocated import Allocated

CONTEXT = Context()


def filled(spec, dim: int, dtype: torch.dtype = torch.float64) -> Any:
    """The module with random parameters."""
    op = spec.build(dim, CONTEXT).to(dtype)
    for parameter in op.parameters():
        nn.init.normal_(parameter)
    return op


# Sinusoidal


@pytest.mark.parametrize("dim", [1, 2, 5, 6, 512])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_sinusoidal_formula(dim, layout):
    pos = torch.tensor([[0, 1, 5], [3, 77, 4999]])
    table = Sinusoidal(layout=layout).table(pos, dim, torch.float64)
    assert table.shape == (2, 3, dim)
    turns = pos.flatten()[:, None].double() / 10000 ** (torch.arange(0, dim, 2).double() / dim)
    sines, cosines = table.flatten(0, 1).split([(dim + 1) // 2, dim // 2], -1)
    if layout == "interleaved":
        sines, cosines = table.flatten(0, 1)[:, 0::2], table.flatten(0, 1)[:, 1::2]
    assert_close(sines, turns.sin(), rtol=0, atol=1e-11)
    assert_close(cosines, turns.cos()[:, : dim // 2], rtol=0, atol=1e-11)


@pytest.mark.parametrize("dim", [5, 8, 512])
def test_sinusoidal_halves_equal_marian(dim):
    theirs = MarianSinusoidalPositionalEmbedding(600, dim)
    ours = Sinusoidal(layout="half").build(dim, CONTEXT)(torch.arange(600)[None], torch.float32)
    assert_close(ours[0], theirs.create_weight(), rtol=0, atol=1e-7)


def test_sinusoids_are_computed_in_full_precision_for_any_dtype():
    op, pos = Sinusoidal().build(64, CONTEXT).to(torch.bfloat16), torch.tensor([[4001]])
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(op(pos, dtype), op(pos).to(dtype))
    assert op(pos).dtype == torch.float64


# Learned


def test_learned_rows_begin_at_the_offset():
    op = filled(Learned(512, offset=2), 4)
    assert op.weight.shape == (514, 4)
    assert_close(op(torch.tensor([[0, 511]])), op.weight[[2, 513]][None])


def test_roberta_rows():
    ids = torch.tensor([[0, 5, 6, 2, 1, 1]])
    rows = RobertaEmbeddings.create_position_ids_from_input_ids(ids, padding_idx=1)
    assert rows.tolist() == [[2, 3, 4, 5, 1, 1]]
    op = filled(Learned(512, offset=2), 4)
    pos = torch.tensor([[0, 1, 2, 3, -1, -1]])  # padding may stand before the first position, where there is an offset
    assert_close(op(pos), op.weight[rows])
    op(torch.arange(512)[None])  # 514 rows hold 512 tokens
    with pytest.raises(InputError, match="position 512 is beyond the 512 learned positions"):
        op(torch.arange(513)[None])


@pytest.mark.parametrize(
    ("pos", "message"), [(1024, "position 1024 is beyond the 1024 learned"), (-1, "-1 is below 0")]
)
def test_positions_outside_the_table_are_named_in_one_line(pos, message):
    with pytest.raises(InputError, match=message) as error:
        filled(Learned(1024), 2)(torch.tensor([[0, pos]]))
    assert "\n" not in str(error.value)


# T5Buckets


def test_t5_decoder_buckets():
    bucket = T5Buckets(8, bidirectional=False).bucket
    far = torch.tensor([0, 1, 15, 16, 17, 31, 32, 64, 112, 113, 128, 5000])
    assert bucket(-far).tolist() == [0, 1, 15, 16, 16, 21, 21, 26, 30, 31, 31, 31]
    assert bucket(far[1:]).tolist() == [0] * 11


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_equal_transformers(bidirectional):
    relative = torch.arange(-1000, 1000)
    ours = T5Buckets(8, bidirectional).bucket(relative)
    assert torch.equal(ours, T5Attention._relative_position_bucket(relative, bidirectional, 32, 128))


@given(st.integers(2, 40), st.integers(1, 500), st.booleans())
def test_t5_buckets_of_any_size(pairs, further, bidirectional):
    spec = T5Buckets(1, bidirectional, 2 * pairs, pairs + further)
    relative = torch.arange(-spec.distance - 3, spec.distance + 4)
    ours = spec.bucket(relative)
    theirs = T5Attention._relative_position_bucket(relative, bidirectional, spec.buckets, spec.distance)
    own = pairs // 2 if bidirectional else pairs
    more = (pairs if bidirectional else 2 * pairs) - own
    for away, mine, other in zip(relative.abs().tolist(), ours.tolist(), theirs.tolist(), strict=True):
        # They differ only where a bucket begins exactly at this distance, so that their logarithm may round below it.
        assert mine == other or Fraction(away, own) ** more == Fraction(spec.distance, own) ** (mine % pairs - own)


def test_t5_bias_equals_transformers_and_follows_the_offset():
    config = T5Config(d_model=16, num_heads=4, d_kv=4, is_decoder=True)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double()
    op = filled(T5Buckets(4, bidirectional=False), 16)
    theirs.relative_attention_bias.weight = op.weight
    pos = torch.arange(140)[None]
    full = op(pos, pos)
    assert full.is_contiguous()
    assert_close(full, theirs.compute_bias(140, 140), rtol=0, atol=0)
    assert_close(op(pos[:, 137:], pos), full[:, :, 137:], rtol=0, atol=0)  # three new tokens after 137 cached ones
    assert_close(op(pos[:, 137:], pos), theirs.compute_bias(3, 140, past_seen_tokens=137), rtol=0, atol=0)


def test_t5_rows_have_their_own_positions():
    op = filled(T5Buckets(4, bidirectional=True), 16)
    q_pos, k_pos = torch.tensor([[3, 4], [50, 51]]), torch.tensor([[0, 1, 2], [60, 40, 3]])
    both = op(q_pos, k_pos)
    assert both.shape == (2, 4, 2, 3)
    for row in range(2):
        assert_close(both[row : row + 1], op(q_pos[row : row + 1], k_pos[row : row + 1]))


# Shaw


@pytest.mark.parametrize("rows", [1, 2])
def test_shaw_equals_the_paper(rows):
    q, weights = torch.randn(2, 3, 5, 4).double(), torch.rand(2, 3, 5, 7).double().softmax(-1)
    q_pos = torch.tensor([[2, 3, 4, 5, 6], [10, 11, 12, 13, 14]])[:rows]
    k_pos = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [14, 13, 0, 1, 12, 11, 30]])[:rows]
    op = filled(Shaw(2), 4)
    clipped = (k_pos[:, None] - q_pos[:, :, None]).clamp(-2, 2) + 2
    keys = torch.einsum("bnlh,blmh->bnlm", q, op.key[clipped].expand(2, -1, -1, -1))  # the second term of eq. 4
    values = torch.einsum("bnlm,blmh->bnlh", weights, op.value[clipped].expand(2, -1, -1, -1))  # that of eq. 3
    assert_close(op.key_bias(q, q_pos, k_pos), keys, rtol=1e-13, atol=1e-13)
    assert_close(op.value_term(weights, q_pos, k_pos), values, rtol=1e-13, atol=1e-13)


def test_shaw_gradients():
    op = filled(Shaw(2), 3)
    q = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(1, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    pos = torch.arange(5)[None]

    def terms(q, weights, *tables):  # the tables are the module's own, which gradcheck changes in place
        return op.key_bias(q, pos[:, 2:], pos), op.value_term(weights, pos[:, 2:], pos)

    assert torch.autograd.gradcheck(terms, (q, weights, op.key, op.value))


def test_shaw_makes_no_vector_for_each_pair_of_tokens():
    op, pos = filled(Shaw(4), 64, torch.float32), torch.arange(100)[None]
    q, weights = torch.randn(1, 2, 100, 64), torch.rand(1, 2, 100, 100)
    with Allocated() as made:
        op.key_bias(q, pos, pos)
        op.value_term(weights, pos, pos)
    assert 0 < made.largest <= 2 * 100 * 100  # scores of two heads, where [L, M, H] would take 32 times as much


def test_shaw_sums_half_precision_weights_in_fp32():
    summed: list[torch.dtype] = []

    class Sums(TorchDispatchMode):  # CPUs add in fp32 by themselves, GPUs in the tensor's dtype: so look at that
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.scatter_add.default:
                summed.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    op = filled(Shaw(1), 4, torch.bfloat16)
    weights = torch.full((1, 1, 1, 4096), 1 / 4096, dtype=torch.bfloat16)
    with Sums():
        y = op.value_term(weights, torch.tensor([[4095]]), torch.arange(4096)[None])
    assert summed == [torch.float32]
    assert y.dtype == torch.bfloat16
    expected = (op.value[0].float() * 4095 + op.value[1].float()) / 4096
    assert_close(y[0, 0, 0].float(), expected, rtol=2**-7, atol=2**-9)


def test_shaw_without_value_vectors():
    op = filled(Shaw(2, values=False), 4)
    assert list(op.state_dict()) == ["key"]
    with pytest.raises(InputError, match="no value vectors"):
        op.value_term(torch.ones(1, 1, 1, 1), torch.zeros(1, 1), torch.zeros(1, 1))


# Alibi


def test_alibi_slopes():
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    extra = (0.707107, 0.353553, 0.176777, 0.088388)
    assert alibi_slopes(12) == pytest.approx((*alibi_slopes(8), *extra), abs=5e-7)


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 20, 71])
def test_alibi_equals_bloom_and_mpt_up_to_a_constant_of_each_query(heads):
    pos = torch.arange(30)[None]
    ours = Alibi(heads).build(64, CONTEXT)(pos, pos)
    bloom = build_alibi_tensor(torch.ones(1, 30), heads, torch.float32).view(1, heads, 1, 30)
    mpt = build_mpt_alibi_tensor(heads, 30).view(1, heads, 1, 30)
    future = torch.ones(30, 30, dtype=torch.bool).triu(1)
    scores = torch.randn(1, heads, 30, 30)

    def weights(bias: torch.Tensor) -> torch.Tensor:
        return (scores + bias).masked_fill(future, -math.inf).softmax(-1)

    assert_close(weights(ours), weights(bloom), rtol=1e-4, atol=1e-6)
    assert_close(weights(ours), weights(mpt), rtol=1e-4, atol=1e-6)


def test_alibi_falls_with_the_distance_both_ways():
    bias = Alibi(2).bias(torch.tensor([[3], [7]]), torch.tensor([[0, 3, 9]]), torch.float64)
    slopes = torch.tensor([1 / 16, 1 / 256]).double()[:, None, None]
    away = torch.tensor([[3, 0, 6], [7, 4, 2]])[:, None, None]
    assert_close(bias, -slopes * away, rtol=0, atol=0)
    far = Alibi(8).bias(torch.tensor([[1001]]), torch.tensor([[0, 1]]), torch.bfloat16)
    assert (far.diff(dim=-1) > 0).all()  # neighbours at a distance of a thousand, in fp32 whatever was asked


# All of them

PAGE = (Path(__file__).parents[2] / "docs" / "positions.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", re.findall(r"^\|.*\| `(.+)` \|$", PAGE, re.MULTILINE))
def test_each_line_of_the_page_is_a_spec(code):
    spec = eval(code, vars(position) | vars(rope) | vars(rope_scaling))
    assert type(spec).from_json(spec.to_json()) == spec
    assert repr(spec).startswith(code[: code.index("(") + 1])


def test_the_page_shows_every_encoding():
    shown = set(re.findall(r"(\w+)\(", " ".join(re.findall(r"`(.+)` \|$", PAGE, re.MULTILINE))))
    specs = {"Sinusoidal", "Learned", "Rope", "T5Buckets", "Shaw", "Alibi"}
    assert shown == specs | {scaling.__name__ for scaling in get_args(rope_scaling.Scaling)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sinusoidal(theta=0.0), "theta is above 0"),
        (lambda: Learned(0), "length is above 0"),
        (lambda: T5Buckets(0, True), "heads is above 0"),
        (lambda: T5Buckets(1, True, buckets=2), "at least 2 a direction"),
        (lambda: T5Buckets(1, True, buckets=7), "even"),
        (lambda: T5Buckets(1, False, buckets=32, distance=16), "distance is above the 16 distances"),
        (lambda: Shaw(0), "distance is above 0"),
        (lambda: Alibi(0), "heads is above 0"),
    ],
)
def test_impossible_specs_are_refused_in_one_line(make, message):
    with pytest.raises(SpecError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


SPECS = [Sinusoidal(), Sinusoidal(layout="half"), Learned(64), T5Buckets(2, True), Shaw(3), Alibi(2)]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_compiles_to_one_graph_as_lengths_grow(spec):
    op = filled(spec, 8, torch.float32)
    counter = CompileCounter()

    def run(x, pos):
        if isinstance(spec, Shaw):
            bias = op.key_bias(x, pos, pos)
            return op.value_term(bias, pos, pos)
        return op(pos) if isinstance(spec, Learned | Sinusoidal) else op(pos, pos)

    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
    for length in (3, 7, 40, 41):
        x, pos = torch.randn(1, 2, length, 8), torch.arange(length)[None]
        assert_close(compiled(x, pos), run(x, pos))
    assert counter.frame_count == 1


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_built_on_meta_and_initialised_by_seed(spec):
    def make(seed: int) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            op = spec.build(64, CONTEXT)
        initialise(op.to_empty(device="cpu"), Init(), seed)
        return op.state_dict()

    first, again, other = make(1), make(1), make(2)
    assert_close(first, again, rtol=0, atol=0)
    for name, table in first.items():
        assert 0.01 < table.std() < 0.3
        assert not torch.equal(table, other[name])
