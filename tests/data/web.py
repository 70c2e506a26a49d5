"""Web servers on loopback for tests of fetching."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar


class Handler(BaseHTTPRequestHandler):
    """`answer` writes an answer by `send`; a class of each server counts what it was asked and may hold clients up."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    asked: ClassVar[Counter[str]]
    lock = threading.Lock()
    release: ClassVar[threading.Event]  # set when the server ends: until then a handler may wait for it

    def do_GET(self):
        self.answer()

    def answer(self):
        raise NotImplementedError

    def send(self, status=200, body=b"", **headers):
        """A whole answer; Content_Length=… announces another length than the body's."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def handle_error(self, *_):
        pass


@contextmanager
def serving(kind: type[Handler]) -> Iterator[Server]:
    """A server for the length of a block, which ends with it however the block ends.

    A server whose socket is closed under its loop spins: one such thread takes a share of every later test.
    """
    handler = type(kind.__name__, (kind,), {"asked": Counter(), "release": threading.Event()})
    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        handler.release.set()
        server.shutdown()
        thread.join()
        server.server_close()
