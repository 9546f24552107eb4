"""Loading a checkpoint: its time beside reading the same bytes, and the private memory it takes at its highest.

The checkpoint is a random Llama of about 430 MB, in Hugging Face's layout, in the page cache. Reading is `read()` of
the whole file into memory of its own, as loading ends in memory of its own; twice where the loaded model has twice the
file's bytes, for most of the time goes into the kernel's making of fresh memory. Quantised, as GGUF, it stands beside
the file in float32, of as many bytes as it becomes.
"""

import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

import sublayer
from bench.harness import ROOT, Options, Row, compared, progress, report, single, timings
from sublayer.nn.sublayer import Model
from sublayer.weights.load import read_spec

CASES = [  # (elements in the file, asked for)
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float32"),
]
BLOCKS = ("q4_0", "q4_1", "q5_0", "q8_0")


def main(options: Options) -> None:
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "float32"
        for stored, asked in CASES[:1] if options.quick else CASES:
            place = Path(folder) / stored
            if not place.exists():
                layers = 1 if options.quick else 28 * 4 // getattr(torch, stored).itemsize
                sublayer.save(model(layers).build(dtype=getattr(torch, stored)), place, layout="hf")
            times = max(1, getattr(torch, asked).itemsize // getattr(torch, stored).itemsize)
            case = f"{stored} as {asked}" if stored != asked else stored
            beside = "read()" if times == 1 else "read() twice"
            rows += measured(case, place, asked, beside, [place / "model.safetensors"] * times, options)
        for kind in BLOCKS[:1] if options.quick else BLOCKS:
            file = Path(folder) / f"{kind}.gguf"
            sublayer.weights.export(whole, file, to="gguf", quantize=kind)
            files = [whole / "model.safetensors"]
            rows += measured(f"{kind} as float32", file, "float32", "read() of float32", files, options)
    report("loading", rows)


def measured(case: str, place: Path, asked: str, beside: str, files: list[Path], options: Options) -> list[Row]:
    """Its time beside that of reading the files, and its memory."""
    progress(f"loading: {case}")
    ways = {"load": lambda: load(place, asked), "read": lambda: [file.read_bytes() for file in files]}
    found = timings(ways, 2 if options.quick else 9)
    taken, whole = private(place, asked)
    return [
        compared(f"{case}: time", found["load"], found["read"], beside, goal="≤ 1.5"),
        single(f"{case}: memory", taken, whole, "parameters", "MB", goal="≤ 1.15"),
    ]


def model(layers: int) -> Model:
    """3.5 million parameters a layer, and 10 in the embedding."""
    return sublayer.recipes.llama(576, layers, 9, 3, hidden=1536, vocab=17_000, tied=True)


def load(place: Path, dtype: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # of blocks
        sublayer.load(place, dtype=getattr(torch, dtype))


def private(folder: Path, dtype: str) -> tuple[float, float]:
    """MB of (the most private memory that loading took, the loaded parameters), in a fresh process.

    The kernel keeps no high-water mark of private memory alone: it is looked at from outside, every millisecond.
    """
    program = "import sys; from bench.loading import watched; watched(*sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder), dtype], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = highest = anonymous(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        while (now := anonymous(child.pid)) and child.poll() is None:
            highest = max(highest, now)
            time.sleep(0.001)
        return (highest - before) / 1e6, json.loads(child.stdout.read()) / 1e6


def watched(folder: str, dtype: str) -> None:
    """The process that is looked at: ready with all that loading imports, it waits to be told, and loads."""
    read_spec(Path(folder))
    print("ready", flush=True)
    sys.stdin.readline()
    loaded = sublayer.load(folder, dtype=getattr(torch, dtype))
    print(sum(parameter.nbytes for parameter in loaded.parameters()))


def anonymous(process: int) -> int:
    """Bytes of a process that no file backs; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
