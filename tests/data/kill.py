"""A program that kills itself: `kill.py FOLDER FIRST STRIDE`, run by test_shards.

It prepares a corpus in a child that dies at its FIRST write, fsync, rename or removal, then in another that dies
STRIDE later, and so on until a child outlives the writing. After each death what is readable has to be the old or the
new, whole; and the next call has to make what an uninterrupted one makes. Prints how many children died, and 1 if the
last one lived.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sublayer.data import shards, writer
from sublayer.data.readers import Document
from sublayer.data.shards import Tokens, prepare
from sublayer.errors import InputError
from sublayer.text import Bytes

TOKENIZER = Bytes(("<|end|>",))
OLD = [Document(f"old {number}\n" * 3, str(number)) for number in range(60)]
NEW = [Document(f"new {number}\n" * 5, str(number)) for number in range(90)]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make(documents: list[Document], folder: Path) -> None:
    prepare(documents, TOKENIZER, folder, held=0.2, shard_tokens=700)


def dying(function: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return call


def child(folder: Path, point: int) -> bool:
    """Whether a process that dies at a point outlives the writing."""
    process = os.fork()
    if process == 0:
        left = [point]
        writer.put = dying(writer.put, left)
        for name in ("fsync", "replace", "unlink", "mkdir", "rmdir"):
            setattr(os, name, dying(getattr(os, name), left))
        make(NEW, folder)
        os._exit(0)
    return os.waitpid(process, 0)[1] == 0


def texts(folder: Path) -> list[str] | None:
    try:
        tokens = Tokens.open(folder)
    except InputError:
        return None
    return [TOKENIZER.decode(tokens.document(number).tolist()) for number in range(tokens.documents)]


def main(folder: Path, first: int, stride: int) -> None:
    shards.GROUP, shards.RECORD = 300, 600
    os.fsync = lambda file: None  # what is written outlives its process anyway
    made = {}
    for name, documents in (("old", OLD), ("new", NEW)):
        make(documents, folder / name)
        made[name] = files(folder / name), [texts(folder / name / side) for side in shards.SIDES]
    for start in (None, "old"):
        deaths, point, lived = 0, first, False
        while not lived:
            work = folder / "work"
            shutil.rmtree(work, ignore_errors=True)
            if start is not None:
                shutil.copytree(folder / start, work)
            lived = child(work, point)
            for number, side in enumerate(shards.SIDES):
                known = [None if start is None else made[start][1][number], made["new"][1][number]]
                assert texts(work / side) in known, (point, side)
            make(NEW, work)
            assert files(work) == made["new"][0], point
            deaths += not lived
            point += stride
    print(deaths, int(lived))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
