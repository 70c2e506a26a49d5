"""What is done of an unfinished chunk: a line per target, and the pictures one after the other in one file.

One file for all pictures, since making a file costs more than fetching what goes into it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TextIO

from components.data.fetching.http import Fetched
from components.io.outcomes import Reason

JOURNAL_FILE = "journal.jsonl"
BODIES_FILE = "bodies.bin"


class Journal:
    """The journal in `folder`, read and open for more. Use as a context manager.

    Whatever a killed run has left is taken as it is: a torn last line, and a picture that is not whole, are not done.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.results: dict[int, Fetched] = {}
        self._offsets: dict[int, int] = {}
        with ExitStack() as stack:
            self._written = stack.enter_context((folder / BODIES_FILE).open("ab"))
            self._read = stack.enter_context((folder / BODIES_FILE).open("rb"))
            self._load(folder / JOURNAL_FILE)
            self._lines = stack.enter_context((folder / JOURNAL_FILE).open("a", encoding="utf-8"))
            self._stack = stack.pop_all()

    def _load(self, path: Path) -> None:
        if not path.is_file():
            return
        whole = path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):  # what is added next must start a line
            with path.open("r+b") as stream:
                stream.truncate(end)
        for line in whole[:end].splitlines():
            values = json.loads(line)
            target, offset = values.pop("target"), values.pop("offset")
            result = Fetched.from_json(values)
            if result.reason is Reason.OK:
                self._offsets[target] = offset
                if hashlib.sha256(self._bytes(offset, result.bytes or 0)).hexdigest() != result.sha256:
                    continue
            self.results[target] = result

    def keep(self, body: IO[bytes]) -> int:
        """Add a picture from where `body` stands to its end; returns where it lies."""
        offset = self._written.tell()
        shutil.copyfileobj(body, self._written, 1 << 20)
        self._written.flush()
        return offset

    def note(self, target: int, result: Fetched, offset: int | None = None) -> None:
        """Say that a target is done; `offset` is that of its picture, if it has one."""
        if offset is not None:
            self._offsets[target] = offset
        self.results[target] = result
        write_line(self._lines, {"target": target, "offset": offset, **result.to_json()})

    def image(self, target: int) -> bytes:
        """The bytes of a target's picture."""
        return self._bytes(self._offsets[target], self.results[target].bytes or 0)

    def _bytes(self, offset: int, size: int) -> bytes:
        self._read.seek(offset)
        return self._read.read(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def write_line(stream: TextIO, values: dict[str, Any]) -> None:
    """Add one line and hand it to the system."""
    stream.write(json.dumps(values) + "\n")
    stream.flush()
