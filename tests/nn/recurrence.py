"""What a recurrence is held to, beside its written form for one document: rows of documents, and a state."""

from collections.abc import Callable

import torch
from torch import Tensor

from sublayer.nn.sublayer import ModelOp
from sublayer.state import State
from sublayer.step import Step
from tests.oracle import close

V = 31
Written = Callable[[ModelOp, Tensor], Tensor]
"""(model, ids [L] of a document) → what the model is to answer, [L, D]."""


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (length,), generator=torch.Generator().manual_seed(seed))


def same_with_gradients(found: Tensor, wanted: Tensor, built: ModelOp) -> None:
    close(found, wanted)
    names, parameters = zip(*built.named_parameters(), strict=True)
    gradients = [torch.autograd.grad(result.square().sum(), parameters) for result in (found, wanted)]
    for name, one, other in zip(names, *gradients, strict=True):
        close(one, other, name)


def check_documents(built: ModelOp, written: Written) -> None:
    """Documents of a row are alone. In chunks of 4 they end inside them, at their edges, and one lies over three."""
    lengths, tokens = (3, 1, 9, 4, 8, 2), ids(27)
    segment = torch.cat([torch.full((n,), i % 3 + 1) for i, n in enumerate(lengths)])
    gap, end = torch.zeros(2, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    segment, padded = (torch.cat([x[:7], gap, x[7:], end]) for x in (segment, tokens))
    found = built(padded[None], Step(segment=segment[None]))[0][segment != 0]
    same_with_gradients(found, torch.cat([written(built, document) for document in tokens.split(lengths)]), built)


@torch.no_grad()
def check_state(built: ModelOp, written: Written) -> None:
    """A state carries on over chunks of 4, single steps, and the end of a document within a call."""
    a, b, state = ids(23), ids(9, 1), State.allocate(built, 1, 40)
    parts = [built(a[None, start:stop], Step(), state) for start, stop in ((0, 6), (6, 7), (7, 16), (16, 19))]
    both = torch.cat([a[19:], b[:6]])[None]
    parts.append(built(both, Step(segment=torch.tensor([[1] * 4 + [2] * 6])), state))
    parts.append(built(b[None, 6:], Step(), state))
    close(torch.cat(parts, 1)[0], torch.cat([written(built, a), written(built, b)]))
