"""Fetching one picture over HTTP from servers that may lie, hang, redirect, or lead into our own network.

Redirects are followed by hand, so that every hop passes the URL rules, and names are resolved by our own resolver, so
that every address is judged at the moment it is used. Bodies past a megabyte go to disk as they arrive.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Self
from weakref import WeakValueDictionary

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from components.data.fetching.signatures import HEAD_BYTES, picture_format
from components.data.fetching.urls import check_url, forbidden_address
from components.io.outcomes import Reason

REDIRECTS = frozenset({301, 302, 303, 307, 308})
PASSING_STATUSES = frozenset({408, 425, 429, *range(500, 600)})  # worth another try
RESOLVER_THREADS = 32
KEEP_ALIVE_SECONDS = 5.0  # idle sockets per second of fetching; longer runs into the limit of open files
READ_BYTES = 1 << 16
SPOOL_BYTES = 1 << 20  # of a body held in memory, times `concurrency` at most; the rest of it goes to disk
Keep = Callable[[IO[bytes]], None]


@dataclass(frozen=True)
class Limits:
    """What one fetch may cost. All parameters of the stage; see there."""

    concurrency: int
    per_host: int
    connect_seconds: float
    total_seconds: float
    row_seconds: float
    max_bytes: int
    max_redirects: int
    retries: int
    backoff_seconds: float
    user_agent: str
    max_url_length: int


@dataclass(frozen=True)
class Fetched:
    """What became of one URL. Free of ports and, but for `milliseconds`, of times: equal answers give equal results."""

    reason: Reason
    detail: str | None = None
    final_url: str | None = None  # the last one that was asked
    http_status: int | None = None
    bytes: int | None = None
    sha256: str | None = None  # hex, of the body
    passing: bool = field(default=False, compare=False)  # whether asking again another day may end otherwise
    milliseconds: int | None = field(default=None, compare=False)  # of asking: neither queues nor waits between tries

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for the journal."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**{**values, "reason": Reason(values["reason"])})


@dataclass(frozen=True)
class _Answer:
    """One hop's outcome: a result, or where to go on; and whether another try may end otherwise."""

    result: Fetched
    location: str | None = None
    passing: bool = False
    retry_after: float | None = None


class ForbiddenAddressError(OSError):
    """A name resolved to an address that must not be asked."""


class Resolver(AbstractResolver):
    """Resolves names to public addresses only; with `hosts` given, these names to loopback ports and no other name."""

    def __init__(self, hosts: Mapping[str, int] | None = None) -> None:
        self._hosts = hosts
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="resolver")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of `host`. Raises OSError when there are none, ForbiddenAddressError when one is not public."""
        if self._hosts is not None:
            if host not in self._hosts:
                raise OSError(socket.EAI_NONAME, "not a host of this corpus")
            return [_resolved(host, "127.0.0.1", self._hosts[host], socket.AF_INET)]
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        )
        results = []
        for found_family, _, _, _, address in found:
            text = str(address[0])
            if forbidden_address(ip_address(text.split("%", 1)[0])):
                raise ForbiddenAddressError(f"{host} resolves to {text}")
            results.append(_resolved(host, text, port, found_family))
        return results

    async def close(self) -> None:
        """Let go of the threads; a lookup that hangs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _resolved(name: str, address: str, port: int, family: int) -> ResolveResult:
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(hostname=name, host=address, port=port, family=family, proto=0, flags=flags)


class Fetcher:
    """Fetches URLs within limits. Use as an async context manager; `fetch` may run many times side by side."""

    def __init__(self, limits: Limits, hosts: Mapping[str, int] | None = None, folder: Path | None = None) -> None:
        """`hosts` maps names to ports of loopback servers; no other host is asked then. None: the internet.

        `folder` is where large bodies lie until they are whole; None: where temporary files lie.
        """
        self._folder = None if folder is None else str(folder)
        self._limits = limits
        self._hosts = hosts
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._host_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def __aenter__(self) -> Self:
        # limits of concurrency and the total deadline are ours: the library's would count the wait for a free slot
        self._resolver = Resolver(self._hosts)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=self._resolver, limit=0, ttl_dns_cache=300, keepalive_timeout=KEEP_ALIVE_SECONDS
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_seconds),
            headers={
                "User-Agent": self._limits.user_agent,
                "Accept": "image/*,*/*;q=0.8",
                "Accept-Encoding": "identity",  # pictures are compressed; a bomb would only be unpacked
            },
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._resolver.close()

    async def fetch(self, url: URL, keep: Keep) -> Fetched:
        """Fetch a URL that passed the rules; a picture's bytes go to `keep`, as an open file.

        Tries again what may pass (timeouts, broken connections, 429 and 5xx), waiting longer each time or as long as
        the server asks; tries and waits together take at most `row_seconds`. Raises OSError when the disk fails;
        everything that the network does is in the result.
        """
        limits = self._limits
        asked = waited = 0.0
        for attempt in range(limits.retries + 1):
            answer, seconds = await self._follow(url, keep, limits.row_seconds - asked - waited)
            asked += seconds
            if not answer.passing or attempt == limits.retries:
                break
            wait = max(limits.backoff_seconds * 2**attempt * random.uniform(0.5, 1.5), answer.retry_after or 0.0)
            if asked + waited + wait >= limits.row_seconds:
                break
            await asyncio.sleep(wait)
            waited += wait
        return replace(answer.result, passing=answer.passing, milliseconds=round(asked * 1000))

    async def _follow(self, url: URL, keep: Keep, most: float) -> tuple[_Answer, float]:
        """One try: the URL and its redirects, within the total deadline, and the seconds that it took.

        `most` is what the row has left; waiting for a free slot does not count.
        """
        limits, asked = self._limits, 0.0
        for _ in range(limits.max_redirects + 1):
            if self._hosts is not None and url.host not in self._hosts:
                return _Answer(Fetched(Reason.DNS_FAILURE, final_url=str(url))), asked
            async with self._slot(url.raw_host or ""):
                started = time.monotonic()
                try:
                    async with asyncio.timeout(min(limits.total_seconds, most) - asked):
                        answer = await self._ask(url, keep)
                except TimeoutError:
                    seconds = f"not done within {limits.total_seconds:g} s"
                    return _Answer(
                        Fetched(Reason.TIMEOUT, seconds, str(url)), passing=True
                    ), time.monotonic() - started + asked
                finally:
                    asked += time.monotonic() - started
            if answer.location is None:
                return answer, asked
            target = check_url(answer.location, max_length=limits.max_url_length, base=url)
            if isinstance(target, Reason):
                detail = "where it redirects to"
                return _Answer(Fetched(target, detail, str(url), answer.result.http_status)), asked
            url = target
        detail = f"more than {limits.max_redirects}"
        return _Answer(Fetched(Reason.TOO_MANY_REDIRECTS, detail, None, answer.result.http_status)), asked

    async def _ask(self, url: URL, keep: Keep) -> _Answer:
        """One request, without following redirects."""
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                status, location = response.status, response.headers.get("Location")
                if status in REDIRECTS and location:
                    return _Answer(Fetched(Reason.OK, None, str(url), status), location=location)
                if status != 200:
                    reason = Reason.HTTP_NOT_FOUND if status in (404, 410) else Reason.HTTP_ERROR
                    return _Answer(
                        Fetched(reason, f"status {status}", str(url), status),
                        passing=status in PASSING_STATUSES,
                        retry_after=retry_delay(response.headers.get("Retry-After"), response.headers.get("Date")),
                    )
                return _Answer(await self._save(response, url, keep))
        except aiohttp.ClientConnectorDNSError as error:
            if isinstance(error.os_error, ForbiddenAddressError):
                return _Answer(Fetched(Reason.URL_FORBIDDEN_HOST, "what its name resolves to", str(url)))
            passing = error.os_error.errno == socket.EAI_AGAIN
            return _Answer(Fetched(Reason.DNS_FAILURE, None, str(url)), passing=passing)
        except TimeoutError:  # before the next: the library's timeouts are both
            detail = f"no connection within {self._limits.connect_seconds:g} s"
            return _Answer(Fetched(Reason.TIMEOUT, detail, str(url)), passing=True)
        except (aiohttp.InvalidURL, UnicodeError):
            return _Answer(Fetched(Reason.URL_INVALID, "refused by the HTTP library", str(url)))
        except (aiohttp.ClientSSLError, ssl.SSLError):
            return _Answer(Fetched(Reason.CONNECT_FAILURE, "no trusted TLS connection", str(url)))
        except aiohttp.ClientConnectorError:
            return _Answer(Fetched(Reason.CONNECT_FAILURE, "no connection", str(url)), passing=True)
        except aiohttp.ClientResponseError:
            return _Answer(Fetched(Reason.HTTP_ERROR, "the answer is not HTTP", str(url)))
        except (aiohttp.ClientError, ConnectionError, ValueError):
            return _Answer(Fetched(Reason.CONNECT_FAILURE, "the connection broke", str(url)), passing=True)

    async def _save(self, response: aiohttp.ClientResponse, url: URL, keep: Keep) -> Fetched:
        """Take in a body, as long as it may be a picture and is not too large; more than a little lies on the disk."""
        too_large = Fetched(Reason.TOO_LARGE, f"more than {self._limits.max_bytes} bytes", str(url), 200)
        if (response.content_length or 0) > self._limits.max_bytes:
            return too_large
        head, size, digest = b"", 0, hashlib.sha256()
        with SpooledTemporaryFile(SPOOL_BYTES, dir=self._folder) as body:
            async for piece in response.content.iter_chunked(READ_BYTES):
                size += len(piece)
                if size > self._limits.max_bytes:
                    return too_large
                if len(head) < HEAD_BYTES:
                    head += piece[:HEAD_BYTES]
                    if len(head) >= HEAD_BYTES and picture_format(head) is None:
                        break  # the rest of a page is of no use
                digest.update(piece)
                body.write(piece)
            if size == 0:
                return Fetched(Reason.EMPTY_BODY, None, str(url), 200, 0)
            if picture_format(head) is None:
                return Fetched(Reason.NOT_AN_IMAGE, "the first bytes are of no picture", str(url), 200)
            body.seek(0)
            keep(body)
        return Fetched(Reason.OK, None, str(url), 200, size, digest.hexdigest())

    @asynccontextmanager
    async def _slot(self, host: str) -> AsyncIterator[None]:
        """A place at the host, then one of all places: a slow host's queue holds up no other host."""
        at_host = self._host_slots.get(host)
        if at_host is None:
            at_host = self._host_slots[host] = asyncio.Semaphore(self._limits.per_host)
        async with at_host, self._slots:
            yield


def retry_delay(retry_after: str | None, now: str | None) -> float | None:
    """The delay that a server asks for, in seconds or as a date, which the server's own `now` makes a delay."""
    if retry_after is None or len(retry_after) > 99:
        return None
    if re.fullmatch(r"\s*[0-9]{1,9}\s*", retry_after):
        return float(retry_after)
    try:
        seconds = (parsedate_to_datetime(retry_after) - parsedate_to_datetime(now or "")).total_seconds()
    except (ValueError, TypeError, OverflowError):  # no dates, or one with a time zone and one without
        return None
    return max(seconds, 0.0)
