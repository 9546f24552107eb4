"""The process that trains, among others: ranks of one run, the lock on its folder, and the signals that end it."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import SublayerError, UsageError

T = TypeVar("T")
MARK = ".sublayer-run"  # the file that is locked; reading text passes over a folder that has one


class Interrupted(SublayerError):
    """A run that was asked to end before its time; what it had reached is saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Stop:
    """Whether Ctrl-C or SIGTERM has come, inside `with`; the loop asks between steps. A second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._former = {n: signal.signal(n, self._take) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def agreed(self) -> int | None:
        """The signal that has come to any rank, so that all of them end at the same step."""
        self.number = _largest(self.number or 0) or None
        return self.number

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def ended_by_signal(message: str) -> Iterator[None]:
    """Within it SIGTERM raises Interrupted with this message; Ctrl-C is Python's own KeyboardInterrupt."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Interrupted(message, number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def ranks(device: str) -> Iterator[torch.device]:
    """Joins the other ranks, where torchrun has started several, and yields this one's device.

    "auto" is cuda where there is one. Raises UsageError for a device that is not there.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if several and name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        found = torch.device(name)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"train.device: {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    if found.type == "cuda":
        torch.cuda.set_device(found)
    if several:
        dist.init_process_group("nccl" if found.type == "cuda" else "gloo")
    try:
        yield found
    finally:
        if several:
            dist.destroy_process_group()


def world() -> int:
    """How many ranks train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this process is."""
    return dist.get_rank() if world() > 1 else 0


def agreed(said: bool) -> bool:
    """Whether any rank says so."""
    return bool(_largest(int(said)))


def _largest(number: int) -> int:
    """The largest number that a rank has."""
    if world() > 1:
        found = torch.tensor(number, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)
    return number


def first(act: Callable[[], T]) -> T:
    """What `act` gives: rank 0 acts while the others wait; then they act too, and find the work done."""
    if rank() > 0:
        dist.barrier()
        return act()
    found = act()
    if world() > 1:
        dist.barrier()
    return found


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Holds the folder of a run, made where it is not there. Raises UsageError where another process trains in it."""
    if rank() > 0:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"out: {folder} cannot be made: {error.strerror}") from None
    with open(folder / MARK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"out: another process is training in {folder}") from None
        yield
