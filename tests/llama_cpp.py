"""llama.cpp, the program that GGUF files are written for, asked through xllamacpp."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xllamacpp
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

library: Any = xllamacpp  # compiled, without types


class LlamaCpp:
    """A model of a GGUF file, with a cache of 32-bit numbers."""

    def __init__(self, path: Path, length: int = 256, *, embedding: bool = False) -> None:
        """embedding: to ask for vectors of texts, and for nothing else."""
        asked = library.CommonParams()
        asked.model.path = str(path)
        asked.n_ctx = length
        asked.n_parallel = 1
        asked.warmup = False
        asked.embedding = embedding
        asked.cpuparams.n_threads = 1
        asked.cache_type_k = asked.cache_type_v = library.ggml_type.GGML_TYPE_F32
        asked.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        with _quiet():
            self._server = library.Server(asked)
        self._line = HTTPConnection(self._server.listening_address.removeprefix("http://"))
        self._request("GET", "/slots")  # its loop has begun once this is answered; ended before that, it never ends

    def log_probabilities(self, ids: Sequence[int], vocab: int, best: int | None = None) -> Tensor:
        """[V] of the token after these ids; NaN for all but so many of the best."""
        top = self._complete(ids, 1, best or vocab)[0]["top_logprobs"]
        found = torch.full((vocab,), float("nan"), dtype=torch.float64)
        for one in top:
            found[one["id"]] = one["logprob"]
        return found

    def greedy(self, ids: Sequence[int], tokens: int) -> list[int]:
        """The ids that it continues with; fewer where it ends."""
        request = {"prompt": list(ids), "n_predict": tokens, "temperature": 0, "return_tokens": True}
        return self._post("completion", request)["tokens"]

    def tokenize(self, text: str, *, framed: bool = True) -> list[int]:
        """The ids of a text, framed: with what it puts around one; special tokens' names in it are text."""
        return self._post("tokenize", {"content": text, "add_special": framed, "parse_special": False})["tokens"]

    def embed(self, texts: Sequence[str | Sequence[int]]) -> Tensor:
        """[texts, D], each divided by its length; texts may be given as ids."""
        with _quiet():
            answer = self._server.handle_embeddings(
                {"input": [one if isinstance(one, str) else [*one] for one in texts]}
            )
        return torch.tensor([one["embedding"] for one in answer["data"]])

    def trained_length(self) -> int:
        """What it takes the file to say."""
        return self._request("GET", "/v1/models")["data"][0]["meta"]["n_ctx_train"]

    def _post(self, route: str, request: dict) -> dict:
        return self._request("POST", f"/{route}", json.dumps(request), {"Content-Type": "application/json"})

    def _request(self, *request: Any) -> Any:
        with _quiet():
            self._line.request(*request)
            answer = json.load(self._line.getresponse())
            self._line.close()  # it would hang up while we compute for longer than it waits; the next request opens it
            return answer

    def _complete(self, ids: Sequence[int], tokens: int, alternatives: int) -> list[dict]:
        request = {"prompt": list(ids), "max_tokens": tokens, "temperature": 0, "n_probs": alternatives,
                   "logprobs": alternatives}  # fmt: skip
        with _quiet():
            answer = self._server.handle_completions(request)
        return answer["choices"][0]["logprobs"]["content"]


@contextmanager
def _quiet() -> Iterator[None]:
    """What it logs goes nowhere."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def quantised(values: np.ndarray, kind: str) -> np.ndarray:
    """What its own quantiser stores for rows of float32 values, as bytes."""
    kinds = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[kinds]
    values = np.ascontiguousarray(values, np.float32)
    rows, width = values.shape
    found = np.empty((rows, width // block * size), np.uint8)
    call = ctypes.CDLL(library.xllamacpp.__file__).ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    assert call(kinds.value, values.ctypes.data, found.ctypes.data, 0, rows, width, None) == found.nbytes
    return found
