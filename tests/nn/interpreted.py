"""Tests of Triton kernels where there is no GPU: in Triton's interpreter, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs_here = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="no GPU: run by the test of the interpreter, in a process of its own"
)


def passed_in_interpreter(file: str, selection: str) -> int:
    """How many of a file's tests passed in the interpreter; fails if one did not. Skipped where the interpreter itself
    fails: that of triton 3.6, which torch 2.11 brings, makes numbers of arrays as numpy 2.4 no longer does."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selection, file]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root, check=False)
    if "InterpreterError: TypeError('only 0-dimensional arrays can be converted to Python scalars')" in done.stdout:
        pytest.skip("the interpreter of this triton does not go with this numpy")
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed[1]) if passed else 0
