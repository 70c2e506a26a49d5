"""A proxy on loopback that stands before an S3 server and lets a test choose what goes wrong, and for how long."""

import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import ClassVar, Literal
from urllib.parse import unquote, urlsplit

from tests.data.web import Handler, serving

Kind = Literal["refuse", "unavailable", "missing", "cut", "hang"]
PATIENCE = 60.0  # seconds until a test that waits for something in vain fails
HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "expect", "proxy-connection"})


@dataclass
class Rule:
    """What happens to requests whose ``METHOD /path?query`` matches, so many `times`.

    refuse: the connection is reset before any answer; unavailable: 503 SlowDown; missing: 404 NoSuchKey; cut: half a
    body goes its way, then the connection is reset; hang: no answer comes until the rule or the server ends.
    """

    kind: Kind
    pattern: re.Pattern[str]
    times: float
    hits: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def takes(self, request: str) -> bool:
        """Whether the rule is for this request; counts it then."""
        with self.changed:
            if self.over.is_set() or self.hits >= self.times or not self.pattern.search(request):
                return False
            self.hits += 1
            self.changed.notify_all()
            return True

    def wait(self, hits: int = 1) -> None:
        """Wait until so many requests have met the rule."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.hits >= hits, PATIENCE), f"{self.hits} requests met {self}"

    def end(self) -> None:
        """From now on requests pass."""
        self.over.set()


class Proxy(Handler):
    """Hands requests on and answers back, unless a rule says otherwise."""

    upstream: ClassVar[str]
    rules: ClassVar[list[Rule]]
    seen: ClassVar[list[str]]

    def answer(self):
        request = f"{self.command} {unquote(self.path)}"
        with self.lock:
            self.seen.append(request)
            rule = next((one for one in self.rules if one.takes(request)), None)
        kind = rule.kind if rule else None
        if kind == "refuse":
            return self.reset()
        length = int(self.headers.get("Content-Length", 0))
        if kind == "cut" and length:
            self.rfile.read(length // 2)
            return self.reset()
        assert "chunked" not in self.headers.get("Transfer-Encoding", ""), "not needed so far"
        body = self.rfile.read(length)
        if kind == "hang":
            while not (rule.over.wait(0.05) or self.release.is_set()):
                pass
            return self.reset()
        if kind == "unavailable":
            return self.error(503, "SlowDown")
        if kind == "missing":
            return self.error(404, "NoSuchKey")
        return self.hand_on(body, cut=kind == "cut")

    do_PUT = do_POST = do_HEAD = do_DELETE = Handler.do_GET  # noqa: N815 - names that http.server looks for

    def handle_expect_100(self):
        go_on = super().handle_expect_100()
        self.wfile.flush()  # boto3 waits a second for it
        return go_on

    def hand_on(self, body, *, cut):
        there = urlsplit(self.upstream)
        connection = HTTPConnection(there.hostname, there.port, timeout=PATIENCE)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP | {"content-length", "date", "server"}:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        if answer.status != 204 and length is not None:
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.wfile.flush()
        if cut:
            self.reset()

    def error(self, status, code):
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by the test</Message></Error>"
        self.send(status, b"" if self.command == "HEAD" else text.encode(), Content_Type="application/xml")

    def reset(self):
        """End the connection as a machine that is not there does: the client sees it reset, not closed."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


@dataclass(frozen=True)
class Faults:
    """A proxy that runs: its address, what it was asked, and the rules that it follows."""

    url: str
    seen: list[str]
    rules: list[Rule]

    def add(self, kind: Kind, pattern: str = "", times: float = float("inf")) -> Rule:
        """Let this happen to the next `times` requests whose ``METHOD /path?query`` matches the regular expression."""
        rule = Rule(kind, re.compile(pattern), times)
        self.rules.append(rule)
        return rule


@contextmanager
def faults_before(upstream: str) -> Iterator[Faults]:
    """A proxy before the server at `upstream`, for the length of a block."""
    rules: list[Rule] = []
    seen: list[str] = []
    with serving(type("Faulty", (Proxy,), {"upstream": upstream, "rules": rules, "seen": seen})) as server:
        try:
            yield Faults(f"http://127.0.0.1:{server.server_port}", seen, rules)
        finally:
            for rule in rules:
                rule.end()
