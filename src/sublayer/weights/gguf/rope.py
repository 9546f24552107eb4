"""Rotary positions: keys of the metadata, and tensors of divisors, for rope_parameters of config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import SpecError
from ...nn.rope_scaling import Llama3, geometric, yarn_magnitude
from .table import Config, Entry, Source, head_size, head_size_of

DIVISORS = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
PUBLISHED = (1.0, 4.0, 8192)  # Llama 3's low and high frequency factor and trained length, of which GGUF says nothing
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}


def rope(
    theta: float = 10000.0,
    *,
    partial: bool = False,
    truncate: bool = True,
    size: Callable[[Source], int] = head_size,
    size_of: Callable[[Config], int] = head_size_of,
) -> Entry:
    """theta: the base where the file says none; partial: a head may be rotated in part; truncate: of YaRN's ramp.
    size, size_of: the dims that may be rotated, from the metadata and from config.json."""

    def read(source: Source) -> dict[str, Any]:
        whole = size(source)
        rotated = source.count("rope.dimension_count", whole)
        parameters: dict[str, Any] = {"rope_theta": source("rope.freq_base", theta), "rope_type": "default"}
        if rotated != whole and not partial:
            raise SpecError(f"{source.name}.rope.dimension_count={rotated}: this family rotates whole heads of {whole}")
        if partial:
            parameters["partial_rotary_factor"] = _part(rotated, whole)
        parameters |= _scaling(source, parameters["rope_theta"], rotated, truncate)
        return {"rope_parameters": parameters, "max_position_embeddings": source.count("context_length")}

    def write(config: Config) -> dict[str, Any]:
        parameters = _parameters(config)
        found: dict[str, Any] = {
            "context_length": _context(config, parameters),
            "rope.dimension_count": int(size_of(config) * parameters.get("partial_rotary_factor", 1.0)),
            "rope.freq_base": float(parameters["rope_theta"]),
        }
        return found | _written(parameters)

    return Entry(read, write, lambda config: _divisors(_parameters(config), size_of(config)))


def _part(rotated: int, whole: int) -> float:
    """They take the whole part of size · factor; half a dim more where rounding would lose one."""
    part = rotated / max(1, whole)
    return part if int(whole * part) == rotated else (rotated + 0.5) / whole


def _scaling(source: Source, theta: float, size: int, truncate: bool) -> dict[str, Any]:
    """What rope_parameters say beside the base."""
    factor = source("rope.scaling.factor", source("rope.scale_linear", 0.0))
    kind = source("rope.scaling.type", "linear" if factor else "none")
    attention = source("rope.scaling.attn_factor", 1.0)
    if source.has(SHORT) or source.has(LONG):
        return _longrope(source, attention)
    if attention != 1.0 and (kind != "yarn" or factor in (0.0, 1.0) or source.has(DIVISORS)):
        raise SpecError(f"{source.name}.rope.scaling.attn_factor={attention} is modelled for yarn and longrope only")
    if source.has(DIVISORS):
        if kind != "none" and factor not in (0.0, 1.0):
            raise SpecError(f"{source.name}.rope.scaling.type={kind!r} is not modelled beside {DIVISORS}")
        return _llama3(source, theta, size)
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise SpecError(f"{source.name}.rope.scaling.type={kind!r} is not modelled (none, linear, yarn)")
    found = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": source.count("rope.scaling.original_context_length"),
        "truncate": truncate,
    }
    found |= {key: source(f"rope.scaling.yarn_{key}", default) for key, default in YARN.items()}
    for key in ("yarn_ext_factor", "yarn_attn_factor"):
        if source(f"rope.scaling.{key}", 1.0) != 1.0:
            raise SpecError(f"{source.name}.rope.scaling.{key} is not modelled")
    scale = source("rope.scaling.yarn_log_multiplier", 0.0)  # DeepSeek's two mscales, where they are one
    if attention != 1.0:
        if scale:
            raise SpecError(f"{source.name}.rope.scaling.attn_factor is not modelled beside yarn_log_multiplier")
        # A factor of the usual one, told in float32: six digits of their product are the file's.
        return found | {"attention_factor": float(f"{yarn_magnitude(factor) * attention:.6g}")}
    return found | ({"mscale": scale * 10, "mscale_all_dim": scale * 10} if scale else {})


def _longrope(source: Source, attention: float) -> dict[str, Any]:
    trained, longest = source.count("rope.scaling.original_context_length"), source.count("context_length")
    found = {
        "rope_type": "longrope",
        "short_factor": _decimals(source.tensor(SHORT)),
        "long_factor": _decimals(source.tensor(LONG)),
        "original_max_position_embeddings": trained,
    }
    usual = _longrope_attention(longest / max(1, trained), trained)
    return found if math.isclose(attention, usual, rel_tol=1e-6) else found | {"attention_factor": attention}


def _longrope_attention(factor: float, trained: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 and trained > 1 else 1.0


def _context(config: Config, parameters: Config) -> int:
    """The length that GGUF wants to know: what config.json says, else what the scaling reaches, else a usual one."""
    trained = parameters.get("original_max_position_embeddings")
    reached = round(parameters.get("factor", 1.0) * trained) if trained else 2048
    if parameters.get("rope_type") == "longrope" and "factor" in parameters:
        return reached  # where it is read from
    return config.get("max_position_embeddings") or reached


def _llama3(source: Source, theta: float, size: int) -> dict[str, Any]:
    """The published parameters where they give these divisors, else the divisors themselves."""
    divisors = source.tensor(DIVISORS).double()
    if divisors.shape != (size // 2,):
        raise SpecError(f"{DIVISORS} {list(divisors.shape)}: expected one for each of {size // 2} rotated pairs")
    if bool((divisors == 1).all()):
        return {}
    if not bool((divisors.isfinite() & (divisors > 0)).all()):
        raise SpecError(f"{DIVISORS} holds what no frequency can be divided by")
    low, high, trained = PUBLISHED
    factor = float(_decimals(divisors.max()[None])[0])
    published = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                 "original_max_position_embeddings": trained}  # fmt: skip
    wanted = _divisors({"rope_theta": theta, **published}, size)[DIVISORS].double()
    if torch.allclose(divisors, wanted, rtol=1e-5, atol=0):
        return published
    listed = _decimals(divisors)
    return {"rope_type": "longrope", "short_factor": listed, "long_factor": listed, "attention_factor": 1.0,
            "original_max_position_embeddings": max(2, source.count("context_length"))}  # fmt: skip


def _written(parameters: Config) -> dict[str, Any]:
    kind = parameters.get("rope_type", "default")
    scaling: dict[str, Any] = {"rope.scaling.type": kind}
    if kind in ("linear", "yarn"):
        scaling["rope.scaling.factor"] = float(parameters["factor"])
    if kind in ("yarn", "longrope"):
        scaling["rope.scaling.original_context_length"] = parameters["original_max_position_embeddings"]
    if kind == "yarn":
        scaling |= {f"rope.scaling.yarn_{key}": float(parameters[key]) for key in YARN if key in parameters}
        scale = parameters.get("mscale_all_dim") or 0.0
        if (parameters.get("mscale") or 0.0) != scale:
            raise SpecError("GGUF cannot say rope_parameters.mscale apart from mscale_all_dim")
        if scale:
            scaling["rope.scaling.yarn_log_multiplier"] = 0.1 * scale
        usual = yarn_magnitude(parameters["factor"])
        attention = parameters.get("attention_factor", usual)
        if not math.isclose(attention, usual, rel_tol=1e-6):
            scaling["rope.scaling.attn_factor"] = attention / usual
    if kind == "longrope":
        trained = parameters["original_max_position_embeddings"]
        usual = _longrope_attention(parameters.get("factor", 1.0), trained)
        scaling["rope.scaling.attn_factor"] = float(parameters.get("attention_factor", usual))
    if kind in ("default", "llama3"):
        return {}
    if kind not in ("linear", "yarn", "longrope"):
        raise SpecError(f"GGUF cannot say rope_parameters.rope_type={kind!r}")
    return scaling


def _divisors(parameters: Config, size: int) -> dict[str, Tensor]:
    kind = parameters.get("rope_type", "default")
    if kind == "longrope":
        return {SHORT: torch.tensor(parameters["short_factor"]), LONG: torch.tensor(parameters["long_factor"])}
    if kind != "llama3":
        return {}
    scaling = Llama3(
        parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"],
        parameters["original_max_position_embeddings"],
    )  # fmt: skip
    plain, theta = geometric(parameters["rope_theta"], size), parameters["rope_theta"]
    pairs = zip(plain, scaling.frequencies(theta, size), strict=True)
    return {DIVISORS: torch.tensor([one / other for one, other in pairs])}


def _parameters(config: Config) -> Config:
    return config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}


def _decimals(tensor: Tensor) -> list[float]:
    """The shortest decimals that are these float32."""
    return [float(str(value)) for value in tensor.float().numpy()]
