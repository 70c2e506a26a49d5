"""Fetching one picture over HTTP from servers that may lie, hang, redirect, or lead into our own network.

Redirects are followed by hand, so that every hop passes the URL rules, and names are resolved by our own resolver, so
that every address is judged at the moment it is used. Bodies past a megabyte go to disk as they arrive.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Self

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from components.data.fetching.hosts import Hosts, Spent
from components.data.fetching.signatures import HEAD_BYTES, picture_format
from components.data.fetching.urls import check_url, forbidden_address
from components.io.outcomes import Reason

REDIRECTS = frozenset({301, 302, 303, 307, 308})
PASSING_STATUSES = frozenset({408, 425, 429, *range(500, 600)})  # worth another try
REFUSALS = frozenset({429, 503})  # that speak for the whole host where they say when to come again
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

    async def __aenter__(self) -> Self:
        self._places = Hosts(self._limits.concurrency, self._limits.per_host, self._limits.row_seconds)
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

        A 429 or 503 with Retry-After is the whole host's wish: until then it is asked for no other URL either. Where
        that is longer than the row may take, or where the host has wished so for `row_seconds` on end, the row ends
        at once and unasked with the status that the host gave to others, as HTTP_ERROR that can pass: the row is not
        told apart from those that were asked, since who was depends on the moment. The next run asks for it again.
        """
        limits, spent = self._limits, Spent()
        for attempt in range(limits.retries + 1):
            answer = await self._follow(url, keep, spent)
            if not answer.passing or attempt == limits.retries:
                break
            wait = max(limits.backoff_seconds * 2**attempt * random.uniform(0.5, 1.5), answer.retry_after or 0.0)
            if spent.total + wait >= limits.row_seconds:
                break
            await asyncio.sleep(wait)
            spent.waited += wait
        return replace(answer.result, passing=answer.passing, milliseconds=round(spent.asked * 1000))

    async def _follow(self, url: URL, keep: Keep, spent: Spent) -> _Answer:
        """One try: the URL and its redirects, within the total deadline and what the row has left.

        Adds to what the row has `spent`; waiting for a free place does not count.
        """
        limits, before = self._limits, spent.asked
        for _ in range(limits.max_redirects + 1):
            if self._hosts is not None and url.host not in self._hosts:
                return _Answer(Fetched(Reason.DNS_FAILURE, final_url=str(url)))
            host = url.raw_host or ""
            async with self._places.place(host, spent) as refused:
                if refused is not None:
                    result = Fetched(Reason.HTTP_ERROR, f"status {refused}", str(url), refused)
                    return _Answer(result, passing=True, retry_after=math.inf)
                left = min(limits.total_seconds - (spent.asked - before), limits.row_seconds - spent.total)
                started = time.monotonic()
                try:
                    async with asyncio.timeout(left):
                        answer = await self._ask(url, keep)
                except TimeoutError:
                    seconds = f"not done within {limits.total_seconds:g} s"
                    return _Answer(Fetched(Reason.TIMEOUT, seconds, str(url)), passing=True)
                finally:
                    spent.asked += time.monotonic() - started
                self._heed(host, answer)  # before the place is another's
            if answer.location is None:
                return answer
            target = check_url(answer.location, max_length=limits.max_url_length, base=url)
            if isinstance(target, Reason):
                detail = "where it redirects to"
                return _Answer(Fetched(target, detail, str(url), answer.result.http_status))
            url = target
        detail = f"more than {limits.max_redirects}"
        return _Answer(Fetched(Reason.TOO_MANY_REDIRECTS, detail, None, answer.result.http_status))

    def _heed(self, host: str, answer: _Answer) -> None:
        """What an answer says of its host: that it wants peace, or that it answers."""
        status = answer.result.http_status
        if status in REFUSALS and answer.retry_after is not None:
            self._places.refused(host, status, answer.retry_after)
        elif status is not None and status not in PASSING_STATUSES:
            self._places.answered(host)

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
