"""What became of every row: one table per data stage, one enumeration of reasons for all of them.

A row is one (picture, caption) pair of a source, named ``SOURCE/000000017``. The rule of conservation: each row that
enters a stage stands exactly once in the stage's ``outcomes.parquet``, kept or rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

OUTCOMES_FILE = "outcomes.parquet"


class Status(StrEnum):
    """Whether the row is in what the stage hands on."""

    KEPT = "kept"
    REJECTED = "rejected"


class Reason(StrEnum):
    """Why. A stage may reject for the reasons of its block only; kept rows are OK or say what was changed."""

    # any stage, kept
    OK = "ok"

    # download: reading the list
    MALFORMED_ROW = "malformed_row"  # not the format that the list claims: columns missing, not text, not JSON
    MISSING_CAPTION = "missing_caption"  # a null, not an empty text (that is clean's to judge)
    MISSING_URL = "missing_url"
    DUPLICATE_ROW = "duplicate_row"  # the same picture reference with the same caption, again
    # download: the URL rules, before any connection
    URL_INVALID = "url_invalid"  # cannot be parsed: no host, bad port, control characters
    URL_SCHEME = "url_scheme"  # neither http nor https
    URL_CREDENTIALS = "url_credentials"  # user:password@
    URL_TOO_LONG = "url_too_long"
    URL_FORBIDDEN_HOST = "url_forbidden_host"  # private, loopback, link-local or metadata address
    # download: fetching
    NOT_FETCHED = "not_fetched"  # `fetch: false`: the row is fine, nothing was asked of the network
    DNS_FAILURE = "dns_failure"
    CONNECT_FAILURE = "connect_failure"
    TIMEOUT = "timeout"
    HTTP_NOT_FOUND = "http_not_found"  # 404 and 410
    HTTP_ERROR = "http_error"  # any other status that is not 200
    TOO_MANY_REDIRECTS = "too_many_redirects"
    TOO_LARGE = "too_large"
    EMPTY_BODY = "empty_body"
    NOT_AN_IMAGE = "not_an_image"  # the first bytes are those of no picture format that we read
    FILE_MISSING = "file_missing"  # a local picture that is not there or cannot be read
    SHA256_MISMATCH = "sha256_mismatch"  # not the bytes that the list expects of this row
    PLACEHOLDER = "placeholder"  # the same picture at so many URLs that it says "no longer available"

    # prepare_tasks
    UNLABELLED = "unlabelled"  # annotators did not agree on a label (SNLI-VE's "-")

    # clean: pictures
    UNDECODABLE = "undecodable"
    TRUNCATED_IMAGE = "truncated_image"
    IMAGE_TOO_SMALL = "image_too_small"
    IMAGE_TOO_LARGE = "image_too_large"  # declared pixels above the cap; refused before decoding
    IMAGE_ASPECT = "image_aspect"
    # clean: captions
    CAPTION_EMPTY = "caption_empty"  # nothing left after the rules
    CAPTION_TOO_LONG = "caption_too_long"  # over the character cap: not a caption
    CAPTION_TRUNCATED = "caption_truncated"  # kept, cut to the word cap

    # deduplicate
    DUPLICATE_EXACT = "duplicate_exact"  # same picture bytes, and the kept picture has this caption already
    DUPLICATE_NEAR = "duplicate_near"  # same by perceptual hash, likewise
    MERGED = "merged"  # kept: its caption moved to the equal picture that is kept
    LEAK_EXACT = "leak_exact"  # an evaluation picture, byte for byte
    LEAK_NAMED = "leak_named"  # an evaluation picture by its name or number (COCO, Visual Genome, Flickr, NLVR2, URL)
    LEAK_NEAR = "leak_near"  # an evaluation picture by perceptual hash


OUTCOME_FIELDS: list[tuple[str, pa.DataType]] = [
    ("row_id", pa.string()),
    ("status", pa.string()),
    ("reason", pa.string()),
    ("detail", pa.string()),  # for a person: the HTTP status, the number of words cut; null where nothing to say
]


def outcome_schema(*extra: tuple[str, pa.DataType]) -> pa.Schema:
    """The schema of ``outcomes.parquet``, with a stage's own columns after the common four."""
    return pa.schema([*OUTCOME_FIELDS, *extra])


def write_outcomes(folder: Path, tables: Iterable[pa.Table]) -> int:
    """Write ``folder/outcomes.parquet`` from tables of one schema, in order, without holding them all.

    Returns the number of rows. Raises ValueError when `tables` is empty, since its schema would be unknown.
    """
    path, partial = folder / OUTCOMES_FILE, folder / f".{OUTCOMES_FILE}.partial"
    writer: pq.ParquetWriter | None = None
    rows = 0
    try:
        for table in tables:
            if writer is None:
                writer = pq.ParquetWriter(partial, table.schema, compression="zstd")
            writer.write_table(table)
            rows += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise ValueError("no outcome table to write: pass at least an empty one")
    partial.rename(path)
    return rows


def read_outcomes(folder: Path, columns: list[str] | None = None) -> pa.Table:
    """The outcomes of the stage whose out is `folder`."""
    return pq.read_table(folder / OUTCOMES_FILE, columns=columns)


def count_reasons(folder: Path) -> Counter[tuple[str, str]]:
    """Rows per (status, reason), most frequent first when listed with ``most_common``."""
    table = read_outcomes(folder, ["status", "reason"])
    grouped = table.group_by(["status", "reason"]).aggregate([([], "count_all")])
    return Counter({(row["status"], row["reason"]): row["count_all"] for row in grouped.to_pylist()})


def kept_row_ids(folder: Path) -> pa.ChunkedArray:
    """The names of the rows that the stage handed on."""
    table = read_outcomes(folder, ["row_id", "status"])
    return table.filter(pc.equal(table["status"], Status.KEPT))["row_id"]


def check_conservation(folder: Path, rows_in: pa.Array | pa.ChunkedArray | list[str]) -> None:
    """Raise ValueError unless the stage's outcomes name each of `rows_in` exactly once and nothing else."""
    got = Counter(read_outcomes(folder, ["row_id"])["row_id"].to_pylist())
    want = Counter(rows_in if isinstance(rows_in, list) else rows_in.to_pylist())
    if got != want:
        lost, invented = list((want - got).elements())[:3], list((got - want).elements())[:3]
        raise ValueError(f"{folder}: rows are not conserved: {len(want - got)} lost (such as {lost}), {invented=}")
