"""Translation, or any text from a text: what an encoder-decoder trained by the objective text_to_text answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import UsageError
from ..nn.sublayer import ModelOp
from ..text.tokenizer import Tokenizer, special_id
from .generate import Stream
from .request import read_options, read_rows

MORE = 50  # tokens that a translation may be longer than its source (Vaswani et al. 2017, section 6.1)


def translate(
    model: ModelOp,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    beams: int = 4,
    length_penalty: float = 0.6,
    start: str | None = None,
    prefix: str = "",
    slots: int = 32,
    progress: Callable[[int, int, float], object] | None = None,
) -> list[str]:
    """The model's answer to each text, in their order, by beam search; beams=1 takes the best token each time.

    The encoder reads prefix, text and the token that ends a text; the decoder begins with that token, or with the
    special one named by `start` (T5's is "<pad>"), as the objective text_to_text trains both. An answer has at most 50
    tokens more than its source; a text of nothing but spaces is answered with "". slots: texts that decode together,
    those of like length beside each other. progress(texts done, texts, share of all source tokens): after each text.

    Raises UsageError for a model without encoder or decoder, or a tokenizer without the tokens named; InputError for a
    text that the model cannot take.
    """
    if model.encoder is None:
        raise UsageError("the model has no encoder: it continues a text (sublayer generate) and translates none")
    if not tokenizer.eos:
        raise UsageError("the tokenizer has no token that ends a text, which is what a translation ends with")
    end = tokenizer.eos[0]
    begin = end if start is None else special_id(tokenizer, start)
    if begin is None:
        raise UsageError(f"start: the tokenizer has no special token {start!r}")
    if not texts:
        return []
    full = [bool(text.strip()) for text in texts]
    sources = [
        [*(tokenizer.encode(prefix + text) if some else ()), end] for text, some in zip(texts, full, strict=True)
    ]
    lengths = [*map(len, sources)]
    asked: dict[str, Any] = {"beams": beams, "slots": slots, "stop_ids": (end,), "max_tokens": max(lengths) + MORE}
    asked |= {"length_penalty": length_penalty} if beams > 1 else {"temperature": 0.0}
    options = read_options(asked)
    rows = read_rows(model, [[begin]] * len(texts), sources, None, tokenizer, options)
    rooms = [length + MORE if some else 1 for length, some in zip(lengths, full, strict=True)]
    rows = [replace(row, room=min(row.room, room)) for row, room in zip(rows, rooms, strict=True)]
    stream, done, read = Stream(model, rows, options, tokenizer), 0, 0
    for event in stream:
        if event.finish is not None:
            done, read = done + 1, read + lengths[event.row]
            if progress is not None:
                progress(done, len(texts), read / sum(lengths))
    return [made.text or "" if some else "" for made, some in zip(stream.generated(), full, strict=True)]
