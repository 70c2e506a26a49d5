"""Stage `download`: a source list to raw records, one per distinct picture, and an outcome for every row."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, StringConstraints, model_validator

from components.data.sources.formats import Format
from components.io.errors import UserError
from components.io.runtime import Runtime

if TYPE_CHECKING:
    import pyarrow as pa

    from components.data.fetching.chunks import Job

SourceName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)]
HostName = Annotated[str, StringConstraints(pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]+$", max_length=253)]


class SourceParams(BaseModel, frozen=True, extra="forbid"):
    """Where a source's list and pictures are."""

    path: Path = Field(description="list file, or folder with the list and local pictures")
    list: str | None = Field(default=None, description="the list within a folder; null: the only one there")
    format: Format = Field(default="auto", description="layout of the list; auto: by suffix and content")
    images: str | None = Field(default=None, description="folder of local pictures, within `path`; null: `path`")
    serve: str | None = Field(default=None, description="folder within `path` to serve on loopback as `host`")
    host: HostName = Field(default="corpus.test", description="the one host that can be asked when `serve` is set")
    url_column: str | None = Field(default=None, description="of a parquet; null: url or image_url, in any case")
    caption_column: str | None = Field(default=None, description="of a parquet; null: text or caption, in any case")
    splits: tuple[str, ...] | None = Field(default=None, description="splits to take from a Karpathy JSON; null: all")


class DownloadParams(BaseModel, frozen=True, extra="forbid"):
    """Parameters of `download`."""

    fetch: bool = Field(default=True, description="false: judge the rows, touch neither network nor pictures")
    sources: dict[SourceName, SourceParams] = Field(default_factory=dict, description="the sources, by name")
    concurrency: int = Field(default=128, ge=1, le=4096, description="fetches side by side")
    per_host: int = Field(default=8, ge=1, le=4096, description="fetches side by side from one host")
    connect_seconds: float = Field(default=10.0, gt=0, le=600, description="until a connection stands")
    total_seconds: float = Field(default=30.0, gt=0, le=3600, description="for one try, redirects and body included")
    max_bytes: int = Field(default=20_000_000, ge=1, le=1 << 30, description="of one picture; more is not read")
    max_redirects: int = Field(default=5, ge=0, le=50, description="to follow, each one checked")
    retries: int = Field(default=2, ge=0, le=20, description="after timeouts, broken connections, 429 and 5xx")
    backoff_seconds: float = Field(default=1.0, ge=0, le=600, description="before the first retry; doubles each time")
    user_agent: str = Field(default="vlp/0.1", pattern=r"^[\x20-\x7e]+$", description="what servers see us as")
    max_url_length: int = Field(default=2083, ge=16, le=65536, description="characters of a URL, percent-encoded")
    records_per_file: int = Field(
        default=1000, ge=1, le=100_000, description="distinct pictures asked for per record file, got or not"
    )

    @model_validator(mode="after")
    def _times_agree(self) -> DownloadParams:
        if self.connect_seconds > self.total_seconds:
            raise ValueError(
                f"connect_seconds ({self.connect_seconds:g}) must not be more than total_seconds "
                f"({self.total_seconds:g}), which it is part of"
            )
        return self


class _Work(BaseModel, frozen=True):
    """What the outcome of one source depends on: neither the other sources nor how many fetches run side by side."""

    name: str
    source: dict[str, Any]
    limits: dict[str, Any]


def download(params: DownloadParams, *, source: str, input: Path, raw: Path, runtime: Runtime = Runtime()) -> None:
    """Get the pictures of one source.

    `input` is the list file, or the folder that holds it (what ``params.sources[source].path`` names). Writes `raw`:
    ``records-00000.arrow`` ... (RECORD_SCHEMA; width and height null) in the order of first mention, ``manifest.json``,
    ``outcomes.parquet`` (the common columns, then url, final_url, http_status, bytes, sha256) in the order of the rows.
    A run that was stopped goes on where it was. Raises UserError when the list cannot be read.
    """
    from components.data.corpus.server import serve
    from components.data.fetching.chunks import Job, fetch_chunks
    from components.data.fetching.http import Limits
    from components.data.fetching.plan import write_plan
    from components.data.sources.lists import read_source
    from components.io.progress import progress
    from components.io.work import publish, run_partition, stage_work

    if source not in params.sources:
        names = ", ".join(params.sources) or "none"
        raise UserError(f"there is no source {source!r} in `download.sources` (there: {names}): add it there")
    place = params.sources[source]
    if not input.exists():
        raise UserError(f"{input} does not exist: set `download.sources.{source}.path` to a list file or a folder")
    served = None if place.serve is None else input / place.serve
    if served is not None and not served.is_dir():
        raise UserError(f"{served} is not a folder: `download.sources.{source}.serve` names a folder in the source")

    settings = params.model_dump(mode="json", exclude={"sources", "concurrency", "per_host"})
    identity = _Work(name=source, source=place.model_dump(mode="json", exclude={"path"}), limits=settings)
    work = stage_work(runtime, "download", identity, {"input": input})

    def plan(_: None, folder: Path) -> dict[str, Any]:
        rows = read_source(input, **place.model_dump(exclude={"path", "serve", "host"}))
        with progress(f"read {source}", None, "rows") as advance:
            counts: dict[str, Any] = write_plan(
                rows, folder, fetch=params.fetch, max_url_length=params.max_url_length, advance=advance
            )
        return counts

    targets = run_partition(plan, None, work / "plan")["targets"]
    limits = Limits(**params.model_dump(include=set(Limits.__dataclass_fields__)))
    with nullcontext(None) if served is None or targets == 0 else serve(served) as port:
        hosts = None if served is None else {place.host: port or 0}
        job = Job(source, work / "plan", work, targets, params.records_per_file, limits, hosts)
        done = sum(len(job.ids(chunk)) for chunk in range(job.chunks) if job.finished(chunk))
        with progress(f"download {source}", targets, "pictures", done) as advance:
            fetch_chunks(job, advance)
    publish(_assemble(job), raw)
    shutil.rmtree(work)


def _assemble(job: Job) -> Path:
    """Put the finished chunks together in a folder that only needs to be moved."""
    from components.data.fetching.chunks import RECORDS_FILE
    from components.io.outcomes import write_outcomes
    from components.io.records import FileEntry, write_manifest
    from components.io.work import DONE_FILE

    built = job.work / "built"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir()
    entries: list[FileEntry] = []
    for chunk in range(job.chunks):
        done = json.loads((job.folder(chunk) / DONE_FILE).read_text(encoding="utf-8"))
        if done["entry"]["rows"] > 0:
            entry = FileEntry(**{**done["entry"], "name": f"records-{len(entries):05d}.arrow"})
            os.link(job.folder(chunk) / RECORDS_FILE, built / entry.name)  # not moved: a kill may come before the end
            entries.append(entry)
    write_outcomes(built, _outcomes(job, job.work / "results.sqlite"))
    write_manifest(built, "raw", entries, source=job.source)
    return built


def _outcomes(job: Job, results: Path) -> Iterator[pa.Table]:
    """The outcome of every row, in order; `results` is a file to use for bringing them in order."""
    import pyarrow as pa

    from components.data.fetching.chunks import RESULT_SCHEMA, read_results
    from components.data.fetching.plan import open_plan, rows_with_results
    from components.io.outcomes import Reason, Status, outcome_schema
    from components.io.records import row_name

    results.unlink(missing_ok=True)
    with closing(sqlite3.connect(results)) as database:
        columns = RESULT_SCHEMA.names
        database.execute(f"CREATE TABLE results ({columns[0]} INTEGER PRIMARY KEY, {', '.join(columns[1:])})")
        insert = f"INSERT INTO results VALUES ({', '.join('?' * len(columns))})"
        for table in read_results(job):
            database.executemany(insert, zip(*(table[name].to_pylist() for name in columns), strict=True))
        database.commit()

    schema = outcome_schema(
        ("url", pa.string()),
        ("final_url", pa.string()),
        ("http_status", pa.int32()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
    )
    yield schema.empty_table()
    with open_plan(job.plan) as plan:
        for batch in rows_with_results(plan, results):
            rows = []
            for row, shown, refused, why, _, got, how, *rest in batch:
                reason = refused if refused is not None else got
                status = Status.KEPT if reason == Reason.OK else Status.REJECTED
                detail = why if refused is not None else how
                rows.append((row_name(job.source, row), str(status), reason, detail, shown, *rest))
            arrays = [
                pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)
            ]
            yield pa.Table.from_arrays(arrays, schema=schema)
