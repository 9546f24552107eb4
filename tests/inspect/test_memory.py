"""What `sublayer show` says of memory, held to what is allocated: the profiler's account, and the tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sublayer import recipes
from sublayer.decoding.slots import Slots
from sublayer.inspect.count import memory
from sublayer.nn.head import Classifier, Head, Pooled
from sublayer.nn.op import Part
from sublayer.nn.sublayer import Model
from sublayer.recipes.deepseek_v3 import TINY as DEEPSEEK_TINY
from sublayer.recipes.mixtral import TINY as MIXTRAL_TINY
from sublayer.state import State

SPECS: dict[str, Model] = {
    "gated": recipes.llama(128, 2, 4, 2, hidden=512, vocab=512),
    "plain": recipes.gpt2(128, 2, 4, vocab=512, context=2048),
    "attention": recipes.llama(128, 2, 16, 16, hidden=64, vocab=512, head_size=64),
    "experts": recipes.mixtral(**{**MIXTRAL_TINY, "dim": 128, "hidden": 256, "vocab": 512}),
    "latent": recipes.deepseek_v3(**DEEPSEEK_TINY),
    "recurrence": recipes.mamba(128, 2, vocab=512),
}
LENGTH = 512


def peak(work: Callable[[], Any]) -> int:
    """Bytes that were allocated at once beyond those before, by torch's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    profiler: Any = watched.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", SPECS)
def test_activations_are_estimated_within_a_factor_of_two(name: str) -> None:
    spec = SPECS[name]
    slots = Slots(spec.build(seed=0).eval(), 1, LENGTH)
    slots.prefill(0, [1, 2, 3])  # what is made once is made now
    slots.clear(0)
    measured = peak(lambda: slots.prefill(0, list(range(1, 65)) * 8))
    needed = memory(spec, 1, LENGTH, torch.float32)
    estimated = needed.activations + needed.logits
    assert measured / 2 < estimated < measured * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_weights_and_state_are_what_is_allocated(name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    model = spec.empty(dtype=dtype)
    needed = memory(spec, 3, 40, dtype)
    assert needed.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert needed.state == State.allocate(model, 3, 40).bytes()
    assert needed.total == needed.weights + needed.state + needed.activations + needed.logits


@pytest.mark.parametrize("head", [Pooled(), Classifier(3), Head()])
def test_only_a_head_over_tokens_answers_as_many_numbers_as_there_are_tokens(head: Part) -> None:
    spec = recipes.bert(16, 1, 2, vocab=256, context=8).replace(head=head, tied=False)
    answers = spec.build(seed=0).eval()(torch.ones(2, 8, dtype=torch.int))
    found = memory(spec, 2, 8, torch.float32).logits
    assert found == (0 if isinstance(head, Pooled) else answers.numel() * (4 + 8))


def test_an_encoder_decoder_keeps_a_memory_and_an_encoder_no_state() -> None:
    t5 = recipes.t5(16, 1, 2, 16, vocab=256, head_size=8)
    assert memory(t5, 2, 10).state == State.allocate(t5.build(), 2, 10, 10, dtype=torch.bfloat16).bytes()
    bert = recipes.model("bert-base")
    assert memory(bert, 2, 64).state == 0
    assert memory(bert, 4, 64).activations == 2 * memory(bert, 2, 64).activations
