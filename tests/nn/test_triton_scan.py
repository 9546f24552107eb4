"""The scan's kernels in Triton against its form in plain PyTorch: on a GPU where there is one, else interpreted.

The interpreter has to be asked for before triton is imported, so without a GPU this file runs itself once more in a
process of its own.
"""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from sublayer.nn import selective_scan as plain
from tests.nn.interpreted import DEVICE, INTERPRETED, passed_in_interpreter, runs_here

triton = pytest.importorskip("triton", reason="triton is not installed")
triton_scan = pytest.importorskip("sublayer.nn.triton_scan")

SHAPES = {"even": (2, 16, 16, 4), "odd": (2, 21, 19, 3), "one state": (1, 9, 5, 1), "several programs": (2, 12, 80, 16)}


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the tests below run here")
def test_the_interpreter_agrees() -> None:
    assert passed_in_interpreter(__file__, "plain_form or operator") == 2 * len(SHAPES) + 1


def drawn(B: int, L: int, W: int, S: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (B, L, W), "dt": (B, L, W), "a": (S, W), "b": (B, L, S), "c": (B, L, S), "past": (B, S, W),
              "d_y": (B, L, W), "d_last": (B, S, W)}  # fmt: skip
    found = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    found["dt"], found["a"] = found["dt"].exp(), -found["a"].exp()
    found["dt"][:, L // 2] = 0  # padding
    found["keep"] = (torch.rand(B, L, generator=generator) > 0.2).double()
    return {name: tensor.to(DEVICE) for name, tensor in found.items()}


@runs_here
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_the_plain_form(
    shape: str, continued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = drawn(*SHAPES[shape])
    d_y, d_last, past, keep = (given.pop(name) for name in ("d_y", "d_last", "past", "keep"))
    T, _ = plain._block_length(given["x"], given["a"])
    more: dict[str, Any] = {"past": past if continued else None, "keep": keep if continued else None}
    back: dict[str, Any] = {"d_y": d_y, "d_last": d_last, "keep": more["keep"]}
    with monkeypatch.context() as patch:
        patch.setattr(plain, "_triton", lambda x: None)
        expected = plain._run(**given, **more, train=True)
        expected_back = plain._run_back(**given, **back, between=expected[2])
    found = triton_scan.run(**given, **more, T=T, train=True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    only = triton_scan.run(**given, **more, T=T, train=False)
    torch.testing.assert_close(only[:2], expected[:2], rtol=1e-10, atol=1e-12)
    found_back = triton_scan.run_back(**given, **back, between=found[2], T=T)
    torch.testing.assert_close(found_back, expected_back, rtol=1e-10, atol=1e-10)


@runs_here
def test_the_operator_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer and all gradients are those it has without them."""
    given = drawn(*SHAPES["odd"])
    _, d_last, past, keep = (given.pop(name) for name in ("d_y", "d_last", "past", "keep"))
    taken: list[int] = []

    def answers(kernels: object) -> list[Tensor]:
        monkeypatch.setattr(plain, "_triton", lambda x: taken.append(1) or kernels)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in (given | {"past": past}).items()}
        y, last = plain.selective_scan(**leaves, keep=keep)
        return [y, last, *torch.autograd.grad(y.square().sum() + (last * d_last).sum(), [*leaves.values()])]

    torch.testing.assert_close(answers(triton_scan), answers(None), rtol=1e-10, atol=1e-10)
    assert len(taken) == 4


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("kernel", ["_forward", "_backward"])
def test_it_compiles_for_a_gpu_with_its_states_in_registers(kernel: str) -> None:
    """For sm_80, in fp32 with Mamba's 16 states of a channel: every branch on."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(triton_scan, kernel)
    constants = {"STATES": 16, "WIDE": 64, "PAST": True, "KEEP": True, "TRAIN": True}
    names = list(inspect.signature(function.fn).parameters)
    types = {name: "constexpr" if name in constants else "i32" if name.isupper() else "*fp32" for name in names}
    chosen = {(names.index(name),): constants[name] for name in names if name in constants}
    compiled = triton.compile(ASTSource(function, types, chosen), target=GPUTarget("cuda", 80, 32))
    assert compiled.metadata.shared <= 16 * 1024
    assert ".local" not in compiled.asm["ptx"]
