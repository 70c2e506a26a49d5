"""One flow at a time in a repository, by a lock that the kernel gives back when its holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

LOCK_FILE = Path(".dvc", "tmp", "vlp-flow.lock")

WhenBusy = Literal["queue", "cancel"]


class BusyError(Exception):
    """Another flow runs in the repository. The message says which."""


@contextmanager
def exclusive(root: Path, name: str, *, when_busy: WhenBusy, say: Callable[[str], None]) -> Iterator[int]:
    """Hold the repository at `root` for the flow `name`; waits for another holder or raises BusyError.

    Yields the lock's file descriptor. A child process that inherits it keeps the repository held until it ends too: the
    stage of a flow that was killed finishes, and the next flow waits for it instead of meeting DVC's own lock.
    """
    path = root / LOCK_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = path.read_text(encoding="utf-8").strip() or "another flow"
            if when_busy == "cancel":
                raise BusyError(f"{holder} runs in this repository") from None
            say(f"{name}: waiting for {holder}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"the flow {name} (process {os.getpid()})\n".encode(), 0)
        try:
            yield descriptor
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
