import math

import pytest
import torch
from torch import Tensor, nn

from sublayer.errors import InputError
from sublayer.inspect.trace import attention, watching
from sublayer.nn.additive import AdditiveOp
from sublayer.nn.attend import Kernel
from sublayer.nn.attention import AttentionOp
from sublayer.nn.rope import Rope
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import family, gpt2, llama
from tests.decoding.models import ENCODER_DECODERS, SPECS, tiny

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def kernel(model: ModelOp, name: Kernel) -> ModelOp:
    for module in model.modules():
        if isinstance(module, AttentionOp):
            module.kernel = name
    return model


def layers(model: ModelOp) -> dict[str, AttentionOp]:
    return {name: module for name, module in model.named_modules() if isinstance(module, AttentionOp)}


def turned(x: Tensor, theta: float) -> Tensor:
    """x [L, N, H] by RoPE's definition: (i, i + H/2) are a complex number, turned by position · theta^(−2i/H)."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([pairs.real, pairs.imag], -1)


@pytest.mark.parametrize("name", ["gpt2", "llama", "window"])
def test_weights_are_the_softmax_of_the_products_of_queries_and_keys(name: str) -> None:
    spec = {
        "gpt2": gpt2(24, 2, 4, vocab=16, context=32),
        "llama": llama(24, 2, 6, 2, hidden=32, vocab=16, rope=Rope(theta=100.0)),
        "window": llama(24, 2, 6, 2, hidden=32, vocab=16, rope=Rope(theta=100.0), window=4),
    }[name]
    model = tiny(spec)
    inputs: dict[str, Tensor] = {}
    handles = []
    for at, op in layers(model).items():

        def keep(module: nn.Module, given: tuple[Tensor, ...], at: str = at) -> None:
            inputs[at] = given[0][0].detach()

        handles.append(op.register_forward_pre_hook(keep))
    found = attention(model, IDS)
    assert list(found) == ["decoder.blocks.0.attn", "decoder.blocks.1.attn"]
    for handle in handles:
        handle.remove()
    for at, op in layers(model).items():
        assert op.k is not None
        q, k = (part(inputs[at]).detach().unflatten(-1, (-1, op.head_size)) for part in (op.q, op.k))
        if op.rope is not None:
            q, k = turned(q, 100.0), turned(k, 100.0)
        expected = torch.zeros(q.shape[1], len(IDS), len(IDS), dtype=torch.float64)
        for head in range(q.shape[1]):
            for i in range(len(IDS)):
                first = max(0, i - 3) if name == "window" else 0
                scores = [
                    float(q[i, head] @ k[j, head * k.shape[1] // q.shape[1]]) / math.sqrt(op.head_size)
                    for j in range(first, i + 1)
                ]
                shares = [math.exp(score - max(scores)) for score in scores]
                expected[head, i, first : i + 1] = torch.tensor(shares, dtype=torch.float64) / sum(shares)
        torch.testing.assert_close(found[at.removesuffix(".op")], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(SPECS.keys() - {"recurrent"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_watched_outputs_are_those_of_the_reference_kernel_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model = kernel(tiny(SPECS[name], dtype), "reference")
    ids = torch.tensor([IDS])
    plain = model(ids)
    with watching(model) as seen:
        watched = model(ids)
    assert torch.equal(plain, watched)
    for weights in seen.values():
        torch.testing.assert_close(weights[0].sum(-1), torch.ones_like(weights[0][..., 0]), rtol=0, atol=1e-6)
        assert torch.equal(weights[0], weights[0].tril())


@pytest.mark.parametrize("name", sorted(SPECS.keys() - {"recurrent"}))
def test_watched_outputs_are_those_of_the_usual_kernel_but_for_rounding(name: str) -> None:
    model = tiny(SPECS[name])
    with watching(model):
        watched = model(torch.tensor([IDS]))
    torch.testing.assert_close(
        watched, model(torch.tensor([IDS])), rtol=0, atol=1e-12 * float(watched.detach().abs().max())
    )


def test_the_weights_shown_are_those_that_the_output_was_made_of() -> None:
    """Changing what an operation reads changes what is shown: a hook's work is seen, for nothing is computed apart."""
    model = tiny(SPECS["llama"])
    first = next(iter(layers(model).values()))
    before = attention(model, IDS)

    def doubled(module: nn.Module, given: tuple[Tensor, ...], values: Tensor) -> Tensor:
        return 2 * values

    assert first.v is not None
    handle = first.v.register_forward_hook(doubled)
    after = attention(model, IDS)
    handle.remove()
    one, two = before
    assert torch.equal(before[one], after[one])
    assert not torch.allclose(before[two], after[two])


def test_watching_leaves_the_model_as_it_was() -> None:
    model = kernel(tiny(SPECS["llama"]), "sdpa").train()
    attention(model, IDS)
    with pytest.raises(RuntimeError, match="on purpose"), watching(model):
        raise RuntimeError("on purpose")
    assert model.training
    assert all((op.kernel, op.watch) == ("sdpa", None) for op in layers(model).values())


def test_dropout_is_off_in_what_is_shown() -> None:
    spec = SPECS["llama"].override("decoder.blocks.*.attn.op.dropout=0.5")
    model = tiny(spec).train()
    found = attention(model, IDS)
    assert all(torch.equal(found[name], weights) for name, weights in attention(model, IDS).items())
    torch.testing.assert_close(found["decoder.blocks.1.attn"].sum(-1), torch.ones(4, len(IDS)).double())


def test_every_attention_of_an_encoder_decoder_is_seen_in_every_call() -> None:
    model = tiny(ENCODER_DECODERS["t5"])
    with watching(model) as seen, torch.inference_mode():
        model(torch.tensor([IDS[:4]]), source=torch.tensor([IDS]))
        model(torch.tensor([IDS[:5]]), source=torch.tensor([IDS]))
    shapes = {name: [list(call.shape[2:]) for call in calls] for name, calls in seen.items()}
    n = len(IDS)
    assert {name for name in shapes if name.endswith("cross")}
    for name, found in shapes.items():
        kind = "encoder" if name.startswith("encoder") else name.rsplit(".", 1)[1]
        expected = {"encoder": [[n, n], [n, n]], "cross": [[4, n], [5, n]]}.get(kind, [[4, 4], [5, 5]])
        assert found == expected, name


def test_additive_attention_is_seen_as_one_head() -> None:
    module = family("seq2seq")
    model = module.seq2seq(**module.TINY).build(seed=0)
    with watching(model) as seen, torch.inference_mode():
        model(torch.tensor([IDS[:4]]), source=torch.tensor([IDS]))
    (calls,) = seen.values()
    assert [list(call.shape) for call in calls] == [[1, 1, 4, len(IDS)]]
    torch.testing.assert_close(calls[0].sum(-1), torch.ones(1, 1, 4))
    assert all(op.watch is None for op in model.modules() if isinstance(op, AdditiveOp))


def test_decoding_shows_each_new_token_over_all_before_it() -> None:
    model = tiny(SPECS["llama"])
    with watching(model) as seen:
        (row,) = model.generate(IDS, max_tokens=3, temperature=0)
    whole = attention(model, [*IDS, *row.ids])
    for name, calls in seen.items():
        assert [list(call.shape) for call in calls] == [[1, 4, 11, 11], [1, 4, 1, 12], [1, 4, 1, 13]]
        torch.testing.assert_close(calls[2][0, :, 0], whole[name][:, 12, :13], rtol=0, atol=1e-10)


def test_what_cannot_be_shown_is_said() -> None:
    with pytest.raises(InputError, match="nothing attends"):
        attention(tiny(SPECS["recurrent"]), IDS)
    for wrong in ([], [IDS]):
        with pytest.raises(InputError, match=r"give its token ids \[L\]"):
            attention(tiny(SPECS["llama"]), torch.tensor(wrong))
