"""What `download` hands on, put together from finished chunks: records, outcomes, quarantine; and timings beside."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.data.fetching.chunks import RECORDS_FILE, RESULT_SCHEMA, RESULTS_FILE, Job, read_results
from components.data.fetching.plan import malformed_of, open_plan, rows_with_results
from components.data.parts import concatenate
from components.io.outcomes import Reason, Status, outcome_schema, write_outcomes
from components.io.records import FileEntry, RecordWriter, open_records, row_name, write_manifest
from components.io.work import DONE_FILE

QUARANTINE_FILE = "quarantine.parquet"
QUARANTINE_SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("location", pa.string()),  # the file, then the line (from 1) or the place in its JSON: "pairs.tsv:17"
        ("problem", pa.string()),
        ("content", pa.string()),  # what stands there, its beginning; bytes that are no UTF-8 escaped
    ]
)
OUTCOME_SCHEMA = outcome_schema(
    ("url", pa.string()),
    ("final_url", pa.string()),
    ("http_status", pa.int32()),
    ("bytes", pa.int64()),
    ("sha256", pa.string()),
)
TIMING_SCHEMA = pa.schema([("row_id", pa.string()), ("milliseconds", pa.int64())])


def build_outs(job: Job, placeholder_urls: int, timings: Path) -> Path:
    """Put the finished chunks together in a folder that only needs to be moved; returns it.

    A picture that came from `placeholder_urls` URLs or more (0: any number) is kept for none of them. The milliseconds
    of each row go to the file `timings`, outside of the folder: no two runs agree in them.
    """
    built = job.work / "built"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir()
    results = job.work / "results.sqlite"
    _bring_in_order(job, results)
    placeholders = _placeholders(job, results, placeholder_urls) if placeholder_urls else {}
    entries: list[FileEntry] = []
    for chunk in range(job.chunks):
        entry = _records(job, chunk, placeholders, built / f"records-{len(entries):05d}.arrow")
        if entry is not None:
            entries.append(entry)
    write_outcomes(built, _outcomes(job, results, placeholders))
    concatenate(_quarantine(job), built / QUARANTINE_FILE)
    timings.parent.mkdir(parents=True, exist_ok=True)
    concatenate(_timings(job, results), timings)
    write_manifest(built, "raw", entries, source=job.source)
    return built


def _bring_in_order(job: Job, results: Path) -> None:
    """All results in an SQLite file, so that rows find theirs without memory for all."""
    results.unlink(missing_ok=True)
    with closing(sqlite3.connect(results)) as database:
        columns = RESULT_SCHEMA.names
        database.execute(f"CREATE TABLE results ({columns[0]} INTEGER PRIMARY KEY, {', '.join(columns[1:])})")
        insert = f"INSERT INTO results VALUES ({', '.join('?' * len(columns))})"
        for table in read_results(job):
            database.executemany(insert, zip(*(table[name].to_pylist() for name in columns), strict=True))
        database.commit()


def _placeholders(job: Job, results: Path, least: int) -> dict[str, int]:
    """The sha256 of pictures that came from `least` URLs or more, each with the number of its URLs."""
    with open_plan(job.plan) as plan:
        plan.execute("ATTACH DATABASE ? AS fetched", (f"{results.resolve().as_uri()}?mode=ro",))
        found = plan.execute(
            "SELECT results.sha256, count(*) FROM fetched.results AS results "
            "JOIN targets ON targets.id = results.target "
            "WHERE results.reason = ? AND NOT targets.local GROUP BY results.sha256 HAVING count(*) >= ?",
            (str(Reason.OK), least),
        )
        return dict(found.fetchall())


def _records(job: Job, chunk: int, placeholders: Collection[str], path: Path) -> FileEntry | None:
    """A chunk's records as the file `path`, without placeholders; None when there are none."""
    finished = job.folder(chunk)
    done = json.loads((finished / DONE_FILE).read_text(encoding="utf-8"))
    entry = FileEntry(**{**done["entry"], "name": path.name})
    hashes = pq.read_table(finished / RESULTS_FILE, columns=["sha256"])["sha256"]
    if placeholders and pc.any(pc.is_in(hashes, value_set=pa.array(placeholders, pa.string()))).as_py():
        with RecordWriter(path) as writer:
            for batch in open_records(finished / RECORDS_FILE).to_batches():
                unwanted = pc.is_in(batch["sha256"], value_set=pa.array(placeholders, pa.string()))
                writer.write(batch.filter(pc.invert(unwanted)))
        entry = writer.entry()
        if not entry.rows:
            path.unlink()
    elif entry.rows:
        os.link(finished / RECORDS_FILE, path)  # not moved: a kill may come before the end
    return entry if entry.rows else None


def _outcomes(job: Job, results: Path, placeholders: dict[str, int]) -> Iterator[pa.Table]:
    """The outcome of every row, in order."""
    columns = (
        "rows.row, rows.reason, rows.detail, rows.expected, results.reason, results.detail, rows.shown, "
        "results.final_url, results.http_status, results.bytes, results.sha256"
    )
    yield OUTCOME_SCHEMA.empty_table()
    with open_plan(job.plan) as plan:
        for batch in rows_with_results(plan, results, columns):
            rows = []
            for row, refused, why, expected, reason, detail, *rest in batch:
                sha256 = rest[-1]
                if refused is not None:
                    reason, detail = refused, why
                elif reason == Reason.OK and expected is not None and expected != sha256:
                    reason, detail = Reason.SHA256_MISMATCH, f"the list expects {expected}"
                elif reason == Reason.OK and sha256 in placeholders:
                    reason, detail = Reason.PLACEHOLDER, f"the same picture at {placeholders[sha256]} URLs"
                status = Status.KEPT if reason == Reason.OK else Status.REJECTED
                rows.append((row_name(job.source, row), str(status), str(reason), detail, *rest))
            yield _table(rows, OUTCOME_SCHEMA)


def _quarantine(job: Job) -> Iterator[pa.Table]:
    """The malformed rows, in order."""
    yield QUARANTINE_SCHEMA.empty_table()
    with open_plan(job.plan) as plan:
        for batch in malformed_of(plan):
            yield _table([(row_name(job.source, row), *rest) for row, *rest in batch], QUARANTINE_SCHEMA)


def _timings(job: Job, results: Path) -> Iterator[pa.Table]:
    """How long each row's picture took; null where nothing was asked."""
    yield TIMING_SCHEMA.empty_table()
    with open_plan(job.plan) as plan:
        for batch in rows_with_results(plan, results, "rows.row, results.milliseconds"):
            yield _table([(row_name(job.source, row), milliseconds) for row, milliseconds in batch], TIMING_SCHEMA)


def _table(rows: list[tuple[object, ...]], schema: pa.Schema) -> pa.Table:
    arrays = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)
