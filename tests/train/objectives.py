"""What the tests of objectives share: a tokenizer of bytes, and runs that take a second."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sublayer.text import Bytes
from sublayer.train import train
from sublayer.train.config import run_of
from sublayer.train.language import END, MASK, Words
from sublayer.train.run import Result

BYTES = Words(Bytes((END, MASK)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SMALL = {"dim": 32, "layers": 1, "heads": 2, "hidden": 48}
TINY_RUN: dict[str, Any] = {
    "eval": {"every": 40, "tokens": 500},
    "save": {"every": 40},
    "schedule": {"warmup": 5},
    "optimizer": {"kind": "adamw", "rate": 0.01},
}


def carry_out(tmp_path: Path, **sections: Any) -> Result:
    return train(run_of(TINY_RUN | {"out": str(tmp_path / "out")} | sections))


def lines(path: Path, records: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)
