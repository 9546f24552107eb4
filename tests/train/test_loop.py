"""The plain training loop: packing, the loss and its counts, decay groups, determinism."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sublayer
from sublayer.step import Step
from sublayer.train.loop import bits_per_byte, next_token_loss, pack, train

EOS = 9


def tiny(seed: int = 0):
    return sublayer.recipes.llama(16, 1, 2, 2, hidden=24, vocab=10).build(seed)


def test_documents_follow_one_another_and_keep_their_numbers() -> None:
    ids, segment = pack([[1, 2, 3], [4], [5, 6]], 4, EOS)
    assert ids.tolist() == [[1, 2, 3, EOS], [4, EOS, 5, 6], [EOS, 0, 0, 0]]
    assert segment.tolist() == [[1, 1, 1, 1], [2, 2, 3, 3], [3, 0, 0, 0]]


def test_the_loss_counts_next_tokens_within_documents_only() -> None:
    """Against the documents one by one, in fp64."""
    documents = [[1, 2, 3, EOS], [4, EOS], [5, 6, 7]]
    model = tiny().double()
    ids, segment = (
        torch.tensor([[*documents[0], *documents[1], *documents[2], 0]]),
        torch.tensor([[1] * 4 + [2] * 2 + [3] * 3 + [0]]),
    )
    loss, tokens = next_token_loss(model, ids, segment)
    alone = sum(
        F.cross_entropy(model(torch.tensor([d[:-1]]))[0].float(), torch.tensor(d[1:]), reduction="sum")
        for d in documents
    )
    assert tokens == 3 + 1 + 2
    torch.testing.assert_close(loss, alone, rtol=1e-6, atol=0)


def test_nothing_to_predict_is_zero_with_zero_gradients() -> None:
    model = tiny()
    loss, tokens = next_token_loss(model, torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 0]]))
    loss.backward()
    assert (loss.item(), tokens) == (0.0, 0)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_row_of_padding_changes_nothing() -> None:
    model = tiny()
    ids, segment = torch.tensor([[1, 2, 3], [0, 0, 0]]), torch.tensor([[1, 1, 1], [0, 0, 0]])
    both, alone = next_token_loss(model, ids, segment), next_token_loss(model, ids[:1], segment[:1])
    assert both[1] == alone[1]
    torch.testing.assert_close(both[0], alone[0])


def test_the_same_seed_trains_the_same_model() -> None:
    windows = pack([[i % 9 for i in range(n)] for n in (30, 20, 25)], 9, EOS)
    runs = []
    for seed in (0, 0, 1):
        model = tiny()
        train(model, windows, 5, batch=4, seed=seed)
        runs.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_the_first_step_moves_and_the_last_does_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of the schedule: step 1 has a tenth of warm-up behind it, and no step has 0."""
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def noted(self, *args, **options):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    train(tiny(), pack([[1, 2, 3, 4, 5, 6, 7, 8] * 4], 9, EOS), 20, batch=2, rate=1.0)
    assert rates[:3] == [0.5, 0.95, 0.9]
    assert rates[-1] == pytest.approx(0.05)


def test_only_matrices_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[dict] = []
    made = torch.optim.AdamW.__init__

    def noted(self, given, **options):
        groups.extend(given)
        made(self, given, **options)

    monkeypatch.setattr(torch.optim.AdamW, "__init__", noted)
    model = sublayer.recipes.gpt2(16, 1, 2, vocab=10, context=16).build()
    train(model, pack([[1, 2, 3, 4]], 5, EOS), 1, batch=1)
    decayed = {id(p) for p in groups[0]["params"]}
    assert [group["weight_decay"] > 0 for group in groups] == [True, False]
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == ("norm" not in name and "pre" not in name and not name.endswith("bias")), (
            name
        )
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_bits_per_byte_of_a_model_that_knows_nothing() -> None:
    model: Any = tiny()
    with torch.no_grad():
        model.head.weight.zero_()  # every token equally likely
    whole, cut = pack([[1, 2, 3, 4, 5, 6, 7]], 8, EOS), pack([[1, 2, 3, 4, 5, 6, 7]], 4, EOS)
    assert bits_per_byte(model, whole, EOS) == pytest.approx(7 * math.log2(10) / 6, rel=1e-6)  # 6 bytes and the end
    assert bits_per_byte(model, cut, EOS) == pytest.approx(6 * math.log2(10) / 5, rel=1e-6)  # the cut's first is given


def test_training_leaves_the_model_in_evaluation_mode_and_uses_segments() -> None:
    model = tiny()
    seen: list[Step] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    train(model, pack([[1, 2], [3, 4, 5]], 7, EOS), 1, batch=1)
    assert not model.training
    assert seen[0].segment is not None
    assert seen[0].segment.max() == 2
