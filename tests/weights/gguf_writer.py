"""GGUF files from folders that transformers wrote, by another hand than Sublayer's: names come from the gguf package,
values are moved in numpy, and keys are set as llama.cpp's converters set them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType
from safetensors.numpy import load_file

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]


def write(
    folder: Path,
    path: Path,
    *,
    wide: bool = True,
    tokens: bool = False,
    split: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """The GGUF file of a folder with config.json and model.safetensors; wide: in 64-bit numbers, which llama.cpp does
    not read. tokens: with a vocabulary of letters, which it needs. split: how the gguf package cuts it into parts, of
    which none has the path itself. changes: of the config."""
    config = json.loads((folder / "config.json").read_text()) | changes
    arch, about, change = MODELS[config["architectures"][0]]
    number = getattr(MODEL_ARCH, arch)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[number], **split or {})
    about(writer, config)
    layers = max(config.get(key) or 0 for key in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"))
    names = gguf.get_tensor_name_map(number, layers)
    for name, value in change(load_file(folder / "model.safetensors"), config).items():
        known = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        kept = value.astype(np.float64 if wide and value.ndim else np.float32)
        writer.add_tensor(known, np.ascontiguousarray(kept), raw_dtype=None if kept.dtype != np.float64 else F64)
    if tokens:
        vocabulary(writer, config["vocab_size"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


F64 = GGMLQuantizationType.F64


def vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Tokens that say no more than their numbers."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*("<unk>", "<s>", "</s>"), *(f"t{i}" for i in range(3, size))])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([2, 3, 3, *[1] * (size - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


# --- keys ---


def sizes(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def dense(writer: gguf.GGUFWriter, config: Config) -> None:
    sizes(writer, config)
    writer.add_feed_forward_length(config["intermediate_size"])


def heads(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])


def rope(writer: gguf.GGUFWriter, config: Config) -> None:
    given = config["rope_parameters"]
    given = given.get("full_attention", given)
    writer.add_rope_freq_base(given["rope_theta"])
    kind = given["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(given["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(given["original_max_position_embeddings"])
        if "attention_factor" in given:  # to llama.cpp, a factor of the usual one
            writer.add_rope_scaling_attn_factors(given["attention_factor"] / (1 + 0.1 * math.log(given["factor"])))


def llama(writer: gguf.GGUFWriter, config: Config) -> None:
    dense(writer, config)
    rope(writer, config)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])


def qwen(writer: gguf.GGUFWriter, config: Config) -> None:
    dense(writer, config)
    rope(writer, config)
    if config.get("head_dim"):
        heads(writer, config)
    if "moe_intermediate_size" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def olmo2(writer: gguf.GGUFWriter, config: Config) -> None:
    dense(writer, config)
    rope(writer, config)


def phi3(writer: gguf.GGUFWriter, config: Config) -> None:
    dense(writer, config)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    part = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(part * config["hidden_size"]) // config["num_attention_heads"])
    trained = config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(trained)
    writer.add_sliding_window(config["sliding_window"] or 0)
    if "long_factor" in config["rope_parameters"]:
        scale = config["max_position_embeddings"] / trained
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(trained))))


def gemma(writer: gguf.GGUFWriter, config: Config) -> None:
    dense(writer, config)
    heads(writer, config)


def gemma2(writer: gguf.GGUFWriter, config: Config) -> None:
    gemma(writer, config)
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def gemma3(writer: gguf.GGUFWriter, config: Config) -> None:
    gemma(writer, config)
    rope(writer, config)
    writer.add_sliding_window(config["sliding_window"])


def gpt2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def neox(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    part = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(part * (config["hidden_size"] // config["num_attention_heads"])))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_parallel_residual(config["use_parallel_residual"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])


def gpt_oss(writer: gguf.GGUFWriter, config: Config) -> None:
    sizes(writer, config)
    heads(writer, config)
    rope(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])


def mamba(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(int(config["expand"] * config["hidden_size"]))
    writer.add_ssm_state_size(config["state_size"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "mamba":
        writer.add_ssm_time_step_rank(config["time_step_rank"])
        writer.add_ssm_dt_b_c_rms(False)
    else:
        writer.add_ssm_time_step_rank(config["num_heads"])
        writer.add_ssm_group_count(config["n_groups"])


def jamba(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    layers = range(config["num_hidden_layers"])
    writer.add_head_count_kv([config["num_key_value_heads"] if i % period == offset else 0 for i in layers])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])


def _encoder(writer: gguf.GGUFWriter, config: Config, eps: float) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(eps)
    writer.add_causal_attention(False)


def bert(writer: gguf.GGUFWriter, config: Config) -> None:
    _encoder(writer, config, config["layer_norm_eps"])
    writer.add_pooling_type(gguf.PoolingType.MEAN)


def modernbert(writer: gguf.GGUFWriter, config: Config) -> None:
    _encoder(writer, config, config["norm_eps"])
    writer.add_sliding_window(config["local_attention"])
    writer.add_sliding_window_pattern(3)
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_vocab_size(config["vocab_size"])


def t5(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_context_length(config.get("n_positions", 512))
    writer.add_embedding_length(config["d_model"])
    writer.add_feed_forward_length(config["d_ff"])
    writer.add_block_count(config["num_layers"])
    writer.add_decoder_block_count(config["num_decoder_layers"])
    writer.add_head_count(config["num_heads"])
    writer.add_key_length(config["d_kv"])
    writer.add_value_length(config["d_kv"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_relative_attn_buckets_count(config["relative_attention_num_buckets"])
    writer.add_decoder_start_token_id(0)


def deepseek(writer: gguf.GGUFWriter, config: Config) -> None:
    dense(writer, config | {"num_key_value_heads": 1})
    rope(writer, config)
    latent, turning = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + turning)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turning)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_rope_dimension_count(turning)
    third = config["model_type"] == "deepseek_v3"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if third else gguf.ExpertGatingFuncType.SOFTMAX)
    if third:
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if (scale := config["rope_parameters"].get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


# --- tensors: name of theirs → value as GGUF holds it; a name that the gguf package does not know is GGUF's own ---


def plain(tensors: Tensors, config: Config) -> Tensors:
    return tensors


def turned(tensors: Tensors, config: Config) -> Tensors:
    """q and k: the pair (i, i + H/2) of a head becomes (2i, 2i + 1), row by row."""
    found = dict(tensors)
    for name, value in tensors.items():
        for part, count in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
            if part in name:
                size = len(value) // count
                moved = np.empty_like(value)
                for head in range(count):
                    for i in range(size // 2):
                        moved[head * size + 2 * i] = value[head * size + i]
                        moved[head * size + 2 * i + 1] = value[head * size + size // 2 + i]
                found[name] = moved
    parameters = config["rope_parameters"]
    if parameters["rope_type"] == "llama3":
        found["rope_freqs.weight"] = _llama3(parameters, config["hidden_size"] // config["num_attention_heads"])
    return found


def _llama3(parameters: Config, size: int) -> np.ndarray:
    factors = []
    for i in range(size // 2):
        wave = 2 * np.pi * parameters["rope_theta"] ** (2 * i / size)
        trained, factor = parameters["original_max_position_embeddings"], parameters["factor"]
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        smooth = (trained / wave - low) / (high - low)
        factors.append(
            1.0 if wave < trained / high else factor if wave > trained / low else 1 / ((1 - smooth) / factor + smooth)
        )
    return np.array(factors)


def stacked(tensors: Tensors, config: Config) -> Tensors:
    """Experts of one layer and one matrix in one tensor, under the name that the gguf package has for it."""
    found: Tensors = {}
    parts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(.*)\.experts\.(\d+)\.(.*)", name)
        if match:
            parts.setdefault(f"{match[1]}.experts.{match[3]}", {})[int(match[2])] = value
        else:
            found[name] = value
    for name, experts in parts.items():
        if "block_sparse_moe" in name:  # Mixtral's
            name = name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
        else:
            name = name.replace("feed_forward", "mlp")
        found[name] = np.stack([experts[i] for i in range(len(experts))])
    return found


def mixtral(tensors: Tensors, config: Config) -> Tensors:
    return stacked(turned(tensors, config), config)


def one_more(tensors: Tensors, config: Config) -> Tensors:
    return {name: value + 1 if name.endswith("norm.weight") else value for name, value in tensors.items()}


def phi3_factors(tensors: Tensors, config: Config) -> Tensors:
    found = dict(tensors)
    for kind in ("long", "short"):
        if f"{kind}_factor" in config["rope_parameters"]:
            found[f"rope_factors_{kind}.weight"] = np.array(config["rope_parameters"][f"{kind}_factor"])
    return found


def by_rows(tensors: Tensors, config: Config) -> Tensors:
    ends = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {name: value.T if name.endswith(ends) else value for name, value in tensors.items()}


def apart(tensors: Tensors, config: Config) -> Tensors:
    found = dict(tensors)
    heads = config["num_attention_heads"]
    for name, value in tensors.items():
        if ".query_key_value." in name:
            size = len(value) // heads // 3
            order = [
                head * 3 * size + part * size + i for part in range(3) for head in range(heads) for i in range(size)
            ]
            found[name] = value[order]
    return found


def oss(tensors: Tensors, config: Config) -> Tensors:
    found: Tensors = {}
    for name, value in tensors.items():
        if name.endswith("sinks"):
            found[name + ".weight"] = value
        elif name.endswith("gate_up_proj"):
            for i, part in enumerate(("gate", "up")):
                found[name.replace("gate_up_proj", f"{part}_proj.weight")] = value[:, :, i::2].transpose(0, 2, 1)
        elif name.endswith("gate_up_proj_bias"):
            for i, part in enumerate(("gate", "up")):
                found[name.replace("gate_up_proj_bias", f"{part}_proj.bias")] = value[:, i::2]
        elif name.endswith("down_proj"):
            found[name + ".weight"] = value.transpose(0, 2, 1)
        elif name.endswith("down_proj_bias"):
            found[name.replace("_bias", ".bias")] = value
        else:
            found[name] = value
    return found


def state_space(tensors: Tensors, config: Config) -> Tensors:
    found: Tensors = {}
    second = config["model_type"] == "mamba2"
    for name, value in tensors.items():
        if name.endswith("conv1d.weight"):
            value = value[:, 0]
        elif name.endswith("A_log"):
            value = -np.exp(value)
        if second and name.endswith((".A_log", ".D")):
            value = value[:, None]
        elif second and name.endswith("mixer.norm.weight"):
            value = value.reshape(config["n_groups"], -1)
        elif name.endswith(".dt_bias"):
            name = name.replace(".dt_bias", ".dt_proj.bias")
        found[name] = value
    return stacked(found, config)


def without_pooler(tensors: Tensors, config: Config) -> Tensors:
    return {name: value for name, value in tensors.items() if "pooler" not in name and "position_ids" not in name}


def latent(tensors: Tensors, config: Config) -> Tensors:
    found: Tensors = {}
    heads, content = config["num_attention_heads"], config["qk_nope_head_dim"]
    for name, value in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            each = value.reshape(heads, -1, value.shape[-1])
            found[name.replace("kv_b", "k_b")] = np.stack([each[head, :content].T for head in range(heads)])
            found[name.replace("kv_b", "v_b")] = each[:, content:]
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = value
    return stacked(found, config)


MODELS: dict[str, tuple[str, Callable[[gguf.GGUFWriter, Config], None], Callable[[Tensors, Config], Tensors]]] = {
    "LlamaForCausalLM": ("LLAMA", llama, turned),
    "MistralForCausalLM": ("LLAMA", llama, turned),
    "SmolLM3ForCausalLM": ("SMOLLM3", llama, turned),
    "MixtralForCausalLM": ("LLAMA", llama, mixtral),
    "Qwen2ForCausalLM": ("QWEN2", qwen, plain),
    "Qwen3ForCausalLM": ("QWEN3", qwen, plain),
    "Qwen3MoeForCausalLM": ("QWEN3MOE", qwen, stacked),
    "Olmo2ForCausalLM": ("OLMO2", olmo2, plain),
    "Phi3ForCausalLM": ("PHI3", phi3, phi3_factors),
    "GemmaForCausalLM": ("GEMMA", gemma, one_more),
    "Gemma2ForCausalLM": ("GEMMA2", gemma2, one_more),
    "Gemma3ForCausalLM": ("GEMMA3", gemma3, one_more),
    "GPT2LMHeadModel": ("GPT2", gpt2, by_rows),
    "GPTNeoXForCausalLM": ("GPTNEOX", neox, apart),
    "GptOssForCausalLM": ("GPT_OSS", gpt_oss, oss),
    "MambaForCausalLM": ("MAMBA", mamba, state_space),
    "Mamba2ForCausalLM": ("MAMBA2", mamba, state_space),
    "JambaForCausalLM": ("JAMBA", jamba, state_space),
    "BertModel": ("BERT", bert, without_pooler),
    "ModernBertModel": ("MODERN_BERT", modernbert, plain),
    "T5ForConditionalGeneration": ("T5", t5, plain),
    "DeepseekV2ForCausalLM": ("DEEPSEEK2", deepseek, latent),
    "DeepseekV3ForCausalLM": ("DEEPSEEK2", deepseek, latent),
}
