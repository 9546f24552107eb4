"""The process that reads mutated files, under a limit of memory and of time for each: one line of JSON an input.

`python -m tests.fuzz.child FOLDER KIND SEED FIRST LAST`; a limit of time ends it by a signal, which its parent sees.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

import sublayer
from sublayer.errors import SublayerError
from sublayer.text import load_tokenizer
from tests.fuzz.mutate import MUTATORS

SOURCE = Path(sublayer.__file__).parent
SECONDS = 2
MEMORY = 1 << 30
FILES = {
    "safetensors": "model.safetensors",
    "GGUF": "x.gguf",
    "GGUF part": "x-00002-of-00002.gguf",
    "config.json": "config.json",
    "index.json": "model.safetensors.index.json",
}


def main(folder: Path, kind: str, seed: int, first: int, last: int) -> None:
    copies = shutil.copytree(folder / kind, folder / "copies" / kind, dirs_exist_ok=True)
    seeds = {path: (path / FILES[kind]).read_bytes() for path in sorted(copies.iterdir())}
    for path in seeds:
        read(path, kind)  # as they are, they are models; and all that reading imports is there
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    for i in range(first, last):
        r = Random(f"{kind} {seed} {i}")
        path = r.choice(list(seeds))
        (path / FILES[kind]).write_bytes(MUTATORS[kind](r, seeds[path]))
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark, proc(5)
        before = resident("VmRSS")
        begun = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(begun) + SECONDS, resource.RLIM_INFINITY))
        found = outcome(path, kind)
        found |= {"i": i, "seconds": time.process_time() - begun, "bytes": resident("VmHWM") - before}
        print(json.dumps(found), flush=True)
        (path / FILES[kind]).write_bytes(seeds[path])


def read(path: Path, kind: str) -> None:
    with warnings.catch_warnings(action="ignore"):
        sublayer.load(path)
        if kind == "GGUF" and path.name in ("llama", "qwen2"):
            load_tokenizer(path / FILES[kind])


def outcome(path: Path, kind: str) -> dict[str, Any]:
    """{"where": the line that refused it, None for a model} or {"fault": what no reader should raise}."""
    try:
        read(path, kind)
    except SublayerError as error:
        if "\n" in str(error) or len(str(error)) > 1100:
            return {"fault": f"not one line: {error}"}
        return {"where": where(error)}
    except BaseException:
        return {"fault": traceback.format_exc()}
    return {"where": None}


def where(error: BaseException) -> list[Any]:
    """[file, line] of the first of our errors, where one was told again by others."""
    while error.__context__ is not None and type(error.__context__).__module__.startswith("sublayer."):
        error = error.__context__
    frame: TracebackType | None = error.__traceback__
    last = ["", 0]
    while frame is not None:
        path = Path(frame.tb_frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            last = [path.relative_to(SOURCE).as_posix(), frame.tb_lineno]
        frame = frame.tb_next
    return last


def resident(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6]))
