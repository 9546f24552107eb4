"""Tiny models with logits far from flat, and what they compute without a decoding state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sublayer.nn.initialise import Init
from sublayer.nn.sublayer import Model, ModelOp
from sublayer.recipes import gpt2, llama, mamba, seq2seq, t5
from sublayer.recipes.gpt2 import TINY as GPT2_TINY
from sublayer.recipes.llama import TINY as LLAMA_TINY
from sublayer.recipes.mamba import TINY as MAMBA_TINY
from sublayer.recipes.seq2seq import TINY as SEQ2SEQ_TINY
from sublayer.recipes.t5 import TINY as T5_TINY

CONTEXT = 80
# Untied: a random model with a tied head repeats its last token.
SPECS: dict[str, Model] = {
    "gpt2": gpt2(**{**GPT2_TINY, "vocab": 128, "context": CONTEXT}, tied=False),
    "llama": llama(**LLAMA_TINY),
    "window": llama(**LLAMA_TINY, window=5),
    "recurrent": mamba(**MAMBA_TINY, tied=False).replace(init=Init()),
}
ENCODER_DECODERS = {"t5": t5(**T5_TINY), "recurrent": seq2seq(**SEQ2SEQ_TINY)}


def tiny(spec: Model, dtype: torch.dtype = torch.float64, sharpness: float = 6.0) -> ModelOp:
    """A random model in evaluation mode, whose larger weights make some tokens much likelier than others."""
    model = spec.build(3, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpness)
    return model


@torch.no_grad()
def next_logits(model: ModelOp, ids: Sequence[int], source: Sequence[int] | None = None) -> Tensor:
    """[V]: the logits of the token after ids, by one forward pass without a state."""
    return model(torch.tensor([list(ids)]), source=None if source is None else torch.as_tensor(source)[None])[0, -1]


@torch.no_grad()
def log_probability(
    model: ModelOp, prompt: Sequence[int], ids: Sequence[int], source: Sequence[int] | Tensor | None = None
) -> Tensor:
    """[n]: log p of each of ids after prompt, teacher-forced, by one forward pass without a state."""
    read = torch.tensor([[*prompt, *ids]])
    logits = model(read, source=None if source is None else torch.as_tensor(source)[None])[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
