"""llama.cpp's own quantiser of files, out of the library that node-llama-cpp comes with (MIT)."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

from tests import assets


class _Options(ctypes.Structure):
    """llama_model_quantize_params, and room for what later versions add."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("threads", "file_type", "output", "embedding")),
        *((name, ctypes.c_bool) for name in ("again", "head", "copy", "pure", "split", "dry")),
        ("pointers", ctypes.c_void_p * 12),
    ]


def quantise_file(source: Path, target: Path, file_type: int) -> None:
    library = _library()
    options = library.llama_model_quantize_default_params()
    options.file_type, options.threads = file_type, 1
    assert library.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(options)) == 0


@cache
def _library() -> Any:
    folder = next(assets.npm("@node-llama-cpp/linux-x64", "3.22.1").rglob("libggml-base.so")).parent
    (found,) = folder.glob("libllama.v*.so")
    library = ctypes.CDLL(str(found))
    library.llama_model_quantize_default_params.restype = _Options
    library.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Options)]
    library.llama_model_quantize.restype = ctypes.c_uint32
    library.llama_log_set(_quiet, None)
    return library


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _quiet(level: int, text: bytes, data: object) -> None:
    """In place of the program's log."""
