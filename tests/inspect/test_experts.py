"""Statistics of experts, counted by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from sublayer.errors import InputError
from sublayer.inspect.experts import experts, routings
from sublayer.nn.moe import MoEOp
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import mixtral
from sublayer.recipes.mixtral import TINY
from sublayer.step import Step
from tests.tiny import tiny

IDS = torch.randint(97, (3, 8), generator=torch.Generator().manual_seed(1))
SEGMENT = torch.tensor([[1] * 8, [0] * 3 + [1] * 5, [1, 1, 2, 2, 2, 0, 0, 0]])


def model(**router: object) -> ModelOp:
    changes = [f"decoder.blocks.*.ffn.op.router.{key}={value}" for key, value in router.items()]
    return mixtral(**TINY).override(*changes).build(seed=3).eval()


def test_counts_are_those_of_the_routing_itself() -> None:
    net = model()
    with torch.no_grad(), routings(net) as seen:
        net(IDS, Step(segment=SEGMENT))
    found = experts(net, [(IDS[:1], Step(segment=SEGMENT[:1])), (IDS[1:], Step(segment=SEGMENT[1:]))])
    assert list(found) == list(seen) == ["decoder.blocks.0.ffn", "decoder.blocks.1.ffn"]
    for name, layer in found.items():
        (routing,) = seen[name]
        assert layer.tokens == 8 + 5 + 5
        sent, together, by_token, entropy = [0] * 4, [[0] * 4 for _ in range(4)], [[0] * 97 for _ in range(4)], 0.0
        weight = [0.0] * 4
        for b, t in torch.nonzero(SEGMENT).tolist():
            pair = routing.chosen[b, t].tolist()
            for rank, e in enumerate(pair):
                sent[e] += 1
                weight[e] += float(routing.weights[b, t, rank])
                by_token[e][int(IDS[b, t])] += 1
                for other in pair:
                    together[e][other] += 1
            entropy -= sum(float(p) * math.log(float(p)) for p in routing.scores[b, t])
        assert layer.sent.tolist() == sent
        assert layer.together.tolist() == together
        assert layer.by_token.tolist() == by_token
        assert layer.dropped == 0
        assert_close(layer.load, torch.tensor(sent) / 36)
        assert layer.entropy == pytest.approx(-sum(n / 36 * math.log(n / 36) for n in sent if n), rel=1e-5)
        assert layer.doubt == pytest.approx(entropy / 18, rel=1e-5)
        assert layer.weight.tolist() == pytest.approx([w / max(n, 1) for w, n in zip(weight, sent, strict=True)])
        busiest = max(range(4), key=sent.__getitem__)
        assert layer.most(busiest, 3)[0][1] == max(by_token[busiest])
        assert sum(times for _, times in layer.most(busiest, 97)) == sent[busiest]


def test_what_a_full_expert_drops_is_counted_apart() -> None:
    found = experts(model(active=1, capacity=2, renormalise="false"), [IDS])
    for layer in found.values():
        assert int(layer.sent.sum()) + layer.dropped == layer.tokens == IDS.numel()
        assert layer.dropped > 0
        assert int(layer.together.diagonal().sum()) == layer.tokens  # what was chosen, dropped or not


def test_the_model_is_left_as_it_was() -> None:
    net = model().train()
    seen: list[object] = []
    layers = [module for module in net.modules() if isinstance(module, MoEOp)]
    layers[0].watch = seen.append
    experts(net, [IDS])
    assert net.training
    assert layers[0].watch == seen.append
    assert layers[1].watch is None
    assert not seen


def test_nothing_to_count_is_an_error() -> None:
    for net, batches in ((tiny().build(), [IDS]), (model(), [])):
        with pytest.raises(InputError, match="no expert was asked"):
            experts(net, batches)
