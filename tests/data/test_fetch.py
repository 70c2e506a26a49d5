"""Fetching from servers that misbehave. Everything runs on loopback."""

import asyncio
import gzip
import hashlib
import socket
import threading
import time
from contextlib import closing
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from components.data.fetching.http import Fetched, Fetcher, Limits, retry_delay
from components.data.fetching.signatures import HEAD_BYTES, picture_format
from components.io.outcomes import Reason
from tests.data.web import Handler, serving

HOST = "corpus.test"
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8
LIMITS: dict[str, Any] = {
    "concurrency": 32,
    "per_host": 32,
    "connect_seconds": 1.0,
    "total_seconds": 2.0,
    "row_seconds": 60.0,
    "max_bytes": 100_000,
    "max_redirects": 3,
    "retries": 2,
    "backoff_seconds": 0.01,
    "user_agent": "test/1",
    "max_url_length": 2083,
}


class Misbehaving(Handler):
    """What a path means is in its first part."""

    wbufsize = 0
    busy = most_busy = 0

    def answer(self):
        path = unquote(self.path)
        with self.lock:
            self.asked[path] += 1
            times = self.asked[path]
        kind, *rest = path.strip("/").split("/")
        getattr(self, f"on_{kind}")(times, *rest)

    def on_ok(self, times, *rest):
        self.send(body=PICTURE)

    def on_status(self, times, status):
        self.send(int(status), b"" if status == "204" else b"sorry")

    def on_flaky(self, times, status, good_after):
        self.send(int(status) if times <= int(good_after) else 200, PICTURE, Retry_After="0")

    def on_later(self, times, seconds):
        self.send(429 if times == 1 else 200, PICTURE, Retry_After=seconds)

    def on_drop(self, times, good_after="9"):
        if times <= int(good_after):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.send(body=PICTURE)

    def on_short(self, times):
        self.send(body=PICTURE, Content_Length=str(len(PICTURE) + 10))
        self.close_connection = True

    def on_loop(self, times, number="0"):
        self.send(302, Location=f"/loop/{int(number) + 1}")

    def on_to(self, times, *rest):
        self.send(301, b"moved", Location="/".join(rest).replace("PORT", str(self.server.server_port)))

    def on_nowhere(self, times):
        self.send(302)

    def on_dribble(self, times):
        self.send(body=PICTURE[:40], Content_Length="5000")
        while not self.release.wait(0.05):
            self.wfile.write(b"x")
        self.close_connection = True

    def on_silent(self, times):
        self.release.wait()
        self.close_connection = True

    def on_large(self, times):
        self.send(body=PICTURE + bytes(200_000))

    def on_endless(self, times):
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        self.wfile.write(PICTURE)
        while True:
            self.wfile.write(bytes(10_000))

    def on_html(self, times):
        self.send(body=b"<html>" + b"not a picture " * 100, Content_Type="image/jpeg")

    def on_empty(self, times):
        self.send(Content_Type="image/jpeg")

    def on_bomb(self, times):
        self.send(body=gzip.compress(PICTURE + bytes(10_000_000)), Content_Encoding="gzip")

    def on_busy(self, times, *rest):
        cls = type(self)
        with self.lock:
            cls.busy += 1
            cls.most_busy = max(cls.most_busy, cls.busy)
        self.release.wait(0.05)
        with self.lock:
            cls.busy -= 1
        self.send(body=PICTURE)


@pytest.fixture
def server():
    with serving(Misbehaving) as running:
        yield running


def keeper(path):
    return lambda body: path.write_bytes(body.read())


def get(paths, tmp_path, port, hosts="corpus", **changed) -> list[Fetched]:
    """Fetch all of `paths` (or whole URLs) side by side; bodies into files named 0, 1, 2 ..."""
    hosts = {HOST: port} if hosts == "corpus" else hosts

    async def run():
        async with Fetcher(Limits(**{**LIMITS, **changed}), hosts) as fetcher:
            urls = [URL(path if "://" in path[:8] else f"http://{HOST}{path}") for path in paths]
            return await asyncio.gather(*(fetcher.fetch(url, keeper(tmp_path / str(i))) for i, url in enumerate(urls)))

    return asyncio.run(run())


def test_a_picture_arrives_whole(server, tmp_path):
    [got] = get(["/ok"], tmp_path, server.server_port)
    digest = hashlib.sha256(PICTURE).hexdigest()
    assert got == Fetched(Reason.OK, None, f"http://{HOST}/ok", 200, len(PICTURE), digest)
    assert (tmp_path / "0").read_bytes() == PICTURE
    assert Fetched.from_json(got.to_json()) == got


@pytest.mark.parametrize(
    ("path", "reason", "status", "asked"),
    [
        ("/status/404", Reason.HTTP_NOT_FOUND, 404, 1),
        ("/status/410", Reason.HTTP_NOT_FOUND, 410, 1),
        ("/status/403", Reason.HTTP_ERROR, 403, 1),
        ("/status/204", Reason.HTTP_ERROR, 204, 1),
        ("/status/500", Reason.HTTP_ERROR, 500, 3),
        ("/status/429", Reason.HTTP_ERROR, 429, 3),
        ("/flaky/500/2", Reason.OK, 200, 3),
        ("/flaky/429/1", Reason.OK, 200, 2),
        ("/flaky/503/3", Reason.HTTP_ERROR, 503, 3),
        ("/drop", Reason.CONNECT_FAILURE, None, 6),  # the library asks again once, in case a kept connection was stale
        ("/drop/2", Reason.OK, 200, 3),
        ("/short", Reason.CONNECT_FAILURE, None, 3),
        ("/to//ok", Reason.OK, 200, 1),
        ("/to//to//ok", Reason.OK, 200, 1),
        ("/to//status/404", Reason.HTTP_NOT_FOUND, 404, 1),
        ("/loop", Reason.TOO_MANY_REDIRECTS, 302, 1),
        ("/nowhere", Reason.HTTP_ERROR, 302, 1),
        ("/to/http://127.0.0.1:PORT/ok", Reason.URL_FORBIDDEN_HOST, 301, 1),
        ("/to/http://2130706433:PORT/ok", Reason.URL_FORBIDDEN_HOST, 301, 1),
        ("/to/http://[::ffff:127.0.0.1]:PORT/ok", Reason.URL_FORBIDDEN_HOST, 301, 1),
        ("/to/http://169.254.169.254/latest/meta-data", Reason.URL_FORBIDDEN_HOST, 301, 1),
        ("/to/file:///etc/passwd", Reason.URL_SCHEME, 301, 1),
        ("/to/http://u:p@corpus.test/ok", Reason.URL_CREDENTIALS, 301, 1),
        ("/to/http://elsewhere.test/ok", Reason.DNS_FAILURE, None, 1),
        ("/large", Reason.TOO_LARGE, 200, 1),
        ("/endless", Reason.TOO_LARGE, 200, 1),
        ("/bomb", Reason.TOO_LARGE, 200, 1),
        ("/html", Reason.NOT_AN_IMAGE, 200, 1),
        ("/empty", Reason.EMPTY_BODY, 200, 1),
    ],
)
def test_misbehaviour_has_its_reason(server, tmp_path, path, reason, status, asked):
    [got] = get([path], tmp_path, server.server_port)
    assert (got.reason, got.http_status) == (reason, status)
    assert server.RequestHandlerClass.asked[path] == asked
    assert [file.name for file in tmp_path.iterdir()] == (["0"] if reason is Reason.OK else [])
    assert str(server.server_port) not in f"{got.detail} {got.final_url}"


@pytest.mark.parametrize("path", ["/dribble", "/silent", "/to//dribble"])
def test_the_total_deadline_holds(server, tmp_path, path):
    started = time.monotonic()
    [got] = get([path], tmp_path, server.server_port, total_seconds=0.3, connect_seconds=0.2, retries=1)
    assert got.reason is Reason.TIMEOUT
    assert time.monotonic() - started < 5
    assert list(tmp_path.iterdir()) == []


def test_a_row_ends_whatever_its_tries(server, tmp_path):
    started = time.monotonic()
    [got] = get(["/dribble"], tmp_path, server.server_port, total_seconds=0.4, row_seconds=1.0, retries=50)
    assert time.monotonic() - started < 5
    assert got.reason is Reason.TIMEOUT
    assert got.passing
    assert 900 <= got.milliseconds < 5000
    assert 2 <= server.RequestHandlerClass.asked["/dribble"] <= 4


def test_a_server_that_says_when_is_asked_then_or_not_at_all(server, tmp_path):
    started = time.monotonic()
    [soon] = get(["/later/1"], tmp_path, server.server_port, row_seconds=30.0)
    assert 1 <= time.monotonic() - started < 15
    assert soon.reason is Reason.OK
    assert soon.milliseconds < 900  # of asking, not of waiting
    [later] = get(["/later/600"], tmp_path, server.server_port, row_seconds=30.0)
    assert (later.reason, later.http_status, later.passing) == (Reason.HTTP_ERROR, 429, True)
    assert server.RequestHandlerClass.asked["/later/600"] == 1


@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30.0),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 0.0),
        ("Wed, 21 Oct 2015 07:28:30 -0000", None),  # without a time zone
        ("soon", None),
        ("-5", None),
        ("1e9", None),
        ("\u0667", None),
        ("9" * 200, None),
        (None, None),
    ],
)
def test_retry_after(retry_after, seconds):
    assert retry_delay(retry_after, "Wed, 21 Oct 2015 07:28:00 GMT") == seconds
    if seconds not in (7.0, 0.0):
        assert retry_delay(retry_after, None) is None


def test_large_bodies_arrive_whole(server, tmp_path, monkeypatch):
    monkeypatch.setattr("components.data.fetching.http.SPOOL_BYTES", 100)  # the rest lies on the disk
    [got] = get(["/ok"], tmp_path, server.server_port)
    assert got.sha256 == hashlib.sha256((tmp_path / "0").read_bytes()).hexdigest()
    assert (tmp_path / "0").read_bytes() == PICTURE


@pytest.mark.parametrize(
    ("path", "passing"),
    [("/status/500", True), ("/status/429", True), ("/drop", True), ("/short", True), ("/status/404", False),
     ("/status/403", False), ("/html", False), ("/empty", False), ("/large", False), ("/loop", False), ("/ok", False),
     ("/to/http://127.0.0.1/", False), ("/to//status/503", True)],
)  # fmt: skip
def test_what_can_pass(server, tmp_path, path, passing):
    [got] = get([path], tmp_path, server.server_port, retries=0)
    assert got.passing is passing


def test_other_hosts_are_not_asked_when_the_corpus_is_served(server, tmp_path):
    urls = ["http://dead.test/x", "http://93.184.216.34/x", "http://[2606:2800:220:1::1]/x"]
    assert [got.reason for got in get(urls, tmp_path, server.server_port)] == [Reason.DNS_FAILURE] * 3


def test_nobody_listens(tmp_path):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        [got] = get(["/ok"], tmp_path, taken.getsockname()[1])
    assert got == Fetched(Reason.CONNECT_FAILURE, "no connection", f"http://{HOST}/ok")


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "::1", "fe80::1%lo", "::ffff:169.254.169.254"])
def test_a_name_that_resolves_to_our_own_network_is_not_asked(server, tmp_path, monkeypatch, address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def resolve(host, port, *_):
        public = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", port))
        return [public, (family, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    [got] = get([f"http://rebind.example:{server.server_port}/ok"], tmp_path, 0, hosts=None)
    assert got.reason is Reason.URL_FORBIDDEN_HOST
    assert not server.RequestHandlerClass.asked


@pytest.mark.parametrize(("errno", "tries"), [(socket.EAI_NONAME, 1), (socket.EAI_AGAIN, 3)])
def test_a_name_that_does_not_resolve(tmp_path, monkeypatch, errno, tries):
    asked = []

    def resolve(host, *_):
        asked.append(host)
        raise socket.gaierror(errno, "no")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    [got] = get(["http://gone.example/x"], tmp_path, 0, hosts=None)
    assert got == Fetched(Reason.DNS_FAILURE, None, "http://gone.example/x")
    assert asked == ["gone.example"] * tries


def test_no_more_than_allowed_at_one_host(server, tmp_path):
    results = get([f"/busy/{i}" for i in range(40)], tmp_path, server.server_port, per_host=3)
    assert {got.reason for got in results} == {Reason.OK}
    assert 1 <= server.RequestHandlerClass.most_busy <= 3


def test_waiting_for_a_slot_does_not_count_towards_the_deadline(server, tmp_path):
    paths = [f"/busy/{i}" for i in range(30)]  # one after the other: 1.5 s and more
    results = get(paths, tmp_path, server.server_port, per_host=1, total_seconds=1.0, retries=0)
    assert {got.reason for got in results} == {Reason.OK}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answer=st.one_of(st.binary(), st.binary().map((b"HTTP/1.1 200 OK\r\n" + b"%s").__mod__)))
def test_any_bytes_as_an_answer_give_a_reason(tmp_path, answer):
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def serve():
            for _ in range(2):
                try:
                    connection = listening.accept()[0]
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        [got] = get(["/x"], tmp_path, listening.getsockname()[1], retries=1, total_seconds=0.5, connect_seconds=0.5)
    assert got.reason is not Reason.OK


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\xff\xd8\xff\xe0", "jpeg"),
        (PICTURE, "png"),
        (b"GIF89a", "gif"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "webp"),
        (b"RIFF\x00\x00\x00\x00WAVE", None),
        (b"II*\x00", "tiff"),
        (b"BM" + bytes(12) + b"\x28\x00\x00\x00", "bmp"),
        (b"BMW sells cars and more", None),
        (b"\x00\x00\x00\x20ftypavif", "avif"),
        (b"\x00\x00\x00\x20ftypmif1\x00\x00\x00\x00mif1avif", "avif"),
        (b"\x00\x00\x00\x20ftypisom\x00\x00\x00\x00mp41", None),
        (b"<svg xmlns=", None),
        (b"%PDF-1.7", None),
        (b"", None),
    ],
)
def test_pictures_are_known_by_their_first_bytes(head, kind):
    assert picture_format(head[:HEAD_BYTES]) == kind
