"""The flex kernel: its functions cell by cell in eager mode over every mask, and compiled where it has to be."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from sublayer.errors import MaskError
from sublayer.nn import flex
from sublayer.nn.attend import attend
from sublayer.nn.mask import Mask
from tests.nn.attention import MASKS, SCALE, close, inputs, present


def run(kernel, q, k, v, mask, **options):
    q, k, v = q.detach(), k.detach(), v.detach()
    return [attend(q, k, v, mask, scale=SCALE, kernel=kernel, **options)]


HIDING = [name for name, (mask, L, M) in MASKS.items() if mask.materialise(L, M, "cpu") is not None]


@pytest.fixture
def _eager(monkeypatch):
    """torch's own uncompiled form of flex_attention: the same functions of masks and scores, without a compiler."""
    monkeypatch.setattr(flex, "compiled", flex_attention)


@pytest.mark.usefixtures("_eager")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, "all") for name in MASKS), *((name, "plain") for name in ("cross", "causal", "window in documents"))],
)
def test_eager_flex_agrees(name, options):
    mask, L, M = MASKS[name]
    generator = torch.Generator().manual_seed(2)
    bias, sinks = torch.randn(2, 4, L, M, generator=generator), torch.randn(4, generator=generator)
    given = {} if options == "plain" else {"bias": bias, "sink_logits": sinks, "softcap": 0.8}
    q, k, v = inputs(L, M, dtype=torch.float32)
    close(run("flex", q, k, v, mask, **given), run("reference", q, k, v, mask, **given), 1e-5)


@pytest.mark.parametrize(
    "name", [name for name, (mask, L, M) in MASKS.items() if mask.materialise(L, M, "cpu") is not None]
)
def test_its_mask_is_ours_cell_by_cell(name):
    mask, L, M = MASKS[name]
    q = inputs(L, M)[0]
    theirs = create_mask(flex._mask_mod(mask, q, M, sink=False), 2, 4, L, M, device="cpu")
    torch.testing.assert_close(theirs, present(mask.materialise(L, M, "cpu")).expand(2, 4, L, M))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "window in documents", "prefix a row", "causal, more queries than keys"])
def test_compiled_flex_agrees(name):
    mask, L, M = MASKS[name]
    q, k, v = inputs(L, M, H=16, Hv=16, dtype=torch.float32)
    options = {"softcap": 0.8, "sink_logits": torch.randn(4)} if name.startswith("window") else {}
    close(run("flex", q, k, v, mask, **options), run("reference", q, k, v, mask, **options), 1e-5)


@pytest.mark.parametrize(
    ("dtype", "options", "line"),
    [
        (
            torch.float32,
            {},
            "the flex kernel has no backward on a CPU: use sdpa, tiled or auto there, or torch.no_grad()",
        ),
        (torch.float64, {}, "the flex kernel has no fp64: reference, sdpa and tiled have, and auto picks one"),
        (
            torch.float32,
            {"dropout": 0.1},
            "the flex kernel has no dropout: reference and tiled can, and auto picks one",
        ),
    ],
)
def test_what_it_cannot_do_is_said_before_anything_is_computed(monkeypatch, dtype, options, line):
    monkeypatch.setattr(flex, "compiled", None)
    q, k, v = inputs(5, 5, dtype=dtype)
    with pytest.raises(MaskError) as error:
        attend(q, k, v, Mask(causal=True), scale=SCALE, kernel="flex", **options)
    assert str(error.value) == line
