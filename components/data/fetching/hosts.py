"""Places at hosts: so many fetches at one host at a time, and none while a host asks for peace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary


@dataclass
class Spent:
    """Seconds of one row so far. Queues for a place count nowhere: they say nothing of the row or its host."""

    asked: float = 0.0  # until answers were complete
    waited: float = 0.0  # between tries, and for hosts that asked for peace

    @property
    def total(self) -> float:
        """Both."""
        return self.asked + self.waited


@dataclass
class _Peace:
    """What a host asked for."""

    status: int  # with which it did
    until: float  # by the clock
    owed: float = 0.0  # seconds of it in a row, all told, since the host last gave another answer


class Hosts:
    """Who may ask which host, and when. Of one event loop."""

    def __init__(
        self, concurrency: int, per_host: int, row_seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """At most `per_host` places at each host and `concurrency` in all; a row may take `row_seconds`."""
        self._per_host = per_host
        self._row_seconds = row_seconds
        self._now = now
        self._all = asyncio.Semaphore(concurrency)
        self._at_host: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._peace: dict[str, _Peace] = {}

    @asynccontextmanager
    async def place(self, host: str, spent: Spent) -> AsyncIterator[int | None]:
        """A place at `host`, then, when the host is not to be left in peace, one of all places.

        A slow or a resting host's queue holds up no other host: its rows hold none of all places. What the row waits
        for the host's peace is added to `spent`. Yields None when the host may be asked. Otherwise it must not be, and
        the row ends with what is yielded, the status by which the host asked for peace: when that lasts longer than
        the row still may, or when the host has asked for `row_seconds` of it and more without another answer between.
        """
        at_host = self._at_host.get(host)
        if at_host is None:
            at_host = self._at_host[host] = asyncio.Semaphore(self._per_host)
        async with at_host:
            while True:
                refused = await self._rest(host, spent)
                if refused is not None:
                    yield refused
                    return
                async with self._all:
                    if self.quiet(host) <= 0:  # else it has asked for peace while we stood in the queue
                        yield None
                        return

    async def _rest(self, host: str, spent: Spent) -> int | None:
        while (wait := self.quiet(host)) > 0:
            if self.hopeless(host) or spent.total + wait >= self._row_seconds:
                return self._peace[host].status
            await asyncio.sleep(wait)
            spent.waited += wait
        return None

    def refused(self, host: str, status: int, seconds: float) -> None:
        """`host` has asked, with `status`, to be left in peace for so many seconds from now."""
        now = self._now()
        peace = self._peace.setdefault(host, _Peace(status, now))
        more = now + seconds - max(now, peace.until)
        if more > 0:  # not the answers to what was under way when the first of them came
            peace.status, peace.until, peace.owed = status, now + seconds, peace.owed + more

    def answered(self, host: str) -> None:
        """`host` has answered without asking for peace: what it has asked for till now was worth waiting for."""
        if host in self._peace:
            wait = self.quiet(host)
            if wait > 0:
                self._peace[host].owed = wait
            else:
                del self._peace[host]

    def quiet(self, host: str) -> float:
        """Seconds until `host` may be asked again; 0 when it may be."""
        peace = self._peace.get(host)
        return 0.0 if peace is None else max(0.0, peace.until - self._now())

    def hopeless(self, host: str) -> bool:
        """Whether `host` has asked for more peace than a row can wait, without another answer between."""
        peace = self._peace.get(host)
        return peace is not None and peace.owed >= self._row_seconds
