"""T5 against transformers, and the faults that others had with it."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

import sublayer
from sublayer.errors import InputError, SpecError
from sublayer.nn.position import T5Buckets
from sublayer.recipes import to_hf
from sublayer.recipes.t5 import TINY, t5, t5_from_hf
from sublayer.state import State
from sublayer.step import Step
from tests.case import alone, rough
from tests.cases import CASES
from tests.oracle import check_parity, close, export, oracle, raised, saved

pytestmark = pytest.mark.filterwarnings("ignore:lm_head.weight differs from shared.weight")
SIZES: dict[str, Any] = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 3,
         "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}  # fmt: skip
CONFIG = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"} | SIZES
IDS = torch.randint(61, (2, 15), generator=torch.Generator().manual_seed(1))
SOURCE = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(2))
V11 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def tiny(family: type = T5Config, made: type = T5ForConditionalGeneration, **changes: Any) -> PreTrainedModel:
    theirs = oracle(family, made=made, **SIZES | changes)
    if changes.get("tie_word_embeddings") is False and hasattr(theirs, "lm_head"):
        # Published files of version 1.1 hold a head of its own; the class itself only makes tied ones.
        drawn = torch.randn(61, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        theirs.lm_head.weight = nn.Parameter(0.2 * drawn)
    return theirs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        V11,
        {"feed_forward_proj": "gated-gelu"},
        {"tie_word_embeddings": False},
        {"num_decoder_layers": 1, "layer_norm_epsilon": 1e-2},
        {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "d_kv": 16},
        *({"feed_forward_proj": form} for form in ("gelu", "silu", "gated-silu")),
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    ours = check_parity(tiny(**changes), tmp_path, IDS, source=SOURCE)
    assert ours.spec.shared
    assert ours.spec.tied == ("tie_word_embeddings" not in changes)


def test_mt5_equals_theirs(tmp_path) -> None:
    theirs = tiny(MT5Config, MT5ForConditionalGeneration, tie_word_embeddings=False)
    ours = check_parity(theirs, tmp_path, IDS, source=SOURCE)
    assert (ours.spec.tied, ours.spec.find("head.scale"), ours.spec.find("decoder.blocks.0.ffn.op.gated")) == (
        False, 1.0, True,
    )  # fmt: skip


@pytest.mark.parametrize("changes", [{}, V11], ids=str)
def test_padded_sources_and_targets_equal_theirs(changes: dict, tmp_path) -> None:
    heard = torch.tensor([[1] * 19, [1] * 7 + [0] * 12])
    read = torch.tensor([[1] * 11 + [0] * 4, [1] * 15])
    step = Step(segment=read, memory_segment=heard)
    masks = {"attention_mask": heard, "decoder_attention_mask": read}
    check_parity(tiny(**changes), tmp_path, IDS, step, read.bool(), SOURCE, **masks)


def test_an_encoder_alone_equals_theirs(tmp_path) -> None:
    theirs = tiny(made=T5EncoderModel)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    heard = torch.tensor([[1] * 19, [1] * 7 + [0] * 12])
    with raised():
        expected = theirs(SOURCE, attention_mask=heard).last_hidden_state
    close(ours(SOURCE, Step(segment=heard))[heard.bool()], expected[heard.bool()])


@pytest.mark.parametrize("changes", [{}, V11, {"feed_forward_proj": "gated-gelu"}], ids=str)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    export(tiny(**changes), tmp_path, IDS, SOURCE, T5ForConditionalGeneration)


def test_published_files_are_read_with_what_they_hold_besides(tmp_path) -> None:
    """The first files store the embedding three times and a bias that nothing reads."""
    theirs = tiny()
    first = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    tensors = load_file(tmp_path / "model.safetensors")
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    tensors |= {name: tensors["shared.weight"].clone() for name in copies}
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(8, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("scale_decoder_outputs", "is_gated_act")}
    (tmp_path / "config.json").write_text(json.dumps(kept | {"n_positions": 512, "output_past": True}))
    again = sublayer.load(tmp_path, dtype=torch.float64)
    assert again.spec == first.spec
    assert all(map(torch.equal, again.parameters(), first.parameters()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("feed_forward_proj", "gated-mish"),
        ("is_gated_act", True),
        ("dense_act_fn", "gelu"),
        ("is_encoder_decoder", False),
        ("is_decoder", True),
        ("relative_attention_num_buckets", 1),
        ("dropout_rate", 1.5),
        ("num_heads", 0),
        ("num_decoder_layers", 1_000_000_000),
        ("tie_word_embeddings", "yes"),
        ("rope_theta", 1e4),
        ("attention_bias", True),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(key: str, value: object) -> None:
    ours = {"relative_attention_num_buckets": "buckets", "dropout_rate": "dropout", "tie_word_embeddings": "tied"}
    with pytest.raises(SpecError, match=ours.get(key, key)) as caught:
        t5_from_hf(CONFIG | {key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["decoder.blocks.0.attn.op.scale=0.5", "shared=false", "encoder.norm=null"])
def test_a_model_that_no_class_of_theirs_has_is_not_exported(change: str) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(t5(**TINY).override(change))


# --- the shared table ---


def test_one_table_serves_the_encoder_the_decoder_and_the_head(tmp_path) -> None:
    model = rough(CASES["t5"])
    tables = [name for name, parameter in model.named_parameters() if parameter.shape == (61, 32)]
    assert tables == ["decoder.embed.tokens.weight"]
    assert model.spec.parameters() == sum(parameter.numel() for parameter in model.parameters())
    sublayer.save(model, tmp_path)
    assert [n for n, t in load_file(tmp_path / "model.safetensors").items() if t.shape == (61, 32)] == tables
    before = model(IDS[:, :3], source=SOURCE), model.encode(SOURCE)[0]
    with torch.no_grad():
        model.get_parameter(tables[0])[SOURCE[0, 0]] += 1.0
    after = model(IDS[:, :3], source=SOURCE), model.encode(SOURCE)[0]
    assert all(not torch.equal(old[0], new[0]) for old, new in zip(before, after, strict=True))


def test_the_shared_table_gets_both_trunks_gradients() -> None:
    model = rough(CASES["t5"])
    table = model.get_parameter("decoder.embed.tokens.weight")
    (of_source,) = torch.autograd.grad(model.encode(SOURCE[:1])[0].square().sum(), table)
    assert set(of_source.abs().sum(1).nonzero()[:, 0].tolist()) == set(SOURCE[0].tolist())


def test_an_encoder_without_its_table_says_so() -> None:
    with pytest.raises(InputError, match="reads the decoder's table"):
        rough(CASES["t5"]).get_submodule("encoder")(SOURCE, Step())


@pytest.mark.parametrize("change", ["encoder.embed.vocab=60", "encoder=null"])
def test_a_table_that_cannot_be_shared_is_refused(change: str) -> None:
    with pytest.raises(SpecError, match="shared=True needs an encoder and a decoder"):
        t5(**TINY).override(change)


# --- memory ---


@torch.no_grad()
def test_sources_may_lie_in_another_order_than_their_targets() -> None:
    case = CASES["t5"]
    model = rough(case)
    a, b = case.documents(case, [4, 6], 2)
    assert a.source is not None
    assert b.source is not None
    step = Step(segment=torch.tensor([[7] * 4 + [2] * 6]), memory_segment=torch.tensor([[2] * 7 + [0] + [7] * 3]))
    sources = torch.cat([b.source, torch.tensor([1]), a.source])
    logits = model(torch.cat([a.inputs, b.inputs])[None], step, source=sources[None])[0]
    close(logits, torch.cat([alone(model, a), alone(model, b)]))


@torch.no_grad()
def test_cross_keys_and_values_are_computed_once() -> None:
    model = rough(CASES["t5"])
    calls = {"k": 0, "v": 0, "encoder": 0}

    def count(what: str) -> None:
        calls[what] += 1

    cross = model.get_submodule("decoder.blocks.0.cross.op")
    cross.k.register_forward_hook(lambda *_: count("k"))  # pyright: ignore
    cross.v.register_forward_hook(lambda *_: count("v"))  # pyright: ignore
    model.get_submodule("encoder").register_forward_hook(lambda *_: count("encoder"))
    state = State.allocate(model, 2, 8, 19)
    model(IDS[:, :3], Step(), state, source=SOURCE)
    for i in range(3, 8):
        model(IDS[:, i : i + 1], Step(), state)
    assert calls == {"k": 1, "v": 1, "encoder": 1}


# --- faults others had ---


def test_the_decoders_buckets() -> None:
    # candle PR#899, hf#16216
    distances = torch.tensor([0, 1, 15, 16, 17, 31, 32, 64, 113, 500])
    buckets = T5Buckets(1, bidirectional=False).bucket(-distances)
    assert buckets.tolist() == [0, 1, 15, 16, 16, 21, 21, 26, 31, 31]
    assert T5Buckets(1, bidirectional=False).bucket(-torch.tensor([112])).item() == 30


@torch.no_grad()
def test_the_bias_counts_what_the_cache_holds() -> None:
    """Far enough for every bucket: token by token the logits of position 140 are those of the whole."""
    spec = t5(**dict[str, Any](TINY, layers=1, buckets=32, distance=128))
    model = spec.build(1, dtype=torch.float64).eval()
    ids = torch.randint(61, (1, 141), generator=torch.Generator().manual_seed(4))
    state = State.allocate(model, 1, 141, 19)
    whole = model(ids, source=SOURCE[:1])
    model(ids[:, :90], Step(), state, source=SOURCE[:1])
    for i in range(90, 141):
        close(model(ids[:, i : i + 1], Step(), state)[:, 0], whole[:, i])


@torch.no_grad()
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("largest", [70e3, 1e8])
def test_activations_beyond_float16_stay_finite(gated: bool, largest: float) -> None:
    # hf#5651, #9295: a feed-forward layer wrote 66246, and float16 ends at 65504.
    model = t5(**TINY, gated=gated).build(1).eval()
    for trunk in ("encoder", "decoder"):
        ffn, wrote = model.get_submodule(f"{trunk}.blocks.1.ffn.op"), list[float]()
        hook = ffn.register_forward_hook(lambda *args, wrote=wrote: wrote.append(float(args[2].abs().max())))
        model(IDS, source=SOURCE)
        hook.remove()
        for name in ("up", "down"):
            ffn.get_parameter(f"{name}.weight").mul_((largest / wrote[0]) ** 0.5)
    expected = model(IDS, source=SOURCE)
    logits = model.half()(IDS, source=SOURCE)
    assert logits.isfinite().all()
    if largest < 1e5:  # little is cut off, and the norms bring back the rest
        assert F.cosine_similarity(logits.float(), expected, -1).min() > 0.99


# --- how new models begin ---


def test_new_weights_begin_as_the_authors() -> None:
    model = t5(256, 1, 4, 512, 1000, head_size=64, tied=False).build(0)
    deviations = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    for trunk, attention in (("encoder", "attn"), ("decoder", "attn"), ("decoder", "cross")):
        at = f"{trunk}.blocks.0.{attention}.op"
        for name, expected in (("q", (256 * 64) ** -0.5), ("k", 1 / 16), ("v", 1 / 16), ("out", 1 / 16)):
            assert deviations[f"{at}.{name}.weight"] == pytest.approx(expected, rel=0.05)
    for name, expected in (
        ("decoder.embed.tokens.weight", 1.0),
        ("decoder.blocks.0.ffn.op.up.weight", 1 / 16),
        ("decoder.blocks.0.ffn.op.down.weight", 512**-0.5),
        ("encoder.bias.weight", 1 / 16),
    ):
        assert deviations[name] == pytest.approx(expected, rel=0.2)
