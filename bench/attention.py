"""Time and memory of the attention kernels, forward and backward, as length grows: causal, packed, windowed.

8 heads of 64, batch 1, fp32. The peer of `auto` is the fastest kernel of each line.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.harness import Options, Row, compared, exponent, peak_memory, report, single, timings
from sublayer.nn.attend import Kernel, attend
from sublayer.nn.mask import Layout, Mask

HEADS, SIZE, WINDOW = 8, 64, 512
LENGTHS = (512, 1024, 2048, 4096, 8192)
CASES = ("causal", "packed", "window", "softcap")
REFERENCE_UNTIL = 4096  # at 8192 its scores and their gradients would take more than 8 GB


def main(options: Options) -> None:
    lengths = LENGTHS[:2] if options.quick else LENGTHS
    rows: list[Row] = []
    seconds: dict[tuple[str, str], dict[int, float]] = {}
    for case in CASES:
        for length in lengths:
            runs = {kernel: work(case, kernel, length) for kernel in _kernels(case, length)}
            found = timings(runs, rounds=1 if options.quick else 9 if length <= 2048 else 5)
            for kernel, series in found.items():
                seconds.setdefault((case, kernel), {})[length] = min(series)
            best = min(set(found) - {"auto"}, key=lambda kernel: min(found[kernel]))
            rows.append(compared(f"{case}, {length}: auto", found["auto"], found[best], best, goal="≤ 1.05"))
    for (case, kernel), by_length in seconds.items():
        slope = exponent(list(by_length), list(by_length.values()))
        goal = "≤ 1.1" if case == "window" and kernel == "auto" else None
        rows.append(single(f"{case}, {kernel}: exponent of time", slope, 1.0, "linear", "", goal))
    bytes_taken: dict[str, dict[int, int]] = {}
    for case in CASES:
        for kernel in ("reference", "sdpa", "tiled", "auto"):
            sizes = [length for length in lengths if kernel in _kernels(case, length)]
            if not sizes:
                continue
            taken = {size: peak_memory("bench.attention:warm_work", case, kernel, size) for size in sizes}
            bytes_taken[f"{case}, {kernel}"] = taken
            goal = None if kernel == "reference" else "≤ 1.1"
            name = f"{case}, {kernel}: exponent of memory"
            rows.append(single(name, exponent(sizes, list(taken.values())), 1.0, "linear", "", goal))
    report(
        "attention",
        rows,
        {
            "seconds": {f"{case}, {kernel}": by_length for (case, kernel), by_length in seconds.items()},
            "bytes": bytes_taken,
        },
    )


def work(case: str, kernel: Kernel, length: int) -> Callable[[], None]:
    """One forward and backward, ready to run."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, length, SIZE)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    weight = torch.randn(shape, generator=generator)
    mask = _mask(case, length)
    softcap = 50.0 if case == "softcap" else None

    def run() -> None:
        out = attend(q, k, v, mask, scale=SIZE**-0.5, softcap=softcap, kernel=kernel)
        assert isinstance(out, Tensor)
        torch.autograd.grad(out, (q, k, v), weight)

    return run


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
