"""What cannot be meant is refused in one line, before any work."""

from typing import Any

import pytest
import torch

from sublayer.decoding import Sampling, generate, stream
from sublayer.errors import InputError, UsageError
from sublayer.nn.attention import Attention
from sublayer.nn.embed import Embed
from sublayer.nn.norm import RMSNorm
from sublayer.nn.sublayer import Block, Model, ModelOp, Trunk, pre_norm
from sublayer.text import Bytes
from tests.decoding.models import CONTEXT, ENCODER_DECODERS, SPECS

GPT2, LLAMA, T5 = SPECS["gpt2"].build(), SPECS["llama"].build(), ENCODER_DECODERS["t5"].build()


@pytest.fixture(autouse=True)
def no_work(monkeypatch) -> None:
    def forward(*_: object, **__: object) -> None:
        pytest.fail("the model was run before the request was refused")

    monkeypatch.setattr(ModelOp, "forward", forward)


def refused(error: type[Exception], model: ModelOp, prompts, **options) -> str:
    """The line; the same from `generate` and, at the call itself, from `stream`."""
    lines = []
    for function in (generate, stream):
        with pytest.raises(error) as caught:
            function(model, prompts, **options)
        lines.append(str(caught.value))
    assert lines[0] == lines[1]
    assert "\n" not in lines[0]
    return lines[0]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"temprature": 1.0}, "unknown option 'temprature' of generate (did you mean 'temperature'?)"),
        ({"temperature": -1.0}, "Sampling: temperature is 0 (take the best token) or above, got -1.0"),
        ({"top_p": 1.1}, "Sampling: top_p is a probability from 0 to 1, got 1.1"),
        ({"top_k": 2.5}, "Sampling.top_k: expected int or None, got 2.5"),
        ({"max_tokens": 0}, "Options: max_tokens is at least 1, got 0"),
        ({"slots": 0}, "Options: slots is at least 1, got 0"),
        ({"logprobs": -1}, "Options: logprobs is 0 or above, got -1"),
        ({"logprobs": True}, "Options.logprobs: expected int or None, got True"),
        ({"stop": ["a", ""]}, "Options: an empty stop string would stop before any text"),
        ({"stop": "a"}, "stop strings need a tokenizer; give tokenizer=…, or stop_ids"),
        ({"stop_ids": [97]}, "stop token 97 is outside the vocabulary of 97; stop_ids=() stops at none"),
        ({"suppress": [97]}, "suppressed token 97 is outside the vocabulary of 97"),
        ({"suppress_first": [-1]}, "suppressed token -1 is outside the vocabulary of 97"),
        ({"suppress": tuple(range(97))}, "suppress leaves none of the 97 tokens to choose"),
        (
            {"suppress": tuple(range(90)), "suppress_first": tuple(range(90, 97)), "beams": 2},
            "suppress leaves none of the 97 tokens to choose",
        ),
        ({"length_penalty": 0.6}, "Options: length_penalty needs beams above 1"),
        ({"beams": 2, "top_k": 5}, "Options: beam search draws nothing and takes no Sampling(top_k=5)"),
        ({"beams": 2, "stop": "a"}, "Options: beam search ends at stop_ids, not at stop strings"),
        ({"beams": 2, "logprobs": 1}, "Options: beam search lists no alternatives: logprobs is 0 or None"),
        ({"seed": -1}, "a seed is a whole number from 0 to below 2^63, got -1"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompts: give one seed, or one a prompt"),
        ({"sources": [[1]]}, "the model has no encoder: leave sources out"),
    ],
)
def test_options(options, line) -> None:
    assert refused(UsageError, LLAMA, [1, 2], **options) == line


@pytest.mark.parametrize(
    ("error", "prompts", "line"),
    [
        (UsageError, [], "no prompts: give at least one"),
        (
            InputError,
            [[1], []],
            "row 1: the prompt is empty; give at least one token, such as the one that begins a text",
        ),
        (InputError, [[1], [2, 128]], "row 1: token id 128 at place 1 is outside the vocabulary of 128"),
        (InputError, [[-1]], "row 0: token id -1 at place 0 is outside the vocabulary of 128"),
        (UsageError, ["text"], "row 0: the prompt is text, which needs a tokenizer: give tokenizer=…, or token ids"),
        (UsageError, [[1], 2.5], "row 1: the prompt is neither text nor a list of token ids: 2.5"),
        (UsageError, [[1.5]], "row 0: the prompt is neither text nor a list of token ids: [1.5]"),
        (
            InputError,
            [[1], [2] * (CONTEXT + 1)],
            "row 1: the prompt of 81 tokens is longer than the 80 positions that the model has learned",
        ),
    ],
)
def test_prompts(error, prompts, line) -> None:
    assert refused(error, GPT2, prompts) == line


def test_a_prompt_longer_than_a_slot() -> None:
    line = "row 0: the prompt of 4 tokens is longer than a slot (length=3)"
    assert refused(InputError, LLAMA, [1, 2, 3, 4], length=3) == line


def test_an_empty_text_without_a_token_that_begins_it() -> None:
    assert refused(InputError, GPT2, "", tokenizer=Bytes()).startswith("row 0: the prompt is empty")


@pytest.mark.parametrize(
    ("error", "sources", "line"),
    [
        (UsageError, None, "the model has an encoder: give one source a prompt"),
        (UsageError, [[1], [2]], "2 sources for 1 prompts: give one source a prompt"),
        (InputError, [[99]], "row 0: token id 99 at place 0 is outside the vocabulary of 61"),
        (InputError, [[]], "row 0: the source is empty; give at least one token, such as the one that begins a text"),
    ],
)
def test_sources(error, sources, line) -> None:
    assert refused(error, T5, [[0]], sources=sources) == line


def test_a_model_without_a_decoder() -> None:
    block = Block((pre_norm("attn", Attention(2, causal=False), RMSNorm()),))
    encoder = Model(8, encoder=Trunk(Embed(10), (block,)))
    line = "the model cannot generate: that takes a decoder over tokens with a head"
    assert refused(UsageError, encoder.build(), [1]) == line
    headless = SPECS["llama"].replace(head=None)
    assert refused(UsageError, headless.build(), [1]) == line


def test_sampling_may_be_given_whole_and_changed() -> None:
    from sublayer.decoding.request import read_options

    options = read_options({"sampling": Sampling(top_k=5, top_p=0.5), "top_p": 0.9, "max_tokens": 3})
    assert options.sampling == Sampling(top_k=5, top_p=0.9)
    assert options.max_tokens == 3


def test_numbers_of_other_libraries_are_ids_too() -> None:
    from sublayer.decoding.request import read_options, read_rows

    prompts: Any = [torch.tensor([1, 2]).numpy()]
    (row,) = read_rows(GPT2, prompts, None, None, None, read_options({}))
    assert row.prompt == (1, 2)
    assert all(type(token) is int for token in row.prompt)
