"""Speed, and the share of time spent waiting for data."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

BOTTLENECK = 0.2  # share of waiting from which the loader is said to hold the training up
SECONDS = 20.0  # of training that this is judged on


class Clock:
    """Pictures a second and the share of waiting, since the last note; says once when the loader is too slow."""

    def __init__(self, batch_size: int, section: str) -> None:
        self.batch_size, self.section = batch_size, section
        self.steps, self.waited, self.since = 0, 0.0, time.monotonic()
        self._warned, self._judged_waited, self._judged_since = False, 0.0, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for data. The first batch does not count: the loader is starting."""
        started = time.monotonic()
        yield
        if self._judged_since:
            self.waited += time.monotonic() - started
        else:
            self.since = self._judged_since = time.monotonic()

    def note(self) -> str:
        """Speed and waiting since the last note."""
        now = time.monotonic()
        seconds = max(now - self.since, 1e-9)
        text = f"{self.steps * self.batch_size / seconds:.0f} pictures/s  waiting for data {self.waited / seconds:.0%}"
        self._judge(now)
        self.since, self.steps, self.waited = now, 0, 0.0
        return text

    def _judge(self, now: float) -> None:
        self._judged_waited += self.waited
        seconds = now - self._judged_since
        if seconds < SECONDS:
            return
        share = self._judged_waited / seconds
        self._judged_since, self._judged_waited = now, 0.0
        if share > BOTTLENECK and not self._warned:
            self._warned = True
            print(  # noqa: T201
                f"{self.section} waits for data {share:.0%} of the time: raise {self.section}.loader_workers, or "
                f"{self.section}.cache_mb where all pictures fit in memory",
                file=sys.stderr,
            )
