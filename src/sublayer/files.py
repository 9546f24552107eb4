"""Writing files so that nothing already written is ever lost."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yields a path beside `path` to write to; on success it is fsynced and renamed over `path`, else removed.

    What a killed process left beside `path` is removed too.
    """
    path = Path(path)
    for left in path.parent.glob(f".{path.name}.*.partial"):
        if not _alive(left.name.split(".")[-2]):
            left.unlink(missing_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield beside
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        beside.unlink(missing_ok=True)


def _alive(process: str) -> bool:
    """Whether a process of this number may still be writing."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except (ValueError, PermissionError):
        return True
    return True
