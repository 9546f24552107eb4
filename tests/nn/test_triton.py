"""The Triton kernel against the reference: on a GPU where there is one, else in Triton's interpreter.

The interpreter has to be asked for before triton is imported, so without a GPU this file runs itself once more in a
process of its own.
"""

import inspect

import pytest
import torch

from sublayer.errors import MaskError
from sublayer.nn.attend import attend
from sublayer.nn.mask import Layout, Mask
from tests.nn.attention import MASKS, SCALE, agree, close, inputs, outcome, present
from tests.nn.interpreted import DEVICE, INTERPRETED, passed_in_interpreter, runs_here

triton = pytest.importorskip("triton", reason="triton is not installed")
triton_attention = pytest.importorskip("sublayer.nn.triton_attention")

EXPRESSED = [name for name, (mask, _, _) in MASKS.items() if mask.allowed is None]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Sixteen queries by sixteen keys, the least there is."""
    monkeypatch.setattr(triton_attention, "TILE_BYTES", 16)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the tests below run here")
def test_the_interpreter_agrees_on_documents():
    assert passed_in_interpreter(__file__, "masks and causal and documents or one_line") == 4


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the tests below run here")
def test_the_interpreter_agrees():
    assert passed_in_interpreter(__file__, "not interpreter") > len(EXPRESSED)


def on_device(mask: Mask) -> Mask:
    def move(x):
        return x.to(DEVICE) if isinstance(x, torch.Tensor) else x

    old = mask.layout
    layout = old and Layout(move(old.q_pos), move(old.k_pos), move(old.q_segment), move(old.k_segment))
    return Mask(mask.causal, mask.window, mask.keep_first, move(mask.prefix), layout=layout)


def leaves(L, M, N=2, K=1, **sizes):
    return [x.detach().to(DEVICE).requires_grad_() for x in inputs(L, M, N=N, K=K, dtype=torch.float32, **sizes)]


@runs_here
@pytest.mark.parametrize("name", EXPRESSED)
def test_masks(name):
    mask, L, M = MASKS[name]
    agree("triton", leaves(L, M), on_device(mask), 1e-5)


@runs_here
@pytest.mark.parametrize("fields", [{"causal": True}, {"causal": True, "window": 17}, {"window": 20}, {"prefix": 20}])
def test_several_tiles_of_grouped_heads_with_odd_sizes(fields):
    segment = torch.tensor([[1] * 21 + [2] * 30 + [0] * 5, [0] * 3 + [3] * 53], device=DEVICE)
    for layout in (None, Layout(q_segment=segment, k_segment=segment)):
        agree("triton", leaves(56, 56, N=4, K=2, H=20, Hv=9), Mask(**fields, layout=layout), 1e-5)
    agree("triton", leaves(37, 56), Mask(**fields), 1e-5)


@runs_here
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("name", ["causal", "causal documents", "causal, more queries than keys"])
def test_softcap_and_sinks(name, softcap):
    mask, L, M = MASKS[name]
    q, k, v = leaves(L, M)
    sinks = torch.randn(2, device=DEVICE, requires_grad=True)

    def run(kernel):
        out = attend(q, k, v, on_device(mask), scale=SCALE, softcap=softcap, sink_logits=sinks, kernel=kernel)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v, sinks))]

    close(run("triton"), run("reference"), 1e-5)


@runs_here
@pytest.mark.parametrize("name", ["causal documents", "padded memory", "ragged decoding", "window, chunk"])
def test_what_no_query_sees_reaches_nothing(name):
    mask, L, M = MASKS[name]
    mask = on_device(mask)
    clean, dirty = leaves(L, M), leaves(L, M)
    unseen = present(mask.cells(L, M, DEVICE)[1]).expand(2, M)
    with torch.no_grad():
        for x in dirty[1:]:
            x.masked_fill_(unseen[:, None, :, None], torch.nan)
    close(outcome("triton", dirty, mask), outcome("triton", clean, mask), 1e-6)


@runs_here
def test_half_precision_is_as_near_as_its_rounding():
    q, k, v = (x.detach().half() for x in leaves(40, 40))
    out = attend(q, k, v, Mask(causal=True), scale=SCALE, kernel="triton")
    assert out.dtype == torch.float16
    close([out.float()], [attend(q.float(), k.float(), v.float(), Mask(causal=True), scale=SCALE)], 2e-3)


@runs_here
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"dropout": 0.1}, "the triton kernel has no dropout: reference and tiled can, and auto picks one"),
        ({"bias": torch.zeros(1)}, "the triton kernel has no bias: reference and tiled can, and auto picks one"),
        (
            {"mask": Mask(allowed=torch.ones(5, 5, dtype=torch.bool))},
            "the triton kernel has no explicit masks: reference, sdpa and tiled have, and auto picks one",
        ),
    ],
)
def test_what_it_cannot_do_is_one_line(options, line):
    q, k, v = leaves(5, 5)
    with pytest.raises(MaskError) as error:
        attend(q, k, v, scale=SCALE, kernel="triton", **options)
    assert str(error.value) == line


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="here it can run")
def test_without_a_gpu_or_the_interpreter_it_says_so():
    q, k, v = leaves(5, 5)
    with pytest.raises(MaskError, match="needs a GPU, and q lies on cpu"):
        attend(q, k, v, scale=SCALE, kernel="triton")


KERNELS = ["_forward", "_backward_queries", "_backward_keys"]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_compiles_for_a_gpu_within_its_shared_memory(kernel):
    """For sm_80, in bfloat16 with heads of 64: every branch on."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(triton_attention, kernel)
    constants = {"N": 4, "G": 2, "H": 64, "HV": 64, "WIDE": 64, "WIDE_V": 64, "CAUSAL": False, "WINDOW": 128}
    constants |= {"KEEP_FIRST": 4, "PREFIX": True, "DOCUMENTS": True, "SOFTCAP": True, "TILE": 64, "SINKS": True}
    whole = {"q_pos", "k_pos", "k_place", "q_segment", "k_segment", "prefix", "columns", "rows"}
    single = {"lse", "delta", "sinks"}
    half = {"q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v"}
    names = list(inspect.signature(function.fn).parameters)
    types = {
        name: "constexpr" if name in constants
        else "fp32" if name in ("scale", "softcap")
        else "*i32" if name in whole
        else "*fp32" if name in single
        else "*bf16" if name in half
        else "i32"
        for name in names
    }  # fmt: skip
    source = ASTSource(function, types, {(names.index(name),): constants[name] for name in names if name in constants})
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32))
    assert compiled.metadata.shared <= 99 * 1024
    assert len(compiled.asm["ptx"]) > 0
