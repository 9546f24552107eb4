"""Reading a config.json strictly: every key is used, known to change nothing here, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError, nearest

# Keys that change no forward pass of a loaded model: bookkeeping, token ids (the tokenizer's), defaults of generation,
# what to return beside logits, and how new weights would be drawn.
IRRELEVANT = frozenset(
    "architectures auto_map model_type _name_or_path name_or_path transformers_version torch_dtype dtype "
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id mask_token_id "
    "use_cache return_dict return_dict_in_generate output_attentions output_hidden_states output_scores "
    "initializer_range task_specific_params problem_type id2label label2id num_labels finetuning_task prefix "
    "do_sample temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size num_beams "
    "num_beam_groups diversity_penalty early_stopping max_length min_length bad_words_ids forced_bos_token_id "
    "forced_eos_token_id suppress_tokens begin_suppress_tokens remove_invalid_values num_return_sequences "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty tokenizer_class chunk_size_feed_forward "
    "torchscript tf_legacy_loss use_bfloat16 pruned_heads gradient_checkpointing attn_implementation "
    "_attn_implementation _attn_implementation_autoset quantization_config pretraining_tp".split()
)


class Config:
    """A config.json being read: `config("hidden_size")`, `config("eps", 1e-6)`, `config.fix("bias", False)`.

    Raises SpecError for a missing key, a value the recipe does not model, and, in `done`, a key nobody asked for.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self.kind = str(values.get("model_type", "config.json"))
        self.used: set[str] = set()

    def __call__(self, key: str, *default: Any) -> Any:
        """The value of a key, or the default where the key is absent or null."""
        self.used.add(key)
        value = self.values.get(key)
        if value is not None:
            return value
        if not default:
            raise SpecError(f"{self.kind}: config.json has no {key!r}{nearest(key, self.values)}")
        return default[0]

    def fix(self, key: str, *allowed: Any) -> None:
        """Refuses a key whose value is not one of those this recipe models; absent or null is fine."""
        self.used.add(key)
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise SpecError(f"{self.kind}: {key}={value!r} is not modelled (only {', '.join(map(repr, allowed))})")

    def choose(self, key: str, choices: Mapping[Any, Any], *default: Any) -> Any:
        """What a value stands for among the recipe's own."""
        value = self(key, *default)
        if value not in choices:
            raise SpecError(f"{self.kind}: {key}={value!r} is not modelled{nearest(str(value), map(str, choices))}")
        return choices[value]

    def done(self, *irrelevant: str) -> None:
        """Refuses every key that nobody asked for and that may matter."""
        for key in self.values.keys() - self.used - IRRELEVANT - set(irrelevant):
            raise SpecError(
                f"{self.kind}: config.json sets {key}={self.values[key]!r}, which this recipe does not model"
            )
