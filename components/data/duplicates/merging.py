"""The last steps of `deduplicate`: plan for all pictures, by their hashes and names, then write each record file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.data.deduplicate import DeduplicateParams
from components.data.duplicates.decide import (
    BY_NAME,
    BY_SHA256,
    DUPLICATE,
    HASH_SCHEMA,
    KEEP,
    LEAK,
    RULES,
    Decisions,
    Ints,
    decide,
)
from components.data.duplicates.hash_parts import HASHES_FILE, NAMES_SCHEMA
from components.data.duplicates.protected import PROTECTED_FILE
from components.data.parts import PartWriter, concatenate
from components.io.outcomes import Reason, Status
from components.io.records import open_records

BATCH = 64  # records at a time
LEAK_REASONS = {BY_SHA256: Reason.LEAK_EXACT, BY_NAME: Reason.LEAK_NAMED}  # by any other rule: LEAK_NEAR
EVIDENCE_FILE = "evidence.parquet"
EVIDENCE_SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("id", pa.string()),  # the record that the row came in
        ("reason", pa.string()),
        ("matched_id", pa.string()),  # the evaluation picture, or the picture kept instead
        ("matched_task", pa.string()),  # or list; null where that is not an evaluation picture
        ("matched_split", pa.string()),
        # sha256, hash, mirrored_hash, cropped_hash; coco, visual_genome, flickr, nlvr2, url: by that name;
        # caption: the same caption again within one record
        ("rule", pa.string()),
        ("distance", pa.int32()),  # bits
        ("name", pa.string()),  # the protected name that the picture bears, or that `via` bears
        ("via", pa.string()),  # the record, itself a leak by bytes or name, that this one is like
    ]
)
FOUND = ("matched_id", "matched_task", "matched_split", "rule", "distance", "name", "via")
PLAN_SCHEMA = pa.schema(
    [
        ("record", pa.int64()),  # row within its file
        ("reasons", pa.list_(pa.string())),  # per row of the record; null where the record is kept
        *(EVIDENCE_SCHEMA.field(name) for name in FOUND),
        ("captions", pa.list_(pa.string())),  # that a kept record takes over
        ("row_ids", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True)
class Files:
    """Record files and, in the same order, the folders with their hashes; and what is known of protected pictures."""

    clean: Sequence[Path]
    hashes: Sequence[Path]
    known: Sequence[Path]  # folders with the hashes of protected pictures
    names: Path  # the folder with ``protected.parquet``


def plan_part(params: DeduplicateParams, files: Files, folder: Path) -> dict[str, Any]:
    """Decide over all pictures; write what concerns each clean file to ``NNNNN.parquet`` (PLAN_SCHEMA).

    Holds the hashes and ids of all pictures in memory, and the captions of those that have duplicates.
    """
    own = [pq.read_table(part / HASHES_FILE, schema=HASH_SCHEMA) for part in files.hashes]
    known = [pq.read_table(part / HASHES_FILE, schema=HASH_SCHEMA) for part in files.known]
    pictures = pa.concat_tables([HASH_SCHEMA.empty_table(), *own])
    evaluation = pa.concat_tables([HASH_SCHEMA.empty_table(), *known])
    found = decide(
        pictures,
        evaluation,
        exact=params.exact,
        max_distance=params.max_distance if params.near else None,
        leak_distance=params.leak_distance if params.near else None,
        crop_distance=params.leak_crop_distance if params.cuts else None,
    )
    protected = _Protected(
        found, pictures, evaluation, pq.read_table(files.names / PROTECTED_FILE, schema=NAMES_SCHEMA)
    )
    starts = np.cumsum([0, *(len(table) for table in own)])
    texts = _captions(files.clean, starts, _clustered(found))
    reasons, taken = _merge(found, texts)

    own_ids = pictures["id"]
    for number, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        rows = []
        for index in range(start, stop):
            action, match = found.action[index], int(found.match[index])
            if action == KEEP and index not in taken:
                continue
            row: dict[str, Any] = {"record": index - start}
            if action == KEEP:
                row["captions"], row["row_ids"] = taken[index]
            else:
                row["rule"], row["distance"] = RULES[found.rule[index]], int(found.distance[index])
            if action == LEAK:
                row["reasons"] = [LEAK_REASONS.get(int(found.rule[index]), Reason.LEAK_NEAR).value]
                row |= protected.origin(index)
            elif action == DUPLICATE:
                row["reasons"], row["matched_id"] = reasons[index], own_ids[match].as_py()
            rows.append(row)
        pq.write_table(pa.Table.from_pylist(rows, schema=PLAN_SCHEMA), folder / plan_name(number))
    return {
        "kept": int((found.action == KEEP).sum()),
        "leaked": int((found.action == LEAK).sum()),
        "duplicates": int((found.action == DUPLICATE).sum()),
    }


class _Protected:
    """Which protected picture a leaking one is."""

    def __init__(self, found: Decisions, pictures: pa.Table, evaluation: pa.Table, names: pa.Table) -> None:
        self.found, self.pictures, self.evaluation, self.names = found, pictures, evaluation, names

    def origin(self, index: int) -> dict[str, Any]:
        """What the evidence says of own picture `index`; an own picture in between is named as `via`."""
        match = int(self.found.match[index])
        if self.found.rule[index] == BY_NAME:
            row = self.names.slice(self.pictures["named"][index].as_py(), 1).to_pylist()[0]
            of_name = {"matched_id": row["picture"], "matched_task": row["task"], "matched_split": row["split"]}
            return {**of_name, "rule": row["name"].partition(":")[0], "name": row["name"]}
        if match >= len(self.evaluation):
            between = match - len(self.evaluation)
            origin = {key: value for key, value in self.origin(between).items() if key != "rule"}
            return {**origin, "via": self.pictures["id"][between].as_py()}
        shown = self.evaluation.select(["id", "task", "split"]).slice(match, 1).to_pylist()[0]
        return {"matched_id": shown["id"], "matched_task": shown["task"], "matched_split": shown["split"]}


def plan_name(number: int) -> str:
    """The plan's file for clean file `number`."""
    return f"{number:05d}.parquet"


def _clustered(found: Decisions) -> Ints:
    """The pictures that are duplicates or have some, in order."""
    gives_way = np.flatnonzero(found.action == DUPLICATE)
    return np.union1d(gives_way, found.match[gives_way])


Texts = dict[int, tuple[list[str], list[str]]]


def _captions(files: Sequence[Path], starts: Ints, wanted: Ints) -> Texts:
    """Captions and row ids of the wanted pictures."""
    texts: Texts = {}
    for file, start in zip(files, starts[:-1].tolist(), strict=True):
        table = open_records(file).select(["captions", "row_ids"])
        low, high = np.searchsorted(wanted, [start, start + len(table)])
        rows = wanted[low:high] - start
        for row, record in zip(rows.tolist(), table.take(pa.array(rows)).to_pylist(), strict=True):
            texts[start + row] = (record["captions"], record["row_ids"])
    return texts


def _merge(found: Decisions, texts: Texts) -> tuple[dict[int, list[str]], Texts]:
    """Reasons for each row of each duplicate, and what each kept picture takes over; duplicates in input order."""
    reasons: dict[int, list[str]] = {}
    taken: Texts = {}
    seen: dict[int, set[str]] = {}
    for index in np.flatnonzero(found.action == DUPLICATE).tolist():
        keeper = int(found.match[index])
        known = seen.setdefault(keeper, set(texts[keeper][0]))
        again = Reason.DUPLICATE_EXACT if RULES[found.rule[index]] == "sha256" else Reason.DUPLICATE_NEAR
        reasons[index] = []
        for caption, row_id in zip(*texts[index], strict=True):
            reasons[index].append((again if caption in known else Reason.MERGED).value)
            if caption not in known:
                known.add(caption)
                captions, row_ids = taken.setdefault(keeper, ([], []))
                captions.append(caption)
                row_ids.append(row_id)
    return reasons, taken


def write_part(item: tuple[Path, Path], folder: Path) -> dict[str, Any]:
    """Write what is kept of one clean file (item: the file and its plan), its outcomes and its evidence."""
    file, plan_file = item
    plan = {row["record"]: row for row in pq.read_table(plan_file).to_pylist()}
    evidence: list[dict[str, Any]] = []
    with PartWriter(folder) as part:
        number = 0
        for batch in open_records(file).to_batches(max_chunksize=BATCH):
            records = []
            for record in batch.to_pylist():
                judged = plan.get(number, {})
                number += 1
                if judged.get("reasons") is None:
                    records.append(_keep(record, judged, part, evidence))
                else:
                    _give_up(record, judged, part, evidence)
            part.write(records)
    pq.write_table(pa.Table.from_pylist(evidence, schema=EVIDENCE_SCHEMA), folder / EVIDENCE_FILE)
    return part.report()


def _keep(
    record: dict[str, Any], judged: dict[str, Any], part: PartWriter, evidence: list[dict[str, Any]]
) -> dict[str, Any]:
    captions: dict[str, str] = {}  # to the row it came from, in order
    for row_id, caption in zip(record["row_ids"], record["captions"], strict=True):
        if caption not in captions:
            captions[caption] = row_id
            part.outcome(row_id, Status.KEPT, Reason.OK)
            continue
        part.outcome(row_id, Status.REJECTED, Reason.DUPLICATE_EXACT, record["id"])
        evidence.append(
            {
                "row_id": row_id,
                "id": record["id"],
                "reason": Reason.DUPLICATE_EXACT.value,
                "matched_id": record["id"],
                "rule": "caption",
                "distance": 0,
            }
        )
    captions.update(zip(judged.get("captions") or [], judged.get("row_ids") or [], strict=True))
    return {**record, "captions": list(captions), "row_ids": list(captions.values())}


def _give_up(record: dict[str, Any], judged: dict[str, Any], part: PartWriter, evidence: list[dict[str, Any]]) -> None:
    reasons = judged["reasons"]
    if len(reasons) == 1:  # a leak: one reason for all rows
        reasons = reasons * len(record["row_ids"])
    for row_id, value in zip(record["row_ids"], reasons, strict=True):
        reason = Reason(value)
        status = Status.KEPT if reason is Reason.MERGED else Status.REJECTED
        part.outcome(row_id, status, reason, judged["matched_id"])
        found = {name: judged[name] for name in FOUND}
        evidence.append({"row_id": row_id, "id": record["id"], "reason": value, **found})


def write_evidence(parts: Sequence[Path], path: Path) -> None:
    """The evidence of all partitions in one file."""

    def tables() -> Iterator[pa.Table]:
        yield EVIDENCE_SCHEMA.empty_table()
        for folder in parts:
            yield pq.read_table(folder / EVIDENCE_FILE, schema=EVIDENCE_SCHEMA)

    concatenate(tables(), path)
