"""The metadata of a GGUF file, where a tokenizer and a chat template may lie."""

from pathlib import Path
from typing import Any

from ..errors import InputError, WeightsError
from ..gguf_header import read_header


def read_metadata(path: Path | str) -> dict[str, Any]:
    """Key → value: a number, a bool, a string, or a list of one of these kinds; the tensors' records are not read.

    Raises InputError, with the byte, for a file that is not GGUF (version 2 or 3, little-endian) or is cut short.
    """
    try:
        return dict(read_header(path, tensors=False).metadata)
    except WeightsError as error:
        raise InputError(str(error)) from None
