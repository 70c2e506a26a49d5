"""Records on disk: Arrow IPC files and a manifest that is written last.

A record is one picture with all its captions. `image` is `large_binary`, since a column of pictures passes 2 GiB.
A folder of records is complete when `manifest.json` stands in it, which names every file with its rows and sha256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from components.io.errors import UserError

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"

RECORD_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # SOURCE/000000017: the first row that named this picture
        ("source", pa.string()),
        ("url", pa.string()),  # where it came from: the URL of the list, or the file's name within its folder
        ("image", pa.large_binary()),
        ("sha256", pa.string()),  # of the bytes as downloaded, hex; `clean` may re-encode `image` but keeps this
        ("width", pa.int32()),  # null until `clean` has decoded the picture
        ("height", pa.int32()),
        ("captions", pa.list_(pa.string())),
        ("row_ids", pa.list_(pa.string())),  # as long as `captions`: the row each caption came from
        ("coco_id", pa.int64()),  # COCO's number of this picture where the source states it: what leaks are found by
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)


@dataclass(frozen=True)
class FileEntry:
    """One record file of a manifest."""

    name: str
    rows: int
    captions: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder of records holds."""

    kind: str
    files: tuple[FileEntry, ...]
    extra: dict[str, Any]

    @property
    def rows(self) -> int:
        """Pictures in all files."""
        return sum(file.rows for file in self.files)

    @property
    def captions(self) -> int:
        """Captions in all files."""
        return sum(file.captions for file in self.files)


def row_name(source: str, row: int) -> str:
    """The name of row `row` (0-based) of `source`, which sorts by position."""
    return f"{source}/{row:09d}"


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class RecordWriter:
    """Writes record batches to one Arrow IPC file under a temporary name; the file appears whole or not at all."""

    def __init__(self, path: Path, schema: pa.Schema = RECORD_SCHEMA) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._sink = pa.OSFile(str(self._partial), "wb")
        self._writer = pa.ipc.new_file(self._sink, schema)
        self._schema = schema
        self.rows = 0
        self.captions = 0

    def write(self, records: Sequence[dict[str, Any]] | pa.Table | pa.RecordBatch) -> None:
        """Append records: dictionaries by field name, or Arrow data of the writer's schema."""
        if isinstance(records, pa.RecordBatch):
            records = pa.Table.from_batches([records])
        elif not isinstance(records, pa.Table):
            records = pa.Table.from_pylist(list(records), schema=self._schema)
        if "coco_id" in self._schema.names and "coco_id" not in records.column_names:  # written before there was one
            records = records.append_column("coco_id", pa.nulls(records.num_rows, pa.int64()))
        self._writer.write_table(records.cast(self._schema))
        self.rows += records.num_rows
        if "captions" in records.column_names:
            self.captions += sum(len(captions) for captions in records["captions"].to_pylist())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self._sink.close()
        if kind is None:
            self._partial.rename(self.path)
        else:
            self._partial.unlink(missing_ok=True)

    def entry(self) -> FileEntry:
        """The manifest entry of the finished file."""
        return FileEntry(self.path.name, self.rows, self.captions, self.path.stat().st_size, sha256_file(self.path))


def write_manifest(folder: Path, kind: str, files: Sequence[FileEntry], **extra: Any) -> Manifest:
    """Write ``manifest.json``, the last file of a folder of records. `extra` must be JSON and free of clock times."""
    manifest = Manifest(kind, tuple(files), extra)
    text = json.dumps(
        {
            "kind": kind,
            "schema_version": SCHEMA_VERSION,
            "rows": manifest.rows,
            "captions": manifest.captions,
            "files": [vars(file) for file in files],
            **extra,
        },
        indent=1,
        sort_keys=True,
    )
    partial = folder / f".{MANIFEST_FILE}.partial"
    partial.write_text(text + "\n", encoding="utf-8")
    partial.rename(folder / MANIFEST_FILE)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder of records.

    Raises UserError when there is none (the stage did not finish), or when it is of another schema version.
    """
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist: the stage that writes {folder} has not finished; run it first"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): run the stage that writes {folder} again") from None
    version = content.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has schema version {version}, this vlp reads {SCHEMA_VERSION}: run its stage again")
    kind, files = content.pop("kind"), tuple(FileEntry(**file) for file in content.pop("files"))
    del content["rows"], content["captions"]
    return Manifest(kind, files, content)


def manifest_digest(folder: Path) -> str:
    """Hex sha256 of the manifest: the name of exactly these records."""
    read_manifest(folder)  # say what is missing in the usual words
    return sha256_file(folder / MANIFEST_FILE)


def open_records(path: Path) -> pa.Table:
    """One record file, memory-mapped: bytes are read when touched.

    Raises UserError when the file is missing or not a whole Arrow file.
    """
    try:
        return pa.ipc.open_file(pa.memory_map(str(path), "r")).read_all()
    except FileNotFoundError:
        raise UserError(f"{path} is named in its manifest but missing: run the stage that writes it again") from None
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is damaged ({error}): run the stage that writes it again") from None


def iter_batches(folder: Path, columns: list[str] | None = None, rows: int = 256) -> Iterator[pa.RecordBatch]:
    """The records of a folder in order, at most `rows` at a time."""
    for file in read_manifest(folder).files:
        table = open_records(folder / file.name)
        if columns is not None:
            table = table.select(columns)
        yield from table.to_batches(max_chunksize=rows)
