"""A host that asks for peace gets it, from all rows. Counted at the server, or by a clock that stands still."""

import asyncio
import time
from typing import ClassVar

import pytest
from yarl import URL

from components.data.fetching.hosts import Hosts, Spent
from components.data.fetching.http import Fetched, Fetcher, Limits
from components.io.outcomes import Reason
from tests.data.test_fetch import HOST, LIMITS, PICTURE
from tests.data.web import Handler, serving

OTHER = "other.test"


class Resting(Handler):
    """Answers ``/SECONDS/...`` of `HOST` by asking for peace, so long from the first request on; then by pictures."""

    until: ClassVar[float | None] = None
    status: ClassVar[int] = 429
    in_peace: ClassVar[int] = 0  # requests before it ended

    def answer(self):
        cls = type(self)
        seconds = self.path.split("/")[1]
        with self.lock:
            self.asked[self.headers["Host"]] += 1
            cls.until = cls.until or time.monotonic() + float(seconds)
            resting = self.headers["Host"] == HOST and time.monotonic() < cls.until
            cls.in_peace += resting
        if resting:
            self.send(cls.status, Retry_After=seconds)
        else:
            self.send(body=PICTURE)


@pytest.fixture(params=[429, 503])
def server(request):
    with serving(type("Resting", (Resting,), {"status": request.param})) as running:
        yield running


def get(port, paths, **changed) -> list[Fetched]:
    async def run():
        limits = Limits(**{**LIMITS, "per_host": 4, "total_seconds": 30.0, **changed})
        async with Fetcher(limits, {HOST: port}) as fetcher:
            urls = [URL(f"http://{HOST}{path}") for path in paths]
            return await asyncio.gather(*(fetcher.fetch(url, lambda body: None) for url in urls))

    return asyncio.run(run())


def test_all_rows_of_a_host_wait_until_it_may_be_asked(server):
    found = get(server.server_port, [f"/1/{n}" for n in range(500)])
    assert {got.reason for got in found} == {Reason.OK}
    seen = server.RequestHandlerClass
    assert 1 <= seen.in_peace <= 4  # what was under way when it first asked for peace
    assert seen.asked[HOST] == 500 + seen.in_peace


def test_rows_that_cannot_wait_so_long_end_unasked_as_those_that_were_asked(server):
    found = get(server.server_port, [f"/600/{n}" for n in range(500)])
    status = server.RequestHandlerClass.status
    for n, got in enumerate(found):
        assert got == Fetched(Reason.HTTP_ERROR, f"status {status}", f"http://{HOST}/600/{n}", status)
        assert got.passing
    assert 1 <= server.RequestHandlerClass.asked[HOST] <= 4


def test_a_resting_host_holds_up_no_other_host(server):
    """With one place in all, and a host that rests for longer than this test may take."""

    async def run():
        limits = Limits(**{**LIMITS, "concurrency": 1, "per_host": 2, "total_seconds": 30.0, "row_seconds": 86400.0})
        port = server.server_port
        async with Fetcher(limits, {HOST: port, OTHER: port}) as fetcher, asyncio.timeout(60):
            resting = [asyncio.create_task(fetcher.fetch(URL(f"http://{HOST}/3600/{n}"), print)) for n in range(20)]
            while not server.RequestHandlerClass.asked[HOST]:
                await asyncio.sleep(0.001)
            others = (fetcher.fetch(URL(f"http://{OTHER}/3600/{n}"), lambda body: None) for n in range(20))
            found = await asyncio.gather(*others)
            for task in resting:
                assert task.cancel()  # it was not done
            await asyncio.wait(resting)
        return found

    assert {got.reason for got in asyncio.run(run())} == {Reason.OK}
    assert dict(server.RequestHandlerClass.asked) == {HOST: 1, OTHER: 20}


def test_a_redirect_into_a_resting_host_waits_like_all_its_rows():
    class Redirecting(Handler):
        def answer(self):
            self.asked[f"{self.headers['Host']}{self.path}"] += 1
            if self.headers["Host"] == OTHER:
                self.send(302, Location=f"http://{HOST}{self.path}")
            else:
                self.send(429, Retry_After="600")

    async def run(port):
        async with Fetcher(Limits(**LIMITS), {HOST: port, OTHER: port}) as fetcher:
            first = await fetcher.fetch(URL(f"http://{HOST}/first"), print)
            return first, await fetcher.fetch(URL(f"http://{OTHER}/second"), print)

    with serving(Redirecting) as server:
        first, second = asyncio.run(run(server.server_port))
        asked = dict(server.RequestHandlerClass.asked)
    assert first == Fetched(Reason.HTTP_ERROR, "status 429", f"http://{HOST}/first", 429)
    assert second == Fetched(Reason.HTTP_ERROR, "status 429", f"http://{HOST}/second", 429)
    assert asked == {f"{HOST}/first": 1, f"{OTHER}/second": 1}


class Clock:
    def __init__(self):
        self.time = 1000.0

    def __call__(self):
        return self.time


def test_peace_without_end_is_not_waited_for():
    clock = Clock()
    hosts = Hosts(1, 1, row_seconds=120.0, now=clock)
    for _ in range(2):
        assert not hosts.hopeless(HOST)
        hosts.refused(HOST, 429, 60)
        hosts.refused(HOST, 429, 60)  # under way when the first came: not asked for twice
        assert hosts.quiet(HOST) == 60
        clock.time += 60
        assert hosts.quiet(HOST) == 0
    assert hosts.hopeless(HOST)
    assert (hosts.quiet(OTHER), hosts.hopeless(OTHER)) == (0, False)


def test_a_host_that_answers_between_is_waited_for_however_often():
    clock = Clock()
    hosts = Hosts(1, 1, row_seconds=120.0, now=clock)
    for _ in range(9):
        hosts.refused(HOST, 503, 60)
        clock.time += 50
        hosts.answered(HOST)  # what was under way is an answer too, and ends no peace
        assert hosts.quiet(HOST) == 10
        clock.time += 1000  # nobody asks: no more of peace than it asked for
        hosts.refused(HOST, 503, 100)
        assert (hosts.quiet(HOST), hosts.hopeless(HOST)) == (100, False)
        clock.time += 100
        hosts.answered(HOST)
    hosts.refused(HOST, 503, 60)
    assert not hosts.hopeless(HOST)


def test_of_two_wishes_the_later_moment_holds():
    clock = Clock()
    hosts = Hosts(1, 1, row_seconds=120.0, now=clock)
    hosts.refused(HOST, 429, 60)
    hosts.refused(HOST, 503, 5)
    assert hosts.quiet(HOST) == 60
    hosts.refused(HOST, 503, 90)
    assert hosts.quiet(HOST) == 90


@pytest.mark.parametrize(
    ("spent", "refusals", "status"),
    [
        (Spent(20, 39), 1, None),
        (Spent(20, 40), 1, 429),
        (Spent(0, 100), 1, 429),
        (Spent(), 2, 429),  # as long as a row can wait, without another answer between
    ],
)
def test_a_row_waits_no_longer_than_it_may(monkeypatch, spent, refusals, status):
    clock, before = Clock(), spent.total

    async def sleep(seconds):
        clock.time += seconds

    async def run():
        hosts = Hosts(1, 1, row_seconds=120.0, now=clock)
        for refusal in range(refusals):
            clock.time = 1000.0 - 60 * (refusals - 1 - refusal)
            hosts.refused(HOST, 429, 60)
        async with hosts.place(HOST, spent) as refused:
            return refused

    monkeypatch.setattr("components.data.fetching.hosts.asyncio.sleep", sleep)
    assert asyncio.run(run()) == status
    assert spent.total - before == clock.time - 1000 == (60 if status is None else 0)
