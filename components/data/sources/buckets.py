"""A source in an S3 bucket: its lists are copied here, its pictures are read where they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from components.data.sources.json_lists import IMAGE_DATA_FILE
from components.io.errors import UserError
from components.io.records import sha256_file
from components.io.storage import Entry, Storage, open_storage

LIST_SUFFIXES = frozenset({".tsv", ".txt", ".json", ".parquet"})


@dataclass(frozen=True)
class Bucket:
    """A source below an S3 prefix, or a single list there."""

    storage: Storage
    listing: Path  # a line of JSON per object: [name, bytes, version]
    only: str | None = None  # the list's name, where the source is that file alone

    def names(self) -> Iterator[str]:
        """The names of all objects."""
        with self.listing.open(encoding="utf-8") as lines:
            for line in lines:
                yield str(json.loads(line)[0])

    def copy_lists(self, wanted: str | None, folder: Path) -> None:
        """Copy the list `wanted`, or whatever may be one (or a picture's captions), into `folder`.

        Raises UserError when `wanted` is not there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        found = wanted is None
        for name in self.names():
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts:  # a key may be any text
                continue
            found = found or name == wanted
            if (
                name == wanted
                or pure.name == IMAGE_DATA_FILE
                or (wanted is None and pure.suffix.lower() in LIST_SUFFIXES)
            ):
                self.storage.download(name, folder / name)
        if not found:
            raise UserError(f"{self.storage.place}/{wanted} does not exist: set the source's `list` to an object there")


def open_bucket(place: Path, work: Path) -> Bucket:
    """List a source in a bucket into `work`; raises UserError when nothing is there or it cannot be read."""
    storage = open_storage(place)
    work.parent.mkdir(parents=True, exist_ok=True)
    only = None
    count = _write_listing(work, storage.list())
    if count == 0 and storage.place.count("/") > 2:  # no folder: the list itself?
        parent, _, only = storage.place.rpartition("/")
        storage, copy = open_storage(parent), work.with_suffix(".copy")
        with suppress(FileNotFoundError):
            storage.download(only, copy)
            count = _write_listing(work, [Entry(only, copy.stat().st_size, sha256_file(copy))])
            copy.unlink()
    if count == 0:
        raise UserError(f"{place} holds no object: set the source's `path` to a list or a prefix in the bucket")
    return Bucket(storage, work, only)


def _write_listing(path: Path, entries: Iterable[Entry]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as lines:
        for entry in entries:
            lines.write(json.dumps(list(entry)) + "\n")
            count += 1
    return count
