"""Translation: a text's answer is that of `generate` to it alone, with the tokens that text_to_text trained."""

from typing import Any

import pytest

from sublayer.decoding import generate, translate
from sublayer.errors import UsageError
from sublayer.nn.sublayer import Model, ModelOp
from sublayer.recipes import gpt2, seq2seq, transformer
from sublayer.text import Bytes
from sublayer.text.tokenizer import Tokenizer
from sublayer.train.examples import TextToText
from sublayer.train.language import Words
from tests.decoding.models import tiny

TOKENIZER = Bytes(("<|end|>", "<|begin|>"))
TEXTS = ["a much longer sentence than the others are", "short", "of some words", "ab"]
SPECS = {
    "transformer": transformer(16, 1, 2, 24, vocab=TOKENIZER.size),
    "gru": seq2seq(16, vocab=TOKENIZER.size, attention=False),
    "gru-attention": seq2seq(16, vocab=TOKENIZER.size),
}


@pytest.fixture(scope="module", params=[*SPECS])
def model(request: pytest.FixtureRequest) -> ModelOp:
    return tiny(SPECS[request.param])


@pytest.mark.parametrize("beams", [1, 3])
def test_each_text_is_answered_as_if_alone_and_in_order(beams: int, model: ModelOp) -> None:
    words, objective = Words(TOKENIZER), TextToText()
    asked: dict[str, Any] = {"beams": beams, "length_penalty": 0.6} if beams > 1 else {"temperature": 0.0}
    expected: list[str | None] = []
    for text in TEXTS:
        source = objective.source(text, words, "to: ")
        prompt, room = [objective.begin(words)], len(source) + 50
        (made,) = generate(model, [prompt], tokenizer=TOKENIZER, sources=[source], max_tokens=room, **asked)
        expected.append(made.text)
    assert len(set(expected)) > 1
    for slots in (1, 3, 32):
        assert translate(model, TOKENIZER, TEXTS, beams=beams, prefix="to: ", slots=slots) == expected


def test_the_decoder_begins_with_the_token_that_is_named(model: ModelOp) -> None:
    begin = TextToText(start="<|begin|>").begin(Words(TOKENIZER))
    source = TextToText().source(TEXTS[0], Words(TOKENIZER))
    asked: dict[str, Any] = {"beams": 4, "length_penalty": 0.6, "max_tokens": len(source) + 50}
    (made,) = generate(model, [[begin]], tokenizer=TOKENIZER, sources=[source], **asked)
    assert translate(model, TOKENIZER, TEXTS[:1], start="<|begin|>") == [made.text]
    with pytest.raises(UsageError, match="start: the tokenizer has no special token '<pad>'"):
        translate(model, TOKENIZER, TEXTS, start="<pad>")


def test_nothing_is_answered_with_nothing_and_moves_no_other(model: ModelOp) -> None:
    assert translate(model, TOKENIZER, []) == []
    assert translate(model, TOKENIZER, ["", "short", " \t"]) == ["", *translate(model, TOKENIZER, ["short"]), ""]


def test_progress_counts_texts_and_the_share_of_their_tokens() -> None:
    told: list[tuple[int, int, float]] = []
    translate(tiny(SPECS["gru"]), TOKENIZER, TEXTS, progress=lambda *values: told.append(values))
    assert [values[:2] for values in told] == [(i, len(TEXTS)) for i in range(1, len(TEXTS) + 1)]
    shares = [share for _, _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("spec", "tokenizer", "said"),
    [
        (gpt2(16, 1, 2, vocab=TOKENIZER.size, context=64), TOKENIZER, "the model has no encoder"),
        (SPECS["gru"], Bytes(), "the tokenizer has no token that ends a text"),
    ],
    ids=["decoder", "endless"],
)
def test_what_cannot_translate_says_why(spec: Model, tokenizer: Tokenizer, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        translate(spec.build(), tokenizer, TEXTS)
