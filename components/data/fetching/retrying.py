"""Opening finished chunks again for what failed for a reason that can pass; all else in them stays as it is."""

from __future__ import annotations

import io
import shutil

import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.data.fetching.chunks import RECORDS_FILE, RESULTS_FILE, Job
from components.data.fetching.http import Fetched
from components.data.fetching.journal import Journal
from components.data.fetching.plan import open_plan, targets_of
from components.io.outcomes import Reason
from components.io.records import open_records, row_name


def passing_failures(job: Job) -> int:
    """How many targets failed for a reason that can pass: timeouts, broken connections, 429, 5xx."""
    return sum(_passing(job, chunk) for chunk in range(job.chunks))


def reopen(job: Job) -> None:
    """Make each finished chunk with such a failure an unfinished one that has everything else.

    Killed at any moment and called again, it goes on where it was.
    """
    for chunk in range(job.chunks):
        if job.finished(chunk) and _passing(job, chunk):
            _reopen(job, chunk)


def _passing(job: Job, chunk: int) -> int:
    table = pq.read_table(job.folder(chunk) / RESULTS_FILE, columns=["passing"])
    return int(pc.sum(table["passing"]).as_py() or 0)


def _reopen(job: Job, chunk: int) -> None:
    fetching, finished = job.fetching(chunk), job.folder(chunk)
    staged = fetching.with_name(f"{fetching.name}.partial")
    for leftover in (staged, fetching):
        shutil.rmtree(leftover, ignore_errors=True)
    records = open_records(finished / RECORDS_FILE)
    place = {name: index for index, name in enumerate(records["id"].to_pylist())}
    with open_plan(job.plan) as plan:
        targets = {target.id: target for target in targets_of(plan, job.ids(chunk))}
    with Journal(staged) as journal:
        for values in pq.read_table(finished / RESULTS_FILE).to_pylist():
            target = targets[values.pop("target")]
            if target.local or values["passing"]:
                continue
            result, offset = Fetched.from_json(values), None
            if result.reason is Reason.OK:
                index = place.get(row_name(job.source, target.row))
                if index is None:  # all of its rows expect other bytes, so nobody kept these
                    continue
                offset = journal.keep(io.BytesIO(records["image"][index].as_py()))
            journal.note(target.id, result, offset)
    staged.rename(fetching)
    trash = finished.with_name(f"{finished.name}.partial")  # what `run_partition` sweeps away, should we not get to it
    finished.rename(trash)
    shutil.rmtree(trash)
