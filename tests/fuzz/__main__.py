"""Readers of files against files that lie: `python -m tests.fuzz` mutates real ones and tells how each was refused.

No input may crash a reader, take over two seconds of a processor, or more than a gigabyte of memory; each ends in a
model or in one line. Each place of the readers that refuses a file has to be reached. Ends with 1 where one of this
does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.run import SHARES, fuzz, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SHARES, help="one kind of file")
    given = parser.parse_args()
    shares = {given.only: 1.0} if given.only else SHARES
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as folder:
        found = fuzz(Path(folder), {kind: round(share * given.inputs) for kind, share in shares.items()}, given.seed)
    print(report(found))
    return 1 if found.faults or (not given.only and found.unreached()) else 0


if __name__ == "__main__":
    sys.exit(main())
