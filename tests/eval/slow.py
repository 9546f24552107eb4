"""The code length of documents under a model of transformers, one piece of a document of a window after another."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def code_length(model: Any, documents: list[list[int]], length: int, stride: int) -> tuple[float, int]:
    """(nats, tokens that were asked); each document begins with a token that is not."""
    nats, tokens = 0.0, 0
    for ids, count in windows(documents, length, stride):
        logits: Tensor = model(torch.tensor([ids[:-1]])).logits[0].double()
        found = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[-count:]
        nats, tokens = nats - float(found.sum()), tokens + count
    return nats, tokens


def windows(documents: list[list[int]], length: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Each document of each window, alone, with how many of its last tokens are asked."""
    stream = [token for document in documents for token in document]
    begins = list(accumulate(map(len, documents)))
    asked = 1  # up to here; the first token of all has nothing before it
    for start in range(0, len(stream), stride):
        stop = min(start + length + 1, len(stream))
        if asked >= stop:
            return
        cuts = [start, *(begin for begin in begins if start < begin < stop), stop]
        for first, last in pairwise(cuts):
            if (wanted := last - max(first + 1, asked)) > 0:
                yield stream[first:last], wanted
        asked = stop
