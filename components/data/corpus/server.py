"""The corpus's own web server, on loopback: files, and what `responses.json` says where it is not simply a file.

``responses.json`` maps a path (``/gone/00001.jpg``) to a response: ``status`` (default 200), ``location`` (of a
redirect), ``content_type``, ``file`` (within the folder; default: the path's own file, or no body).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from mimetypes import guess_type
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

RESPONSES_FILE = "responses.json"


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD from a folder and a table of responses."""

    protocol_version = "HTTP/1.1"  # keep-alive: thousands of small pictures over a few connections
    wbufsize = 1 << 16  # head and body in one packet; without it each answer waits for a delayed acknowledgement
    timeout = 60  # seconds that an idle connection is held

    def __init__(self, folder: Path, responses: dict[str, dict[str, Any]], *args: Any) -> None:
        self._folder = folder
        self._responses = responses
        super().__init__(*args)

    def do_GET(self) -> None:
        """A file, or what the table says."""
        self._answer(send_body=True)

    def do_HEAD(self) -> None:
        """The head that GET would give."""
        self._answer(send_body=False)

    def _answer(self, *, send_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        planned = self._responses.get(path, {})
        body = self._read(planned.get("file", path.removeprefix("/")))
        status = planned.get("status", 200 if body is not None else 404)
        self.send_response(status)
        if "location" in planned:
            self.send_header("Location", planned["location"])
        content_type = planned.get("content_type") or guess_type(path)[0] or "application/octet-stream"
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if send_body and body:
            self.wfile.write(body)

    def _read(self, name: str) -> bytes | None:
        """The bytes of a file below the folder; None when there is no such file or the name leads elsewhere."""
        parts = PurePosixPath(name).parts
        if not parts or name == RESPONSES_FILE or "\0" in name or any(part in ("..", "/") for part in parts):
            return None
        path = self._folder.joinpath(*parts)
        return path.read_bytes() if path.is_file() else None

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the stage that asks counts what it gets."""


class _Server(ThreadingHTTPServer):
    """One thread per connection; none of them keeps the process alive."""

    daemon_threads = True
    block_on_close = False  # idle keep-alive connections must not hold up the end
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that hangs up in the middle is no error of the server."""


@contextmanager
def serve(folder: Path) -> Iterator[int]:
    """Serve `folder` on 127.0.0.1 for the length of a ``with`` block; gives the port that the system chose.

    Whatever ``Host`` a request names, it gets this folder, so a client may send the corpus's host here by resolving
    it to 127.0.0.1 and this port. Raises FileNotFoundError when `folder` is not there.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder to serve")
    table = folder / RESPONSES_FILE
    responses = json.loads(table.read_text(encoding="utf-8")) if table.is_file() else {}
    server = _Server(("127.0.0.1", 0), partial(_Handler, folder, responses))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="corpus-server", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
