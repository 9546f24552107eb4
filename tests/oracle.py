"""Parity with transformers: a tiny random model of theirs, saved by them, loaded by us, compared in fp64.

Both sides compute in fp64, so a difference above rounding is a difference of formulas. transformers casts to float32
inside (norms, rotary tables, softmax, loss); `raised` lifts those casts to float64 while its model is built and runs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as MODELS
from transformers.models.auto.modeling_auto import MODEL_MAPPING as BASES
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

import sublayer
from sublayer.names import expand
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import from_hf, names
from sublayer.step import Step
from sublayer.weights.load import read_json

logging.getLogger("transformers").setLevel(logging.ERROR)
TOLERANCE = 1e-10  # of the largest absolute value of what is compared
ROUNDING = 1e-13  # of the largest gradient: below it a bias has none, but for rounding

_QWEN3_NEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 6,
    "linear_value_head_dim": 5, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
}
_DEEPSEEK = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 4,
    "n_group": 4, "topk_group": 3, "first_k_dense_replace": 1,
}  # fmt: skip
SMALL: dict[type, dict[str, Any]] = {
    GPT2Config: {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    | dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    **{
        family: {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
        for family in (LlamaConfig, MistralConfig, Qwen2Config)
    },
    GPTNeoXConfig: {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                    "num_attention_heads": 2},
    **{
        family: {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}
        for family in (Gemma2Config, Gemma3TextConfig)
    },
    Gemma4TextConfig: {
        "vocab_size": 97, "vocab_size_per_layer_input": 97, "hidden_size": 32, "intermediate_size": 24, "head_dim": 8,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5,
        "global_head_dim": 16, "hidden_size_per_layer_input": 6, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": None,
    },
    GemmaConfig: {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
                  "num_attention_heads": 4, "num_key_value_heads": 2},
    Phi3Config: {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": 0},
    SmolLM3Config: {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None},
    Olmo2Config: {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": 0},
    Qwen3Config: {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
                  "num_attention_heads": 4, "num_key_value_heads": 2},
    MixtralConfig: {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
                    "bos_token_id": 0, "eos_token_id": 0},
    Qwen3NextConfig: _QWEN3_NEXT | _EXPERTS | {"intermediate_size": 24},
    Qwen3_5TextConfig: _QWEN3_NEXT | {"intermediate_size": 24},
    Qwen3_5MoeTextConfig: _QWEN3_NEXT | _EXPERTS,
    Qwen3MoeConfig: {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
                     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
                     "num_experts": 4, "num_experts_per_tok": 2},
    **dict.fromkeys((DeepseekV3Config, DeepseekV2Config), _DEEPSEEK),
    GptOssConfig: {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
                   "num_experts_per_tok": 2, "sliding_window": 5},
}  # fmt: skip


class _Raise(TorchFunctionMode):
    """Every float32 that a call names becomes float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        wide = {torch.float32: torch.float64}
        args = tuple(wide.get(value, value) if isinstance(value, torch.dtype) else value for value in args)
        kwargs = {
            key: wide.get(value, value) if isinstance(value, torch.dtype) else value
            for key, value in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


@contextmanager
def raised() -> Iterator[None]:
    """Inside, casts to float32 and tensors made as float32 are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Raise():
            yield
    finally:
        torch.set_default_dtype(before)


def oracle(family: Any, *, base: bool = False, made: Any = None, **changes: Any) -> PreTrainedModel:
    """A tiny fp64 model of theirs, by its configuration class; `made` is the model's class where it is no causal one.

    No parameter is at a value that would hide it: biases and norms are drawn too.
    """
    config = family(**SMALL.get(family, {}) | changes)
    config._attn_implementation = config._experts_implementation = "eager"
    with raised(), warnings.catch_warnings(action="ignore"):
        made = made or (BASES if base else MODELS)[family]
        model: PreTrainedModel = made(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            parameter.normal_(around, 0.2)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and name in model.state_dict():  # what a router learns without gradients
                buffer.normal_(0, 0.2)
    return model


def saved(theirs: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """The folder, with the model in it as transformers writes it."""
    theirs.save_pretrained(folder, **options)
    return folder


def check_parity(
    theirs: PreTrainedModel,
    folder: Path,
    ids: Tensor,
    step: Step | None = None,
    real: Tensor | None = None,
    source: Tensor | None = None,
    **inputs: Any,
) -> ModelOp:
    """Saves theirs, loads it, and compares logits, loss and the gradient of every parameter; returns ours.

    `inputs` are what their forward takes beside ids, `step` what ours takes; `source` is what an encoder reads, the
    ids are then the decoder's; only tokens where `real` [B, L] is true
    are compared, and only predictions of a real token by a real one count in the loss.
    """
    ours = sublayer.load(saved(theirs, folder), dtype=torch.float64)
    compare(theirs, ours, folder, ids, step, real, source, **inputs)
    return ours


def compare(
    theirs: PreTrainedModel,
    ours: ModelOp,
    folder: Path,
    ids: Tensor,
    step: Step | None = None,
    real: Tensor | None = None,
    source: Tensor | None = None,
    **inputs: Any,
) -> None:
    """What `check_parity` compares, for a model of ours that was loaded already; `folder` is where from."""
    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
    with raised():
        expected = theirs(**asked(ids, source), **inputs).logits
    found = ours(ids, step, source=source)
    logits = found[0] if isinstance(found, tuple) else found
    agree(theirs, ours, folder, logits, expected, lambda answer: _loss(answer, ids, real), real=real)


def asked(ids: Tensor, source: Tensor | None) -> dict[str, Any]:
    """What their forward is given: ids, or, with an encoder, its ids or frames [B, T, F] and the decoder's ids."""
    if source is None:
        return {"input_ids": ids, "use_cache": False}
    read = {"input_features": source.transpose(1, 2)} if source.is_floating_point() else {"input_ids": source}
    return read | {"decoder_input_ids": ids, "use_cache": False}


def agree(
    theirs: nn.Module,
    ours: ModelOp,
    folder: Path,
    found: Tensor,
    expected: Tensor,
    loss: Callable[[Tensor], Tensor] = lambda answer: answer.square().mean(),
    *,
    real: Tensor | None = None,
    unread: Sequence[str] = (),
) -> None:
    """The same answer, loss and gradient of every parameter; for models that are asked in their own ways.

    Only where `real` is true are answers compared. `unread` are their parameters that the answer does not depend on,
    which then must be so on both sides. `folder` is where ours was loaded from: its config.json names the table.
    Parameters go by their names on disk.
    """
    assert found.dtype == torch.float64
    close(*((found, expected) if real is None else (found[real], expected[real])), "answer")
    losses = [loss(answer) for answer in (found, expected)]
    close(losses[0], losses[1], "loss")
    for one in losses:
        one.backward()
    zero = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in ours.named_parameters()}
    gradients = exported(ours, folder, zero)
    named = {p: name for name, p in theirs.named_parameters(remove_duplicate=False)}
    named |= {
        p: name for name, p in theirs.named_parameters(remove_duplicate=False) if name in gradients
    }  # of a tied one
    wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for p, name in named.items()}
    if isinstance(theirs, PreTrainedModel):
        wanted = revert_weight_conversion(theirs, wanted)  # names as on disk: experts are fused in memory only
    if not gradients.keys() & wanted.keys():  # a base class, whose names have no prefix
        gradients = {name.partition(".")[2]: gradient for name, gradient in gradients.items()}
    assert gradients.keys() - dict(theirs.named_buffers()).keys() == wanted.keys()
    nothing = ROUNDING * max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        if not gradient.any():
            assert not gradients[name].any(), f"{name} has a gradient in ours alone"
            assert name in unread, f"{name}: nothing compares it; say so in `unread` if that is right"
        elif name.endswith("bias") and gradient.abs().max() < nothing:  # a key's, where scores know no positions
            assert gradients[name].abs().max() < nothing, f"{name} has a gradient in ours alone"
        else:
            close(gradients[name], gradient, f"gradient of {name}")
    theirs.zero_grad()
    ours.zero_grad()


def exported(ours: ModelOp, folder: Path, values: dict[str, Any]) -> dict[str, Tensor]:
    """Values named as our parameters, under the names that the checkpoint table gives theirs."""
    _, family = from_hf(read_json(folder / "config.json"))
    found: dict[str, Tensor] = {}
    for row in expand(names(family, ours.spec), ours):
        back = row.change.back([values[name] for name in row.our_names])
        found |= dict(zip(row.their_names, back, strict=True))
    return found


def close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal to TOLERANCE of the largest absolute value expected."""
    largest = expected.abs().max().item()
    assert largest > 0, f"{what} is all zeros and compares nothing"
    assert_close(actual, expected, rtol=0, atol=TOLERANCE * largest, msg=lambda text: f"{what}: {text}")


def _loss(logits: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    counted = real[:, 1:] & real[:, :-1]
    return F.cross_entropy(logits[:, :-1][counted], ids[:, 1:][counted])


def reopened(folder: Path, made: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Our export, read by transformers in fp64; it must miss nothing and find nothing left over."""
    with raised(), warnings.catch_warnings(action="ignore"):
        found: Any = made.from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    model, report = found
    assert not any(report.values()), report
    return model.double().eval()


PADDED = torch.tensor([[1] * 12, [0] * 4 + [1] * 8])  # left-padded, as transformers' attention_mask says it
PACKED = torch.tensor([[1] * 5 + [2] * 4 + [3] * 3, [1] * 2 + [2] * 10])  # documents of packed rows


def positions(segment: Tensor) -> Tensor:
    """Each token's place in its document, 0 for padding: what transformers wants to be told."""
    index = torch.arange(segment.shape[1])
    return torch.stack([index - (row[None, :] == row[:, None]).int().argmax(1) for row in segment]) * (segment != 0)


def check_geometry(family: type, folder: Path, **changes: Any) -> None:
    """Left-padded and packed batches equal theirs with attention_mask and position_ids."""
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(2))
    theirs = oracle(family, **changes)
    padded = {"attention_mask": PADDED, "position_ids": positions(PADDED)}
    ours = check_parity(theirs, folder, ids, Step(segment=PADDED), PADDED.bool(), **padded)
    same = PACKED[:, :, None] == PACKED[:, None, :]
    seen = (same & torch.ones(12, 12, dtype=torch.bool).tril())[:, None]
    hidden = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    packed = {"attention_mask": hidden, "position_ids": positions(PACKED)}
    compare(theirs, ours, folder, ids, Step(segment=PACKED), **packed)


def check_base(family: type, folder: Path, ids: Tensor, **changes: Any) -> None:
    """The base class, which has no head, answers their hidden vectors."""
    theirs = oracle(family, base=True, **changes)
    ours = sublayer.load(saved(theirs, folder), dtype=torch.float64)
    with raised():
        expected = theirs(ids, use_cache=False).last_hidden_state
    close(ours(ids), expected)


def check_export(family: type, folder: Path, **changes: Any) -> None:
    """Import → export → import is exact to the bit, and transformers reads the export as the same function."""
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(3))
    export(oracle(family, **changes), folder, ids)


def round_trip(theirs: PreTrainedModel, folder: Path) -> None:
    """Import → export → import is exact to the bit; the export lies in folder/ours."""
    first = sublayer.load(saved(theirs, folder / "theirs"), dtype=torch.float64)
    sublayer.save(first, folder / "ours", layout="hf")
    again = sublayer.load(folder / "ours", dtype=torch.float64)
    assert again.spec == first.spec
    for (name, one), (other_name, other) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name


def export(
    theirs: PreTrainedModel, folder: Path, ids: Tensor, source: Tensor | None = None, made: Any = AutoModelForCausalLM
) -> None:
    """What `check_export` does, with a model, its inputs, and the class that reads the export."""
    round_trip(theirs, folder)
    with raised():
        logits = reopened(folder / "ours", made)(**asked(ids, source)).logits
        expected = theirs(**asked(ids, source)).logits
    close(logits, expected, "logits of the export")
