"""k-quants: the gguf package reads what we write, as close to the values as llama.cpp's own quantiser gets."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from sublayer.weights.gguf.k_quants import FORMS, quantize
from tests.llama_cpp import quantised

ROWS, WIDTH = 48, 1024


def _drawn() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    normal = draw.normal(size=(ROWS, WIDTH))
    sizes = draw.lognormal(sigma=2, size=(ROWS, WIDTH // 16)).repeat(16, 1)
    return {
        "normal": 0.02 * normal,
        "heavy tails": 0.02 * draw.standard_t(3, size=(ROWS, WIDTH)),
        "groups of many sizes": 0.02 * sizes * normal,
        "above zero": 1 + 0.02 * normal,
        "below zero": -1 + 0.02 * normal,
        "mostly zero": 0.02 * normal * (draw.random((ROWS, WIDTH)) < 0.1),
        "large": 1e4 * normal,
        "small": 1e-3 * normal,
    }


DRAWN = {name: values.astype(np.float32) for name, values in _drawn().items()}


def _read(data: np.ndarray, kind: str) -> np.ndarray:
    return dequantize(data, GGMLQuantizationType[kind])


def _error(values: np.ndarray, data: np.ndarray, kind: str) -> float:
    """The sum of squared errors, of the squares."""
    values = values.astype(np.float64)
    return float(((_read(data, kind) - values) ** 2).sum() / (values**2).sum())


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", DRAWN)
def test_the_error_is_no_larger_than_llama_cpps(name: str, kind: str) -> None:
    values = DRAWN[name]
    data = quantize(torch.from_numpy(values), kind).numpy()
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert (data.dtype, data.shape) == (np.uint8, (ROWS, WIDTH // block * size))
    ours, theirs = _error(values, data, kind), _error(values, quantised(values, kind), kind)
    print(f"\n{name}, {kind}: {ours:.3e}, llama.cpp {theirs:.3e}, {ours / theirs - 1:+.1%}")
    assert ours <= theirs


@pytest.mark.parametrize(("kind", "error"), [("Q2_K", 0.0703), ("Q3_K", 0.0206), ("Q4_K", 0.00496), ("Q5_K", 0.00122),
                                             ("Q6_K", 0.000297)])  # fmt: skip
def test_the_errors_that_the_documentation_states(kind: str, error: float) -> None:
    values = np.random.default_rng(0).normal(size=(256, 2048)).astype(np.float32)
    data = quantize(torch.from_numpy(values), kind).numpy()
    assert _error(values, data, kind) == pytest.approx(error, rel=0.01)


@pytest.mark.parametrize("kind", FORMS)
def test_what_a_block_can_hold_comes_back_to_a_rounding_of_its_scales(kind: str) -> None:
    """Nothing; one value alone; two values in turn, and the other way round; one block beside a far larger one."""
    pair = torch.tensor([-1.0 if FORMS[kind].signed else 0.0, 1.0]).repeat(128) / 4
    alone = torch.zeros(256)
    alone[77] = -0.5
    blocks = torch.stack([torch.zeros(256), alone, pair, -pair, pair / 2**6, pair * 2**12])
    found = torch.from_numpy(_read(quantize(blocks.view(2, -1), kind).numpy(), kind)).view(blocks.shape)
    for value, wanted in zip(found, blocks, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=0.01 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", FORMS)
def test_values_whose_scale_f16_holds_only_roughly_are_kept(kind: str) -> None:
    """Half the smallest step and less is nothing; at a thousand of them most of the value is there, at any sign."""
    normal = np.random.default_rng(1).normal(size=(16, 512)).astype(np.float32)
    small = normal * 2**-24 * 1000
    assert _error(small, quantize(torch.from_numpy(small), kind).numpy(), kind) < 0.15
    for nothing in (normal * 1e-9, normal * 1e-30, normal * 1e-42):
        assert not _read(quantize(torch.from_numpy(nothing), kind).numpy(), kind).any()


@pytest.mark.parametrize("kind", FORMS)
def test_a_row_is_stored_the_same_whatever_stands_beside_it(kind: str) -> None:
    values = torch.from_numpy(DRAWN["heavy tails"])
    whole = quantize(values, kind)
    assert torch.equal(quantize(values[5:9], kind), whole[5:9])
    assert torch.equal(quantize(values.reshape(-1, 256), kind).view(whole.shape), whole)
