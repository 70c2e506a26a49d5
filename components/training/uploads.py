"""Copies of checkpoints elsewhere, made in the background: a training does not wait for a bucket.

Beside each copy lies ``NAME.json`` with its length and sha256, written last: without it a copy is not there yet.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from components.io.errors import UserError
from components.io.records import sha256_file
from components.io.storage import Storage

PATIENCE = 300.0  # seconds that a storage may refuse at the end of a training
START_PATIENCE = 90.0  # and at its start, where the place may also be wrong
BESTS = 3  # best weights that stay: a checkpoint may still name an earlier one
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds between two tries
_KIND = re.compile(r"(step|best)-\d+\.pt")
Result = TypeVar("Result")


class Uploads:
    """A thread that copies files to `storage`, the newest checkpoint first in line, and keeps the newest `keep` there.

    A storage that refuses is tried again until it takes the file or a newer one has come.
    """

    def __init__(self, storage: Storage, keep: int, *, patience: float = PATIENCE) -> None:
        self.storage, self.keep, self.patience = storage, keep, patience
        self._waiting: dict[str, Path] = {}  # by kind: a newer checkpoint takes the place of one that still waits
        self._changed = threading.Condition()
        self._closing = self._given_up = False
        self._busy: str | None = None
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._thread.start()

    def add(self, path: Path) -> None:
        """Have `path` copied under its own name."""
        with self._changed:
            self._waiting[path.name.partition("-")[0]] = path
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all is copied, for `patience` seconds at most; then give up, and say on standard error on what."""
        deadline = time.monotonic() + self.patience
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            done = self._changed.wait_for(
                lambda: not self._waiting and self._busy is None, timeout=deadline - time.monotonic()
            )
            left = sorted([*(path.name for path in self._waiting.values()), *([self._busy] if self._busy else [])])
            self._waiting.clear()
            self._given_up = not done
            self._changed.notify_all()
        if not done:
            _say(f"{', '.join(left)} could not be copied to {self.storage.place} within {self.patience:.0f} s")

    def _work(self) -> None:
        wait, refused = FIRST_WAIT, False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                kind = next(iter(self._waiting))
                path = self._waiting.pop(kind)
                self._busy = path.name
            try:
                self._copy(path)
                wait, refused, failed = FIRST_WAIT, False, False
            except (UserError, OSError) as error:
                failed = True
                if not refused:
                    _say(f"{path.name} is not copied yet: {error}; trying again while the training goes on")
                refused = True
            except RuntimeError:  # the process ends under the last try, and takes no new threads
                if not self._given_up:
                    raise
                return
            with self._changed:
                self._busy = None
                if failed and not self._given_up:
                    self._waiting.setdefault(kind, path)
                    self._changed.wait_for(lambda: not self._waiting, timeout=wait)  # only `close` gives up earlier
                    wait = min(2 * wait, LONGEST_WAIT)
                self._changed.notify_all()

    def _copy(self, path: Path) -> None:
        if not path.is_file():  # removed since, because newer ones were written
            return
        note = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        self.storage.upload(path, path.name)
        self.storage.write(f"{path.name}.json", json.dumps(note).encode())
        whole = sorted(_whole(self.storage))
        for kind, keep in (("step-", self.keep), ("best-", BESTS)):
            for old in [name for name in whole if name.startswith(kind)][:-keep]:
                self.storage.delete(f"{old}.json")
                self.storage.delete(old)


def complete(storage: Storage) -> set[str]:
    """The names of files whose copies are whole, as far as a listing tells. Waits out a storage that refuses."""
    return patiently(lambda: _whole(storage))


def _whole(storage: Storage) -> set[str]:
    names = {entry.name for entry in storage.list()}
    return {name for name in names if _KIND.fullmatch(name) and f"{name}.json" in names}


def fetch(storage: Storage, name: str, path: Path) -> None:
    """Copy a file from `storage` to `path`. Raises UserError when it is not the one that was copied there."""
    note = json.loads(patiently(lambda: storage.read(f"{name}.json")))
    arriving = path.with_name(f".{path.name}.arriving-{threading.get_native_id()}")
    try:
        patiently(lambda: storage.download(name, arriving))
        if arriving.stat().st_size != note["bytes"] or sha256_file(arriving) != note["sha256"]:
            raise UserError(f"{name} at {storage.place} is not the file that was copied there")
        arriving.replace(path)
    finally:
        arriving.unlink(missing_ok=True)


def patiently(call: Callable[[], Result], patience: float = START_PATIENCE) -> Result:
    """What `call` returns, tried again for `patience` seconds while it raises UserError, as a storage does."""
    deadline, wait = time.monotonic() + patience, FIRST_WAIT
    while True:
        try:
            return call()
        except UserError as error:
            if time.monotonic() + wait > deadline:
                raise
            _say(f"{error}; trying again")
        threading.Event().wait(wait)
        wait = min(2 * wait, LONGEST_WAIT)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)  # noqa: T201
