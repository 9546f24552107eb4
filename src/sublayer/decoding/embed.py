"""Vectors of texts, to be compared by cosine: what an encoder with a head that pools answers.

B texts that are read together, D model width.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError, SpecError, UsageError
from ..nn.head import Pool, Pooled, of_documents
from ..nn.sublayer import ModelOp, TrunkOp
from ..spec import Spec
from ..step import Step
from ..text.ending import read_bytes, read_json
from ..text.tokenizer import Tokenizer
from .request import longest
from .slots import evaluating

POOLS: dict[str, Pool] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


class Pooling(Spec):
    """How a checkpoint makes one vector of a text."""

    pool: Pool = "mean"
    """The mean of its tokens, its first token or its last."""
    normalise: bool = True
    """Whether the vector is divided by its length."""
    length: int | None = None
    """Tokens of a text that are read, its special ones counted; None: all."""
    prefix: str = ""
    """What stands before each text."""

    def check(self) -> None:
        self.require(self.length is None or self.length >= 1, f"length is at least 1, got {self.length}")


def read_pooling(folder: Path | str) -> Pooling | None:
    """What the files of sentence-transformers say (modules.json, 1_Pooling, …); None where there are none.

    Raises SpecError for another kind of pooling, and for modules beside an encoder, a pooling and a normalisation.
    """
    folder = Path(folder)
    if not (folder / "modules.json").is_file():
        return None
    modules = {kind: folder / path for kind, path in _modules(folder / "modules.json")}
    other = sorted(modules.keys() - {"Transformer", "Pooling", "Normalize"})
    if other or "Pooling" not in modules:
        raise SpecError(f"{folder / 'modules.json'}: {f'{other[0]} is not modelled' if other else 'it has no pooling'}")
    path = modules["Pooling"] / "config.json"
    asked = [key for key, value in read_json(path).items() if key.startswith("pooling_mode_") and value is True]
    if len(asked) != 1 or asked[0] not in POOLS:
        kind = " and ".join(asked) or "no kind of pooling"
        raise SpecError(f"{path}: {kind} is not modelled, but one of {', '.join(POOLS)} is")
    length = _read(folder / "sentence_bert_config.json").get("max_seq_length")
    texts = _read(folder / "config_sentence_transformers.json")
    prompts = texts.get("prompts")
    prefix = prompts.get(str(texts.get("default_prompt_name")), "") if isinstance(prompts, dict) else ""
    try:
        return Pooling(POOLS[asked[0]], "Normalize" in modules, length, prefix)
    except SpecError as error:
        raise SpecError(f"{folder}: {error}") from None


def embed(
    model: ModelOp,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pooling: Pooling | None = None,
    *,
    batch: int = 32,
    progress: Callable[[int, int, float], object] | None = None,
) -> Tensor:
    """The vectors of texts, [texts, D] in fp32 on the CPU, in their order.

    pooling: what `read_pooling` found; None: by the model's own head, which has to be one that pools, as the objective
    contrastive leaves it. A text is read between the special tokens that its model expects. Those longer than
    pooling.length are cut, keeping the special tokens at their end, with a warning that says how many. batch: texts
    that are read together, those of like length. progress(texts done, texts, share): after each batch.

    Raises UsageError for a model of two trunks, or without a head that pools where pooling is None; InputError naming
    the text that is empty or longer than the positions that the model has learned.
    """
    if (model.encoder is None) == (model.decoder is None):
        raise UsageError("the model reads a text and answers another; vectors of texts take an encoder alone")
    if pooling is None and not isinstance(model.spec.head, Pooled):
        raise UsageError("the model's head does not pool: say how it does, as in pooling=Pooling('mean')")
    if batch < 1:
        raise UsageError(f"batch is at least 1, got {batch}")
    rows = _rows(model, tokenizer, texts, pooling)
    if pooling is not None:
        model = model.with_head(Pooled(pooling.pool, normalise=pooling.normalise))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found = torch.empty(len(rows), model.spec.dim)
    device, done = next(model.parameters()).device, 0
    with evaluating(model), torch.inference_mode():
        while done < len(rows):
            chosen = order[done : done + batch]
            lengths = torch.tensor([len(rows[i]) for i in chosen])
            ids = pad_sequence([torch.tensor(rows[i]) for i in chosen], batch_first=True)
            step = Step(segment=(torch.arange(ids.shape[1]) < lengths[:, None]).long().to(device))
            answer: Any = model(ids.to(device), step)
            answer = answer[0] if isinstance(answer, tuple) else answer  # auxiliary losses are for training
            found[chosen] = of_documents(answer, step).float().cpu()
            done += len(chosen)
            if progress is not None:
                progress(done, len(rows), done / len(rows))
    return found


def _rows(model: ModelOp, tokenizer: Tokenizer, texts: Sequence[str], pooling: Pooling | None) -> list[list[int]]:
    pooling = pooling or Pooling()
    rows = [tokenizer.encode(pooling.prefix + text, framed=True) for text in texts]
    longer = 0
    if pooling.length is not None:
        longer = sum(len(row) > pooling.length for row in rows)
        rows = [_cut(row, pooling.length, tokenizer) for row in rows]
    if longer:
        warnings.warn(f"{longer} of {len(rows)} texts have more than {pooling.length} tokens: cut", stacklevel=3)
    most, of = longest(cast(TrunkOp, model.encoder or model.decoder), None)
    for index, row in enumerate(rows):
        if not row:
            raise InputError(f"text {index} is empty")
        if most is not None and len(row) > most:
            raise InputError(f"text {index}: {len(row)} tokens are more than {of}")
    return rows


def _cut(row: list[int], length: int, tokenizer: Tokenizer) -> list[int]:
    """A row of at most `length` ids, which ends with the special tokens that it ended with."""
    if len(row) <= length:
        return row
    behind = next((i for i, token in enumerate(reversed(row)) if tokenizer.token_bytes(token)), 0)
    behind = min(behind, length)
    return row[: length - behind] + row[len(row) - behind :]


def _modules(path: Path) -> list[tuple[str, str]]:
    """(class, folder inside this one) of each module, in order."""
    try:
        found = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in json.loads(read_bytes(path))]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InputError(f"{path}: expected a list of modules, each with its type and its path") from None
    outside = next((inner for _, inner in found if Path(inner).name != inner), None)
    if outside is not None:
        raise InputError(f"{path}: {outside!r} is no folder beside it")
    return found


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
