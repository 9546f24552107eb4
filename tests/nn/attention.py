"""What the tests of every attention kernel share: masks of all kinds, and the comparison."""

from typing import TypeVar

import torch

from sublayer.nn.attend import attend
from sublayer.nn.mask import Layout, Mask

Value = TypeVar("Value")

SCALE = 0.3
ALIKE = torch.tensor([[1, 1, 1, 2, 2, 2, 3, 3, 3, 0, 4, 4, 4], [1, 1, 2, 2, 0, 3, 3, 3, 3, 3, 4, 4, 4]])
SEGMENT = torch.tensor([[1] * 5 + [2] * 4 + [3] * 2 + [0] * 2, [0] * 2 + [1] * 11])
CONTINUED = Layout(torch.arange(4, 17).expand(2, -1), torch.arange(4, 17).expand(2, -1), SEGMENT, SEGMENT)
TORN = Layout(q_segment=SEGMENT[:, [0, 5, 1, 6, 2, 7, 3, 8, 4, 9, 10, 11, 12]], k_segment=SEGMENT)

# name: (mask, L, M); 13 keys or queries where there are documents.
MASKS = {
    "everything": (Mask(), 7, 7),
    "cross": (Mask(), 3, 9),
    "causal": (Mask(causal=True), 9, 9),
    "causal, chunk of a prefill": (Mask(causal=True), 4, 11),
    "causal, long chunk": (Mask(causal=True), 8, 11),
    "causal, decoding": (Mask(causal=True), 1, 11),
    "causal, more queries than keys": (Mask(causal=True), 9, 4),
    "window": (Mask(causal=True, window=3), 13, 13),
    "window of one": (Mask(causal=True, window=1), 5, 5),
    "window, chunk": (Mask(causal=True, window=3), 4, 13),
    "window, decoding": (Mask(causal=True, window=3), 1, 13),
    "window, more queries than keys": (Mask(causal=True, window=3), 9, 4),
    "window, many blocks": (Mask(causal=True, window=4), 23, 23),
    "window, many blocks after others": (Mask(causal=True, window=3), 19, 30),
    "window both ways, many blocks": (Mask(window=3), 30, 30),
    "window both ways": (Mask(window=3), 13, 13),
    "window both ways, cross": (Mask(window=2), 9, 4),
    "window past the end": (Mask(causal=True, window=40), 6, 6),
    "kept first": (Mask(causal=True, window=3, keep_first=2), 13, 13),
    "prefix": (Mask(prefix=4), 9, 9),
    "prefix of none": (Mask(prefix=0), 5, 5),
    "prefix, chunk": (Mask(prefix=6), 4, 9),
    "prefix a row": (Mask(prefix=torch.tensor([2, 5])), 9, 9),
    "prefix and window": (Mask(prefix=4, window=3), 9, 9),
    "documents": (Mask(layout=Layout(q_segment=SEGMENT, k_segment=SEGMENT)), 13, 13),
    "causal documents": (Mask(causal=True, layout=Layout(q_segment=SEGMENT, k_segment=SEGMENT)), 13, 13),
    "documents of one length": (Mask(causal=True, window=2, layout=Layout(q_segment=ALIKE, k_segment=ALIKE)), 13, 13),
    "window in documents": (Mask(causal=True, window=3, layout=CONTINUED), 13, 13),
    "kept first in documents": (Mask(causal=True, window=2, keep_first=6, layout=CONTINUED), 13, 13),
    "prefix in documents": (
        Mask(prefix=torch.tensor([2, 4]), layout=Layout(q_segment=SEGMENT, k_segment=SEGMENT)),
        13,
        13,
    ),
    "prefix in continued documents": (Mask(prefix=7, layout=CONTINUED), 13, 13),
    "torn documents": (Mask(causal=True, layout=TORN), 13, 13),
    "cross documents": (Mask(layout=Layout(q_segment=SEGMENT[:, :10], k_segment=SEGMENT)), 10, 13),
    "padded memory": (Mask(layout=Layout(k_segment=SEGMENT.clamp(max=1))), 6, 13),
    "ragged decoding": (
        Mask(
            causal=True,
            layout=Layout(torch.tensor([[5], [8]]), torch.arange(13).expand(2, -1), None, torch.ones(2, 13).long()),
        ),
        1,
        13,
    ),
    "one row for all": (Mask(causal=True, layout=Layout(q_segment=SEGMENT[:1], k_segment=SEGMENT[:1])), 13, 13),
    "allowed": (Mask(allowed=torch.rand(2, 4, 9, 9, generator=torch.Generator().manual_seed(1)) > 0.5), 9, 9),
    "allowed, broadcast": (Mask(causal=True, allowed=torch.arange(9) % 3 != 1), 9, 9),
}


def present(x: Value | None) -> Value:
    """x, which is not None."""
    assert x is not None
    return x


def inputs(L, M, *, B=2, N=4, K=2, H=8, Hv=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, N, L, H), (B, K, M, H), (B, K, M, Hv)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def outcome(kernel, leaves, mask, **options):
    """Output and gradients, with a weight on each output that no two share."""
    q, k, v, *_ = leaves
    out = attend(q, k, v, mask, scale=SCALE, kernel=kernel, **options)
    assert isinstance(out, torch.Tensor)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


def close(actual, expected, tolerance):
    """Within a share of the largest value of each expected tensor; NaN nowhere.

    A gradient that is 0 in exact arithmetic (one visible key) is measured by the largest of all the tensors.
    """
    sizes = [theirs.detach().abs().max().item() if theirs.numel() else 0.0 for theirs in expected]
    for ours, theirs, size in zip(actual, expected, sizes, strict=True):
        largest = size if size > 1e-6 * max(sizes) else max(sizes)
        torch.testing.assert_close(ours, theirs.to(ours), rtol=0, atol=tolerance * largest)


def agree(kernel, leaves, mask, tolerance, **options):
    close(outcome(kernel, leaves, mask, **options), outcome("reference", leaves, mask, **options), tolerance)
