"""The mixtures of k-quants that files are named for: which matrix is stored in which type, as llama.cpp's own program
chooses. What errors hurt most, the values of attention, the way down from the hidden layer and the head, gets more
bits; in the _M ones in the first and last eighth of the layers and every third between."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

Rule = tuple[Callable[[int, int], bool], str]  # whether layer i of n is meant, and the type it gets


def _all(i: int, n: int) -> bool:
    return True


def _more(i: int, n: int) -> bool:
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


@dataclass(frozen=True)
class Mixture:
    most: str
    values: tuple[Rule, ...] = ()
    """The values of attention; the first rule that holds."""
    down: tuple[Rule, ...] = ()
    out: str | None = None
    """Attention's last matrix."""


MIXTURES = {
    "q2_k": Mixture("Q2_K", ((_all, "Q3_K"),), ((_all, "Q3_K"),), "Q3_K"),
    "q3_k_s": Mixture("Q3_K"),
    "q3_k_m": Mixture(
        "Q3_K",
        ((lambda i, n: i < 2, "Q5_K"), (_all, "Q4_K")),
        ((lambda i, n: i < n // 16, "Q5_K"), (_all, "Q4_K")),
        "Q4_K",
    ),
    "q3_k_l": Mixture("Q3_K", ((_all, "Q5_K"),), ((_all, "Q5_K"),), "Q5_K"),
    "q4_k_s": Mixture("Q4_K", ((lambda i, n: i < 4, "Q5_K"),), ((lambda i, n: i < n // 8, "Q5_K"),)),
    "q4_k_m": Mixture("Q4_K", ((_more, "Q6_K"),), ((_more, "Q6_K"),)),
    "q5_k_s": Mixture("Q5_K"),
    "q5_k_m": Mixture("Q5_K", ((_more, "Q6_K"),), ((_more, "Q6_K"),)),
    "q6_k": Mixture("Q6_K"),
}
FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What a matrix becomes whose rows are no multiple of 256, but of 32."""


def types_of(name: str, matrices: Collection[str], metadata: Mapping[str, Any]) -> dict[str, str]:
    """The type of each matrix, by GGUF's names and metadata, whatever its rows."""
    mixture, said = MIXTURES[name], _Sizes(metadata)
    ordered = sorted(matrices, key=lambda matrix: (_layer(matrix), matrix))
    values = [matrix for matrix in ordered if re.search(r"attn_(v|qkv|kv_b)\.weight", matrix)]
    downs = [matrix for matrix in ordered if "ffn_down" in matrix]
    head = "output.weight" if "output.weight" in matrices else "token_embd.weight"
    found: dict[str, str] = {}
    for matrix in ordered:
        kind = mixture.most
        if matrix == head:
            kind = "Q6_K"
        elif matrix in values:
            kind = _first(mixture.values, values.index(matrix), len(values)) or kind
            if name == "q2_k" and said.group >= 4:
                kind = "Q4_K"
            if said.seventy and kind in ("Q3_K", "Q4_K"):  # its values are small: many query heads share a value head
                kind = "Q5_K"
            if said.experts == 8:
                kind = "Q8_0"
        elif "attn_k.weight" in matrix and said.experts == 8:
            kind = "Q8_0"
        elif matrix in downs:
            # Of experts, one layer has several, so there the layer is counted.
            i = _layer(matrix) if said.experts > 1 else downs.index(matrix)
            kind = _first(mixture.down, i, said.layers) or kind
        elif "attn_output.weight" in matrix and said.experts == 8:
            kind = "Q5_K" if name in ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m") else kind
        elif "attn_output.weight" in matrix:
            kind = mixture.out or kind
        found[matrix] = kind
    return found


class _Sizes:
    """What the choice depends on."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        name = metadata["general.architecture"]

        def number(key: str, default: int = 0) -> int:
            value = metadata.get(f"{name}.{key}", default)
            return value[0] if isinstance(value, (list, tuple)) else value

        self.layers, self.experts = number("block_count"), number("expert_count")
        heads = number("attention.head_count")
        kv_heads = number("attention.head_count_kv", heads)
        self.group = heads // kv_heads if kv_heads else 0
        self.seventy = self.layers == 80 and (name == "qwen2" or (name == "llama" and heads != kv_heads))


def _first(rules: tuple[Rule, ...], i: int, n: int) -> str | None:
    return next((kind for holds, kind in rules if holds(i, n)), None)


def _layer(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1
