"""Rope against the paper's formula, against transformers for every scaling, and its reported faults."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotate
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from sublayer.errors import InputError, SpecError
from sublayer.nn.constant import constant
from sublayer.nn.rope import Rope, pairing_permutation, repair, rope_from_hf, rope_to_hf, rotate
from sublayer.nn.rope_scaling import DynamicNtk, Linear, Llama3, LongRope, Ntk, Yarn

HEAD = 16
SCALINGS = {
    "none": None,
    "linear": Linear(4),
    "ntk": Ntk(4),
    "dynamic": DynamicNtk(2, 32),
    "yarn": Yarn(4, 64),
    "llama3": Llama3(8, 1, 4, 64),
    "longrope": LongRope(tuple(1 + 0.1 * i for i in range(8)), tuple(2.0 + i for i in range(8)), 32, 4.0),
}
every_scaling = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())


class DoublePrecision(TorchFunctionMode):
    """Casts to float32 inside the oracle give float64, so that only the formulas are compared."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def oracle(parameters: dict, head_size: int, longest: int, length: int | None = None) -> tuple[torch.Tensor, float]:
    """transformers' frequencies and attention factor, in fp64."""
    with DoublePrecision():
        return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf_config(parameters, head_size, longest), None, length)


def hf_config(parameters: dict, head_size: int, longest: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        head_dim=head_size,
        max_position_embeddings=longest,
        rope_parameters=dict(parameters),
    )


def angles(rope: Rope, pos: int, head_size: int, length: int) -> torch.Tensor:
    """[R/2] in fp64, as the tables hold them; below π."""
    at, lengths = torch.tensor([[pos]]), torch.tensor([[length]])
    cos, sin = rope.tables(at, head_size, lengths=lengths, dtype=torch.float64)
    return torch.atan2(sin, cos)[0, 0]


# The paper's formula


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_pairs_turn_as_complex_numbers(pairing):
    rope, x, pos = (
        Rope(500.0, pairing=pairing),
        torch.randn(2, 3, 5, HEAD).double(),
        torch.tensor([[0, 1, 7, 30, 1000]]),
    )
    turns = torch.polar(torch.ones(()).double(), pos[0, :, None] * 500.0 ** (-torch.arange(0, HEAD, 2).double() / HEAD))
    split = (lambda t: t.chunk(2, -1)) if pairing == "half" else (lambda t: (t[..., ::2], t[..., 1::2]))
    y = rotate(x, *rope.tables(pos, HEAD, dtype=torch.float64), pairing)
    assert_close(torch.complex(*split(y)), torch.complex(*split(x)) * turns, rtol=1e-13, atol=1e-13)


@given(st.data())
def test_scores_depend_on_the_difference_of_positions_alone(data):
    pairing = data.draw(st.sampled_from(["half", "interleaved"]))
    scaling = data.draw(st.sampled_from([s for s in SCALINGS.values() if s is None or s.magnitude() == 1]))
    rope = Rope(data.draw(st.floats(10, 1e6)), None if isinstance(scaling, LongRope) else 12, pairing, scaling)
    q_pos, k_pos, shift = (data.draw(st.integers(0, 2000)) for _ in range(3))
    q, k = torch.randn(2, 1, 1, 1, HEAD, dtype=torch.float64).unbind()

    def score(shift: int) -> torch.Tensor:
        pos, lengths = torch.tensor([[q_pos + shift], [k_pos + shift]]), torch.tensor([[5000]])
        cos, sin = rope.tables(pos, HEAD, lengths=lengths, dtype=torch.float64)
        turned = rotate(torch.cat((q, k)), cos, sin, pairing)
        assert_close(turned.norm(dim=-1), torch.cat((q, k)).norm(dim=-1), rtol=1e-12, atol=0)
        return (turned[0] * turned[1]).sum()

    assert_close(score(0), score(shift), rtol=0, atol=1e-9)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_only_the_first_dims_turn_when_the_size_is_partial(pairing):
    x = torch.randn(2, 3, 5, HEAD)
    pos = torch.arange(1, 6)[None]
    y = rotate(x, *Rope(size=4, pairing=pairing).tables(pos, HEAD), pairing)
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert_close(y[..., :4], rotate(x[..., :4], *Rope(pairing=pairing).tables(pos, 4), pairing))
    assert not torch.isclose(y[..., :4], x[..., :4]).all(-1).any()


def test_rotation_broadcasts_over_heads_and_rows():
    x, pos = torch.randn(2, 3, 4, 5, HEAD), torch.randint(0, 50, (2, 5))
    cos, sin = Rope().tables(pos, HEAD)
    for row in range(2):
        alone = Rope().tables(pos[row : row + 1], HEAD)
        assert_close(rotate(x[:, 0], cos, sin)[row], rotate(x[row, 0], *alone))  # [B, N, L, H]
        assert_close(rotate(x, cos, sin)[row], rotate(x[row], *alone))  # [B, K, N / K, L, H]
        assert_close(rotate(x[:, 0, 0], cos, sin)[row : row + 1], rotate(x[row : row + 1, 0, 0], *alone))  # [B, L, H]


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_gradient_of_the_rotation(pairing):
    cos, sin = Rope().tables(torch.arange(3)[None], 4, dtype=torch.float64)
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin, pairing), x)
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, cos, sin, pairing) ** 2, x)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_a_rotation_keeps_nothing_of_what_it_turns(pairing):
    """Its gradient is the rotation back, which needs the tables alone."""
    cos, sin = Rope().tables(torch.arange(5)[None], HEAD)
    x = torch.randn(2, 3, 5, HEAD, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape), lambda t: t):
        rotate(x, cos, sin, pairing)
    assert kept
    assert x.shape not in kept
    assert all(shape.numel() <= cos.numel() for shape in kept)


# Precision


@every_scaling
def test_angles_are_never_below_fp32(scaling):
    rope, pos = Rope(scaling=scaling), torch.tensor([[1, 100_003]])
    lengths = torch.full_like(pos, 100_004)
    exact = rope.tables(pos, HEAD, lengths=lengths, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tables = rope.tables(pos, HEAD, lengths=lengths, dtype=dtype)
        assert {table.dtype for table in tables} == {torch.float32}
        # An angle of 1e5 holds an error of up to 1.5 units in its last place: 1e5 · 2^-24 · 1.5.
        assert_close([table.double() for table in tables], list(exact), rtol=0, atol=1e-2)
        assert_close([table[:, 0].double() for table in tables], [table[:, 0] for table in exact], rtol=0, atol=1e-6)
    assert {table.dtype for table in exact} == {torch.float64}


def test_half_precision_is_rotated_in_fp32_and_rounded_once():
    x, tables = torch.randn(1, 2, 9, HEAD).bfloat16(), Rope().tables(torch.arange(9)[None] + 3000, HEAD)
    for pairing in ("half", "interleaved"):
        assert_close(rotate(x, *tables, pairing), rotate(x.float(), *tables, pairing).bfloat16(), rtol=0, atol=0)
        cos, sin = tables[0].bfloat16(), tables[1].bfloat16()
        in_fp32 = rotate(x.float(), cos.float(), sin.float(), pairing)
        assert_close(rotate(x, cos, sin, pairing), in_fp32.bfloat16(), rtol=0, atol=0)
    assert rotate(x.double(), *tables).dtype == torch.float64


# Scalings against transformers

thetas = st.floats(100, 1e7)
sizes = st.sampled_from([4, 8, 16, 30, 64, 96, 128])
factors = st.floats(1, 128)
trained_lengths = st.sampled_from([16, 100, 2048, 4096, 8192, 32768])


@st.composite
def scaled(draw) -> tuple[dict, int, int]:
    """(rope_parameters, head size, max_position_embeddings) of any type that transformers scales."""
    kind = draw(st.sampled_from(["linear", "dynamic", "yarn", "llama3", "longrope"]))
    head_size, trained = draw(sizes), draw(trained_lengths)
    parameters = {"rope_type": kind, "rope_theta": draw(thetas), "factor": draw(factors)}
    rotated = head_size
    if head_size % 8 == 0 and draw(st.booleans()):
        parameters["partial_rotary_factor"] = draw(st.sampled_from([0.5, 0.75]))
        rotated = int(head_size * parameters["partial_rotary_factor"])
    if kind in ("yarn", "llama3", "longrope"):
        parameters["original_max_position_embeddings"] = trained
    maybe = {
        "yarn": {
            "beta_fast": st.floats(8, 64),
            "beta_slow": st.floats(0.25, 4),
            "attention_factor": st.floats(0.5, 2),
            "mscale": st.floats(0.1, 2),
            "mscale_all_dim": st.floats(0.1, 2),
            "truncate": st.booleans(),
        },
        "longrope": {"attention_factor": st.floats(0.5, 2)},
    }.get(kind, {})
    parameters |= {key: draw(values) for key, values in maybe.items() if draw(st.booleans())}
    if kind == "llama3":
        parameters["low_freq_factor"] = draw(st.floats(0.5, 2))
        parameters["high_freq_factor"] = draw(st.floats(2.5, 8))
    if kind == "longrope":
        divisors = st.lists(st.floats(1, 60), min_size=rotated // 2, max_size=rotated // 2)
        parameters |= {"short_factor": draw(divisors), "long_factor": draw(divisors)}
    return parameters, head_size, trained if kind == "dynamic" else 4 * trained


def yarn(head_size: int, theta: float, trained: int, **more) -> tuple[dict, int, int]:
    parameters = {"rope_type": "yarn", "rope_theta": theta, "factor": 8.0, "original_max_position_embeddings": trained}
    return parameters | more, head_size, 8 * trained


@given(scaled(), st.integers(1, 200_000))
@example(drawn=yarn(16, 10000.0, 6), length=1)  # both ends of the ramp at the first pair
@example(drawn=yarn(64, 10.0, 1000), length=1)  # its upper end beyond the head
def test_frequencies_and_attention_factor_equal_transformers(drawn, length):
    parameters, head_size, longest = drawn
    rope = rope_from_hf({"rope_parameters": parameters, "max_position_embeddings": longest}, head_size)
    frequencies, attention_factor = oracle(parameters, head_size, longest, length)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-14)
    assert_close(angles(rope, 1, head_size, length), frequencies, rtol=1e-12, atol=0)
    if not rope.dynamic:
        assert_close(torch.tensor(rope.frequencies(head_size)).double(), frequencies, rtol=1e-6, atol=0)


def test_the_unscaled_rotation_equals_llama():
    config = hf_config({"rope_type": "default", "rope_theta": 500.0}, HEAD, 64)
    rope = rope_from_hf(config.to_dict(), HEAD)
    assert rope == Rope(500.0)
    q, k, pos = torch.randn(2, 4, 9, HEAD).double(), torch.randn(2, 2, 9, HEAD).double(), torch.randint(0, 64, (2, 9))
    with DoublePrecision():
        theirs = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, pos))
    tables = rope.tables(pos, HEAD, dtype=torch.float64)
    assert_close((rotate(q, *tables), rotate(k, *tables)), theirs, rtol=1e-12, atol=1e-12)


def test_the_interleaved_rotation_equals_gpt_j():
    x, pos = torch.randn(2, 9, 4, HEAD).double(), torch.randint(0, 64, (2, 9))
    cos, sin = Rope(pairing="interleaved").tables(pos, HEAD, dtype=torch.float64)
    ours = rotate(x.transpose(1, 2), cos, sin, "interleaved").transpose(1, 2)
    assert_close(ours, gptj_rotate(x, sin, cos), rtol=1e-12, atol=1e-12)


def test_static_ntk_keeps_the_highest_frequency_and_interpolates_the_lowest():
    plain, stretched = Rope().frequencies(128), Rope(scaling=Ntk(8)).frequencies(128)
    assert stretched[0] == plain[0] == 1
    assert stretched[-1] == pytest.approx(plain[-1] / 8, rel=1e-12)


# Reported faults


def test_yarn_attention_factor_is_applied_once_and_an_explicit_one_wins():
    def applied(scaling: Yarn) -> float:
        rope = Rope(scaling=scaling)
        cos, sin = rope.tables(torch.tensor([[5]]), HEAD, dtype=torch.float64)
        lengths = (cos.square() + sin.square()).sqrt()
        assert_close(lengths, torch.full_like(lengths, rope.attention_factor), rtol=1e-12, atol=0)
        return rope.attention_factor

    assert applied(Yarn(4, 4096)) == pytest.approx(1.138629, abs=5e-7)
    assert applied(Yarn(128, 4096)) == pytest.approx(1.485203, abs=5e-7)
    assert applied(Yarn(128, 4096, attention_factor=1.0)) == 1.0
    assert applied(Yarn(40, 4096, mscale=1.0, mscale_all_dim=1.0)) == 1.0  # DeepSeek-V3
    assert applied(Yarn(40, 4096, mscale=0.707, mscale_all_dim=1.0)) == pytest.approx(
        (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1), rel=1e-14
    )


def test_a_factor_of_yarns_attention_factor_is_multiplied():
    """DeepSeek-R1-0528-Qwen3-8B's, which takes the usual one away."""
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = rope_from_hf({"rope_scaling": given | {"attn_factor": 0.8782488562869419}}, 128)
    assert rope.attention_factor == pytest.approx(1.0, abs=1e-15)
    assert rope_from_hf({"rope_scaling": given}, 128).attention_factor == pytest.approx(1.138629, abs=5e-7)
    for wrong in ({"attn_factor": 0}, {"attn_factor": "1"}, {"attn_factor": 1.0, "attention_factor": 1.0}):
        with pytest.raises(SpecError, match=r"^rope_scaling\.attn_factor=.*: a number above 0, where"):
            rope_from_hf({"rope_scaling": given | wrong}, 128)
    with pytest.raises(SpecError, match=r"attn_factor: not a key of rope_type 'linear'"):
        rope_from_hf({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "attn_factor": 1.0}}, 128)


@pytest.mark.parametrize(("length", "base"), [(500, 10000), (2048, 10000), (4096, 30527.74), (8192, 72195.86)])
def test_dynamic_ntk_base_follows_the_length(length, base):
    angle = angles(Rope(scaling=DynamicNtk(2, 2048)), 1, 128, length)[1]  # base^(−2/128)
    assert float(angle) ** -64 == pytest.approx(base, abs=5e-3)


@pytest.mark.parametrize("scaling", [SCALINGS["dynamic"], SCALINGS["longrope"]], ids=["dynamic", "longrope"])
def test_a_long_document_leaves_no_trace_on_a_short_one(scaling):
    rope = Rope(scaling=scaling)
    plain = Rope() if isinstance(scaling, DynamicNtk) else Rope(scaling=scaling.replace(long=scaling.short))
    pos = torch.arange(40)[None]

    def tables(lengths: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        return rope.tables(pos, HEAD, lengths=torch.tensor(lengths))

    fresh = plain.tables(pos, HEAD, lengths=torch.full((1, 40), 1))
    long = tables([[400] * 40])
    assert not torch.isclose(long[0], fresh[0]).all()
    for length in (1, 31, 32):  # one call after another
        assert_close(tables([[length] * 40]), fresh, rtol=0, atol=0)
    assert not torch.isclose(tables([[33] * 40])[0], fresh[0]).all()
    cos, sin = tables([[32] * 40, [400] * 40])  # beside each other in a batch
    assert_close((cos[:1], sin[:1]), fresh, rtol=0, atol=0)
    assert_close((cos[1:], sin[1:]), long, rtol=0, atol=0)
    cos, sin = tables([[400] * 20 + [12] * 20])  # packed into one row
    assert_close((cos[:, 20:], sin[:, 20:]), (fresh[0][:, 20:], fresh[1][:, 20:]), rtol=0, atol=0)
    assert_close((cos[:, :20], sin[:, :20]), (long[0][:, :20], long[1][:, :20]), rtol=0, atol=0)


@every_scaling
def test_tables_follow_offset_and_length(scaling):
    rope = Rope(scaling=scaling)
    for offset, length in ((0, 512), (5, 513), (0, 511), (7, 3)):
        pos = torch.arange(offset, offset + length)[None]
        lengths = torch.full_like(pos, offset + length)
        cos, sin = rope.tables(pos, HEAD, lengths=lengths, dtype=torch.float64)
        turns = angles(rope, 1, HEAD, offset + length) * pos[0, :, None]
        expected = (turns.cos()[None] * rope.attention_factor, turns.sin()[None] * rope.attention_factor)
        assert_close((cos, sin), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("heads", "head_size", "size"), [(32, 8, None), (4, 8, None), (4, 64, None), (4, 64, 16)])
def test_repairing_rows_turns_one_pairing_into_the_other(heads, head_size, size):
    rope = Rope(size=size)
    weight, x = torch.randn(heads * head_size, 12).double(), torch.randn(1, 6, 12).double()
    tables = rope.tables(torch.arange(6)[None], head_size, dtype=torch.float64)
    interleaved = repair(weight, head_size, size, to="interleaved")

    def project(weight: torch.Tensor, pairing) -> torch.Tensor:
        return rotate((x @ weight.T).view(1, 6, -1, head_size).transpose(1, 2), *tables, pairing)

    half, other = project(weight, "half"), project(interleaved, "interleaved")
    assert_close(half @ half.mT, other @ other.mT, rtol=1e-12, atol=1e-12)  # the same scores
    assert_close(other, half[..., pairing_permutation(head_size, size)], rtol=0, atol=1e-12)
    assert torch.equal(repair(interleaved, head_size, size, to="half"), weight)
    assert torch.equal(repair(weight[:, 0], head_size, size, to="interleaved"), interleaved[:, 0])  # a bias


def test_keys_are_permuted_by_their_own_head_count():
    def llama_cpp(rows: torch.Tensor, heads: int) -> torch.Tensor:  # what a GGUF file of a Llama holds
        return torch.stack([torch.stack(head.chunk(2), 1).flatten() for head in rows.chunk(heads)]).flatten()

    keys = torch.arange(256)  # 4 heads of 64 beside 32 query heads
    right, fault = llama_cpp(keys, 4), llama_cpp(keys, 32 // 4)
    assert (right != fault).sum() == 128
    assert torch.equal(repair(keys, 64, to="interleaved"), right)
    assert torch.equal(repair(torch.arange(32), 8, to="interleaved"), llama_cpp(torch.arange(32), 4))


# Where the frequencies live


@every_scaling
def test_compiles_to_one_graph_as_lengths_grow(scaling):
    rope, other = Rope(scaling=scaling), Rope(77.0)

    def turn(x, pos, lengths, head_size=HEAD):
        x = rotate(x, *rope.tables(pos, head_size, lengths=lengths), rope.pairing)
        return rotate(x, *other.tables(pos, HEAD))

    counter = CompileCounter()
    compiled = torch.compile(turn, backend=counter, fullgraph=True, dynamic=True)
    for length in (3, 7, 40, 41):
        pos = torch.arange(length)[None]
        x, lengths = torch.randn(1, 2, length, HEAD), torch.full_like(pos, length)
        assert_close(compiled(x, pos, lengths, HEAD), turn(x, pos, lengths))
    assert counter.frame_count == 1


def test_no_mode_of_the_first_caller_stays_with_the_frequencies():
    pos = torch.arange(4)[None]
    first = Rope(1234.5)
    with FakeTensorMode():
        first.tables(torch.arange(4)[None], HEAD)
    second = Rope(2345.5)
    with torch.inference_mode():
        second.tables(pos, HEAD)
        kept = constant((0.125, 0.25), pos, torch.float32)
    assert not kept.is_inference()
    with torch.device("meta"):
        assert Rope(3456.5).tables(torch.arange(4)[None], HEAD)[0].is_meta
        assert not Rope(3456.5).tables(pos, HEAD)[0].is_meta
    third = Rope(4567.5)
    torch.func.grad(lambda x: rotate(x, *third.tables(pos, HEAD)).sum())(torch.randn(1, 1, 4, HEAD))
    for rope in (first, second, third):
        cos, _ = rope.tables(pos, HEAD)
        turns = torch.tensor([0.0, 1.0, 2.0, 3.0])[:, None] * rope.theta ** (-torch.arange(0, HEAD, 2) / HEAD)
        assert_close(cos, turns.cos()[None])
        assert not cos.is_inference()


# config.json


@given(scaled())
def test_config_round_trip(drawn):
    parameters, head_size, longest = drawn
    rope = rope_from_hf({"rope_parameters": parameters, "max_position_embeddings": longest}, head_size)
    written = rope_to_hf(rope, head_size)
    assert rope_from_hf({"max_position_embeddings": longest} | written, head_size) == rope
    theirs = oracle(written["rope_parameters"], head_size, longest, longest + 1)
    assert_close(theirs[0], oracle(parameters, head_size, longest, longest + 1)[0], rtol=1e-13, atol=0)
    assert theirs[1] == pytest.approx(rope.attention_factor, rel=1e-14)


@given(st.integers(2, 128).map(lambda pairs: 2 * pairs), st.data())
def test_partial_sizes_survive_the_rounding_of_their_factor(head_size, data):
    rope = Rope(size=2 * data.draw(st.integers(1, head_size // 2 - 1)))
    written = rope_to_hf(rope, head_size)
    assert int(head_size * written["rope_parameters"]["partial_rotary_factor"]) == rope.size
    assert rope_from_hf(written, head_size) == rope


def test_ntk_is_written_as_its_base():
    rope = Rope(scaling=Ntk(4))
    back = rope_from_hf(rope_to_hf(rope, 64), 64)
    assert back.frequencies(64) == pytest.approx(rope.frequencies(64), rel=1e-12)


def test_longrope_without_a_factor_keeps_its_attention_factor():
    rope = Rope(scaling=LongRope((1.0, 1.0), (2.0, 2.0), 16))
    back = rope_from_hf(rope_to_hf(rope, 4) | {"max_position_embeddings": 64}, 4)
    assert rope.attention_factor == back.attention_factor == 1


OLD = {
    "llama 2": ({"rope_scaling": None}, Rope()),
    "code llama": ({"rope_theta": 1000000, "rope_scaling": None}, Rope(1e6)),
    "position interpolation": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, Rope(scaling=Linear(4))),
    "dynamic": (
        {"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        Rope(scaling=DynamicNtk(2, 2048)),
    ),
    "llama 3.1": (
        {
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        Rope(5e5, scaling=Llama3(8, 1, 4, 8192)),
    ),
    "qwen 2.5, 128k": (
        {
            "rope_theta": 1e6,
            "max_position_embeddings": 32768,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
        Rope(1e6, scaling=Yarn(4, 32768)),
    ),
    "yarn, factor from the lengths": (
        {
            "max_position_embeddings": 163840,
            "rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
        },
        Rope(scaling=Yarn(40, 4096)),
    ),
    "phi 3": (
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
            "rope_scaling": {"type": "su", "short_factor": [1.0, 1.5], "long_factor": [2, 3.5]},
        },
        Rope(size=4, scaling=LongRope((1.0, 1.5), (2.0, 3.5), 4096, 32.0)),
    ),
    "both names of the type": (
        {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}},
        Rope(scaling=Linear(2)),
    ),
}


@pytest.mark.parametrize(("config", "rope"), OLD.values(), ids=OLD.keys())
def test_reads_the_older_spelling(config, rope):
    assert rope_from_hf(config, HEAD) == rope


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_scaling": {"type": "yarm"}},
            r"^rope_scaling\.rope_type: 'yarm' is not known \(did you mean 'yarn'\?\)$",
        ),
        (
            {"rope_parameters": {"rope_type": "proportionate"}},
            r"^rope_parameters\.rope_type: 'proportionate' is not known",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fats": 3}, "max_position_embeddings": 8},
            r"^rope_scaling\.beta_fats: not a key of rope_type 'yarn' \(did you mean 'beta_fast'\?\)$",
        ),
        (
            {"rope_parameters": {"mrope_section": [1, 2]}},
            r"^rope_parameters\.mrope_section: not a key of rope_type 'default'",
        ),
        ({"rope_parameters": {"full_attention": {}}}, r"^rope_parameters\.full_attention: not a key"),
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 20000, "short_factor": [1.0]}},
            r"^rope_scaling\.long_factor: 20000 numbers, and no head has more than 16384 pairs$",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"^rope_scaling\.factor: missing, rope_type 'linear' needs it$"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"^max_position_embeddings: missing"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            r"^rope_scaling\.original_max_position_embeddings: missing",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, r"^Linear\.factor: expected float, got '2'$"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            r"^rope_scaling: differs from rope_parameters",
        ),
    ],
)
def test_refuses_configs_it_does_not_understand(config, message):
    with pytest.raises(SpecError, match=message):
        rope_from_hf(config, HEAD)


# Mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rope(size=5), "even"),
        (lambda: Rope(theta=1.0), "above 1"),
        (lambda: Rope(size=8, scaling=LongRope((1.0,), (1.0,), 8)), "1 divisors for 4 rotated pairs"),
        (lambda: Rope(scaling=LongRope((1.0,), (1.0, 2.0), 8)), "1 short divisors but 2 long"),
        (lambda: Rope(scaling=Yarn(4, 64, beta_fast=1, beta_slow=2)), "beta_fast is not below beta_slow"),
        (lambda: Rope(scaling=Llama3(8, 4, 1, 64)), "high_frequency_factor is above"),
        (lambda: Rope(scaling=Linear(0)), "factor is above 0"),
        (lambda: Rope(size=20).frequencies(HEAD), "20 rotated dims do not fit a head of size 16"),
        (lambda: Rope().frequencies(15), "odd"),
        (lambda: Rope(scaling=Ntk(2)).frequencies(2), "at least 4 rotated dims"),
        (lambda: Rope(size=2, scaling=DynamicNtk(2, 8)), "at least 4 rotated dims"),
    ],
)
def test_impossible_specs_are_refused_in_one_line(make, message):
    with pytest.raises(SpecError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_tables_and_rotation_refuse_what_they_cannot_take():
    with pytest.raises(InputError, match="DynamicNtk needs lengths"):
        Rope(scaling=DynamicNtk(2, 8)).tables(torch.arange(3)[None], HEAD)
    with pytest.raises(InputError, match="tables for 16 dims do not fit heads of size 8"):
        rotate(torch.randn(1, 1, 3, 8), *Rope().tables(torch.arange(3)[None], HEAD))


@every_scaling
def test_specs_survive_json(scaling):
    rope = Rope(5e5, 16, "interleaved", scaling)
    assert Rope.from_json(rope.to_json()) == rope
    assert rope.dynamic == isinstance(scaling, DynamicNtk | LongRope)
