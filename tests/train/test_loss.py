"""The chunked loss against whole logits: values, gradients, what is computed, and what is never in memory."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import sublayer.train.loss
from sublayer.errors import InputError, SublayerError
from sublayer.nn.head import Head
from sublayer.nn.sublayer import ModelOp
from sublayer.step import Step
from sublayer.train.loss import CHUNK, Loss, head_loss, rows_of_a_chunk
from tests.tiny import tiny

V, D = 97, 32
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"scale": 0.3, "bias": True},
    "capped": {"softcap": 2.0, "scale": 1.7},
}
FORMS = [(0.0, 0.0), (0.05, 0.0), (0.0, 0.2), (0.05, 0.2)]


def built(head: dict[str, Any] | None = None, tied: bool = False, dtype: torch.dtype = torch.float64) -> ModelOp:
    """A model with random biases too, whose head is of `HEADS`."""
    model = tiny(tied=tied).override(head=Head(**head or {})).build(dtype=dtype)
    assert model.head is not None
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def example(rows: int = 14, dtype: torch.dtype = torch.float64, vocab: int = V) -> tuple[Tensor, Tensor]:
    """hidden [2, rows / 2, D] and labels, of which every fifth does not count."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, rows // 2, D, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(vocab, (2, rows // 2), generator=generator)
    labels.view(-1)[::5] = -100
    return hidden.requires_grad_(), labels


def whole(model: ModelOp, hidden: Tensor, labels: Tensor, z_loss: float = 0.0, smoothing: float = 0.0) -> Tensor:
    """The same by torch, from all the logits."""
    logits, labels = model.logits(hidden).flatten(0, -2).float(), labels.flatten()
    logits = model.logits(hidden).flatten(0, -2) if hidden.dtype == torch.float64 else logits
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    return loss + z_loss * logits[labels != -100].logsumexp(1).square().sum()


def read_by_head(model: ModelOp) -> list[Tensor]:
    """What the head's gradient flows to, beside the hidden vectors."""
    assert model.head is not None
    table = model.table()
    return [*model.head.parameters(), *([] if table is None else [table])]


class Made(NamedTuple):
    """What an operation of torch gave; not the tensor itself, which would then be copied where it could be taken."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    address: int


class Watch(TorchDispatchMode):
    """Notes each operation's first result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Made] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            name, address = func.overloadpacket.__name__, result.untyped_storage().data_ptr()
            self.seen.append(Made(name, tuple(result.shape), result.dtype, result.nbytes, address))
        return result

    def shapes(self, *names: str) -> list[tuple[int, ...]]:
        """Of the results of these operations."""
        return [made.shape for made in self.seen if made.name in names]


@contextmanager
def watched() -> Iterator[Watch]:
    with Watch() as watch:
        yield watch


def by_autograd(model: ModelOp) -> list[bool]:
    """Leads the head to the general path: something watches it, and notes whether its logits have a graph."""
    assert model.head is not None
    graphs: list[bool] = []

    def note(module: nn.Module, given: Any, output: Any) -> None:
        graphs.append(output.requires_grad)

    model.head.register_forward_hook(note)
    return graphs


@pytest.mark.parametrize("general", [False, True], ids=["by hand", "by autograd"])
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_loss_and_gradients_are_those_of_whole_logits(
    head: str, form: tuple[float, float], tied: bool, general: bool
) -> None:
    model, (hidden, labels) = built(HEADS[head], tied), example()
    inputs = [hidden, *read_by_head(model)]
    expected = whole(model, hidden, labels, *form)
    wanted = torch.autograd.grad(1.7 * expected, inputs)
    if general:
        by_autograd(model)
    loss = head_loss(model, hidden, labels, z_loss=form[0], label_smoothing=form[1], chunk=4)
    found = torch.autograd.grad(1.7 * loss.sum, inputs)
    assert_close(loss.sum, expected, rtol=1e-10, atol=0)
    assert int(loss.tokens) == int((labels != -100).sum()) == 11
    assert_close(loss.nats, whole(model, hidden, labels).detach(), rtol=1e-10, atol=0)
    assert not loss.nats.requires_grad
    for ours, theirs in zip(found, wanted, strict=True):
        assert_close(ours, theirs, rtol=0, atol=1e-10 * float(theirs.abs().max()))


@given(chunk=st.integers(1, 20), ignored=st.sets(st.integers(0, 13)))
def test_neither_chunks_nor_ignored_rows_change_the_loss(chunk: int, ignored: set[int]) -> None:
    model, (hidden, labels) = built(), example()
    labels = torch.arange(14).view(2, 7)
    labels.view(-1)[list(ignored)] = -100
    loss = head_loss(model, hidden, labels, chunk=chunk)
    inputs = [hidden, *read_by_head(model)]
    assert int(loss.tokens) == 14 - len(ignored)
    expected = whole(model, hidden, labels)
    assert_close(loss.sum, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(*(torch.autograd.grad(x, inputs) for x in (loss.sum, expected)), strict=True):
        assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("general", [False, True], ids=["by hand", "by autograd"])
@pytest.mark.parametrize("head", HEADS)
def test_gradients_are_slopes(head: str, general: bool) -> None:
    model = built(HEADS[head])
    if general:
        by_autograd(model)
    hidden, labels = example(6)
    inputs = [hidden, *read_by_head(model)]

    def loss(*inputs: Tensor) -> Tensor:
        return head_loss(model, inputs[0], labels, z_loss=0.1, label_smoothing=0.1, chunk=2).sum

    torch.autograd.gradcheck(loss, inputs, fast_mode=True)


def test_masked_rows_on_a_device_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows cannot be picked without waiting, they are masked; NaN in them still reaches nothing."""
    model, (hidden, labels) = built({"bias": True, "softcap": 3.0}), example()
    inputs, form = [hidden, *read_by_head(model)], {"z_loss": 0.05, "label_smoothing": 0.2, "chunk": 4}
    picked = head_loss(model, hidden, labels, **form)
    wanted = torch.autograd.grad(picked.sum, inputs)
    with torch.no_grad():
        hidden[labels == -100] = math.nan
    for where in ((), ("cpu",)):
        monkeypatch.setattr(sublayer.train.loss, "PICKING", where)
        masked = head_loss(model, hidden, labels, **form)
        assert_close(masked, picked, rtol=1e-12, atol=0)
        for ours, theirs in zip(torch.autograd.grad(masked.sum, inputs), wanted, strict=True):
            assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_device_is_never_waited_for() -> None:
    """On meta no value can be read: whoever asked for one would raise."""
    model = tiny(tied=True).build(device="meta")
    hidden = torch.empty(2, 7, D, device="meta", requires_grad=True)
    loss = head_loss(model, hidden, torch.empty(2, 7, dtype=torch.long, device="meta"), z_loss=0.1, chunk=3)
    (loss.sum / 3).backward()
    assert isinstance(loss.tokens, Tensor)
    assert all(x.grad is not None for x in (hidden, *read_by_head(model)))


@pytest.mark.parametrize("general", [False, True], ids=["by hand", "by autograd"])
@pytest.mark.parametrize("poison", [1.0, math.nan])
def test_a_batch_without_labels_is_zero(general: bool, poison: float) -> None:
    model = built({"bias": True})
    if general:
        by_autograd(model)
    hidden = torch.full((2, 3, D), poison, dtype=torch.float64, requires_grad=True)
    loss = head_loss(model, hidden, torch.full((2, 3), -100))
    loss.sum.backward()
    assert (loss.sum.item(), int(loss.tokens)) == (0.0, 0)
    for tensor in (hidden, *read_by_head(model)):
        assert tensor.grad is not None
        assert not tensor.grad.any()


def test_rows_without_a_label_are_left_out_of_the_products() -> None:
    model, (hidden, labels) = built(), example()
    with watched() as watch:
        head_loss(model, hidden, labels, chunk=4).sum.backward()
    logits = [shape for shape in watch.shapes("mm") if shape[1] == V]
    assert [rows for rows, _ in logits] == [4, 4, 3]


@pytest.mark.parametrize("general", [False, True], ids=["by hand", "by autograd"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_none_is_computed(mode: Callable[[], Any], general: bool) -> None:
    model, (hidden, labels) = built({"softcap": 2.0}), example()
    expected = whole(model, hidden, labels, 0.1, 0.2).detach()
    graphs = by_autograd(model) if general else []
    with mode(), watched() as watch:
        loss = head_loss(model, hidden, labels, z_loss=0.1, label_smoothing=0.2, chunk=4)
    assert watch.shapes("mm", "addmm", "addmm_", "linear") == [(4, V), (4, V), (3, V)]
    assert not loss.sum.requires_grad
    assert not any(graphs)
    assert_close(loss.sum.clone(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("general", [False, True], ids=["by hand", "by autograd"])
def test_what_is_frozen_costs_nothing(general: bool) -> None:
    model, (hidden, labels) = built({"bias": True}), example()
    inputs = read_by_head(model)
    wanted = torch.autograd.grad(whole(model, hidden, labels), [hidden, *inputs])
    if general:
        by_autograd(model)
    for parameter in inputs:
        parameter.requires_grad_(False)
    with watched() as watch:
        head_loss(model, hidden, labels, chunk=20).sum.backward()
    assert (V, D) not in watch.shapes("mm", "addmm_", "zeros_like")
    assert all(parameter.grad is None for parameter in inputs)
    assert_close(hidden.grad, wanted[0], rtol=1e-10, atol=1e-12)
    for parameter in inputs:
        parameter.requires_grad_()
    with watched() as watch:  # and now the trunk is frozen
        head_loss(model, hidden.detach(), labels, chunk=20).sum.backward()
    assert (11, D) not in watch.shapes("mm")
    for parameter, theirs in zip(inputs, wanted[1:], strict=True):
        assert_close(parameter.grad, theirs, rtol=1e-10, atol=1e-12)


def test_a_tied_table_gathers_both_gradients() -> None:
    model = built(tied=True)
    ids = torch.randint(V, (2, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(1, 1)
    whole(model, model(ids, Step(), output="hidden"), labels).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    head_loss(model, model(ids, Step(), output="hidden"), labels, chunk=5).sum.backward()
    for name, parameter in model.named_parameters():
        theirs = wanted[name]
        assert theirs is not None
        assert_close(parameter.grad, theirs, rtol=0, atol=1e-10 * float(theirs.abs().max()))


def test_micro_batches_add_up() -> None:
    model, (hidden, labels) = built(), example()
    (whole(model, hidden, labels) / 11).backward()
    inputs = (hidden, *read_by_head(model))
    wanted = [x.grad for x in inputs]
    for tensor in inputs:
        tensor.grad = None
    for row in range(2):
        (head_loss(model, hidden[row], labels[row]).sum / 11).backward()
    for tensor, theirs in zip(inputs, wanted, strict=True):
        assert_close(tensor.grad, theirs, rtol=1e-10, atol=1e-12)


def test_the_backward_pass_may_run_twice_where_the_graph_is_kept() -> None:
    model, (hidden, labels) = built(), example()
    weight = read_by_head(model)[0]
    loss = head_loss(model, hidden, labels).sum
    wanted = torch.autograd.grad(whole(model, hidden, labels), weight)[0]
    for factor in (1.0, 3.0, 1.0):
        found = torch.autograd.grad(loss, weight, torch.tensor(factor, dtype=torch.float64), retain_graph=True)[0]
        assert_close(found, factor * wanted, rtol=1e-10, atol=1e-12)
        found.zero_()  # whoever receives a gradient may overwrite it
    (2 * loss).backward()
    assert_close(weight.grad, 2 * wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    model, (hidden, labels) = built(), example()
    with pytest.raises(SublayerError, match="no second derivative"):
        torch.autograd.grad(head_loss(model, hidden, labels).sum, hidden, create_graph=True)


@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_the_weight_s_gradient_is_not_copied(factor: float) -> None:
    model, (hidden, labels) = built(), example()
    loss = factor * head_loss(model, hidden, labels).sum
    with watched() as watch:
        loss.backward()
    large = {made.name for made in watch.seen if made.shape == (V, D)}
    assert large <= {"mul_", "detach"}


def test_logits_of_a_large_vocabulary_are_never_whole() -> None:
    rows, vocab, width = 384, 128_000, 8
    model = tiny(dim=width, heads=1, kv_heads=1, vocab=vocab, layers=1).build()
    hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(rows) * 333
    with watched() as watch:
        head_loss(model, hidden, labels).sum.backward()
    assert max(made.nbytes for made in watch.seen) <= CHUNK["cpu"] < rows * vocab * 4 / 2
    large = {made.address for made in watch.seen if made.nbytes > CHUNK["cpu"] / 2}
    assert len(large) == 1  # all chunks share one room


@given(rows=st.integers(0, 100_000), vocab=st.integers(1, 300_000))
def test_chunks_are_bounded_in_bytes_and_nearly_equal(rows: int, vocab: int) -> None:
    size = rows_of_a_chunk(rows, vocab, torch.device("cpu"))
    assert size >= 1
    assert size == 1 or size * vocab * 4 <= CHUNK["cpu"]
    chunks = -(-rows // size)
    assert chunks * size - rows < max(chunks, 1)
    assert rows == 0 or (chunks - 1) * (CHUNK["cpu"] // (4 * vocab)) < rows  # no fewer chunks would do


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("general", [False, True], ids=["by hand", "by autograd"])
def test_weights_of_few_bits_gather_their_gradient_in_more(dtype: torch.dtype, general: bool) -> None:
    """512 equal terms: a sum in bf16 would stop at 256."""
    model = tiny(vocab=4, dim=8, heads=1, kv_heads=1).override(head=Head(bias=True)).build(dtype=dtype)
    if general:
        by_autograd(model)
    with torch.no_grad():
        for parameter in read_by_head(model):
            parameter.zero_()
    hidden = torch.ones(512, 8, dtype=dtype, requires_grad=True)
    loss = head_loss(model, hidden, torch.zeros(512, dtype=torch.long), chunk=1)
    (loss.sum / 512).backward()
    assert loss.sum.dtype == torch.float32
    assert_close(loss.sum, torch.tensor(512 * math.log(4)))
    weight, bias = read_by_head(model)
    expected = torch.tensor([-0.75, 0.25, 0.25, 0.25], dtype=dtype)
    assert_close(weight.grad, expected[:, None].expand(4, 8), rtol=0, atol=0)
    assert_close(bias.grad, expected, rtol=0, atol=0)
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype


@pytest.mark.parametrize("head", HEADS)
def test_bf16_is_close_to_fp32(head: str) -> None:
    narrow = built(HEADS[head], dtype=torch.bfloat16)
    wide = built(HEADS[head], dtype=torch.float32)
    wide.load_state_dict(narrow.state_dict())
    hidden, labels = example(60, torch.bfloat16)
    precise = hidden.detach().float().requires_grad_()
    loss, expected = head_loss(narrow, hidden, labels, chunk=7), whole(wide, precise, labels)
    assert_close(loss.sum, expected, rtol=5e-3, atol=0)
    found = torch.autograd.grad(loss.sum, [hidden, *read_by_head(narrow)])
    wanted = torch.autograd.grad(expected, [precise, *read_by_head(wide)])
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert_close(ours.float(), theirs, rtol=0, atol=0.03 * float(theirs.abs().max()))


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("general", [False, True], ids=["by hand", "by autograd"])
def test_autocast_is_respected(general: bool, tied: bool) -> None:
    model, (hidden, labels) = built({"bias": True}, tied, torch.float32), example(40, torch.float32)
    if general:
        by_autograd(model)
    inputs = [hidden, *read_by_head(model)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole(model, hidden, labels)
        with watched() as watch:
            loss = head_loss(model, hidden, labels, chunk=9)
    products = [made.dtype for made in watch.seen if made.name in ("mm", "addmm")]
    assert products
    assert set(products) == {torch.bfloat16}
    assert_close(loss.sum, expected, rtol=1e-3, atol=0)
    found, wanted = torch.autograd.grad(loss.sum, inputs), torch.autograd.grad(expected, inputs)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours, theirs, rtol=0, atol=0.02 * float(theirs.abs().max()))


def test_logits_far_apart_lose_nothing() -> None:
    """The label's share is below what a float holds; its logarithm is not."""
    model, (hidden, labels) = built(dtype=torch.float32), example(dtype=torch.float32)
    hidden = (1000 * hidden).detach().requires_grad_()
    loss, expected = head_loss(model, hidden, labels), whole(model, hidden, labels)
    assert expected.item() > 11 * 1000
    assert_close(loss.sum, expected)
    for ours, theirs in zip(*(torch.autograd.grad(x, hidden) for x in (loss.sum, expected)), strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    model, (hidden, labels) = built(), example()
    with torch.no_grad():
        hidden[0, 1, 0] = value
    assert not head_loss(model, hidden, labels).sum.isfinite()


class Adapted(nn.Module):
    """A head that is no HeadOp: a frozen one, and a low-rank change that trains (and one weight that nothing reads)."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.frozen = head.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, D, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(V, 2, dtype=torch.float64))
        self.unread = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: Tensor, step: Step | None = None, table: Tensor | None = None) -> Tensor:
        return torch.tanh(
            self.frozen(x, step, table) + F.linear(F.linear(x, self.down), self.up)
        )  # tanh keeps its result


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_any_head_will_do(tied: bool) -> None:
    model, (hidden, labels) = built(tied=tied), example()
    assert model.head is not None
    model.head = head = Adapted(model.head)
    inputs = [hidden, head.down, head.up, *([] if (table := model.table()) is None else [table])]
    loss, expected = head_loss(model, hidden, labels, chunk=4, z_loss=0.1), whole(model, hidden, labels, 0.1)
    assert_close(loss.sum, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(*(torch.autograd.grad(x, inputs) for x in (loss.sum, expected)), strict=True):
        assert_close(ours, theirs, rtol=0, atol=1e-10 * float(theirs.abs().max()))


def test_a_hook_on_the_head_is_heard() -> None:
    def twice(module: nn.Module, given: Any, output: Any) -> Any:
        return 2 * output

    model, (hidden, labels) = built(), example()
    alone = whole(model, hidden, labels)
    assert model.head is not None
    model.head.register_forward_hook(twice)
    assert_close(head_loss(model, hidden, labels).sum, whole(model, hidden, labels))
    assert float(alone.detach()) != float(head_loss(model, hidden, labels).nats)


def test_a_loss_without_more_is_all_code_length() -> None:
    loss = Loss(torch.tensor(3.0, requires_grad=True), 2)
    assert loss.nats == 3
    assert not loss.nats.requires_grad


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"labels": torch.tensor([[V] * 7] * 2)}, "label 97 is outside the vocabulary of 97"),
        ({"labels": torch.tensor([[-1] * 7] * 2)}, "label -1 is outside the vocabulary of 97"),
        ({"labels": torch.zeros(2, 6, dtype=torch.long)}, "got torch.int64 [2, 6] beside [2, 7, 32]"),
        ({"labels": torch.zeros(2, 7)}, "got torch.float32 [2, 7]"),
        ({"chunk": 0}, "chunk=0 is a number of rows: 1 or more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], complaint: str) -> None:
    hidden, labels = example()
    arguments: dict[str, Any] = {"model": built(), "hidden": hidden, "labels": labels} | change
    with pytest.raises(InputError) as caught:
        head_loss(**arguments)
    assert complaint in str(caught.value)


def test_a_model_without_a_head_is_refused() -> None:
    hidden, labels = example()
    with pytest.raises(InputError, match="has no head"):
        head_loss(tiny().override(head=None).build(dtype=torch.float64), hidden, labels)
