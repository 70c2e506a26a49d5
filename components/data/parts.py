"""One partition of records with its outcomes, and partitions put together as a stage's out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from components.io.outcomes import Reason, Status, outcome_schema, read_outcomes, write_outcomes
from components.io.records import FileEntry, Manifest, RecordWriter, write_manifest
from components.io.work import discard, publish

RECORDS_FILE = "records.arrow"
FLUSH = 65_536  # outcomes held in memory before they become Arrow


class PartWriter:
    """Writes one partition: ``records.arrow`` and ``outcomes.parquet`` in its folder, in the order of the calls."""

    def __init__(self, folder: Path, *extra: tuple[str, pa.DataType]) -> None:
        self.folder = folder
        self._schema = outcome_schema(*extra)
        self._records = RecordWriter(folder / RECORDS_FILE)
        self._rows: list[tuple[Any, ...]] = []
        self._tables: list[pa.Table] = []
        self.rows = 0

    def outcome(self, row_id: str, status: Status, reason: Reason, detail: str | None = None, *extra: Any) -> None:
        """Say what became of one row; `extra` are the values of the stage's own columns."""
        self._rows.append((row_id, status.value, reason.value, detail, *extra))
        self.rows += 1
        if len(self._rows) >= FLUSH:
            self._flush()

    def write(self, records: Sequence[dict[str, Any]] | pa.Table) -> None:
        """Append records of the record schema."""
        if len(records):
            self._records.write(records)

    def _flush(self) -> None:
        columns = zip(*self._rows, strict=True) if self._rows else [[] for _ in self._schema]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._tables.append(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._records.__exit__(kind, error, trace)
        if kind is None:
            self._flush()
            write_outcomes(self.folder, self._tables)

    def report(self) -> dict[str, Any]:
        """What `assemble` needs to know of the finished partition, as JSON."""
        return {"file": vars(self._records.entry()), "outcomes": self.rows}


def assemble(
    parts: Sequence[tuple[Path, dict[str, Any]]],
    *,
    work: Path,
    out: Path,
    kind: str,
    rows_in: int,
    files: Sequence[Path] = (),
    **extra: Any,
) -> Manifest:
    """Publish partitions (folder, report) as the record folder `out`, then remove `work`.

    Record files are numbered ``records-00000.arrow`` …, empty ones left out. Other `files` stand beside them under
    their own names; `extra` goes into the manifest.

    Raises ValueError when the outcomes are not `rows_in` in number: rows were lost or invented.
    """
    built = work / "built"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir()
    entries: list[FileEntry] = []
    for folder, report in parts:
        entry = FileEntry(**report["file"])
        if entry.rows == 0:
            continue
        name = f"records-{len(entries):05d}.arrow"
        link(folder / RECORDS_FILE, built / name)
        entries.append(FileEntry(name, entry.rows, entry.captions, entry.bytes, entry.sha256))

    def outcomes() -> Iterator[pa.Table]:
        if not parts:
            yield outcome_schema().empty_table()
        for folder, _ in parts:
            yield read_outcomes(folder)

    rows = write_outcomes(built, outcomes())
    if rows != rows_in:
        raise ValueError(f"{kind}: {rows_in} rows came in, {rows} have an outcome")
    for path in files:
        link(path, built / path.name)
    manifest = write_manifest(built, kind, entries, **extra)
    publish(built, out)
    discard(work)
    return manifest


def concatenate(tables: Iterable[pa.Table], path: Path) -> None:
    """Write tables of one schema, at least one, as one parquet file; equal tables in equal order give equal bytes."""
    partial = path.with_name(f".{path.name}.partial")
    writer: pq.ParquetWriter | None = None
    try:
        for table in tables:
            writer = writer or pq.ParquetWriter(partial, table.schema, compression="zstd")
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    partial.rename(path)


def link(source: Path, target: Path) -> None:
    """The same file under a second name; a partition stays whole until all is published."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
