"""S4 language models against their equations, written naively in fp64: transformers has no class for them."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sublayer.errors import SpecError
from sublayer.nn.s4 import S4Op
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import s4, to_hf
from sublayer.recipes.s4 import TINY
from sublayer.step import Step
from tests.nn import state_space
from tests.oracle import PACKED, PADDED, close

IDS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))


def drawn(**changes: Any) -> ModelOp:
    """As it begins, for random state spaces remember nothing; but no norm or bias at a value that would hide it."""
    model = s4(**TINY | changes).build(dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def written(model: ModelOp, p: Mapping[str, Tensor], ids: Tensor, repeats: int) -> Tensor:
    """[L, V]: one document, every state space a dense recurrence."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[1:], p[f"{name}.weight"], p[f"{name}.bias"])

    x = p["decoder.embed.tokens.weight"][ids]
    for layer in range(2):
        at = f"decoder.blocks.{layer}"
        for i in range(repeats):
            mixer = cast(S4Op, model.get_submodule(f"{at}.s4_{i}.op"))
            x = x + state_space.written(mixer, norm(x, f"{at}.s4_{i}.pre"))
        inner = norm(x, f"{at}.ffn.pre") @ p[f"{at}.ffn.op.up.weight"].T + p[f"{at}.ffn.op.up.bias"]
        x = x + F.gelu(inner) @ p[f"{at}.ffn.op.down.weight"].T + p[f"{at}.ffn.op.down.bias"]
    table = p["head.weight"] if "head.weight" in p else p["decoder.embed.tokens.weight"]
    return norm(x, "decoder.norm") @ table.T


def check_parity(model: ModelOp, ids: Tensor, segment: Tensor, repeats: int = 1) -> None:
    """Logits and the gradient of every parameter, document by document."""
    parameters = dict(model.named_parameters())
    found = model(ids, Step(segment=segment))
    parts = [(row, segment[row] == number) for row in range(len(ids)) for number in segment[row].unique() if number]
    documents = [(found[row, where], written(model, parameters, ids[row, where], repeats)) for row, where in parts]
    ours, expected = (torch.cat(side) for side in zip(*documents, strict=True))
    close(ours, expected, "logits")
    gradients = [torch.autograd.grad(side.square().mean(), list(parameters.values())) for side in (ours, expected)]
    for name, one, other in zip(parameters, *gradients, strict=True):
        close(one, other, f"gradient of {name}")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"repeats": 2, "tied": False, "hidden": 40},
        {"structure": "diagonal", "start": "lin"},
        {"structure": "diagonal", "discretisation": "zoh"},
    ],
    ids=str,
)
def test_logits_and_gradients_are_those_of_the_equations(changes: dict) -> None:
    check_parity(drawn(**changes), IDS, torch.ones_like(IDS), changes.get("repeats", 1))


@pytest.mark.parametrize("segment", [PADDED, PACKED], ids=["padded", "packed"])
def test_padded_and_packed_rows_are_their_documents(segment: Tensor) -> None:
    check_parity(drawn(), IDS, segment)


def test_no_class_of_theirs_has_it() -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(s4(**TINY))
