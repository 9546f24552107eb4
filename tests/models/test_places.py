"""The places of a sublayer that no recipe fills yet: adaptive ones, auxiliary losses, other front ends."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sublayer.nn.attention import Attention
from sublayer.nn.embed import Embed
from sublayer.nn.feed_forward import FeedForward
from sublayer.nn.norm import LayerNorm
from sublayer.nn.op import Context, Op, Part
from sublayer.nn.position import Learned
from sublayer.nn.sublayer import Block, Model, Sublayer, Trunk, pre_norm, repeat
from sublayer.state import State
from sublayer.step import Step
from tests.case import assert_near, roughen

D, VOCAB = 16, 31


# --- adaptive scale, shift and gate (DiT, arXiv 2212.09748, section 3.2) ---


class ShiftedPlace(Part):
    """norm(x) · (1 + scale(c)) + shift(c), a `pre` place."""

    def build(self, dim: int, context: Context) -> nn.Module:
        return ShiftedPlaceOp(dim)


class ShiftedPlaceOp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        assert step.condition is not None
        c = step.condition[:, None]
        return F.layer_norm(x, x.shape[-1:]) * (1 + self.scale(c)) + self.shift(c)


class GatePlace(Part):
    """y · gate(c), a `scale` place."""

    def build(self, dim: int, context: Context) -> nn.Module:
        return GatePlaceOp(dim)


class GatePlaceOp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, dim)

    def forward(self, y: Tensor, step: Step) -> Tensor:
        assert step.condition is not None
        return y * self.gate(step.condition)[:, None]


@torch.no_grad()
def test_a_condition_scales_shifts_and_gates_each_row_on_its_own() -> None:
    def adaptive(name: str, op: Part) -> Sublayer:
        return Sublayer(name, op, pre=ShiftedPlace(), scale=GatePlace())

    block = Block((adaptive("attn", Attention(2)), adaptive("ffn", FeedForward(24))))
    model = Model(D, decoder=Trunk(Embed(VOCAB), repeat(block, 2), LayerNorm())).build(dtype=torch.float64)
    roughen(model)
    ids, c = torch.randint(VOCAB, (3, 7)), torch.randn(3, D, dtype=torch.float64)
    logits = model(ids, Step(condition=c))

    w = dict(model.named_parameters())

    def places(at: str, row: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift, gate = (
            F.linear(condition, w[f"{at}.{name}.weight"], w[f"{at}.{name}.bias"])
            for name in ("pre.scale", "pre.shift", "scale.gate")
        )
        normed = (row - row.mean(-1, keepdim=True)) / (row.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return normed * (1 + scale) + shift, gate

    for row, condition, expected in zip(ids, c, logits, strict=True):
        x = w["decoder.embed.tokens.weight"][row]
        for i in range(2):
            for name in ("attn", "ffn"):
                at = f"decoder.blocks.{i}.{name}"
                inner, gate = places(at, x, condition)
                x = x + gate * model.get_submodule(f"{at}.op")(inner[None], Step())[0]
        x = F.layer_norm(x, (D,), w["decoder.norm.weight"], w["decoder.norm.bias"])
        assert_near(expected, x @ w["head.weight"].T, 1e-10)

    state = State.allocate(model, 3, 7)
    pieces = [model(ids[:, i : i + 1], Step(condition=c), state) for i in range(7)]
    assert_near(torch.cat(pieces, 1), logits, 1e-10)

    for gate in (module.gate for module in model.modules() if isinstance(module, GatePlaceOp)):
        nn.init.zeros_(gate.weight)
        nn.init.zeros_(gate.bias)
    closed = model(ids, Step(condition=c), output="hidden")
    x = w["decoder.embed.tokens.weight"][ids]
    assert_near(closed, F.layer_norm(x, (D,), w["decoder.norm.weight"], w["decoder.norm.bias"]), 1e-10)


# --- auxiliary losses ---


class BalancedLayer(Part):
    """A feed-forward layer with a loss of its own and a second one that only some layers have."""

    second: bool = False

    def build(self, dim: int, context: Context) -> nn.Module:
        return BalancedLayerOp(self, dim)


class BalancedLayerOp(Op):
    def __init__(self, spec: BalancedLayer, dim: int) -> None:
        super().__init__()
        self.spec, self.inner = spec, nn.Linear(dim, dim)

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.inner(x)
        return y, {"balance": y.square().mean()} | ({"second": y.abs().mean()} if self.spec.second else {})


def test_auxiliary_losses_are_summed_by_name_and_come_with_the_result() -> None:
    def block(*second: bool) -> Block:
        return Block(tuple(pre_norm(f"ffn{i}", BalancedLayer(flag), LayerNorm()) for i, flag in enumerate(second)))

    trunk = Trunk(Embed(VOCAB), (block(False, True), block(True)))
    model = Model(D, encoder=trunk, decoder=trunk).build(dtype=torch.float64)
    roughen(model)
    seen: list[Any] = []
    for module in model.modules():
        if isinstance(module, BalancedLayerOp):
            module.register_forward_hook(lambda op, args, result: seen.append(result))
    logits, extras = model(torch.randint(VOCAB, (2, 5)), source=torch.randint(VOCAB, (2, 3)))
    assert len(seen) == 6
    assert logits.shape == (2, 5, VOCAB)
    assert extras.keys() == {"balance", "second"}
    for name, value in extras.items():
        assert_near(value, torch.stack([more[name] for _, more in seen if name in more]).sum(), 1e-10)
    extras["balance"].backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name != "head.weight"), name


# --- a front end that makes tokens of images, and puts one of its own before them (arXiv 2010.11929) ---


class ImagePatches(Part):
    """Square patches, projected, after a class token; with learned positions."""

    size: int
    length: int

    def build(self, dim: int, context: Context) -> nn.Module:
        return ImagePatchesOp(self, dim, context)


class ImagePatchesOp(nn.Module):
    def __init__(self, spec: ImagePatches, dim: int, context: Context) -> None:
        super().__init__()
        self.size = spec.size
        self.project, self.first = nn.Linear(3 * spec.size**2, dim), nn.Embedding(1, dim)
        self.position = Learned(spec.length).build(dim, context)

    def forward(self, images: Tensor, step: Step) -> tuple[Tensor, Step]:
        x = self.project(F.unfold(images, self.size, stride=self.size).mT)
        x = torch.cat([self.first.weight.expand(len(x), 1, -1), x], 1)
        segment = None if step.segment is None else F.pad(step.segment, (1, 0), value=1)
        return x + self.position(torch.arange(x.shape[1])[None]), step.replace(segment=segment, shared=None)


@torch.no_grad()
def test_images_become_patches_and_a_class_token() -> None:
    norm = LayerNorm()
    block = Block((pre_norm("attn", Attention(2, causal=False), norm), pre_norm("ffn", FeedForward(24), norm)))
    spec = Model(D, encoder=Trunk(ImagePatches(4, 10), repeat(block, 2), norm), head=None)
    model = spec.build(dtype=torch.float64)
    roughen(model)
    images = torch.randn(2, 3, 12, 8, dtype=torch.float64)
    x = model(images)
    assert x.shape == (2, 1 + 6, D)

    patches = [images[0, :, i : i + 4, j : j + 4].flatten() for i in (0, 4, 8) for j in (0, 4)]
    w = dict(model.named_parameters())
    tokens = F.linear(torch.stack(patches), w["encoder.embed.project.weight"], w["encoder.embed.project.bias"])
    tokens = torch.cat([w["encoder.embed.first.weight"], tokens]) + w["encoder.embed.position.weight"][:7]
    for i in range(2):
        for name in ("attn", "ffn"):
            sublayer = model.get_submodule(f"encoder.blocks.{i}.{name}")
            tokens, _ = sublayer(tokens[None], Step())
            tokens = tokens[0]
    assert_near(x[0], F.layer_norm(tokens, (D,), w["encoder.norm.weight"], w["encoder.norm.bias"]), 1e-10)

    # An image of four patches beside one of six: the segment counts patches, not pixels.
    smaller = images.clone()
    smaller[1, :, 8:] = torch.nan
    padded = model(smaller, Step(segment=torch.tensor([[1] * 6, [1] * 4 + [0] * 2])))
    assert_near(padded[0], x[0], 1e-10)
    assert_near(padded[1, :5], model(images[1:, :, :8])[0], 1e-10)
