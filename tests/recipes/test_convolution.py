"""Gated convolutions against the published equations (arXiv 1612.08083, 1705.03122), token by token in fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sublayer.errors import SpecError
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import to_hf
from sublayer.recipes.convolution import TINY, convolution
from tests.case import Case, rough, texts
from tests.oracle import close

FORMS: dict[str, dict[str, Any]] = {
    "language model": {},
    "language model, tied": {"tied": True, "kernel": 4, "context": 20},
    "ConvS2S": {"encoder_layers": 2, "context": 20},
}


class Naive:
    """A document (and its source) → logits [L, V] by the model's own parameters, one sum at a time."""

    def __init__(self, model: ModelOp, **options: Any) -> None:
        self.w, self.options = dict(model.named_parameters()), options
        self.kernel, self.tied = options.get("kernel", 3), options.get("tied", False)

    def __call__(self, ids: Tensor, source: Tensor | None) -> Tensor:
        memory = None
        if source is not None:
            memory = self.embedded("encoder", source)
            for i in range(self.options["encoder_layers"]):
                memory = (memory + self.convolved(f"encoder.blocks.{i}", memory, self.kernel // 2, i)) * 0.5**0.5
        x = self.embedded("decoder", ids)
        for i in range(self.options["layers"]):
            x = (x + self.convolved(f"decoder.blocks.{i}", x, self.kernel - 1, i)) * 0.5**0.5
            if memory is not None:
                x = (x + self.attended(f"decoder.blocks.{i}.cross.op", x, memory)) * 0.5**0.5
        table = self.w["decoder.embed.tokens.weight" if self.tied else "head.weight"]
        return x @ table.T + self.w["head.bias"]

    def embedded(self, trunk: str, ids: Tensor) -> Tensor:
        x = self.w[f"{trunk}.embed.tokens.weight"][ids]
        position = self.w.get(f"{trunk}.embed.position.weight")
        return x if position is None else x + position[: len(ids)]

    def convolved(self, at: str, x: Tensor, middle: int, layer: int) -> Tensor:
        """Output t is the sum over taps j of W_j x at t + (j − middle) · dilation, where that is in the document."""
        weight = self.w[f"{at}.mixer.op.weight"].unflatten(1, (self.kernel, -1))
        dilation, outputs = self.options["dilations"][layer % len(self.options["dilations"])], []
        for t in range(len(x)):
            total = self.w[f"{at}.mixer.op.bias"]
            for j in range(self.kernel):
                place = t + (j - middle) * dilation
                if 0 <= place < len(x):
                    total = total + weight[:, j] @ x[place]
            a, b = total.chunk(2)
            outputs.append(a / (1 + torch.exp(-b)))
        return torch.stack(outputs)

    def attended(self, at: str, x: Tensor, memory: Tensor) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            return x @ self.w[f"{at}.{name}.weight"].T + self.w[f"{at}.{name}.bias"]

        scores = linear("q", x) @ linear("k", memory).T
        return linear("out", scores.softmax(-1) @ linear("v", memory))


def check_parity(model: ModelOp, found: Tensor, expected: Tensor) -> None:
    """The same logits, loss and gradient of every parameter."""
    close(found, expected, "logits")
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = []
    for logits in (found, expected):
        loss = F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])
        gradients.append(torch.autograd.grad(loss, parameters))
    for name, one, other in zip(names, *gradients, strict=True):
        if not name.endswith("cross.op.k.bias"):  # it moves all scores of a query alike, so its gradient is 0
            close(one, other, f"gradient of {name}")


@pytest.mark.parametrize("form", FORMS)
def test_logits_loss_and_gradients_equal_the_equations(form: str) -> None:
    options: dict[str, Any] = TINY | FORMS[form]
    case = Case(form, convolution(**options))
    model = rough(case)
    for document in texts(case, [2, 12], 1):  # one shorter than a kernel's reach
        source = None if document.source is None else document.source[None]
        found = model(document.inputs[None], source=source)[0]
        check_parity(model, found, Naive(model, **options)(document.inputs, document.source))


def test_dilations_repeat() -> None:
    spec = convolution(24, 5, dilations=(1, 2, 3))
    assert [spec.find(f"decoder.blocks.{i}.mixer.op.dilation") for i in range(5)] == [1, 2, 3, 1, 2]


def test_no_config_json_expresses_it() -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture"):
        to_hf(convolution(**TINY))
