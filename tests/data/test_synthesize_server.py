"""The corpus's web server: files, and what responses.json says; nothing outside of its folder."""

import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from components.data.corpus.server import serve

RESPONSES = {
    "/gone.jpg": {"status": 404},
    "/moved.jpg": {"status": 302, "location": "/a/b.jpg"},
    "/page.jpg": {"content_type": "image/jpeg"},
    "/alias.jpg": {"file": "a/b.jpg", "status": 200},
}


@pytest.fixture
def web(tmp_path) -> Path:
    folder = tmp_path / "web"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "b.jpg").write_bytes(b"\xff\xd8picture")
    (folder / "page.jpg").write_bytes(b"<html>")
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "responses.json").write_text(json.dumps(RESPONSES))
    (tmp_path / "secret").write_bytes(b"secret")
    return folder


def ask(connection: http.client.HTTPConnection, path: str, method: str = "GET"):
    connection.request(method, path, headers={"Host": "corpus.test"})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def test_answers(web):
    with serve(web) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        status, headers, body = ask(connection, "/a/b.jpg?size=1")
        assert (status, headers["Content-Type"], body) == (200, "image/jpeg", b"\xff\xd8picture")
        socket = connection.sock
        assert ask(connection, "/alias.jpg")[2] == b"\xff\xd8picture"
        assert ask(connection, "/gone.jpg")[::2] == (404, b"")
        assert ask(connection, "/never.jpg")[::2] == (404, b"")
        status, headers, body = ask(connection, "/moved.jpg")
        assert (status, headers["Location"], body) == (302, "/a/b.jpg", b"")
        status, headers, body = ask(connection, "/page.jpg")
        assert (status, headers["Content-Type"], body) == (200, "image/jpeg", b"<html>")
        assert ask(connection, "/empty.jpg")[::2] == (200, b"")
        status, headers, body = ask(connection, "/a/b.jpg", "HEAD")
        assert (status, headers["Content-Length"], body) == (200, "9", b"")
        assert connection.sock is socket  # all over one connection
        connection.close()


@pytest.mark.parametrize(
    "path", ["/../secret", "/%2e%2e/secret", "/a/../../secret", "//etc/hosts", "/responses.json", "/a", "/", "/%00"]
)
def test_nothing_else_is_served(web, path):
    with serve(web) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        assert ask(connection, path)[::2] == (404, b"")
        connection.close()


def test_many_clients_at_once(web):
    def client(_: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        good = sum(ask(connection, "/a/b.jpg")[2] == b"\xff\xd8picture" for _ in range(20))
        connection.close()
        return good

    with serve(web) as port, ThreadPoolExecutor(16) as pool:
        assert list(pool.map(client, range(16))) == [20] * 16


def test_it_ends_with_the_block_though_a_client_holds_on(web):
    with serve(web) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        ask(connection, "/a/b.jpg")
    # Not by connecting again: any other process may have been given the port in between.
    assert "corpus-server" not in {thread.name for thread in threading.enumerate()}
    connection.close()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"), serve(tmp_path / "nowhere"):
        pass


def test_quiet(web, capfd):
    with serve(web) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        ask(connection, "/never.jpg")
        connection.close()
    assert capfd.readouterr() == ("", "")
