"""Reading a config.json strictly: every key is used, known to change nothing here, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import SpecError, nearest
from ..nn.rope import Rope, rope_from_hf
from ..nn.sublayer import Model

MAX_COUNT = 1 << 30  # of anything a config.json counts; a larger number is a mistake, and would exhaust the memory
MAX_LAYERS = 10_000

# Keys that change no forward pass of a loaded model: bookkeeping, token ids (the tokenizer's), defaults of generation,
# what to return beside logits, what others make of them, and how new weights would be drawn.
_IRRELEVANT = (
    "architectures auto_map model_type _name_or_path name_or_path transformers_version torch_dtype dtype "
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id mask_token_id "
    "use_cache return_dict return_dict_in_generate output_attentions output_hidden_states output_scores "
    "initializer_range task_specific_params problem_type id2label label2id num_labels finetuning_task prefix "
    "do_sample temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size num_beams "
    "num_beam_groups diversity_penalty early_stopping max_length min_length bad_words_ids forced_bos_token_id "
    "forced_eos_token_id suppress_tokens begin_suppress_tokens remove_invalid_values num_return_sequences "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty tokenizer_class chunk_size_feed_forward "
    "output_past torchscript tf_legacy_loss use_bfloat16 gradient_checkpointing attn_implementation "
    "_attn_implementation _attn_implementation_autoset pretraining_tp _num_labels custom_pipelines "
    "sentence_transformers sbert_ce_default_activation_function transformers.js_config unsloth_fixed unsloth_version"
)
IRRELEVANT = frozenset(_IRRELEVANT.split())


class Config:
    """A config.json being read: `config("eps", 1e-6)`, `config.count("hidden_size")`, `config.fix("bias", False)`.

    Raises SpecError for a missing key, a value the recipe does not model, and, in `done`, a key nobody asked for.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self.kind = str(values.get("model_type", "config.json"))
        self.used: set[str] = set()

    def __call__(self, key: str, *default: Any) -> Any:
        """The value of a key, or the default where the key is absent or null."""
        value = self.given(key, None)
        if value is not None:
            return value
        if not default:
            absent = " but null" if key in self.values else nearest(key, self.values)
            raise SpecError(f"{self.kind}: config.json has no {key!r}{absent}")
        return default[0]

    def given(self, key: str, default: Any) -> Any:
        """The value of a key, null being None; the default only where it is absent, as in their config classes."""
        self.used.add(key)
        return self.values.get(key, default)

    def count(self, key: str, *default: int | None, least: int = 1, most: int = MAX_COUNT) -> Any:
        """A whole number from `least` to `most`."""
        value = self(key, *default)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise SpecError(f"{self.kind}: {key}={_short(value)} is not a whole number from {least} to {most}")
        return value

    def number(self, key: str, *default: float, most: float = math.inf) -> float:
        """A number above 0, up to `most`."""
        value = self(key, *default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            limit = "" if most == math.inf else f", at most {most}"
            raise SpecError(f"{self.kind}: {key}={_short(value)} is not a number above 0{limit}")
        return value

    def over(self, layers: int, key: str, default: float) -> float:
        """A coefficient of each layer's loss, where the key is of the mean over `layers`: ours are added up."""
        value = self(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(f"{self.kind}: {key}={_short(value)} is not a number")
        return value / max(layers, 1)

    def table(self, key: str) -> dict[str, Any]:
        """A JSON object; empty where the key is absent or null."""
        value = self(key, {})
        if not isinstance(value, dict):
            raise SpecError(f"{self.kind}: {key}={_short(value)} is not an object with keys")
        return value

    def layers(self, key: str) -> int:
        """How many layers: bounded, for each becomes a part of the spec."""
        return self.count(key, most=MAX_LAYERS)

    def layers_of(self, key: str) -> frozenset[int]:
        """The layers that a list names, counted from 0; none where the key is absent."""
        value = self(key, [])
        if not isinstance(value, list) or len(value) > MAX_LAYERS or any(type(layer) is not int for layer in value):
            raise SpecError(f"{self.kind}: {key}={_short(value)} is not a list of layers, {MAX_LAYERS} at most")
        return frozenset(value)

    def decoder(
        self, eps: float, kv_heads: int | None = None, *, heads: int | None = None, tied: bool = False
    ) -> dict[str, Any]:
        """Arguments of most decoders' recipes, from keys that their files have in common.

        What is given stands in for what the file does not say; kv_heads None: as many as heads; heads None: it must.
        """
        heads = self.count("num_attention_heads", *(() if heads is None else (heads,)))
        return {
            "dim": self.count("hidden_size"),
            "layers": self.layers("num_hidden_layers"),
            "heads": heads,
            "kv_heads": self.given("num_key_value_heads", kv_heads) or heads,
            "vocab": self.count("vocab_size"),
            "eps": self("rms_norm_eps", eps),
            "dropout": self("attention_dropout", 0.0),
            "tied": self("tie_word_embeddings", tied),
        }

    def rope(self, head_size: int, values: Mapping[str, Any] | None = None) -> Rope:
        """The rotary positions of whole heads; values: what tells them, where that is not the whole file.

        Raises SpecError for positions of a part of each head, and for tables that are none.
        """
        for key in ("rope_parameters", "rope_scaling"):
            self.table(key)
        self.fix("partial_rotary_factor", 1.0)
        self.used |= {"rope_theta", "max_position_embeddings", "original_max_position_embeddings"}
        rope = rope_from_hf(self.values if values is None else values, head_size)
        if rope.size is not None:
            raise SpecError(f"{self.kind}: partial_rotary_factor is not modelled: this family rotates whole heads")
        return rope

    def local_layers(self, default: Sequence[bool]) -> tuple[bool, ...]:
        """Which layers see a window only: what layer_types says, or the default."""
        kinds, known = self("layer_types", None), ("full_attention", "sliding_attention")
        if kinds is None:
            return tuple(default)
        if not isinstance(kinds, list) or len(kinds) != len(default) or any(kind not in known for kind in kinds):
            raise SpecError(
                f"{self.kind}: layer_types does not say {' or '.join(known)} for each of {len(default)} layers"
            )
        return tuple(kind == "sliding_attention" for kind in kinds)

    def classes(self) -> int:
        """How many classes a head tells apart: those of id2label, or num_labels, or 2 as in their config classes."""
        if self("id2label", None) is not None:
            return len(self.table("id2label"))
        return self.count("num_labels", 2)

    def fix(self, key: str, *allowed: Any, absent: Any = None) -> None:
        """Refuses a key whose value is not one of those this recipe models; null is fine, and `absent` stands in for a
        key that is not there."""
        value = self.given(key, absent)
        if value is not None and value not in allowed:
            only = f" (only {', '.join(map(repr, allowed))})" if allowed else ""
            raise SpecError(f"{self.kind}: {key}={_short(value)} is not modelled{only}")

    def choose(self, key: str, choices: Mapping[str, Any], *default: str) -> Any:
        """What a value stands for among the recipe's own."""
        value = self(key, *default)
        if not isinstance(value, str) or value not in choices:
            raise SpecError(f"{self.kind}: {key}={_short(value)} is not modelled{nearest(str(value), choices)}")
        return choices[value]

    def done(self, *irrelevant: str) -> None:
        """Refuses every key that nobody asked for and that may matter."""
        self.fix("pruned_heads", {})
        for key in ("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder"):
            if key not in self.used | set(irrelevant):
                self.fix(key, False)
        for key in sorted(self.values.keys() - self.used - IRRELEVANT - set(irrelevant)):
            value = self.values[key]
            raise SpecError(f"{self.kind}: config.json sets {key}={_short(value)}, which this recipe does not model")


def without_head(read: Callable[[Mapping[str, Any]], Model]) -> Callable[[Mapping[str, Any]], Model]:
    """The reader of the same architecture's base class, whose checkpoints hold no head: it answers hidden vectors."""
    return lambda values: read(values).replace(head=None, tied=False)


def of_text(read: Callable[[Mapping[str, Any]], Model], *others: str) -> Callable[[Mapping[str, Any]], Model]:
    """The reader of a class that sees or hears too: its text_config is that of the language model, and what is left of
    the file, with the keys `others`, is not of it."""

    def text(values: Mapping[str, Any]) -> Model:
        config = Config(values)
        inner = config.table("text_config")
        tied = config("tie_word_embeddings", inner.get("tie_word_embeddings"))
        config.done("vision_config", *others)
        return read(inner | {"tie_word_embeddings": tied})

    return text


def written(model: Model, attention: Any) -> dict[str, Any]:
    """What `Config.decoder` reads."""
    return {
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.find("decoder.blocks")),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "vocab_size": model.vocab,
        "rms_norm_eps": model.find("decoder.norm.eps"),
        "attention_dropout": attention.dropout,
        "tie_word_embeddings": model.tied,
    }


def mean(each: float, layers: int) -> float:
    """The coefficient that `Config.over` reads as `each`: the shortest, to the last bit where that can be."""
    near = each * max(layers, 1)
    tried = (float(f"{near:.12g}"), near, math.nextafter(near, math.inf), math.nextafter(near, 0))
    return next((value for value in tried if value / max(layers, 1) == each), near)


def labels(classes: int) -> dict[str, Any]:
    """The keys that say how many classes there are, with the names that their config classes give unnamed ones."""
    names = [f"LABEL_{i}" for i in range(classes)]
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
