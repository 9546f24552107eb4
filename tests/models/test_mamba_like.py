"""mamba_like against the recurrence solved in closed form, in fp64; and padding, which leaves the state untouched."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from sublayer.state import State
from sublayer.step import Step
from tests.cases import CASES
from tests.contracts import assert_near, rough
from tests.models.mamba_like import TINY

CASE = CASES["mamba_like"]
Weights = Mapping[str, Tensor]


def naive(w: Weights, ids: Tensor) -> Tensor:
    """[L, V]: h at t is the sum over s ≤ t of what came in at s times the product of the decays after s."""
    table = w["decoder.embed.tokens.weight"]
    x = table[ids]
    for i in range(TINY["layers"]):
        x = x + mixer(w, f"decoder.blocks.{i}.mixer", x)
    return norm(x, w["decoder.norm.weight"]) @ table.T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def mixer(w: Weights, at: str, x: Tensor) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{at}.op.{name}.weight"], w[f"{at}.op.{name}.bias"])

    inner, size, kernel = TINY["inner"], TINY["size"], TINY["kernel"]
    wide = linear("up", norm(x, w[f"{at}.pre.weight"]))
    inputs, gate = wide[:, :inner], wide[:, inner:]
    padded = F.pad(inputs.T[None], (kernel - 1, 0))
    u = F.silu(F.conv1d(padded, w[f"{at}.op.taps"].T[:, None], groups=inner))[0].T
    rate = (1 + linear("rate", u).exp()).log()  # [L, inner]
    b, c = linear("select", u).split(size, -1)
    decay = w[f"{at}.op.decay"].exp()
    outputs = []
    for t in range(len(x)):
        y = u[t].clone()
        for s in range(t + 1):
            kept = torch.exp(-rate[s + 1 : t + 1].sum(0)[:, None] * decay)  # [inner, size]
            y = y + (kept * b[s] * c[t]).sum(-1) * rate[s] * u[s]
        outputs.append(y)
    return linear("down", torch.stack(outputs) * F.silu(gate))


@torch.no_grad()
def test_logits_equal_the_closed_form() -> None:
    model = rough(CASE)
    weights = dict(model.named_parameters())
    for document in CASE.documents(CASE, [1, 2, 13], 1):  # two are shorter than the convolution
        assert_near(model(document.inputs[None])[0], naive(weights, document.inputs), 1e-10)


@torch.no_grad()
def test_padding_leaves_the_state_as_it_is() -> None:
    model = rough(CASE)
    a, b = CASE.documents(CASE, [7, 7], 2)
    state = State.allocate(model, 2, 16)
    model(torch.stack([a.inputs, b.inputs]), Step(), state)
    before = {name: tensor.clone() for name, tensor in state.store.tensors.items()}
    model(torch.stack([b.inputs, a.inputs]), Step(segment=torch.tensor([[0] * 7, [0, 1, 1, 1, 1, 0, 0]])), state)
    assert state.length.tolist() == [7, 11]
    for name, tensor in state.store.tensors.items():
        assert torch.equal(tensor[0], before[name][0])
        assert not torch.equal(tensor[1], before[name][1])
