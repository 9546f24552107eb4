"""MegaByte against its equations (arXiv 2305.07185, section 2), naive and in fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sublayer.errors import SpecError
from sublayer.nn.rope import Rope
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import model, to_hf
from sublayer.recipes.multiscale import TINY, multiscale
from sublayer.state import State
from sublayer.step import Step
from sublayer.train.flops import flops_per_token
from sublayer.train.optim import kinds
from tests.case import rough
from tests.cases import CASES
from tests.oracle import PACKED, close

P = TINY["patch"]
IDS = torch.randint(TINY["vocab"], (2, 12), generator=torch.Generator().manual_seed(1))


def built() -> ModelOp:
    return rough(CASES["multiscale"])


def layer(x: Tensor, weights: dict[str, Tensor], heads: int) -> Tensor:
    """A pre-norm layer of a transformer decoder, [L, D], one query at a time."""

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    y = norm(x, "attn.pre")
    q, k, v = (linear(y, f"attn.op.{name}").unflatten(-1, (heads, -1)) for name in "qkv")
    rows: list[Tensor] = []
    for i in range(len(x)):
        scores = torch.einsum("nh,mnh->nm", q[i], k[: i + 1]) / q.shape[-1] ** 0.5
        rows.append(torch.einsum("nm,mnh->nh", scores.softmax(-1), v[: i + 1]).flatten())
    x = x + linear(torch.stack(rows), "attn.op.out")
    inner = linear(norm(x, "ffn.pre"), "ffn.op.up")
    return x + linear(inner * (1 + torch.erf(inner / 2**0.5)) / 2, "ffn.op.down")


def trunk(x: Tensor, weights: dict[str, Tensor], prefix: str, norm: str, heads: int) -> Tensor:
    for i in range(2):
        start = f"{prefix}.blocks.{i}."
        x = layer(x, {name.removeprefix(start): w for name, w in weights.items() if name.startswith(start)}, heads)
    return F.layer_norm(x, x.shape[-1:], weights[f"{norm}.weight"], weights[f"{norm}.bias"])


def published(model: ModelOp, document: Tensor) -> Tensor:
    """[L, V]: the equations for the bytes y that follow the first token of a document, which completes the padding.

    y_t is predicted from the patches before its own and the bytes of its patch before it.
    """
    weights: dict[str, Tensor] = dict(model.named_parameters())
    front = "decoder.embed"
    embedded = weights[f"{front}.bytes.weight"][document] + weights[f"{front}.position.weight"][: len(document)]
    padding = torch.cat([weights[f"{front}.before"], embedded[:1]])  # E^global-pad
    y, answers = document[1:], list[Tensor]()
    patches = [padding, *(embedded[1 + k : 1 + k + P] for k in range(0, len(y) - P + 1, P))]
    h_global_in = torch.stack([patch.flatten() for patch in patches])
    h_global_out = trunk(h_global_in, weights, f"{front}.trunk", f"{front}.trunk.norm", TINY["global_heads"])
    table = weights[f"{front}.tokens.weight"]
    for k, said in enumerate(h_global_out):
        count = min(P, len(document) - k * P)
        own = said.view(P, -1)[:count] @ weights[f"{front}.down.weight"].T
        local = torch.stack([weights[f"{front}.begin"], *table[y[k * P : k * P + count - 1]]])
        answers.append(trunk(local + own, weights, "decoder", "decoder.norm", TINY["heads"]) @ table.T)
    return torch.cat(answers)


def check_parity(found: list[tuple[ModelOp, Tensor]], documents: list[Tensor]) -> None:
    """The same logits, loss and gradients."""
    (ours, logits), (theirs, _) = found[0], found[-1]
    expected = torch.cat([published(theirs, document) for document in documents])
    close(logits, expected, "logits")
    targets = torch.arange(len(expected)) % TINY["vocab"]
    for answer in (logits, expected):
        F.cross_entropy(answer, targets).backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        if not name.endswith(".k.bias"):  # it moves the scores of a query alike: 0 but for rounding
            close(a.grad, b.grad, f"gradient of {name}")


@pytest.mark.parametrize("length", [5, 11, 12])
def test_logits_loss_and_gradients_are_those_of_the_equations(length: int) -> None:
    ours, documents = built(), [*IDS[:, :length]]
    check_parity([(ours, ours(IDS[:, :length]).flatten(0, 1)), (built(), IDS)], documents)


def test_patches_begin_at_each_document_of_a_packed_row() -> None:
    ours = built()
    logits = ours(IDS, Step(segment=PACKED))
    documents = [(row, PACKED[row] == number) for row in range(len(IDS)) for number in PACKED[row].unique() if number]
    found = torch.cat([logits[row, here] for row, here in documents])
    check_parity([(ours, found), (built(), IDS)], [IDS[row, here] for row, here in documents])


def test_no_byte_sees_itself_or_what_follows() -> None:
    model, other = built(), IDS.clone()
    other[:, 6:] = (other[:, 6:] + 1) % TINY["vocab"]
    a, b = model(IDS), model(other)
    assert torch.equal(a[:, :6], b[:, :6])
    assert bool((a[:, 6:] != b[:, 6:]).any(-1).all())


@torch.no_grad()
def test_the_global_trunk_runs_when_a_patch_is_full() -> None:
    model, state, runs = built(), None, list[int]()
    state = State.allocate(model, 2, 12)
    front: Any = model.get_submodule("decoder.embed.trunk.blocks.0")
    front.register_forward_pre_hook(lambda module, args: runs.append(args[0].shape[1]))
    where = list[int]()
    for i in range(12):
        before = len(runs)
        model(IDS[:, i : i + 1], None, state)
        where += [i] * (len(runs) > before)
    assert where == [0, 4, 8]
    assert set(runs) == {1}


def test_rotary_positions_in_both_trunks() -> None:
    rope = {f"decoder.{path}blocks.*.attn.op.position": Rope() for path in ("", "embed.")}
    model = multiscale(**TINY).override(**rope, **{"decoder.embed.position": None}).build(dtype=torch.float64).eval()
    state = State.allocate(model, 2, 12)
    parts = [model(chunk, None, state) for chunk in IDS.split([3, 1, 6, 2], 1)]
    close(torch.cat(parts, 1), model(IDS), "logits")
    packed = model(IDS.view(1, -1), Step(segment=torch.tensor([[1] * 12 + [2] * 12])))
    close(packed.view(2, 12, -1), model(IDS), "packed")


def test_generates_with_beams_and_alone() -> None:
    model = built()
    prompts = [IDS[0, :5].tolist(), IDS[1, :2].tolist()]
    together = model.generate(prompts, max_tokens=9, temperature=0)
    for prompt, found in zip(prompts, together, strict=True):
        ids = list(prompt)
        for _ in range(9):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert list(found.ids) == ids[len(prompt) :]
    assert len(model.generate(prompts, max_tokens=9, beams=3)) >= 2


def test_a_patch_of_eight_costs_an_eighth_of_the_global_trunk() -> None:
    spec = multiscale(**TINY)
    model = spec.build()
    front: Any = model.get_submodule("decoder.embed")
    inner, local = 0, 0
    for name, parameter in model.named_parameters():
        if kinds(model)[name] == "matrix":
            size, within = parameter.numel(), "embed.trunk" in name
            inner, local = inner + size * within, local + size * (not within)
    down = front.down.weight.numel()
    head = TINY["vocab"] * TINY["dim"]
    attention = 12 * (2 * TINY["dim"] * P + 2 * TINY["global_dim"] * (32 // P) // P)
    assert flops_per_token(model, 32) == 6 * (inner // P + down + local + head) + attention


def test_published_size_and_refusals() -> None:
    # Embeddings of bytes and positions; 12 D² + 13 D a layer; norms; the projection between the trunks; what is trained
    # in place of bytes.
    def layers(dim: int) -> int:
        return 24 * (12 * dim * dim + 13 * dim) + 2 * dim

    small = 257 * (1024 + 256) + 8192 * 256 + 256 * 1024 + 7 * 256 + 1024
    assert model("megabyte-1.3b-350m").parameters() == layers(2048) + layers(1024) + small
    with pytest.raises(SpecError, match="not a multiple of patch"):
        multiscale(**TINY | {"global_dim": 34})
    with pytest.raises(SpecError, match="no Hugging Face"):
        to_hf(multiscale(**TINY))


def test_a_first_call_of_nothing_but_padding() -> None:
    """Rows padded on the left, a token a call: no byte has come, so no patch says anything yet."""
    model = built()
    state = State.allocate(model, 2, 8)
    nothing = torch.zeros(2, 1, dtype=torch.long)
    with torch.no_grad():
        model(nothing, Step(segment=nothing), state)
        found = model(IDS[:, :5], Step(), state)
        close(found, model(IDS[:, :5], Step()))
