"""What to fetch: every row of a source judged before any connection, rows of the same picture brought together.

The plan is an SQLite file in the work folder, so that grouping 14 million rows by URL needs no memory for them. It is
written once; later steps only read it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from components.data.fetching.urls import check_url, mask_credentials
from components.data.sources.rows import SourceRow
from components.io.outcomes import Reason
from components.io.progress import Advance
from components.io.records import row_name

PLAN_FILE = "plan.sqlite"
BATCH_ROWS = 4096

_SCHEMA = """
CREATE TABLE targets (
    id INTEGER PRIMARY KEY, key BLOB UNIQUE, reference TEXT, local INTEGER, shown TEXT, row INTEGER, coco_id INTEGER);
CREATE TABLE rows (
    row INTEGER PRIMARY KEY, shown TEXT, caption TEXT, target INTEGER, reason TEXT, detail TEXT, expected TEXT);
CREATE TABLE malformed (row INTEGER PRIMARY KEY, location TEXT, problem TEXT, content TEXT);
CREATE TABLE seen (key BLOB PRIMARY KEY, row INTEGER) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Target:
    """One distinct picture to get."""

    id: int  # 0, 1, 2 ... in the order of first mention
    reference: str  # the normalised URL, or a local picture's name within the images folder
    local: bool
    shown: str  # the URL as the list spells it, or the local file's name
    row: int  # the first row that names it
    coco_id: int | None  # COCO's number of the picture, where a row states it


def write_plan(rows: Iterable[SourceRow], folder: Path, *, fetch: bool, max_url_length: int, advance: Advance) -> Any:
    """Judge `rows` and write ``folder/plan.sqlite``; returns {"rows": ..., "targets": ...}.

    With `fetch` false every acceptable row gets the reason ``not_fetched`` and there are no targets.
    """
    with closing(sqlite3.connect(folder / PLAN_FILE)) as plan:
        # a plan that is not finished is thrown away: no journal, no waiting for the disk
        plan.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-65536; {_SCHEMA}")
        count = 0
        pending: list[tuple[Any, ...]] = []
        for row in rows:
            target, reason, detail = _judge(plan, row, fetch, max_url_length)
            pending.append((row.row, _shown(row), row.caption, target, reason, detail, row.sha256))
            if reason is Reason.MALFORMED_ROW:
                content = None if row.content is None else mask_credentials(row.content)
                plan.execute("INSERT INTO malformed VALUES (?, ?, ?, ?)", (row.row, row.location, row.note, content))
            count += 1
            if len(pending) == BATCH_ROWS:
                plan.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", pending)
                pending.clear()
                advance(BATCH_ROWS)
        plan.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", pending)
        advance(len(pending))
        plan.execute("CREATE INDEX rows_by_target ON rows (target, row) WHERE target IS NOT NULL")
        plan.execute("DROP TABLE seen")
        targets = plan.execute("SELECT count(*) FROM targets").fetchone()[0]
        plan.commit()
    return {"rows": count, "targets": targets}


def _judge(
    plan: sqlite3.Connection, row: SourceRow, fetch: bool, max_url_length: int
) -> tuple[int | None, Reason | None, str | None]:
    """The row's target, or the reason why it has none, with its place in the list for the person who mends it."""
    if row.error is not None:
        return None, row.error, f"{row.location}: {row.note}" if row.note else row.location
    reference = row.name or ""
    if row.url is not None:
        url = check_url(row.url, max_length=max_url_length)
        if isinstance(url, Reason):
            return None, url, row.location
        reference = str(url)
    key = blake2b(reference.encode(), digest_size=16).digest()
    # rows that expect other bytes of the same URL are not the same
    pair = blake2b(f"{row.sha256}\0{row.caption}".encode(), digest_size=16, key=key).digest()
    if plan.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (pair, row.row)).rowcount == 0:
        first = plan.execute("SELECT row FROM seen WHERE key = ?", (pair,)).fetchone()[0]
        return None, Reason.DUPLICATE_ROW, f"{row.location}: same as row {first}"
    if not fetch:
        return None, Reason.NOT_FETCHED, None
    found = plan.execute("SELECT id FROM targets WHERE key = ?", (key,)).fetchone()
    if found is not None:
        if row.coco_id is not None:
            plan.execute("UPDATE targets SET coco_id = coalesce(coco_id, ?) WHERE id = ?", (row.coco_id, found[0]))
        return found[0], None, None
    made = plan.execute(
        # the first is 0: numbers follow the largest so far
        "INSERT INTO targets SELECT coalesce(max(id), -1) + 1, ?, ?, ?, ?, ?, ? FROM targets",
        (key, reference, row.url is None, _shown(row), row.row, row.coco_id),
    )
    return made.lastrowid, None, None


def _shown(row: SourceRow) -> str | None:
    """The picture's URL as the list spells it, or its name, fit to be shown."""
    return row.name if row.url is None else mask_credentials(row.url)


def open_plan(folder: Path) -> closing[sqlite3.Connection]:
    """The finished plan, for reading."""
    return closing(sqlite3.connect(f"{(folder / PLAN_FILE).resolve().as_uri()}?mode=ro", uri=True))


def targets_of(plan: sqlite3.Connection, ids: range) -> list[Target]:
    """The targets of one chunk, by id."""
    found = plan.execute(
        "SELECT id, reference, local, shown, row, coco_id FROM targets WHERE id BETWEEN ? AND ? ORDER BY id",
        (ids[0], ids[-1]),
    )
    return [Target(one[0], one[1], bool(one[2]), *one[3:]) for one in found]


def captions_of(plan: sqlite3.Connection, target: int, source: str, sha256: str | None) -> tuple[list[str], list[str]]:
    """The captions of a target and the names of their rows, in the order of the rows.

    Rows that expect another hash than `sha256`, which the picture has, are left out.
    """
    found = plan.execute(
        "SELECT caption, row FROM rows WHERE target = ? AND coalesce(expected = ?, true) ORDER BY row", (target, sha256)
    ).fetchall()
    return [caption for caption, _ in found], [row_name(source, row) for _, row in found]


def malformed_of(plan: sqlite3.Connection) -> Iterator[list[tuple[Any, ...]]]:
    """Batches of (row, location, problem, content) of the malformed rows, in order."""
    found = plan.execute("SELECT row, location, problem, content FROM malformed ORDER BY row")
    yield from iter(partial(found.fetchmany, BATCH_ROWS), [])


def rows_with_results(plan: sqlite3.Connection, results: Path, columns: str) -> Iterator[list[tuple[Any, ...]]]:
    """Batches of `columns` of the plan's ``rows`` and of ``results``, one tuple per row, in the order of the rows.

    `results` is an SQLite file with a table ``results``, which has a column ``target``.
    """
    plan.execute("ATTACH DATABASE ? AS fetched", (f"{results.resolve().as_uri()}?mode=ro",))
    found = plan.execute(
        f"SELECT {columns} FROM rows LEFT JOIN fetched.results AS results ON results.target = rows.target "
        "ORDER BY rows.row"
    )
    yield from iter(partial(found.fetchmany, BATCH_ROWS), [])
    plan.execute("DETACH DATABASE fetched")
