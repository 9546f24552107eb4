"""The loss of a head over a large vocabulary without its logits: a chunk of rows at a time, gradients with it.

Logits [R, V] and their gradient are what a small model with a large vocabulary takes most memory for in training. Here
the head and its cross-entropy are one function, which takes the gradients of hidden vectors and weights while a chunk's
logits are at hand, and keeps those alone. To compute logits anew in the backward pass would keep less, and was measured
slower than keeping them whole.

R rows (tokens that count), C rows of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError, SublayerError
from ..nn.head import HeadOp
from ..nn.sublayer import ModelOp

IGNORED = -100  # the label of a position that predicts nothing
PICKING = ("cpu",)  # where labels lie when the rows that count can be picked without waiting for a device

# Whether the backward pass under way may be run again (retain_graph); where torch cannot tell, it may.
_kept_graph = getattr(getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", lambda: True)


class Loss(NamedTuple):
    """What an objective gives: a sum, which the caller divides by the tokens of all micro-batches and ranks."""

    sum: Tensor
    """0-d, what is minimised: the nats of all tokens that count, and `extra`."""
    tokens: Tensor | int
    """How many those are; a 0-d tensor where Python would have to wait for the device."""
    extra: Tensor | float = 0.0
    """What of `sum` is no code length (z-loss, what smoothing adds, auxiliary losses), without gradient."""
    right: Tensor | None = None
    """How many of `tokens` were answered right, where that was counted."""

    @property
    def nats(self) -> Tensor:
        """0-d, the code length of the tokens that count, without gradient."""
        return self.sum.detach() - self.extra


def head_loss(
    model: ModelOp,
    hidden: Tensor,
    labels: Tensor,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
) -> Loss:
    """Cross-entropy of model.logits(hidden) against labels, summed; the logits are never whole in memory.

    hidden: […, D], the model's output="hidden"; labels: […] integers from 0 to V − 1, or -100 for what does not count.
    Rows that do not count are left out of the products where labels lie on the CPU, and masked elsewhere, since to pick
    rows is to wait for the device. z_loss: z in + z · logsumexp², which keeps logits near 0 (PaLM, arXiv 2204.02311,
    section 5). label_smoothing: the share of the target that is spread evenly over V (arXiv 1512.00567, section 7).
    chunk: rows at a time; None: by bytes, from the shapes alone, so that a run repeats.

    Logits are the model's own, autocast included; softmax and sums are in fp32 at least, and weights of fewer bits
    gather their gradient in fp32. With gradients off none is computed. Else they are taken now and multiplied later by
    what arrives in the backward pass; a second derivative raises SublayerError.
    Raises InputError for shapes that do not fit and, on the CPU, for labels outside the vocabulary.
    """
    if model.head is None:
        raise InputError("the model has no head: there are no logits to take a loss of")
    if hidden.shape[:-1] != labels.shape or labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(
            f"labels are whole numbers, of the shape of hidden without its last axis; "
            f"got {labels.dtype} {list(labels.shape)} beside {list(hidden.shape)}"
        )
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk={chunk} is a number of rows: 1 or more, or None")
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    counted: Tensor | None = labels != IGNORED
    tokens = counted.sum()
    if labels.device.type in PICKING:
        if tokens < len(labels):
            kept = counted.nonzero()[:, 0]
            rows, labels = rows.index_select(0, kept.to(rows.device)), labels[kept]
        counted, labels = None, labels.to(rows.device)
    else:
        rows, labels = rows.masked_fill(~counted[:, None], 0), labels.clamp(min=0)  # NaN in padding reaches nothing
    head = _General(model) if _unusual(model) else _Plain(model)
    inputs = (rows, *head.parameters)
    if not torch.is_grad_enabled():
        inputs = tuple(tensor.detach() for tensor in inputs)
    chunks: Any = _Chunks.apply
    total, extra = chunks(head, labels, counted, _Form(z_loss, label_smoothing, chunk), *inputs)
    return Loss(total, tokens, extra if z_loss or label_smoothing else 0.0)


CHUNK = {"cpu": 64 << 20}  # bytes of a chunk's logits in fp32
CHUNK_ELSEWHERE = 256 << 20  # not measured: enough rows to keep a large device busy


def rows_of_a_chunk(rows: int, vocab: int, device: torch.device) -> int:
    """How many rows to compute at a time: as many as the bytes of CHUNK hold, in chunks of nearly equal size.

    With fewer rows the matrix products reuse less of the weight. More rows take more memory, which is fresh in each
    call and so costs time as well.
    """
    most = max(1, CHUNK.get(device.type, CHUNK_ELSEWHERE) // (4 * vocab))
    return -(-rows // -(-rows // most)) if rows else 1


@dataclass(frozen=True)
class _Form:
    """What is minimised."""

    z_loss: float
    smoothing: float
    chunk: int | None

    def slope(self, logits: Tensor, labels: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
        """(nats, extra) of each row, [C]; their sum's gradient is written over logits [C, V]."""
        if logits.device.type == "cpu":
            _check(labels, logits.shape[1])
        picked = logits.gather(1, labels[:, None])[:, 0]
        mean = logits.mean(1) if self.smoothing else picked
        top = logits.amax(1)
        torch.softmax(logits, 1, out=logits)
        logsumexp = top - logits.amax(1).log()  # the largest share is 1 / sum(exp(logits − top))
        nats = logsumexp - picked
        extra = self.z_loss * logsumexp.square() + self.smoothing * (picked - mean)
        if self.z_loss:
            logits.mul_((1 + 2 * self.z_loss * logsumexp)[:, None])
        if self.smoothing:
            logits.sub_(self.smoothing / logits.shape[1])
        logits.scatter_add_(1, labels[:, None], logits.new_full((len(labels), 1), self.smoothing - 1))
        if counted is not None:
            logits.masked_fill_(~counted[:, None], 0)
            nats, extra = nats.masked_fill(~counted, 0), extra.masked_fill(~counted, 0)
        return nats, extra


def _check(labels: Tensor, vocab: int) -> None:
    outside = (labels < 0) | (labels >= vocab)
    if bool(outside.any()):
        bad = int(labels[outside][0])
        raise InputError(f"label {bad} is outside the vocabulary of {vocab}, and is not {IGNORED}: does not count")


class _Plain:
    """softcap(scale · x Wᵀ + bias) by hand: of a chunk nothing lasts but the room of its logits, used again."""

    def __init__(self, model: ModelOp) -> None:
        assert isinstance(model.head, HeadOp)
        self.spec = model.head.spec
        weight, bias = model.head.weight if model.head.weight is not None else model.table(), model.head.bias
        assert weight is not None
        self.parameters = (weight,) if bias is None else (weight, bias)
        self.vocab, kind, dtype = len(weight), weight.device.type, weight.dtype
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        self.weight, *self.bias = (parameter.detach().to(dtype) for parameter in self.parameters)
        self.room = self.weight.new_empty(0, self.vocab)

    def logits(self, rows: Tensor, grad: bool) -> Tensor:
        """[C, V] in fp32 at least, to be overwritten."""
        x = rows.to(self.weight.dtype)
        self.x = x if self.spec.scale == 1 else x * self.spec.scale
        if len(self.room) < len(x):
            self.room = self.weight.new_empty(len(x), self.vocab)
        self.products = self.room[: len(x)]
        if self.bias:
            torch.addmm(self.bias[0], self.x, self.weight.t(), out=self.products)
        else:
            torch.mm(self.x, self.weight.t(), out=self.products)
        logits = self.products.to(_wide(self.products))
        if self.spec.softcap is None:
            return logits
        self.bent = logits.div_(self.spec.softcap).tanh_()
        return self.bent * self.spec.softcap

    def backward(self, slope: Tensor, d_rows: Tensor | None, *d_parameters: Tensor | None) -> None:
        """Adds to each d what the gradient of the last logits means for it; slope is overwritten."""
        if self.spec.softcap is not None:
            slope.mul_(self.bent.square_().neg_().add_(1))
        d_weight, d_bias = (*d_parameters, None)[:2]
        if d_bias is not None:
            d_bias.add_(slope.sum(0))
        if slope.dtype != self.products.dtype:
            slope = self.products.copy_(slope)
        if d_rows is not None:
            d_rows.add_(torch.mm(slope, self.weight), alpha=self.spec.scale)
        if d_weight is not None and d_weight.dtype == slope.dtype:
            d_weight.addmm_(slope.t(), self.x)
        elif d_weight is not None:
            d_weight.add_(torch.mm(slope.t(), self.x))


class _General:
    """Any head, by autograd; of parameters it uses its own and the tied table."""

    def __init__(self, model: ModelOp) -> None:
        assert model.head is not None
        table = model.table()
        self.model = model
        self.parameters = (*model.head.parameters(), *(() if table is None else (table,)))
        self.vocab = model.spec.vocab or 1  # sizes chunks, no more

    def logits(self, rows: Tensor, grad: bool) -> Tensor:
        with torch.set_grad_enabled(grad):
            self.x = rows.detach().requires_grad_(grad)
            self.found = self.model.logits(self.x)
        return self.found.detach().to(_wide(self.found), copy=True)

    def backward(self, slope: Tensor, *sums: Tensor | None) -> None:
        wanted = [(x, d) for x, d in zip((self.x, *self.parameters), sums, strict=True) if d is not None]
        grads = torch.autograd.grad(self.found, [x for x, _ in wanted], slope.to(self.found.dtype), allow_unused=True)
        for (_, d), grad in zip(wanted, grads, strict=True):
            if grad is not None:
                d.add_(grad)


def _unusual(model: ModelOp) -> bool:
    """Whether the head is anything but a HeadOp of plain parameters that nothing watches or transforms."""
    head = model.head
    if type(head) is not HeadOp or head.before is not None:
        return True
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    kinds = {type(parameter) for parameter in (*head.parameters(), model.table()) if parameter is not None}
    return any(hooks) or not kinds <= {Tensor, nn.Parameter}


class _Chunks(torch.autograd.Function):
    """(sum, extra) of rows [R, D] and labels [R], with the gradients of rows and parameters."""

    @staticmethod
    def forward(
        ctx: Any, head: _Plain | _General, labels: Tensor, counted: Tensor | None, form: _Form, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, wanted = inputs[0], ctx.needs_input_grad[4:]
        sums = [torch.zeros_like(x, dtype=_wide(x)) if need else None for x, need in zip(inputs, wanted, strict=True)]
        nats = torch.empty(len(rows), dtype=_wide(rows), device=rows.device)
        extra = torch.empty_like(nats)
        size = form.chunk or rows_of_a_chunk(len(rows), head.vocab, rows.device)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            logits = head.logits(rows[part], any(wanted))
            nats[part], extra[part] = form.slope(logits, labels[part], None if counted is None else counted[part])
            if any(wanted):
                head.backward(logits, None if sums[0] is None else sums[0][part], *sums[1:])
        ctx.save_for_backward(*sums)
        extra = extra.sum()
        ctx.mark_non_differentiable(extra)
        return nats.sum() + extra, extra

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise SublayerError("head_loss has no second derivative: take its gradient without create_graph")
        # What is asked for once may be handed out as it is: the weight's gradient is the largest tensor of a step.
        again = _kept_graph()
        found = ctx.saved_tensors
        if again or grad.device.type != "cpu" or float(grad) != 1:
            found = [None if d is None else d * grad if again else d.mul_(grad) for d in found]
        return None, None, None, None, *found  # autograd rounds each to its input's dtype


def _wide(x: Tensor) -> torch.dtype:
    """x's dtype, or fp32 where that has fewer bits."""
    return torch.promote_types(x.dtype, torch.float32)
