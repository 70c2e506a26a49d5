"""Getting the planned pictures, chunk by chunk, in a way that survives a kill at any moment.

A chunk is a run of consecutive targets. While it is being fetched its pictures and a journal of what is done lie in
``fetching-00000/``. When all are done the chunk becomes ``chunk-00000/`` with one record file
and its results, and ``fetching-00000/`` goes. Several chunks are open at a time, so that one slow server does not make
all others wait at a chunk's end.
"""

from __future__ import annotations

import asyncio
import hashlib
import resource
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
from yarl import URL

from components.data.fetching.http import Fetched, Fetcher, Limits
from components.data.fetching.journal import Journal
from components.data.fetching.plan import Target, captions_of, open_plan, targets_of
from components.data.fetching.signatures import HEAD_BYTES, picture_format
from components.data.sources.local import path_below
from components.io.outcomes import Reason
from components.io.progress import Advance
from components.io.records import RecordWriter, row_name
from components.io.storage import Storage
from components.io.work import DONE_FILE, run_partition

OPEN_CHUNKS = 8
BATCH_RECORDS = 256
BUCKET_READS = 16  # pictures read side by side from a bucket
BATCH_BYTES = 32 << 20  # of pictures held before they are written
RECORDS_FILE = "records.arrow"
RESULTS_FILE = "results.parquet"
RESULT_SCHEMA = pa.schema(
    [
        ("target", pa.int64()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("final_url", pa.string()),
        ("http_status", pa.int32()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("passing", pa.bool_()),
        ("milliseconds", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Job:
    """What all chunks of a source share."""

    source: str
    plan: Path  # folder of the plan
    work: Path
    targets: int
    chunk_targets: int
    limits: Limits
    hosts: Mapping[str, int] | None  # see Fetcher
    images: Path  # folder of the source's own pictures; within `bucket`, if there is one
    bucket: Storage | None = None

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return -(-self.targets // self.chunk_targets)

    def ids(self, chunk: int) -> range:
        """The targets of a chunk."""
        return range(chunk * self.chunk_targets, min((chunk + 1) * self.chunk_targets, self.targets))

    def folder(self, chunk: int) -> Path:
        """Where the chunk lies once it is finished."""
        return self.work / f"chunk-{chunk:05d}"

    def fetching(self, chunk: int) -> Path:
        """Where it lies until then."""
        return self.work / f"fetching-{chunk:05d}"

    def finished(self, chunk: int) -> bool:
        """Whether an earlier run finished the chunk."""
        return (self.folder(chunk) / DONE_FILE).is_file()


def fetch_chunks(job: Job, advance: Advance) -> None:
    """Get all targets of `job` that no earlier run got. Raises what the disk raises, never what the network does."""
    waiting = [chunk for chunk in range(job.chunks) if not job.finished(chunk)]
    if not waiting:
        return
    _allow_open_files()
    try:
        asyncio.run(_fetch_all(job, waiting, advance))
    except BaseExceptionGroup as group:  # the first error tells what went wrong, the others that it did
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def _fetch_all(job: Job, waiting: list[int], advance: Advance) -> None:
    open_chunks = asyncio.Semaphore(OPEN_CHUNKS)

    async def run(chunk: int) -> None:
        try:
            await _fetch_chunk(job, chunk, fetcher, advance)
        finally:
            open_chunks.release()

    async with Fetcher(job.limits, job.hosts, job.work) as fetcher, asyncio.TaskGroup() as group:
        for chunk in waiting:
            await open_chunks.acquire()
            group.create_task(run(chunk))


async def _fetch_chunk(job: Job, chunk: int, fetcher: Fetcher, advance: Advance) -> None:
    with open_plan(job.plan) as plan:
        targets = targets_of(plan, job.ids(chunk))
    with await asyncio.to_thread(Journal, job.fetching(chunk)) as journal:
        advance(len(journal.results))

        async def fetch(target: Target) -> None:
            offset: int | None = None

            def keep(body: IO[bytes]) -> None:
                nonlocal offset
                offset = journal.keep(body)

            result = await fetcher.fetch(URL(target.reference, encoded=True), keep)
            journal.note(target.id, result, offset)
            advance()

        async with asyncio.TaskGroup() as group:
            for target in targets:
                if not target.local and target.id not in journal.results:
                    group.create_task(fetch(target))
        finish = partial(_write_chunk, job, journal=journal)
        await asyncio.to_thread(run_partition, finish, chunk, job.folder(chunk))
    await asyncio.to_thread(shutil.rmtree, job.fetching(chunk))
    advance(sum(target.local for target in targets))


def _write_chunk(job: Job, chunk: int, folder: Path, *, journal: Journal) -> dict[str, Any]:
    """Write a chunk's records and results into `folder`; pictures of the source's own folder are read now."""
    table: list[dict[str, Any]] = []
    with open_plan(job.plan) as plan, RecordWriter(folder / RECORDS_FILE) as writer:
        batch: list[dict[str, Any]] = []
        held = 0
        for target, result, image in _pictures(job, targets_of(plan, job.ids(chunk)), journal):
            table.append({"target": target.id, **result.to_json()})
            if result.reason is not Reason.OK:
                continue
            captions, row_ids = captions_of(plan, target.id, job.source, result.sha256)
            if not captions:  # each of them expects other bytes
                continue
            batch.append(
                {
                    "id": row_name(job.source, target.row),
                    "source": job.source,
                    "url": target.shown,
                    "image": image,
                    "sha256": result.sha256,
                    "captions": captions,
                    "row_ids": row_ids,
                    "coco_id": target.coco_id,
                }
            )
            held += len(image)
            if len(batch) == BATCH_RECORDS or held >= BATCH_BYTES:
                writer.write(batch)
                batch, held = [], 0
        if batch:
            writer.write(batch)
    pq.write_table(pa.Table.from_pylist(table, schema=RESULT_SCHEMA), folder / RESULTS_FILE)
    return {"entry": vars(writer.entry())}


def _pictures(job: Job, targets: list[Target], journal: Journal) -> Iterator[tuple[Target, Fetched, bytes]]:
    """Each target in order, with what became of it and its bytes; those of a bucket are asked for side by side."""

    def get(target: Target) -> tuple[Target, Fetched, bytes]:
        if not target.local:
            result = journal.results[target.id]
            return target, result, journal.image(target.id) if result.reason is Reason.OK else b""
        started = time.monotonic()
        result, image = _read_picture(job, target)
        return target, replace(result, milliseconds=round(1000 * (time.monotonic() - started))), image

    if job.bucket is None:
        yield from map(get, targets)
        return
    with ThreadPoolExecutor(BUCKET_READS) as threads:
        for first in range(0, len(targets), BUCKET_READS):  # in groups: no more than these are in memory
            yield from threads.map(get, targets[first : first + BUCKET_READS])


def _read_picture(job: Job, target: Target) -> tuple[Fetched, bytes]:
    if job.bucket is None:
        return read_local(path_below(job.images, target.reference), job.limits.max_bytes)
    try:
        image = job.bucket.read((job.images / target.reference).as_posix(), job.limits.max_bytes + 1)
    except FileNotFoundError:
        return Fetched(Reason.FILE_MISSING), b""
    return judge_bytes(image, job.limits.max_bytes)


def read_local(path: Path, max_bytes: int) -> tuple[Fetched, bytes]:
    """A local picture's bytes and what became of it; the bytes are empty unless the reason is OK."""
    try:
        if not path.is_file():
            return Fetched(Reason.FILE_MISSING), b""
        with path.open("rb") as stream:
            image = stream.read(max_bytes + 1)
    except OSError as error:
        return Fetched(Reason.FILE_MISSING, type(error).__name__), b""
    return judge_bytes(image, max_bytes)


def judge_bytes(image: bytes, max_bytes: int) -> tuple[Fetched, bytes]:
    """Whether bytes are a picture's; `image` holds at most one more than `max_bytes` of them."""
    if len(image) > max_bytes:
        return Fetched(Reason.TOO_LARGE, f"more than {max_bytes} bytes"), b""
    if not image:
        return Fetched(Reason.EMPTY_BODY, bytes=0), b""
    if picture_format(image[:HEAD_BYTES]) is None:
        return Fetched(Reason.NOT_AN_IMAGE, "the first bytes are of no picture"), b""
    return Fetched(Reason.OK, bytes=len(image), sha256=hashlib.sha256(image).hexdigest()), image


def read_results(job: Job) -> Iterator[pa.Table]:
    """The results of all finished chunks, in order."""
    for chunk in range(job.chunks):
        yield pq.read_table(job.folder(chunk) / RESULTS_FILE)


def _allow_open_files() -> None:
    """Raise this process's limit of open files as far as the system lets it: a socket and a file per fetch."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
