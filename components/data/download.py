"""Stage `download`: a source list to raw records, one per distinct picture, and an outcome for every row."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints, model_validator

from components.data.sources.formats import Format
from components.io.errors import UserError
from components.io.runtime import Runtime

PUBLISHED_FILE = "published"  # in work that stays for another try
SourceName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)]
HostName = Annotated[str, StringConstraints(pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]+$", max_length=253)]


class SourceParams(BaseModel, frozen=True, extra="forbid"):
    """Where a source's list and pictures are."""

    path: Path = Field(description="list file, or folder (or s3://BUCKET/PREFIX) with the list and local pictures")
    list: str | None = Field(default=None, description="the list within a folder; null: the only one there")
    format: Format = Field(default="auto", description="layout of the list; auto: by suffix and content")
    images: str | None = Field(
        default=None,
        description="folder of local pictures, within `path`; null: `path`, and for lists of COCO and Visual Genome "
        "the URLs that stand in them",
    )
    serve: str | None = Field(default=None, description="folder within `path` to serve on loopback as `host`")
    host: HostName = Field(default="corpus.test", description="the one host that can be asked when `serve` is set")
    url_column: str | None = Field(default=None, description="of a parquet; null: url or image_url, in any case")
    caption_column: str | None = Field(default=None, description="of a parquet; null: text or caption, in any case")
    sha256_column: str | None = Field(
        default=None, description="of a parquet: the sha256 expected of each picture, hex; null: none"
    )
    splits: tuple[str, ...] | None = Field(
        default=None, description="splits to take from a list that names them; null: all"
    )


class DownloadParams(BaseModel, frozen=True, extra="forbid"):
    """Parameters of `download`."""

    fetch: bool = Field(default=True, description="false: judge the rows, touch neither network nor pictures")
    sources: dict[SourceName, SourceParams] = Field(default_factory=dict, description="the sources, by name")
    concurrency: int = Field(default=128, ge=1, le=4096, description="fetches side by side")
    per_host: int = Field(default=8, ge=1, le=4096, description="fetches side by side from one host")
    connect_seconds: float = Field(default=10.0, gt=0, le=600, description="until a connection stands")
    total_seconds: float = Field(default=30.0, gt=0, le=3600, description="for one try, redirects and body included")
    row_seconds: float = Field(
        default=120.0,
        gt=0,
        le=86400,
        description="for one picture: all its tries, the waits between them and for a host that asks for peace",
    )
    max_bytes: int = Field(default=20_000_000, ge=1, le=1 << 30, description="of one picture; more is not read")
    max_redirects: int = Field(default=5, ge=0, le=50, description="to follow, each one checked")
    retries: int = Field(default=2, ge=0, le=20, description="after timeouts, broken connections, 429 and 5xx")
    backoff_seconds: float = Field(default=1.0, ge=0, le=600, description="before the first retry; doubles each time")
    user_agent: str = Field(default="vlp/0.1", pattern=r"^[\x20-\x7e]+$", description="what servers see us as")
    max_url_length: int = Field(default=2083, ge=16, le=65536, description="characters of a URL, percent-encoded")
    placeholder_urls: int = Field(
        default=20,
        ge=0,
        le=1_000_000,
        description='a picture that comes from so many URLs says "no longer available" and is rejected; 0: never',
    )
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
        if self.total_seconds > self.row_seconds:
            raise ValueError(
                f"total_seconds ({self.total_seconds:g}) must not be more than row_seconds "
                f"({self.row_seconds:g}), which it is part of"
            )
        return self


class _Work(BaseModel, frozen=True):
    """What the outcome of one source depends on: neither the other sources nor how many fetches run side by side."""

    name: str
    source: dict[str, Any]
    limits: dict[str, Any]


def download(params: DownloadParams, *, source: str, input: Path, raw: Path, runtime: Runtime = Runtime()) -> None:
    """Get the pictures of one source.

    `input` is the list file, or the folder or S3 prefix that holds it (what ``params.sources[source].path`` names).
    Writes `raw`: ``records-00000.arrow`` ... (RECORD_SCHEMA; width and height null) in the order of first mention,
    ``manifest.json``, ``outcomes.parquet`` (the common columns, then url, final_url, http_status, bytes, sha256) in the
    order of the rows, ``quarantine.parquet`` (malformed rows with file and line). The milliseconds of each row, in
    which no two runs agree, go to ``work/timings/download-SOURCE.parquet``.

    A host that answers 429 or 503 with Retry-After is left in peace as a whole until then; where that is longer than
    `row_seconds`, its rows end unasked with that status, as what can pass.

    A run that was stopped goes on where it was. When something failed for a reason that can pass, the work stays (its
    record files are those of `raw`, by hard links where the file system has them), and the next run with the same list,
    parameters and code asks for that alone. Raises UserError when the list cannot be read.
    """
    from components.data.corpus.server import serve
    from components.data.fetching.chunks import Job, fetch_chunks
    from components.data.fetching.http import Limits
    from components.data.fetching.outs import build_outs
    from components.data.fetching.plan import write_plan
    from components.data.fetching.retrying import passing_failures, reopen
    from components.data.sources.buckets import open_bucket
    from components.data.sources.lists import images_folder, read_source
    from components.io.progress import progress
    from components.io.storage import is_s3
    from components.io.work import discard, publish, run_partition, stage_work

    place = _place(params, source, input)
    served = None if place.serve is None else input / place.serve
    bucket = open_bucket(input, runtime.work / "listings" / f"{source}.jsonl") if is_s3(input) else None

    settings = params.model_dump(mode="json", exclude={"sources", "concurrency", "per_host"})
    identity = _Work(name=source, source=place.model_dump(mode="json", exclude={"path"}), limits=settings)
    work = stage_work(runtime, f"download-{source}", identity, {"input": input if bucket is None else bucket.listing})
    lists = work / "lists" / "files"

    def copy_lists(_: None, folder: Path) -> dict[str, Any]:
        if bucket is not None:
            bucket.copy_lists(bucket.only or place.list, folder / lists.name)
        return {}

    def plan(_: None, folder: Path) -> dict[str, Any]:
        options = place.model_dump(exclude={"path", "serve", "host"})
        if bucket is None:
            rows = read_source(input, **options)
        else:
            rows = read_source(lists / (bucket.only or ""), **options, names=bucket.names())
        with progress(f"read {source}", None, "rows") as advance:
            counts: dict[str, Any] = write_plan(
                rows, folder, fetch=params.fetch, max_url_length=params.max_url_length, advance=advance
            )
        return counts

    if not (work / "plan").is_dir():
        run_partition(copy_lists, None, lists.parent)
    targets = run_partition(plan, None, work / "plan")["targets"]
    limits = Limits(**params.model_dump(include=set(Limits.__dataclass_fields__)))
    with nullcontext(None) if served is None or targets == 0 else serve(served) as port:
        hosts = None if served is None else {place.host: port or 0}
        if bucket is None:
            images, storage = images_folder(input, place.images), None
        else:
            images, storage = Path(place.images or ""), bucket.storage
        job = Job(source, work / "plan", work, targets, params.records_per_file, limits, hosts, images, storage)
        if (work / PUBLISHED_FILE).is_file():
            reopen(job)
            (work / PUBLISHED_FILE).unlink()
        done = sum(len(job.ids(chunk)) for chunk in range(job.chunks) if job.finished(chunk))
        with progress(f"download {source}", targets, "pictures", done) as advance:
            fetch_chunks(job, advance)
    timings = runtime.work / "timings" / f"download-{source}.parquet"
    publish(build_outs(job, params.placeholder_urls, timings), raw)
    if passing_failures(job):
        (work / PUBLISHED_FILE).touch()
    else:
        discard(work)
    for other in sorted(work.parent.iterdir()):  # what was kept for a list or for parameters that are no more
        if other != work and (other / PUBLISHED_FILE).is_file():
            discard(other)


def _place(params: DownloadParams, source: str, input: Path) -> SourceParams:
    """Where the source is; raises UserError when it is not there."""
    from components.io.storage import is_s3

    if source not in params.sources:
        names = ", ".join(params.sources) or "none"
        raise UserError(f"there is no source {source!r} in `download.sources` (there: {names}): add it there")
    place = params.sources[source]
    if is_s3(input):
        if place.serve is not None:
            raise UserError(f"`download.sources.{source}.serve` names a folder of this machine: {input} is in a bucket")
        return place
    if not input.exists():
        raise UserError(f"{input} does not exist: set `download.sources.{source}.path` to a list file or a folder")
    if place.serve is not None and not (input / place.serve).is_dir():
        raise UserError(
            f"{input / place.serve} is not a folder: `download.sources.{source}.serve` names a folder in the source"
        )
    return place
