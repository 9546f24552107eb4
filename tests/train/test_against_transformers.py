"""The same weights, the same batches, two libraries: the same loss curve."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import sublayer
from sublayer.recipes import gpt2, llama
from sublayer.train.batch import Batch
from sublayer.train.language import next_token
from sublayer.train.optim import AdamW
from sublayer.train.update import update

STEPS, LENGTH = 25, 32
MODELS = {
    "gpt2": gpt2(64, 2, 4, vocab=256, context=LENGTH),
    "llama": llama(64, 2, 4, 2, hidden=96, vocab=256),
}


def batches() -> list[Tensor]:
    """Rows of this file's bytes, [4, LENGTH + 1] a step."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - LENGTH - 1, (STEPS, 4), generator=generator)
    return list(text[starts[..., None] + torch.arange(LENGTH + 1)])


@pytest.mark.parametrize("family", MODELS)
def test_the_loss_curve_is_theirs(family: str, tmp_path: Path) -> None:
    ours = MODELS[family].build(seed=0)
    sublayer.save(ours, tmp_path, layout="hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()

    optimizer = AdamW(rate=3e-3, decay=0.1).build(ours)
    curve: list[float] = []
    for ids in batches():
        # Two micro-batches here, one batch there.
        halves = [Batch(half[:, :-1], half[:, 1:]) for half in ids.split(2)]
        curve.append(update(ours, halves, next_token, optimizer, limit=1.0).loss)

    tables = ("wte", "wpe", "embed_tokens")
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in theirs.named_parameters():
        groups[parameter.dim() > 1 and not any(table in name for table in tables)].append(parameter)
    decays = [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(decays, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=False)
    expected: list[float] = []
    for ids in batches():
        labels = ids[:, 1:].contiguous()  # moved by one already: GPT-2 has no position for a token more
        loss = theirs(ids[:, :-1], labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        reference.step()
        reference.zero_grad()
        expected.append(loss.item())

    torch.testing.assert_close(curve, expected, rtol=0, atol=1e-4)
    assert expected[0] - expected[-1] > 1  # they learn: the curve is no flat line that anything would match
