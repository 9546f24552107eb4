"""config.json files as they were published, each with its model's number of parameters as its page gives it.

Keys that say nothing of the model (versions, ids of tokens, how new weights are drawn) are left out, unless they are
unusual ones; those of one line stand once. Where theirs counts tables of sinusoids, and not a bias that is added to
logits, as Marian's, the difference is written out. `small` makes a model that can be run of one.
"""

from typing import Any

Config = dict[str, Any]


def named(architecture: str, kind: str, **keys: Any) -> Config:
    return {"architectures": [architecture], "model_type": kind, **keys}


LLAMA = named("LlamaForCausalLM", "llama", hidden_act="silu", rms_norm_eps=1e-5, vocab_size=32000, pretraining_tp=1)
LLAMA3 = LLAMA | {"vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072, "mlp_bias": False,
                  "attention_bias": False, "attention_dropout": 0.0, "num_key_value_heads": 8}  # fmt: skip
FARTHER = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
           "rope_type": "llama3"}  # fmt: skip
MISTRAL = LLAMA | named("MistralForCausalLM", "mistral", num_key_value_heads=8, num_attention_heads=32)
QWEN = named("Qwen2ForCausalLM", "qwen2", hidden_act="silu", rms_norm_eps=1e-6, vocab_size=151936,
             attention_dropout=0.0, use_sliding_window=False, rope_theta=1000000.0)  # fmt: skip
QWEN3_MOE = QWEN | named(
    "Qwen3MoeForCausalLM", "qwen3_moe", attention_bias=False, head_dim=128, hidden_size=2048, num_attention_heads=32,
    num_key_value_heads=4, num_hidden_layers=48, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, output_router_logits=False, rope_scaling=None,
    router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False,
)  # fmt: skip
PHI = named("Phi3ForCausalLM", "phi3", hidden_act="silu", rms_norm_eps=1e-5, embd_pdrop=0.0, resid_pdrop=0.0,
            attention_bias=False, attention_dropout=0.0, hidden_size=3072, intermediate_size=8192, rope_theta=10000.0,
            num_hidden_layers=32, original_max_position_embeddings=4096)  # fmt: skip
GEMMA = {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 256, "rms_norm_eps": 1e-6}
GEMMA2 = GEMMA | named(
    "Gemma2ForCausalLM", "gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0, rope_theta=10000.0,
    cache_implementation="hybrid", hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=8192, sliding_window=4096, vocab_size=256000, query_pre_attn_scalar=256,
)  # fmt: skip
GEMMA3 = GEMMA | named(
    "Gemma3ForCausalLM", "gemma3_text", attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=512,
    hidden_activation="gelu_pytorch_tanh", max_position_embeddings=32768, rope_local_base_freq=10000, vocab_size=262144,
    rope_scaling=None, rope_theta=1000000, query_pre_attn_scalar=256, num_key_value_heads=1,
)  # fmt: skip
OLMO = named("Olmo2ForCausalLM", "olmo2", attention_bias=False, attention_dropout=0.0, hidden_act="silu",
             max_position_embeddings=4096, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=500000,
             tie_word_embeddings=False, vocab_size=100352)  # fmt: skip
DEEPSEEK = named(
    "DeepseekV2ForCausalLM", "deepseek_v2", attention_bias=False, aux_loss_alpha=0.001, ep_size=1, seq_aux=True,
    first_k_dense_replace=1, hidden_act="silu", kv_lora_rank=512, max_position_embeddings=163840, moe_layer_freq=1,
    n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=6, pretraining_tp=1, qk_nope_head_dim=128,
    qk_rope_head_dim=64, rms_norm_eps=1e-6, rope_theta=10000, scoring_func="softmax", v_head_dim=128, vocab_size=102400,
)  # fmt: skip
DEEPSEEK3 = DEEPSEEK | named(
    "DeepseekV3ForCausalLM", "deepseek_v3", norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc",
    n_shared_experts=1, num_experts_per_tok=8, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
    num_hidden_layers=61, q_lora_rank=1536,
)  # fmt: skip
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn",
        "original_max_position_embeddings": 4096}  # fmt: skip
NEOX = named("GPTNeoXForCausalLM", "gpt_neox", hidden_act="gelu", layer_norm_eps=1e-5, max_position_embeddings=2048,
             rotary_emb_base=10000, rotary_pct=0.25, tie_word_embeddings=False, use_parallel_residual=True,
             vocab_size=50432)  # fmt: skip
GPT2 = named("GPT2LMHeadModel", "gpt2", activation_function="gelu_new", attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1,
             layer_norm_epsilon=1e-5, n_ctx=1024, n_positions=1024, summary_activation=None, vocab_size=50257,
             summary_first_dropout=0.1, summary_proj_to_labels=True, summary_type="cls_index",
             summary_use_proj=True)  # fmt: skip
BERT = named("BertModel", "bert", attention_probs_dropout_prob=0.1, gradient_checkpointing=False, hidden_act="gelu",
             hidden_dropout_prob=0.1, hidden_size=768, intermediate_size=3072, layer_norm_eps=1e-12, pad_token_id=0,
             max_position_embeddings=512, num_attention_heads=12, num_hidden_layers=12, type_vocab_size=2,
             position_embedding_type="absolute", vocab_size=30522)  # fmt: skip
ROBERTA = BERT | named("RobertaForMaskedLM", "roberta", layer_norm_eps=1e-5, max_position_embeddings=514,
                       pad_token_id=1, type_vocab_size=1, vocab_size=50265)  # fmt: skip
T5 = named("T5ForConditionalGeneration", "t5", d_kv=64, dropout_rate=0.1, initializer_factor=1.0,
           is_encoder_decoder=True, layer_norm_epsilon=1e-6, n_positions=512, output_past=True,
           relative_attention_num_buckets=32, vocab_size=32128)  # fmt: skip


def labels(count: int) -> Config:
    return {
        "id2label": {str(i): f"LABEL_{i}" for i in range(count)},
        "label2id": {f"LABEL_{i}": i for i in range(count)},
    }


PUBLISHED: dict[str, tuple[int, Config]] = {
    "huggyllama/llama-7b": (6738415616, LLAMA | {
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048, "max_sequence_length": 2048,
        "num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}),
    "meta-llama/Llama-3.1-70B-Instruct": (70553706496, LLAMA3 | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
        "rope_scaling": FARTHER | {"factor": 8.0}, "tie_word_embeddings": False}),
    "meta-llama/Llama-3.2-1B": (1235814400, LLAMA3 | {
        "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_hidden_layers": 16, "rope_scaling": FARTHER | {"factor": 32.0}, "tie_word_embeddings": True}),
    "unsloth/Llama-3.2-3B-Instruct": (3212749824, LLAMA3 | {
        "head_dim": 128, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
        "num_hidden_layers": 28, "rope_scaling": FARTHER | {"factor": 32.0}, "tie_word_embeddings": True,
        "unsloth_fixed": True, "unsloth_version": "2024.9"}),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (1711376384, LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 8192, "num_attention_heads": 32,
        "num_hidden_layers": 24, "num_key_value_heads": 32, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 130000, "tie_word_embeddings": True, "vocab_size": 49152, "is_llama_config": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
    "deepseek-ai/deepseek-coder-1.3b-instruct": (1346471936, LLAMA | {
        "hidden_size": 2048, "intermediate_size": 5504, "max_position_embeddings": 16384, "num_attention_heads": 16,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "rope_theta": 100000,
        "rope_scaling": {"factor": 4.0, "type": "linear"}, "tie_word_embeddings": False, "vocab_size": 32256}),
    "HuggingFaceTB/SmolLM3-3B": (3075098624, LLAMA | named(
        "SmolLM3ForCausalLM", "smollm3", attention_bias=False, attention_dropout=0.0, hidden_size=2048,
        intermediate_size=11008, layer_types=["full_attention"] * 36, max_position_embeddings=65536, mlp_bias=False,
        max_window_layers=28, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, num_attention_heads=16,
        num_hidden_layers=36, num_key_value_heads=4, pretraining_tp=2, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=5000000.0, sliding_window=None, use_sliding_window=False, vocab_size=128256)),
    "mistralai/Mistral-7B-v0.1": (7241732096, MISTRAL | {
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_hidden_layers": 32,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False}),
    "mistralai/Mistral-Nemo-Instruct-2407": (12247782400, MISTRAL | {
        "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "num_hidden_layers": 40, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "vocab_size": 131072}),
    "Qwen/Qwen2.5-0.5B": (494032768, QWEN | {
        "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "sliding_window": 32768,
        "tie_word_embeddings": True, "use_mrope": False}),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (1777088000, QWEN | {
        "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 21,
        "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rope_theta": 10000,
        "sliding_window": 4096, "tie_word_embeddings": False, "use_mrope": False}),
    "Qwen/Qwen3-0.6B": (596049920, QWEN | named(
        "Qwen3ForCausalLM", "qwen3", attention_bias=False, head_dim=128, hidden_size=1024, intermediate_size=3072,
        max_position_embeddings=40960, max_window_layers=28, num_attention_heads=16, num_hidden_layers=28,
        num_key_value_heads=8, rope_scaling=None, sliding_window=None, tie_word_embeddings=True)),
    "Qwen/Qwen3-30B-A3B": (30532122624, QWEN3_MOE | {
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48}),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (30532122624, QWEN3_MOE | {
        "intermediate_size": 5472, "max_position_embeddings": 262144, "max_window_layers": 28, "qkv_bias": False,
        "rope_theta": 10000000, "shared_expert_intermediate_size": 0, "use_qk_norm": True}),
    "microsoft/Phi-3-mini-4k-instruct": (3821079552, PHI | {
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "rope_scaling": None,
        "sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064}),
    "microsoft/Phi-4-mini-instruct": (3836021760, PHI | {
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "max_position_embeddings": 131072, "num_attention_heads": 24, "num_key_value_heads": 8,
        "partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
        "rope_scaling": {"long_factor": [1 + i / 2 for i in range(48)], "short_factor": [1 + i / 50 for i in range(48)],
                         "type": "longrope"}}),
    "google/gemma-2b": (2506172416, GEMMA | named(
        "GemmaForCausalLM", "gemma", hidden_act="gelu", hidden_size=2048, intermediate_size=16384, num_hidden_layers=18,
        max_position_embeddings=8192, num_attention_heads=8, num_key_value_heads=1, rope_theta=10000.0,
        rope_scaling=None, vocab_size=256000)),
    "google/gemma-2-9b": (9241705984, GEMMA2 | {
        "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_hidden_layers": 42,
        "num_key_value_heads": 8, "sliding_window_size": 4096}),
    "google/gemma-2-27b-it": (27227128320, GEMMA2 | {
        "head_dim": 128, "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32,
        "num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144}),
    "google/gemma-3-1b-it": (999885952, GEMMA3 | {
        "cache_implementation": "hybrid", "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
        "num_hidden_layers": 26, "sliding_window_pattern": 6}),
    "google/gemma-3-270m": (268098176, GEMMA3 | {
        "_sliding_window_pattern": 6, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4, "num_hidden_layers": 18,
        "use_bidirectional_attention": False}),
    "allenai/OLMo-2-0325-32B": (32234279936, OLMO | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_hidden_layers": 64,
        "num_key_value_heads": 8}),
    "deepseek-ai/DeepSeek-V2-Lite": (15706484224, DEEPSEEK | {
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
        "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0, "topk_method": "greedy"}),
    "deepseek-ai/DeepSeek-V3": (671026419200, DEEPSEEK3 | {
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "n_routed_experts": 256, "num_attention_heads": 128,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "rope_scaling": YARN, "routed_scaling_factor": 2.5,
        "vocab_size": 129280}),
    "moonshotai/Kimi-K2-Instruct": (1026408232448, DEEPSEEK3 | {
        "n_group": 1, "topk_group": 1, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0, "rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "vocab_size": 163840}),
    "openai/gpt-oss-20b": (20914757184, named(
        "GptOssForCausalLM", "gpt_oss", attention_bias=True, attention_dropout=0.0, experts_per_token=4, head_dim=64,
        hidden_act="silu", hidden_size=2880, initial_context_length=4096, intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072, rms_norm_eps=1e-5,
        num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8,
        num_local_experts=32, output_router_logits=False, router_aux_loss_coef=0.9, sliding_window=128,
        rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                      "rope_type": "yarn", "truncate": False},
        rope_theta=150000, swiglu_limit=7.0, tie_word_embeddings=False, vocab_size=201088)),
    "EleutherAI/pythia-70m": (70426624, NEOX | {
        "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 6,
        "vocab_size": 50304}),
    "databricks/dolly-v2-3b": (2775086080, NEOX | {
        "custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.InstructionTextGenerationPipeline"}},
        "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32, "num_hidden_layers": 32,
        "vocab_size": 50280}),
    "togethercomputer/RedPajama-INCITE-Base-3B-v1": (2775864320, NEOX | {
        "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32, "num_hidden_layers": 32,
        "rotary_pct": 1.0, "use_parallel_residual": False}),
    "openai-community/gpt2-medium": (354823168, GPT2 | {
        "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": True}),
    "distilbert/distilgpt2": (81912576, GPT2 | labels(1) | {
        "_num_labels": 1, "n_embd": 768, "n_head": 12, "n_layer": 6}),
    "google-bert/bert-base-uncased": (109514298, BERT | {"architectures": ["BertForMaskedLM"]}),
    "BAAI/bge-small-en-v1.5": (33360000, BERT | labels(1) | {
        "classifier_dropout": None, "hidden_size": 384, "intermediate_size": 1536}),
    "cross-encoder/ms-marco-MiniLM-L6-v2": (22713601, BERT | labels(1) | {
        "architectures": ["BertForSequenceClassification"], "hidden_size": 384, "intermediate_size": 1536,
        "num_hidden_layers": 6, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
    "dslim/bert-base-NER": (107726601, BERT | labels(9) | {
        "architectures": ["BertForTokenClassification"], "_num_labels": 9, "output_past": True, "vocab_size": 28996}),
    "nlptown/bert-base-multilingual-uncased-sentiment": (167360261, BERT | labels(5) | {
        "architectures": ["BertForSequenceClassification"], "_num_labels": 5, "directionality": "bidi",
        "finetuning_task": "sentiment-analysis", "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
        "vocab_size": 105879}),
    "deepset/roberta-base-squad2": (124056578, ROBERTA | {
        "architectures": ["RobertaForQuestionAnswering"], "language": "english", "name": "Roberta"}),
    "FacebookAI/xlm-roberta-base": (278295186, ROBERTA | named(
        "XLMRobertaForMaskedLM", "xlm-roberta", output_past=True, vocab_size=250002)),
    "google-t5/t5-small": (60506624, T5 | {"d_ff": 2048, "d_model": 512, "num_heads": 8, "num_layers": 6}),
    "google/flan-t5-base": (247577856, T5 | {
        "d_ff": 2048, "d_model": 768, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "Helsinki-NLP/opus-mt-en-de": (74410496 - 2 * 512 * 512 + 58101, labels(3) | named(
        "MarianMTModel", "marian", _num_labels=3, activation_dropout=0.0, activation_function="swish",
        add_bias_logits=False, add_final_layer_norm=False, attention_dropout=0.0, classif_dropout=0.0, d_model=512,
        decoder_attention_heads=8, decoder_ffn_dim=2048, decoder_layerdrop=0.0, decoder_layers=6, dropout=0.1,
        decoder_vocab_size=58101, encoder_attention_heads=8, encoder_ffn_dim=2048, encoder_layerdrop=0.0,
        encoder_layers=6, gradient_checkpointing=False, is_encoder_decoder=True, max_position_embeddings=512,
        normalize_before=False, normalize_embedding=False, num_hidden_layers=6, scale_embedding=True,
        share_encoder_decoder_embeddings=True, static_position_embeddings=True, vocab_size=58101)),
    "mistralai/Mamba-Codestral-7B-v0.1": (7285403648, named(
        "Mamba2ForCausalLM", "mamba2", chunk_size=256, conv_kernel=4, expand=2, head_dim=64, hidden_act="silu",
        hidden_size=4096, intermediate_size=8192, layer_norm_epsilon=1e-5, n_groups=8, norm_before_gate=True,
        num_heads=128, num_hidden_layers=64, rescale_prenorm_residual=False, residual_in_fp32=True, rms_norm=True,
        state_size=128, tie_word_embeddings=False, time_step_limit=[0.0, float("inf")], time_step_rank=256,
        use_bias=False, use_conv_bias=True, vocab_size=32768)),
}  # fmt: skip


def small(config: Config) -> Config:
    """The same file of a model of a few layers, four heads of the published size and a small vocabulary. What its other
    keys say, and the positions above all, is as it was published."""
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    every = config["num_attention_heads"] == config.get("num_key_value_heads")
    sizes = {
        "num_attention_heads": 4, "num_key_value_heads": 4 if every else 2, "hidden_size": 4 * head_size,
        "intermediate_size": 40, "moe_intermediate_size": 24, "n_routed_experts": 16, "num_local_experts": 16,
        "num_experts": 16, "kv_lora_rank": 24, "q_lora_rank": 20, "sliding_window": 5, "sliding_window_size": 5,
        "num_hidden_layers": 6, "max_window_layers": 6, "vocab_size": 97,
    }  # fmt: skip
    changed = {key: size for key, size in sizes.items() if config.get(key) is not None}
    changed |= {key: config[key][:6] for key in ("layer_types", "no_rope_layers") if key in config}
    return config | changed | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
