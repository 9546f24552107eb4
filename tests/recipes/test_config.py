"""Reading config.json: whatever stands in it, the answer is a spec or one line."""

import json
import re
from typing import Any

import pytest
import torch
import transformers
from transformers.activations import ACT2FN
from transformers.models.bert import modeling_bert as bert
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe

from sublayer.errors import SpecError
from sublayer.nn.feed_forward import ACTIVATIONS
from sublayer.recipes import FAMILIES, family, from_hf
from sublayer.recipes.config import IRRELEVANT, Config, mean
from sublayer.spec import Spec
from tests.recipes.test_deepseek_v3 import config as deepseek_v3
from tests.recipes.test_deepseek_v3 import config_v2 as deepseek_v2
from tests.recipes.test_gemma import config as gemma
from tests.recipes.test_gemma4 import CONFIG as GEMMA4
from tests.recipes.test_gpt2 import CONFIG as GPT2
from tests.recipes.test_gpt_neox import CONFIG as GPT_NEOX
from tests.recipes.test_llama import config
from tests.recipes.test_olmo2 import CONFIG as OLMO2
from tests.recipes.test_phi3 import CONFIG as PHI3
from tests.recipes.test_state_spaces import LINES
from tests.recipes.test_state_spaces import config as state_space

CONFIGS = {
    **{name: gemma(name) for name in ("gemma", "gemma2", "gemma3_text")},
    "gemma4": GEMMA4,
    "deepseek_v3": deepseek_v3(),
    "deepseek_v2": deepseek_v2(),
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    **{name: state_space(name) for name in LINES},
    **{name.lower(): config(name) for name in ("Llama", "Mistral")},
    "olmo2": OLMO2,
    "phi3": PHI3,
    "qwen2": config("Qwen2", use_sliding_window=True),
    "qwen3": config("Qwen3", use_sliding_window=True, head_dim=8),
    "smollm3": config("SmolLM3"),
}
KEYS = (
    "architectures model_type head_dim rope_theta rope_scaling rope_parameters partial_rotary_factor sliding_window "
    "use_sliding_window max_window_layers layer_types hidden_act activation_function attention_dropout attention_bias "
    "mlp_bias tie_word_embeddings max_position_embeddings n_inner layer_norm_epsilon resid_pdrop pruned_heads unknown "
    "rotary_pct rotary_emb_base use_parallel_residual query_pre_attn_scalar rope_local_base_freq "
    "sliding_window_pattern per_layer_config num_kv_shared_layers attention_k_eq_v "
    "hidden_size_per_layer_input global_head_dim topk_method norm_topk_prob rope_interleave moe_layer_freq "
    "no_rope_layers"
)
VALUES = [
    None, True, False, 0, -1, 3, 1.5, 1 << 70, float("nan"), float("inf"), "", "silu", [], [1], ["a"], {}, {"a": 1},
    {"rope_type": []},
    {"rope_type": "linear", "factor": 0, "rope_theta": 0},
    {"rope_type": "dynamic", "factor": "2"},
    {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0},
    {"rope_type": "longrope", "short_factor": 3, "long_factor": [1]},
]  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_any_value_under_any_key_is_a_spec_or_one_line(name: str) -> None:
    refusals: list[str] = []
    for key in sorted({*KEYS.split(), *CONFIGS[name]}):
        for value in VALUES:
            try:
                spec, _ = from_hf(CONFIGS[name] | {key: value})
            except SpecError as error:
                refusals.append(str(error))
            else:
                assert isinstance(spec, Spec)
    assert len(refusals) > 100
    assert all(len(line) < 400 and "\n" not in line for line in refusals)
    assert not [line for line in refusals if "wrong type" in line]  # each names its key


def test_what_no_reader_foresaw_still_ends_in_one_line(monkeypatch) -> None:
    def reader(values: dict) -> None:
        raise TypeError("unhashable")

    monkeypatch.setitem(family("gpt2").HF, "GPT2LMHeadModel", reader)
    with pytest.raises(SpecError, match=r"config\.json holds a value of the wrong type: unhashable"):
        from_hf(GPT2)


def test_every_key_is_used_irrelevant_or_refused() -> None:
    values = Config({"model_type": "toy", "a": 1, "b": 2, "torch_dtype": "float16"})
    assert values("a") == 1
    with pytest.raises(SpecError, match="toy: config.json sets b=2, which this recipe does not model"):
        values.done()
    values.done("b")


def test_a_key_of_which_no_value_is_modelled_names_none() -> None:
    with pytest.raises(SpecError, match="toy: clip=1 is not modelled$"):
        Config({"model_type": "toy", "clip": 1}).fix("clip")
    with pytest.raises(SpecError, match=r"toy: clip=1 is not modelled \(only 2, 3\)$"):
        Config({"model_type": "toy", "clip": 1}).fix("clip", 2, 3)


def test_what_older_versions_wrote_of_every_model_is_read() -> None:
    """XLM-R's file has output_past; files within a file, and those written whole, have the others."""
    kept = {"is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False, "output_past": True}
    Config({"model_type": "toy", **kept}).done()
    with pytest.raises(SpecError, match="toy: add_cross_attention=True is not modelled"):
        Config({"model_type": "toy", **kept, "add_cross_attention": True}).done()


def test_a_null_is_told_from_a_key_that_is_missing() -> None:
    with pytest.raises(SpecError, match="toy: config.json has no 'depth' but null"):
        Config({"model_type": "toy", "depth": None})("depth")


def test_published_files_say_what_changes_nothing() -> None:
    """Qwen2.5's base models, and Mamba-Codestral, whose code gates before the norm whatever the file says."""
    qwen = config("Qwen2")
    assert from_hf(qwen | {"use_mrope": False})[0] == from_hf(qwen)[0]
    with pytest.raises(SpecError, match="use_mrope=True is not modelled"):
        from_hf(qwen | {"use_mrope": True})
    codestral = state_space("mamba2")
    assert from_hf(codestral | {"norm_before_gate": True})[0] == from_hf(codestral)[0]


@pytest.mark.parametrize(("name", "key"), [("bamba", "attn_layer_indices"), ("qwen3_moe", "mlp_only_layers"),
                                           ("qwen3_next", "mlp_only_layers")])  # fmt: skip
def test_a_list_of_layers_is_bounded(name: str, key: str) -> None:
    """Each layer is looked for in it, and a file has room for millions."""
    module = family(name)
    values = module.to_hf(getattr(module, name)(**module.TINY))
    for wrong in (list(range(10_001)), [1.5], [True], "1", {"1": 1}):
        with pytest.raises(SpecError, match=f"{key}=.* is not a list of layers, 10000 at most"):
            from_hf(values | {key: wrong})
    layers = values[key]
    assert from_hf(values | {key: [*reversed(layers), *layers]}) == from_hf(values)


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(SpecError) as caught:
        Config({"quantization_config": {"layers": list(range(10_000))}}).done()
    assert len(str(caught.value)) < 200


def test_keys_that_change_the_function_are_not_passed_over() -> None:
    assert not IRRELEVANT & {"quantization_config", "pruned_heads", "sliding_window", "rope_scaling", "hidden_act"}


@pytest.mark.parametrize("name", [name for name in FAMILIES if hasattr(family(name), "ACTIVATIONS")])
def test_an_activation_is_theirs_of_that_name(name: str) -> None:
    x = torch.linspace(-3, 3, 101, dtype=torch.float64)
    for theirs, ours in family(name).ACTIVATIONS.items():
        torch.testing.assert_close(ACTIVATIONS[ours](x), ACT2FN[theirs](x), rtol=0, atol=1e-9, msg=theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_tiny_model_is_written_and_read_as_itself(name: str) -> None:
    module = family(name)
    if module.HF:
        spec = getattr(module, name)(**module.TINY)
        assert from_hf(json.loads(json.dumps(module.to_hf(spec)))) == (spec, module)


@pytest.mark.parametrize("coefficient", [0.0, 0.001, 0.02, 0.5, 1 / 3, 0.1, 7.123456789012345e-4])
def test_a_coefficient_of_a_mean_is_written_as_it_was_read(coefficient: float) -> None:
    for layers in range(200):
        each = Config({"loss": coefficient}).over(layers, "loss", 0.0)
        assert each == (coefficient / layers if layers else coefficient)
        assert Config({"loss": mean(each, layers)}).over(layers, "loss", 0.0) == each
        if len(str(coefficient)) < 7:
            assert mean(each, layers) == coefficient


def test_a_coefficient_that_is_no_number_is_refused() -> None:
    with pytest.raises(SpecError, match="loss='a' is not a number"):
        Config({"loss": "a"}).over(2, "loss", 0.0)


# What their classes leave open and ours need.
OPEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p"]},
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
LATER = {"time_step_rank": "auto", "mamba_dt_rank": "auto"}  # which their classes work out
WITH_HEADS = [name for one in FAMILIES for name in family(one).HF if one != "dit" and not name.endswith("Model")]


@pytest.mark.parametrize("architecture", WITH_HEADS)
def test_an_absent_key_means_what_their_config_class_says(architecture: str) -> None:
    made: Any = getattr(transformers, architecture).config_class
    layers = 12 if hasattr(made(), "layer_types") else 4  # in keys of their own, numbers of two digits are padded
    given = made(**{key: layers for key in LAYERS if hasattr(made(), key)}, **OPEN.get(made.model_type, {}))
    full = json.loads(given.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    full |= {key: value for key, value in LATER.items() if key in full}
    whole, needed = from_hf(full)[0], {}
    for key in full:
        try:
            assert from_hf({other: value for other, value in full.items() if other != key})[0] == whole, key
        except SpecError:
            needed[key] = full[key]
    assert len(needed) < 16
    assert from_hf(needed)[0] == whole


def test_an_absent_key_does_not_follow_another() -> None:
    """Theirs does not take the decoder's sizes from the encoder's."""
    for name, key in (("transformer", "decoder_ffn_dim"), ("whisper", "decoder_attention_heads")):
        values = family(name).to_hf(getattr(family(name), name)(**family(name).TINY))
        with pytest.raises(SpecError, match=key):
            from_hf({other: value for other, value in values.items() if other != key})
    values = family("switch").to_hf(family("switch").switch(**family("switch").TINY))
    values.pop("num_decoder_layers")
    made = transformers.SwitchTransformersConfig(**values)
    assert len(from_hf(values)[0].find("decoder.blocks")) == made.num_decoder_layers == 12


# --- their config classes ---

MADE: dict[str, dict[str, Any]] = {
    "Deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},  # as all published files say
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DeepseekV2": {"num_experts_per_tok": 6},
}
"""What has to be said beside their defaults, by the beginning of a class's name."""


def theirs(name: str) -> Any:
    """A class of transformers; some are not among its public names."""
    for module in (transformers, bert, qwen3_5, qwen3_5_moe):
        if hasattr(module, name):
            return getattr(module, name)
    raise LookupError(name)


@pytest.mark.parametrize("name", [name for name in FAMILIES if family(name).HF and name != "dit"])  # dit is diffusers'
def test_every_key_that_their_class_writes_is_used_or_known(name: str) -> None:
    """All of to_dict(), with its defaults: more keys than published files have. One more, and it is refused."""
    for architecture in family(name).HF:
        changes = next((made for line, made in MADE.items() if re.match(f"{line}(For|Model)", architecture)), {})
        written = json.loads(json.dumps(theirs(architecture).config_class(**changes).to_dict()))
        config = written | {"architectures": [architecture]}
        spec, _ = from_hf(config)
        assert isinstance(spec, Spec)
        with pytest.raises(SpecError, match=r"config\.json sets made_up=1, which this recipe does not model"):
            from_hf(config | {"made_up": 1})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("LlamaForCausaLM", "did you mean 'LlamaForCausalLM'?"),
        ("LalmaForCausalLM", "did you mean 'LlamaForCausalLM'?"),
        ("llamaforcausallm", "sublayer recipes lists"),
        ("BertForNextSentencePrediction", "; of that line, these have: BertModel, "),
        ("GPT2DoubleHeadsModel", "sublayer recipes lists"),
        ("BartForConditionalGeneration", "has no recipe; sublayer recipes lists those that have"),
        ("BartForSequenceClassification", "has no recipe; sublayer recipes lists those that have"),
        ("Gemma3nForCausalLM", "has no recipe; sublayer recipes lists those that have"),
    ],
)
def test_an_unknown_architecture_is_not_told_as_another_one(name: str, told: str) -> None:
    with pytest.raises(SpecError, match=re.escape(told)):
        from_hf({"architectures": [name]})


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("deberta-v2", "one of DebertaV2Model, DebertaV2ForMaskedLM, .* for model_type 'deberta-v2'"),
        ("gpt_neox", "one of GPTNeoXForCausalLM, .* for model_type 'gpt_neox'"),
        ("rwkv", "; model_type 'rwkv' has no recipe"),
        (None, r"it needs architectures=\[…\]$"),
    ],
)
def test_a_file_without_an_architecture_is_told_those_of_its_type(kind: str | None, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        from_hf({"model_type": kind} if kind else {})
