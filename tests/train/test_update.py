"""One optimiser step: the gradient of the whole, however it is cut; clipping; what is not finite; ranks."""

import math
import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

import sublayer
from sublayer.nn.sublayer import ModelOp
from sublayer.step import Step
from sublayer.train.batch import Batch
from sublayer.train.language import next_token
from sublayer.train.loss import Loss
from sublayer.train.optim import AdamW, Optimizer
from sublayer.train.update import Scaler, Update, update

VOCAB = 23


def tiny(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> ModelOp:
    spec = sublayer.recipes.llama(16, 2, 2, 1, hidden=24, vocab=VOCAB, dropout=dropout)
    return spec.build(seed=3, dtype=dtype)


def batch(rows: int, length: int = 7, seed: int = 0, ignored: float = 0.2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, length + 1), generator=generator)
    labels = ids[:, 1:].masked_fill(torch.rand((rows, length), generator=generator) < ignored, -100)
    return Batch(ids[:, :-1], labels)


def parts(whole: Batch, *sizes: int) -> list[Batch]:
    cut = zip(whole.inputs.split(sizes), whole.labels.split(sizes), strict=True)
    return [Batch(ids, labels) for ids, labels in cut]


def watched(model: ModelOp) -> tuple[Optimizer, list[Tensor]]:
    """An optimiser that keeps the gradients it was given."""
    optimizer = AdamW(rate=1e-3).build(model)
    seen: list[Tensor] = []
    inner = optimizer.step

    def step() -> None:
        seen.extend(p.grad.clone() for p in optimizer.parameters() if p.grad is not None)
        inner()

    optimizer.step = step
    return optimizer, seen


def whole_gradient(model: ModelOp, data: Batch, optimizer: Optimizer) -> list[Tensor]:
    logits = model(data.inputs, Step())
    loss = F.cross_entropy(logits.flatten(0, 1), data.labels.flatten(), ignore_index=-100)
    return list(torch.autograd.grad(loss, optimizer.parameters()))


@pytest.mark.parametrize("sizes", [(6,), (3, 3), (1, 5), (2, 1, 3)])
def test_the_gradient_is_that_of_the_mean_over_all_tokens_however_rows_are_cut(sizes: tuple[int, ...]) -> None:
    """Micro-batches hold different numbers of tokens that count, so that a mean of means would be another number."""
    model, data = tiny(), batch(6, ignored=0.5)
    optimizer, seen = watched(model)
    expected = whole_gradient(model, data, optimizer)
    made = update(model, parts(data, *sizes), next_token, optimizer, limit=None)
    assert made.tokens == int((data.labels != -100).sum())
    for found, right in zip(seen, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-13)
    norm = torch.stack([g.square().sum() for g in expected]).sum().sqrt().item()
    assert made.norm == pytest.approx(norm, rel=1e-10)


def test_the_loss_is_nats_a_token() -> None:
    model, data = tiny(), batch(4)
    expected = F.cross_entropy(model(data.inputs).flatten(0, 1), data.labels.flatten(), ignore_index=-100).item()
    made = update(model, parts(data, 1, 3), next_token, AdamW().build(model))
    assert made.loss == pytest.approx(expected, rel=1e-10)
    assert made.taken


def test_the_gradient_is_clipped_as_a_whole() -> None:
    model, data = tiny(), batch(4)
    optimizer, seen = watched(model)
    right = whole_gradient(model, data, optimizer)
    made = update(model, [data], next_token, optimizer, limit=0.01)
    assert made.norm > 0.01
    for found, unclipped in zip(seen, right, strict=True):
        torch.testing.assert_close(found, unclipped * (0.01 / made.norm), rtol=1e-3, atol=1e-12)


def test_no_token_that_counts_changes_nothing() -> None:
    model, data = tiny(), batch(2)
    before = [p.clone() for p in model.parameters()]
    nothing = Batch(data.inputs, torch.full_like(data.labels, -100))
    assert update(model, [nothing], next_token, AdamW().build(model)) == Update(0.0, 0, 0.0, taken=False)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_one_part_without_tokens_does_not_disturb_the_others() -> None:
    model, data = tiny(), batch(4)
    nothing = Batch(data.inputs, torch.full_like(data.labels, -100))
    optimizer, seen = watched(model)
    expected = whole_gradient(model, data, optimizer)
    update(model, [nothing, data], next_token, optimizer, limit=None)
    for found, right in zip(seen, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_no_weight_and_no_moment(value: float) -> None:
    model, data = tiny(), batch(2)
    optimizer = AdamW().build(model)
    update(model, [data], next_token, optimizer)
    before = [p.clone() for p in model.parameters()]
    moments = {name: t.clone() for name, t in optimizer.state_tensors().items()}

    def poisoned(model: ModelOp, batch: Batch) -> Loss:
        loss = next_token(model, batch)
        return Loss(loss.sum * value, loss.tokens)

    made = update(model, [data], poisoned, optimizer)
    assert not made.finite
    assert not made.taken
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(t, moments[name]) for name, t in optimizer.state_tensors().items())
    assert update(model, [data], next_token, optimizer).taken


def test_a_loss_scale_changes_no_gradient_and_halves_where_it_overflows() -> None:
    model, data, scaler = tiny(), batch(3), Scaler(1024.0)
    optimizer, seen = watched(model)
    expected = whole_gradient(model, data, optimizer)
    update(model, [data], next_token, optimizer, limit=None, scaler=scaler)
    for found, right in zip(seen, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-13)
    assert (scaler.scale, scaler.good) == (1024.0, 1)
    huge = Scaler(1e308)
    assert not update(model, [data], next_token, optimizer, scaler=huge).taken
    assert huge.scale == 5e307
    scaler.good = 1999
    update(model, [data], next_token, optimizer, scaler=scaler)
    assert (scaler.scale, scaler.good) == (2048.0, 0)


def test_dropout_is_on_while_training() -> None:
    model, data = tiny(dropout=0.5).eval(), batch(3)
    losses = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.add(update(model, [data], next_token, AdamW(rate=1e-12).build(model)).loss)
    assert len(losses) == 2


def _work(rank: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=(Path(folder) / "port").read_text())
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    # faults.md's toy: a mean over two ranks and two micro-batches, of unequal counts
    data = batch(8, ignored=0.5)
    mine = parts(data, 1, 2, 4, 1)[2 * rank : 2 * rank + 2]
    if rank == 1:
        mine[1] = Batch(mine[1].inputs, torch.full_like(mine[1].labels, -100))
    model = tiny()
    made = update(model, mine, next_token, AdamW(rate=0.1).build(model), limit=0.5)
    torch.save([made.loss, made.tokens, made.norm, *[p.detach() for p in model.parameters()]], f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one(tmp_path: Path) -> None:
    """Summed gradients over global tokens; every rank ends with the same weights."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    mp.spawn(_work, (str(tmp_path),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    data = batch(8, ignored=0.5)
    pieces = parts(data, 1, 2, 4, 1)[:3]
    model = tiny()
    made = update(model, pieces, next_token, AdamW(rate=0.1).build(model), limit=0.5)
    alone = [made.loss, made.tokens, made.norm, *[p.detach() for p in model.parameters()]]
    for rank in range(2):
        theirs = torch.load(tmp_path / str(rank), weights_only=True)
        for found, right in zip(theirs, alone, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


def test_a_step_that_is_taken_balances_experts() -> None:
    """The bias moves by the load of all micro-batches; after a step that is not taken the load is forgotten."""
    spec = sublayer.recipes.mixtral(16, 1, 2, 1, hidden=8, experts=4, vocab=VOCAB)
    spec = spec.override("decoder.blocks.*.ffn.op.router.balance_rate=0.01")
    found: list[Tensor] = []
    for sizes in ((4,), (1, 3)):
        model = spec.build(seed=3, dtype=torch.float64)
        update(model, parts(batch(4), *sizes), next_token, AdamW(rate=1e-3).build(model))
        bias = model.get_parameter("decoder.blocks.0.ffn.op.selection_bias")
        found.append(bias.detach().clone())
        for ignored in (batch(4, ignored=2.0), Batch(batch(4).inputs, batch(4).labels)):
            if ignored.labels.max() >= 0:
                model.get_parameter("head.weight").data[0] = math.nan
            done = update(model, [ignored], next_token, AdamW(rate=1e-3).build(model))
            assert not done.taken
            assert torch.equal(bias, found[-1])
            assert not model.get_buffer("decoder.blocks.0.ffn.op.load").any()
    assert torch.equal(*found)
    assert sorted(found[0].abs().unique().tolist())[-1] == 0.01
