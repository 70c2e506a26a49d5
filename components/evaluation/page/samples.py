"""Pictures to look at: some that were kept, and for each reason some that were not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from components.evaluation.page.funnel import outcome_folders
from components.evaluation.page.thumbnails import Thumbnail, thumbnail
from components.io.outcomes import Status, read_outcomes
from components.io.records import MANIFEST_FILE, iter_batches, open_records, read_manifest

CAPTIONS_SHOWN = 2
LONGEST = 300  # characters shown of a caption: one that was rejected may be a whole web page
LONGEST_URL = 120
CREDENTIALS = re.compile(r"//[^/?#]*@")  # a report is passed around: no passwords of a source list in it
PER_REASON = 2


@dataclass(frozen=True)
class Sample:
    """One picture with its captions (untrusted text); `picture` is None where none can be shown."""

    name: str
    picture: Thumbnail | None
    captions: tuple[str, ...]
    more: int = 0
    note: str = ""


@dataclass(frozen=True)
class Rejected:
    """Samples of one reason of one stage."""

    stage: str
    reason: str
    rows: int
    samples: tuple[Sample, ...]


def record_folders(folder: Path) -> list[Path]:
    """`folder` itself when it holds records, else those below it that do (``data/raw/SOURCE``), by name."""
    if (folder / MANIFEST_FILE).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{MANIFEST_FILE}"))


def kept_samples(folder: Path, count: int) -> list[Sample]:
    """`count` records of a folder (or all), at equal distances in its order."""
    if count == 0 or not (folder / MANIFEST_FILE).is_file():
        return []
    manifest = read_manifest(folder)
    count = min(count, manifest.rows)
    wanted = [index * manifest.rows // count for index in range(count)]
    samples: list[Sample] = []
    start = 0
    for file in manifest.files:
        here = [index - start for index in wanted if start <= index < start + file.rows]
        start += file.rows
        if here:
            table = open_records(folder / file.name)
            samples += [_sample(record) for record in table.take(pa.array(here)).to_pylist()]
    return samples


def rejected_samples(stages: Sequence[tuple[str, Path, Path]], count: int) -> list[Rejected]:
    """At most `count` rejected pictures, as evenly over the reasons as they allow; stages are (name, out, input).

    The picture and the caption are those of the input's record.
    """
    groups = [(stage, source, *group) for stage, out, source in stages for group in _rejected_rows(out)]
    shares = [0] * len(groups)
    for _ in range(PER_REASON):
        for place, (_, _, _, rows, _) in enumerate(groups):
            if sum(shares) < count and shares[place] < rows:
                shares[place] += 1
    found = []
    for (stage, source, reason, rows, table), share in zip(groups, shares, strict=True):
        chosen = table.slice(0, share).to_pylist()
        records = _records_of([row["row_id"] for row in chosen], record_folders(source))
        samples = [_rejected_sample(row, records[row["row_id"]]) for row in chosen if row["row_id"] in records]
        if samples:
            found.append(Rejected(stage, reason, rows, tuple(samples)))
    return found


def refused_samples(stage: str, out: Path, per_reason: int = 2) -> list[Rejected]:
    """For each reason of `download`, the first rows that it refused or could not fetch: no picture, but a URL."""
    return [
        Rejected(stage, reason, rows, tuple(_refused(row) for row in table.slice(0, per_reason).to_pylist()))
        for reason, rows, table in _rejected_rows(out)
    ]


def _rejected_rows(out: Path) -> Iterable[tuple[str, int, pa.Table]]:
    """For each reason of the stage's rejects, the most frequent first: reason, rows, and the first rows."""
    tables = [read_outcomes(folder) for folder in outcome_folders(out)]
    if not tables:
        return
    table = pa.concat_tables(tables, promote_options="default")
    table = table.filter(pc.equal(table["status"], Status.REJECTED))
    counts = {row["values"]: row["counts"] for row in pc.value_counts(table["reason"]).to_pylist()}
    for reason in sorted(counts, key=lambda name: (-counts[name], name)):
        yield reason, counts[reason], table.filter(pc.equal(table["reason"], reason))


def _records_of(row_ids: Sequence[str], folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The records that hold the rows, by row. Pictures are read for these alone."""
    found: dict[str, dict[str, Any]] = {}
    wanted = pa.array(row_ids, pa.string())
    for folder in folders:
        for batch in iter_batches(folder, rows=8192):
            column = batch.column("row_ids")
            rows = pc.list_flatten(column)
            hits = pc.is_in(rows, value_set=wanted)
            if not pc.any(hits).as_py():
                continue
            parents = pc.list_parent_indices(column).filter(hits)
            for row_id, parent in zip(rows.filter(hits).to_pylist(), parents.to_pylist(), strict=True):
                found[row_id] = batch.slice(parent, 1).to_pylist()[0]
            if len(found) == len(row_ids):
                return found
    return found


def _sample(record: dict[str, Any]) -> Sample:
    captions = record["captions"]
    return Sample(
        record["id"],
        thumbnail(record["image"]),
        tuple(caption[:LONGEST] for caption in captions[:CAPTIONS_SHOWN]),
        max(0, len(captions) - CAPTIONS_SHOWN),
    )


def _rejected_sample(row: dict[str, Any], record: dict[str, Any]) -> Sample:
    caption = record["captions"][record["row_ids"].index(row["row_id"])]
    return Sample(row["row_id"], thumbnail(record["image"]), (caption[:LONGEST],), note=row.get("detail") or "")


def _refused(row: dict[str, Any]) -> Sample:
    note = CREDENTIALS.sub("//…@", row.get("url") or row.get("detail") or "")
    return Sample(row["row_id"], None, (), note=note if len(note) <= LONGEST_URL else f"{note[:LONGEST_URL]}…")
