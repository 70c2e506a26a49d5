"""Shards that lie in a bucket, as files of this machine: fetched when asked for, the longest unused ones given up."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from components.io.errors import UserError
from components.io.records import MANIFEST_FILE, FileEntry, open_records, sha256_file
from components.io.storage import open_storage

CACHE_BYTES = 16 << 30


class ShardCache:
    """A folder of records at `place` (``s3://…``, or a folder that is slow to reach), through files in `folder`.

    The files of one manifest lie together in `home`, of which at most `limit` bytes are kept (one file at least), the
    longest unused removed first. Processes may share it: each file is fetched by one of them, checked against the
    manifest's sha256, and appears whole. A file that is removed stays readable for those that have it mapped.
    """

    def __init__(self, place: Path | str, folder: Path, limit: int = CACHE_BYTES) -> None:
        self.storage = open_storage(place)
        self.limit = limit
        try:
            manifest = self.storage.read(MANIFEST_FILE)
        except FileNotFoundError:
            raise UserError(
                f"{self.storage.place} holds no {MANIFEST_FILE}: publish whole shards there, or correct the place"
            ) from None
        self.home = folder / hashlib.sha256(manifest).hexdigest()[:16]
        self.home.mkdir(parents=True, exist_ok=True)
        if not (self.home / MANIFEST_FILE).is_file():
            self.storage.download(MANIFEST_FILE, self.home / MANIFEST_FILE)

    def open(self, file: FileEntry) -> pa.Table:
        """One of the manifest's files, memory-mapped from its local copy.

        Raises UserError when it is missing at the place or its bytes are not the manifest's.
        """
        path = self.home / file.name
        if path.parent != self.home or file.name.startswith("."):
            raise UserError(f"the manifest at {self.storage.place} names {file.name!r}, which is no file beside it")
        with self._locked(file.name):
            if not path.is_file():
                self._make_room(file.bytes)
                self._fetch(file, path)
            os.utime(path)
            return open_records(path)

    def _fetch(self, file: FileEntry, path: Path) -> None:
        arriving = path.with_name(f".{file.name}.arriving")
        try:
            self.storage.download(file.name, arriving)
        except FileNotFoundError:
            raise UserError(f"{file.name} is missing at {self.storage.place}: publish the shards again") from None
        try:
            if arriving.stat().st_size != file.bytes or sha256_file(arriving) != file.sha256:
                raise UserError(
                    f"{file.name} at {self.storage.place} is truncated or altered: its bytes are not the manifest's; "
                    "publish the shards again"
                )
            arriving.rename(path)
        finally:
            arriving.unlink(missing_ok=True)

    def _make_room(self, needed: int) -> None:
        """Remove the longest unused files until `needed` bytes more stay within the limit."""
        with self._locked("room"):
            files = []
            for path in self.home.glob("*.arrow"):
                try:
                    status = path.stat()
                except FileNotFoundError:  # removed by another process since
                    continue
                files.append((status.st_mtime_ns, status.st_size, path))
            total = needed + sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total <= self.limit:
                    break
                try:
                    with self._locked(path.name, wait=False):
                        path.unlink(missing_ok=True)
                        total -= size
                except BlockingIOError:  # about to be opened by another process
                    continue

    @contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[None]:
        with (self.home / f".{name}.lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield  # closing the file unlocks it
