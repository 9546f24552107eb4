"""Ratios against peers: `python -m bench` runs every file of this folder that has a main, `--only NAME` one of them."""

import argparse
import importlib
import sys
from pathlib import Path

from bench.harness import Options

NAMES = sorted(
    path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "__main__", "harness")
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", choices=NAMES, metavar="NAME", help=f"one of: {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, once: that it runs, not how fast")
    given = parser.parse_args()
    for name in [given.only] if given.only else NAMES:
        importlib.import_module(f"bench.{name}").main(Options(quick=given.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
