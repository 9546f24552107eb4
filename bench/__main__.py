"""Ratios against peers: `python -m bench` runs every file of this folder that has a main, `--only NAME` one of them."""

import argparse
import importlib
import sys
from pathlib import Path

import torch

from bench.harness import Options

NAMES = sorted(
    path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "__main__", "harness")
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", choices=NAMES, metavar="NAME", help=f"one of: {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, once: that it runs, not how fast")
    parser.add_argument("--full", action="store_true", help="the longest lengths too, where they take many minutes")
    parser.add_argument("--threads", type=int, help="threads of torch; with 1, CPU time is what is measured")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    for name in [given.only] if given.only else NAMES:
        importlib.import_module(f"bench.{name}").main(Options(given.quick, given.threads, given.full))
    return 0


if __name__ == "__main__":
    sys.exit(main())
