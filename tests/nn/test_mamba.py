"""The scans of Mamba and Mamba-2 against their recurrences, token by token, and what new mixers begin as.

B batch, L length, W channels, S states, H heads, P channels of a head, G groups.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

from sublayer.errors import SpecError
from sublayer.nn.embed import Embed
from sublayer.nn.initialise import Init
from sublayer.nn.mamba import Mamba, Mamba2, Mamba2Op, MambaOp
from sublayer.nn.norm import RMSNorm
from sublayer.nn.op import Part
from sublayer.nn.selective_scan import selective_scan
from sublayer.nn.ssd import CHUNK, ssd
from sublayer.nn.sublayer import Block, Model, ModelOp, Trunk, pre_norm
from sublayer.recipes import mamba
from sublayer.state import State
from sublayer.step import Step

Inputs = dict[str, Any]


def drawn(shapes: dict[str, tuple[int, ...]], starts: bool, seed: int = 0) -> Inputs:
    """Random tensors in fp64; dt is above 0, a below it, with decays from almost 1 to almost 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    tensors["dt"] = tensors["dt"].exp()
    tensors["a"] = -tensors["a"].exp()
    inputs: Inputs = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    B, L = shapes["dt"][:2]
    inputs["starts"] = torch.rand(B, L, generator=generator) < 0.1 if starts else None
    return inputs


def results(f: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs) -> list[Tensor]:
    """What f gives, and the gradients of everything that has one."""
    y, last = f(**inputs)
    leaves = [tensor for tensor in inputs.values() if tensor is not None and tensor.requires_grad]
    return [y, last, *torch.autograd.grad(y.square().sum() + (last**3).sum(), leaves)]


def scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: Any, past: Any = None
) -> tuple[Tensor, Tensor]:
    return selective_scan(x, dt, a, b, c, past, None if starts is None else (~starts).double())


def by_token(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: Any, past: Any = None
) -> tuple[Tensor, Tensor]:
    h = x.new_zeros(len(x), *a.shape) if past is None else past
    ys = []
    for t in range(x.shape[1]):
        if starts is not None:
            h = torch.where(starts[:, t, None, None], 0, h)
        h = (dt[:, t, None] * a).exp() * h + (dt[:, t] * x[:, t])[:, None] * b[:, t, :, None]
        ys.append((c[:, t, :, None] * h).sum(1))
    return torch.stack(ys, 1), h


def heads_by_token(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: Any, past: Any = None
) -> tuple[Tensor, Tensor]:
    """Each head as channels of the scan above, with its group's b and c and one decay for all states."""
    (B, _, H, P), (G, S) = x.shape, b.shape[2:]
    ys, lasts = [], []
    for head in range(H):
        group, place = head // (H // G), slice(head % (H // G) * P, (head % (H // G) + 1) * P)
        before = None if past is None else past[:, group, :, place]
        y, last = by_token(
            x[:, :, head],
            dt[:, :, head, None].expand(-1, -1, P),
            a[head].expand(S, P),
            b[:, :, group],
            c[:, :, group],
            starts,
            before,
        )
        ys.append(y)
        lasts.append(last)
    return torch.stack(ys, 2), torch.stack(lasts, 1).view(B, G, H // G, S, P).transpose(2, 3).reshape(B, G, S, -1)


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("sizes", [(2, 37, 5, 3), (3, 150, 40, 8), (2, 9, 1030, 32), (2, 2, 4, 2)], ids=str)
def test_selective_scan_is_the_recurrence(sizes: Sequence[int], past: bool, starts: bool) -> None:
    B, L, W, S = sizes
    shapes = {"x": (B, L, W), "dt": (B, L, W), "a": (S, W), "b": (B, L, S), "c": (B, L, S)}
    inputs = drawn(shapes | ({"past": (B, S, W)} if past else {}), starts)
    assert_close(results(scan, inputs), results(by_token, inputs))


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize(
    "sizes", [(2, 37, 4, 5, 2, 3), (1, 3 * CHUNK - 7, 6, 2, 3, 4), (2, CHUNK, 2, 3, 1, 2), (1, 2, 2, 1, 2, 1)], ids=str
)
def test_ssd_is_the_recurrence(sizes: Sequence[int], past: bool, starts: bool) -> None:
    B, L, H, P, G, S = sizes
    shapes = {"x": (B, L, H, P), "dt": (B, L, H), "a": (H,), "b": (B, L, G, S), "c": (B, L, G, S)}
    inputs = drawn(shapes | ({"past": (B, G, S, H // G * P)} if past else {}), starts)
    assert_close(results(ssd, inputs), results(heads_by_token, inputs))


@pytest.mark.parametrize("large", [30.0, 1e4])
def test_vanishing_decays_give_no_nan(large: float) -> None:
    """exp(-large) is 0 in fp32: a form that divides by products of decays would fail here."""
    B, L, W, S = 1, 100, 4, 3
    shapes = {"x": (B, L, W), "dt": (B, L, W), "a": (S, W), "b": (B, L, S), "c": (B, L, S)}
    inputs = drawn(shapes, starts=False)
    inputs["a"] = (inputs["a"].detach() * large).requires_grad_()
    narrow = {name: None if x is None else x.detach().float().requires_grad_() for name, x in inputs.items()}
    scanned = zip(results(scan, narrow), results(by_token, inputs), strict=True)
    heads: Inputs = {"x": inputs["x"][..., None], "dt": inputs["dt"], "a": inputs["a"][0],
                     "b": inputs["b"][:, :, None], "c": inputs["c"][:, :, None], "starts": None}  # fmt: skip
    leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in heads.items()}
    narrow_leaves = {name: None if x is None else x.detach().float().requires_grad_() for name, x in heads.items()}
    by_heads = zip(results(ssd, narrow_leaves), results(heads_by_token, leaves), strict=True)
    for actual, expected in (*scanned, *by_heads):
        assert_close(actual.double(), expected, rtol=0, atol=1e-30 + 1e-5 * float(expected.detach().abs().max()))


@pytest.mark.parametrize(
    ("mixer", "bytes_a_token"), [(Mamba(48, 32), 6_000), (Mamba2(4, 12, 32), 20_000)], ids=["mamba", "mamba2"]
)
def test_what_training_keeps_grows_with_length_and_holds_no_states(mixer: Part, bytes_a_token: int) -> None:
    """The states of a token are 48 · 32 · 8 = 12,288 bytes, and a plain scan keeps them and as many decays."""
    built = model(mixer)

    def kept(length: int) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with saved_tensors_hooks(pack, lambda x: x):
            built(torch.arange(length)[None] % V).sum().backward()
        return sum(sizes.values())

    short, long, longer = kept(128), kept(256), kept(512)
    assert longer - long == pytest.approx(2 * (long - short), rel=0.1)
    assert (longer - long) / 256 < bytes_a_token


V, D = 13, 16


def model(mixer: Part) -> ModelOp:
    spec = Model(D, decoder=Trunk(Embed(V), (Block((pre_norm("mixer", mixer, RMSNorm()),)),)), init=Init("torch"))
    return spec.build(1, dtype=torch.float64)


@pytest.mark.parametrize("mixer", [Mamba(12, 3), Mamba2(4, 3, 5, groups=2)], ids=["mamba", "mamba2"])
@torch.no_grad()
def test_padding_leaves_the_state_as_it_is(mixer: Part) -> None:
    built = model(mixer)
    ids = torch.randint(V, (2, 7), generator=torch.Generator().manual_seed(2))
    state = State.allocate(built, 2, 16)
    built(ids, Step(), state)
    before = {name: tensor.clone() for name, tensor in state.store.tensors.items()}
    for segment in ([[0] * 7, [0, 1, 1, 1, 1, 0, 0]], [[0], [1]]):
        built(ids[:, : len(segment[0])], Step(segment=torch.tensor(segment)), state)
        for name, tensor in state.store.tensors.items():
            assert torch.equal(tensor[0], before[name][0])
            assert not torch.equal(tensor[1], before[name][1])
    assert state.length.tolist() == [7, 12]


def test_the_scan_is_one_operator_to_a_compiler() -> None:
    """Its loops are not unrolled; shapes, gradients and aliasing are as it says."""
    x, dt, a = torch.randn(2, 20, 6), torch.rand(2, 20, 6), -torch.rand(3, 6)
    b, past, keep = torch.randn(2, 20, 3), torch.randn(2, 3, 6), torch.ones(2, 20)
    inputs = (*(tensor.requires_grad_() for tensor in (x, dt, a, b, b.detach().clone(), past)), keep)
    operator = torch.ops.sublayer.selective_scan.default
    torch.library.opcheck(operator, (*inputs, True), test_utils=("test_schema", "test_faketensor"))
    compiled: Any = torch.compile(selective_scan, backend="eager", fullgraph=True)
    plain: Any = selective_scan
    assert_close(compiled(*inputs), plain(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_fp32_at_least(dtype: torch.dtype) -> None:
    for mixer in (Mamba(12, 3), Mamba2(4, 3, 5)):
        built = model(mixer).to(dtype)
        state = State.allocate(built, 1, 8)
        found = {name.rpartition(".")[2]: tensor.dtype for name, tensor in state.store.tensors.items()}
        assert found == {"scan": torch.float32, "inputs": dtype}
        ids = torch.arange(6)[None]
        whole = built(ids).float()
        parts = torch.cat([built(part, Step(), state) for part in ids.split(1, 1)], 1).float()
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        assert_close(parts, whole, rtol=0, atol=tolerance * float(whole.detach().abs().max()))


def test_mamba_begins_as_the_authors_code() -> None:
    op = next(module for module in model(Mamba(4000, 5, rank=4)).modules() if isinstance(module, MambaOp))
    assert_close(op.A_log.exp(), torch.arange(1.0, 6.0, dtype=torch.float64).expand(4000, 5), rtol=1e-6, atol=0)
    steps = F.softplus(op.dt_bias)
    spread(steps.log() / torch.tensor(10.0).log(), -3, -1)
    spread(op.dt.weight, -0.5, 0.5)
    spread(op.up.weight, -0.25, 0.25)
    assert torch.equal(op.D, torch.ones_like(op.D))


def test_mamba2_begins_as_the_authors_code() -> None:
    op = next(module for module in model(Mamba2(4000, 1, 5)).modules() if isinstance(module, Mamba2Op))
    spread(op.A_log.exp(), 1, 16)
    spread(F.softplus(op.dt_bias).log() / torch.tensor(10.0).log(), -3, -1)
    assert torch.equal(op.D, torch.ones_like(op.D))


def spread(x: Tensor, low: float, high: float) -> None:
    """Evenly between two values."""
    room = high - low
    assert low <= x.min() < low + 0.01 * room
    assert high - 0.01 * room < x.max() <= high
    assert float((x - low).detach().mean() / room) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Mamba(0), "above 0"),
        (lambda: Mamba(8, rank=0), "rank must be above 0"),
        (lambda: Mamba(8, kernel=1), "kernel=1 mixes no positions"),
        (lambda: Mamba2(4, groups=3), "heads=4 is not a multiple of groups=3"),
        (lambda: Mamba2(4, state_size=0), "above 0"),
        (lambda: model(Mamba2(2, 4, 4, norm=RMSNorm(groups=3))), "groups=3 do not divide the width 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        make()


def test_reading_imports_no_compiler() -> None:
    """It would take a second before the first token."""
    program = (
        "import sys, torch; from sublayer.recipes import mamba\n"
        "with torch.no_grad(): mamba(8, 1, vocab=9).build()(torch.tensor([[1, 2, 3]]))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_scan_answers_the_same_with_gradients_and_without() -> None:
    model = mamba(8, 1, vocab=9).build(seed=0, dtype=torch.float64)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        read = model(ids)
    assert torch.equal(read, model(ids).detach())
