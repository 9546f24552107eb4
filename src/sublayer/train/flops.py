"""What training costs in floating-point operations, and how many of them a machine does a second."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from ..nn.attention import AttendingOp
from ..nn.moe import MoEOp
from ..nn.op import Op
from ..nn.sublayer import ModelOp
from .optim import kinds


def flops_per_token(model: nn.Module, length: int) -> int:
    """Operations, forward and backward, for one token in rows of `length` (T): 6 N + 12 · L · H · Q · T.

    N counts the weights that multiply: matrices, and the head or the table that stands in for it (a table that is
    only looked up costs nothing), of experts as many as a token is sent to; frozen ones count 4 and not 6, for no
    gradient of theirs is computed. The second term is that of L layers with H heads of size Q; a window shortens T,
    and a causal mask does not. Of what runs once in n tokens (`Op.every`), an n-th counts. What is computed twice to
    save memory counts once. Source: PaLM, arXiv 2204.02311, appendix B.
    """
    weights = [model.get_parameter(n) for n, kind in kinds(model, frozen=True).items() if kind in ("matrix", "outer")]
    if isinstance(model, ModelOp) and model.spec.tied and model.head is not None:
        trunk = model.decoder if model.decoder is not None else model.encoder
        assert trunk is not None
        weights += [p for p in trunk.embed.parameters() if p.shape == (model.spec.vocab, model.spec.dim)]
    attention, share, rare = 0, dict[int, float](), dict[int, int]()
    for module in model.modules():
        if isinstance(module, MoEOp):
            active = module.spec.router.active / module.spec.experts
            share |= {id(p): active for p in module.experts.parameters()}
        if isinstance(module, Op) and module.every > 1:
            share |= {id(p): 1 / module.every for p in module.parameters()}
            rare |= {id(inner): module.every for inner in module.modules()}
        if isinstance(module, AttendingOp):
            every = rare.get(id(module), 1)
            seen = length // every if module.reach is None else min(length // every, module.reach)
            attention += 6 * module.pair * seen // every
    return sum((6 if p.requires_grad else 4) * round(p.numel() * share.get(id(p), 1.0)) for p in weights) + attention


@torch.no_grad()
def gemm_rate(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, seconds: float = 0.3) -> float:
    """Operations a second of square matrix products, as this process would get them: the best of about `seconds`.

    They are 1024 wide on a CPU and 8192 elsewhere, large enough to be as fast as any. torch's random numbers stay
    as they are.
    """
    device, generator = torch.device(device), torch.Generator().manual_seed(0)
    size = 1024 if device.type == "cpu" else 8192
    a, b, product = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(3))
    _timed(a, b, product)  # the first one also chooses how
    best, begun = _timed(a, b, product), time.perf_counter()
    while time.perf_counter() - begun < seconds:
        best = min(best, _timed(a, b, product))
    return 2 * size**3 / best


def _timed(a: Tensor, b: Tensor, product: Tensor) -> float:
    _wait(a.device)
    begun = time.perf_counter()
    torch.mm(a, b, out=product)
    _wait(a.device)
    return time.perf_counter() - begun


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
