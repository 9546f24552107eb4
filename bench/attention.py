"""Time and memory of the attention kernels, forward and backward, as length grows: causal, packed, windowed.

8 heads of 64, batch 1, fp32. `auto` is held against the fastest kernel of each line, and against transformers, whose
models give torch's fused attention a mask of L × L cells for packed documents and windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.harness import Options, Row, compared, exponent, peak_memory, progress, report, single, timings
from sublayer.nn.attend import Kernel, attend
from sublayer.nn.mask import Layout, Mask

HEADS, SIZE, WINDOW = 8, 64, 512
LENGTHS = (512, 1024, 2048, 4096, 8192)
CASES = ("causal", "packed", "window", "softcap")
PEER = "transformers"
REFERENCE_UNTIL = 2048  # its time is plain by then; at 8192 it would take more than 8 GB


def main(options: Options) -> None:
    lengths = LENGTHS[:3] if options.quick else LENGTHS
    seconds = {case: {length: _times(case, length, options) for length in lengths} for case in CASES}
    rows = [_best(case, length, found) for case in CASES for length, found in seconds[case].items()]
    rows += [
        compared(f"{case}, {length}: auto", found["auto"], found[PEER], PEER)
        for case in CASES
        for length, found in seconds[case].items()
        if PEER in found
    ]
    fastest: dict[tuple[str, Kernel], dict[int, float]] = {
        (case, kernel): {length: min(found[kernel]) for length, found in by_length.items() if kernel in found}
        for case, by_length in seconds.items()
        for kernel in _kernels(case, 0)
    }
    bytes_taken = {(case, kernel): _bytes(case, kernel, lengths[1:]) for case, kernel in fastest if kernel != "auto"}
    for (case, kernel), by_length in fastest.items():
        goal = "≤ 1.1" if (case, kernel) == ("window", "auto") else None
        # Rows shorter than a few windows have seen less than a window on average, and tell nothing of its growth.
        fitted = {length: x for length, x in by_length.items() if case != "window" or length >= 4 * WINDOW}
        if len(fitted) > 1:
            rows.append(_exponent(f"{case}, {kernel}: exponent of time", fitted, goal))
    for (case, kernel), by_length in bytes_taken.items():
        goal = None if kernel == "reference" else "≤ 1.1"
        rows.append(_exponent(f"{case}, {kernel}: exponent of memory", by_length, goal))
    notes = {
        "seconds": {", ".join(key): by_length for key, by_length in fastest.items()},
        "bytes": {", ".join(key): by_length for key, by_length in bytes_taken.items()},
    }
    report("attention", rows, notes)


def _times(case: str, length: int, options: Options) -> dict[str, list[float]]:
    progress(f"time of {case}, {length}")
    runs = {kernel: work(case, kernel, length) for kernel in _kernels(case, length)}
    if case != "softcap":
        runs[PEER] = peer_work(case, length)
    rounds = 1 if options.quick else 5 if length <= 2048 else 3
    return timings(runs, rounds, warm=1 if length <= 1024 else 0)


def _best(case: str, length: int, found: dict[str, list[float]]) -> Row:
    """What the rule of `auto` costs: against the kernel that was fastest."""
    best = min(set(found) - {"auto", PEER}, key=lambda kernel: min(found[kernel]))
    return compared(f"{case}, {length}: auto", found["auto"], found[best], best, goal="≤ 1.05")


def _bytes(case: str, kernel: Kernel, lengths: Sequence[int]) -> dict[int, int]:
    progress(f"memory of {case}, {kernel}")
    return {
        length: peak_memory("bench.attention:warm_work", case, kernel, length)
        for length in lengths
        if kernel in _kernels(case, length)
    }


def _exponent(name: str, by_length: dict[int, float] | dict[int, int], goal: str | None) -> Row:
    return single(name, exponent(list(by_length), list(by_length.values())), 1.0, "linear", "", goal)


def work(case: str, kernel: Kernel, length: int) -> Callable[[], None]:
    """One forward and backward, ready to run."""
    q, k, v, weight = _inputs(length)
    mask = _mask(case, length)
    softcap = 50.0 if case == "softcap" else None

    def run() -> None:
        out = attend(q, k, v, mask, scale=SIZE**-0.5, softcap=softcap, kernel=kernel)
        assert isinstance(out, Tensor)
        torch.autograd.grad(out, (q, k, v), weight)

    return run


def peer_work(case: str, length: int) -> Callable[[], None]:
    """The same by transformers; its mask is made beforehand, as a model makes it once for all layers."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v, weight = _inputs(length)
    seen = None if case == "causal" else _mask(case, length).materialise(length, length, "cpu")
    module = torch.nn.Module()

    def run() -> None:
        out, _ = sdpa_attention_forward(module, q, k, v, seen, scaling=SIZE**-0.5, is_causal=seen is None)
        torch.autograd.grad(out, (q, k, v), weight.transpose(1, 2))

    return run


def _inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, length, SIZE)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    return q, k, v, torch.randn(shape, generator=generator)


def warm_work(case: str, kernel: Kernel, length: int) -> Callable[[], None]:
    """The same, once what only a first call takes (thread pools, code) is taken."""
    work(case, kernel, 128)()
    return work(case, kernel, length)


def _mask(case: str, length: int) -> Mask:
    if case == "window":
        return Mask(causal=True, window=WINDOW)
    if case == "packed":
        return Mask(causal=True, layout=_documents(length))
    return Mask(causal=True)


def _documents(length: int) -> Layout:
    """Documents of mixed length, from 16 to 512 tokens, log-uniform; the same mix whatever the length."""
    generator = torch.Generator().manual_seed(1)
    lengths: list[int] = []
    while sum(lengths) < length:
        lengths.append(int(16 * 32 ** torch.rand((), generator=generator).item()))
    numbers = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))[None, :length]
    return Layout(q_segment=numbers, k_segment=numbers)


def _kernels(case: str, length: int) -> list[Kernel]:
    kernels: list[Kernel] = ["auto", "tiled"]
    if case != "softcap":
        kernels.append("sdpa")
    if length <= REFERENCE_UNTIL:
        kernels.append("reference")
    return kernels
