"""The second half of the contract of learning: a language model learns language."""

import math
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from sublayer.data.batches import Batches, windows
from sublayer.data.readers import Document, documents
from sublayer.data.shards import write
from sublayer.nn.sublayer import Model
from sublayer.text import Bytes
from sublayer.train.evaluate import evaluate
from sublayer.train.language import next_token, next_tokens
from sublayer.train.optim import AdamW
from sublayer.train.schedule import Schedule
from sublayer.train.update import update


def beats_unigrams(spec: Model, steps: int) -> None:
    """Trained by the package's own parts on Python's library as bytes, a model takes fewer bits for files it has not
    seen than those files' own unigram entropy."""
    tokenizer = Bytes(("<|end|>",))
    end = tokenizer.eos[0]
    model = spec.override(f"decoder.embed.vocab={tokenizer.size}").build(seed=2)
    training, held = corpus()
    schedule, optimizer = Schedule(shape="linear", warmup=steps // 10), AdamW(rate=1e-2).build(model)
    with TemporaryDirectory() as folder:
        seen, unseen = (
            write([Document(text, "") for text in texts], tokenizer, Path(folder) / name)
            for name, texts in (("seen", training), ("unseen", held))
        )
        batches = Batches([(seen, 1.0)], 48, 8, seed=23)
        for step in range(steps):
            optimizer.set_rate(schedule.factor(step, steps))
            update(model, [next_tokens(batches.at(step), end)], next_token, optimizer)
        judged = (next_tokens(rows, end) for rows, _ in windows(unseen, 48, rows=64))
        bits = evaluate(model, judged, next_token).nats / math.log(2) / unseen.bytes
    entropy = unigram_bits(held)
    assert bits < entropy, f"{bits:.3f} bits per byte, the unigram entropy is {entropy:.3f}"


@cache
def corpus() -> tuple[list[str], list[str]]:
    """Files of Python's library: to train on, and to be judged by."""
    texts = [document.text for document in islice(documents("stdlib:"), 60)]
    return [text for i, text in enumerate(texts) if i % 8], [text[:8_000] for text in texts[:32:8]]


def unigram_bits(texts: list[str]) -> float:
    """The entropy of single bytes, in bits: what a model must beat to have learned any order."""
    counts = Counter("".join(texts).encode())
    total = sum(counts.values())
    return -sum(n / total * math.log2(n / total) for n in counts.values())
