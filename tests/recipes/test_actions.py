"""Images, instructions and actions in one stream: against the equations, written naively in fp64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sublayer.errors import InputError, SpecError
from sublayer.nn.embed import Embed
from sublayer.nn.patches import Patches
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import actions, llama, to_hf
from sublayer.recipes.actions import PATCH, TINY, ImagesAndTokens, images_first
from sublayer.state import State
from sublayer.step import Step
from tests.case import roughen
from tests.oracle import close

SMALL: dict[str, Any] = TINY | {"image": (8, 12), "patch": 4, "channels": 2}
PLACES = 2 * 3  # of an image


def drawn(**changes: Any) -> ModelOp:
    model = actions(**SMALL | changes).build(dtype=torch.float64)
    roughen(model)
    return model.eval()


def observation(rows: int = 2, images: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    """(ids [B, L], images [B, I, C, H, W])."""
    generator = torch.Generator().manual_seed(3)
    pictures = torch.randn(rows, images, 2, 8, 12, dtype=torch.float64, generator=generator)
    return torch.randint(97, (rows, length), generator=generator), pictures


# --- the equations ---


def naive(model: ModelOp, images: Tensor, ids: Tensor, prefix: int = 0) -> Tensor:
    """[I · P + L, V] of one observation: every vector, score and angle by itself."""
    p = dict(model.named_parameters())
    stream: list[Tensor] = []
    for image in images:
        for row in range(2):
            for column in range(3):
                cell = image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
                vector = torch.einsum("chw,dchw->d", cell, p["decoder.embed.patches.weight"])
                place = p["decoder.embed.patches.position"][3 * row + column]
                stream.append(vector + p["decoder.embed.patches.bias"] + place)
    stream += [p["decoder.embed.tokens.weight"][token] for token in ids]
    for layer in range(2):
        at = f"decoder.blocks.{layer}"
        normed = [norm(x, p[f"{at}.attn.pre.weight"]) for x in stream]
        q, k, v = ([p[f"{at}.attn.op.{name}.weight"] @ x for x in normed] for name in "qkv")
        for place in range(len(stream)):
            heads: list[Tensor] = []
            for head in range(4):
                mine = rotated(q[place].view(4, 8)[head], place)
                seen = [other for other in range(len(stream)) if other <= place or other < prefix]
                scores = [mine @ rotated(k[other].view(2, 8)[head // 2], other) / math.sqrt(8) for other in seen]
                weights = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
                mixed = [w * v[other].view(2, 8)[head // 2] for w, other in zip(weights, seen, strict=True)]
                heads.append(torch.stack(mixed).sum(0))
            stream[place] = stream[place] + p[f"{at}.attn.op.out.weight"] @ torch.cat(heads)
        for place, x in enumerate(stream):
            inner = norm(x, p[f"{at}.ffn.pre.weight"])
            gate = p[f"{at}.ffn.op.gate.weight"] @ inner
            inner = gate / (1 + (-gate).exp()) * (p[f"{at}.ffn.op.up.weight"] @ inner)
            stream[place] = x + p[f"{at}.ffn.op.down.weight"] @ inner
    return torch.stack([p["head.weight"] @ norm(x, p["decoder.norm.weight"]) for x in stream])


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """Pairs (x[i], x[i + 4]), turned by position · 10000^(−i/4)."""
    turned = x.clone()
    for i in range(4):
        angle = position * 10000.0 ** (-i / 4)
        a, b = x[i], x[i + 4]
        turned[i], turned[i + 4] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)
    return turned


def check_parity(step: Step, prefix: int) -> None:
    """Answers, a loss and every gradient of two observations of two images each."""
    model = drawn()
    ids, images = observation()
    found = model(images_first(model.spec, ids, images), step)
    expected = torch.stack([naive(model, *row, prefix) for row in zip(images, ids, strict=True)])
    close(found, expected, "answer")
    gradients: list[dict[str, Tensor]] = []
    for answer in (found, expected):
        model.zero_grad()
        (answer[:, PLACES:].square().mean() + answer[:, -1, 5].mean()).backward()
        gradients.append({name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None})
    assert gradients[0].keys() == {name for name, _ in model.named_parameters()}
    for name, gradient in gradients[1].items():
        close(gradients[0][name], gradient, name)


def test_the_stream_is_the_equations() -> None:
    check_parity(Step(), 0)


def test_images_may_see_themselves_both_ways() -> None:
    check_parity(Step(prefix=torch.full((2,), 2 * PLACES)), 2 * PLACES)


# --- the stream ---


def test_patches_stand_where_their_ids_are() -> None:
    """Text before and between images, another number of images in each row: the same as each row alone."""
    model = drawn()
    ids, images = observation(length=4)
    one = torch.full((PLACES,), PATCH)
    rows = [torch.cat([ids[0, :1], one, ids[0, 1:3], one]), torch.cat([ids[1, :2], one, ids[1, 2:]])]
    length = max(map(len, rows))
    stream, segment = torch.zeros(2, 2, length, dtype=torch.long)
    for i, row in enumerate(rows):
        stream[i, length - len(row) :], segment[i, length - len(row) :] = row, 1
    found = model({"ids": stream, "images": images}, Step(segment=segment))
    for i, row in enumerate(rows):
        alone = model({"ids": row[None], "images": images[i : i + 1, : 2 - i]})
        close(found[i, length - len(row) :], alone[0], f"row {i}")
    swapped = model({"ids": rows[0][None], "images": images[:1].flip(1)})
    assert not torch.allclose(swapped[0], found[0], atol=1e-3)


@torch.no_grad()
def test_a_stream_is_decoded_as_it_runs_whole() -> None:
    """Whole images in the first call of some rows, then their tokens one by one, in ragged rows."""
    model = drawn()
    ids, images = observation(length=6)
    whole = model(images_first(model.spec, ids, images))
    state = State.allocate(model, 2, 2 * PLACES + 6)
    for slot, first in ((1, 1), (0, 3)):
        inputs = images_first(model.spec, ids[slot : slot + 1, :first], images[slot : slot + 1])
        found = model(inputs, Step(slots=torch.tensor([slot])), state)
        close(found[0], whole[slot, : 2 * PLACES + first], f"slot {slot}")
    for i in range(3):
        tokens = torch.stack([ids[0, 3 + i], ids[1, 1 + i]])[:, None]
        found = model(tokens, Step(), state)
        close(found[0, 0], whole[0, 2 * PLACES + 3 + i], f"token {i} of slot 0")
        close(found[1, 0], whole[1, 2 * PLACES + 1 + i], f"token {i} of slot 1")


def test_without_images_it_is_llama() -> None:
    """A stream of ids alone, such as a time series."""
    model = drawn()
    trunk = {name: size for name, size in TINY.items() if name not in ("image", "patch")}
    plain = llama(**trunk).build(dtype=torch.float64).eval()
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if "patches" not in name})
    ids, _ = observation()
    close(model(ids), plain(ids), "answer")


def test_what_does_not_fit_is_refused() -> None:
    model = drawn()
    ids, images = observation()
    with pytest.raises(InputError, match="13 places for patches, and its images have 12"):
        model({"ids": torch.full((2, 13), PATCH), "images": images})
    with pytest.raises(InputError, match="token id -1 is outside the vocabulary of 97"):
        model(torch.full((2, 3), PATCH))
    with pytest.raises(InputError, match="token id -2 is outside"):
        model({"ids": torch.full((2, 3), -2), "images": images})
    with pytest.raises(InputError, match=r'inputs are ids, or \{"ids", "images"\}'):
        model({"ids": ids})
    with pytest.raises(InputError, match=r"images are \[B, C, H, W\]"):
        model({"ids": ids, "images": images[:1]})
    with pytest.raises(InputError, match="floating-point"):
        model({"ids": ids, "images": images.byte()})
    with pytest.raises(InputError, match="reads no images"):
        images_first(llama(32, 1, 4, 2, 48, 97), ids, images)
    with pytest.raises(SpecError, match="needs patches"):
        ImagesAndTokens(97)
    with pytest.raises(SpecError, match="needs patches"):
        ImagesAndTokens(97, patches=Patches((8, 8), (4, 4), class_token=True))
    with pytest.raises(SpecError, match="there are no types"):
        ImagesAndTokens(97, types=2, patches=Patches((8, 8), (4, 4)))
    with pytest.raises(SpecError, match="no Hugging Face architecture"):
        to_hf(model.spec)
    assert isinstance(model.spec.embedding, Embed)
