"""Stage `deduplicate`: no picture of an evaluation split, each other picture once, with all its captions."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pydantic import BaseModel, Field, model_validator

from components.io.errors import UserError
from components.io.runtime import Runtime


class DeduplicateParams(BaseModel, frozen=True, extra="forbid"):
    """What counts as the same picture, and which pictures are kept out."""

    exact: bool = Field(default=True, description="merge pictures of equal bytes")
    near: bool = Field(default=True, description="merge pictures of near perceptual hashes (and of equal bytes)")
    mirror: bool = Field(default=True, description="a mirror image counts as the same picture")
    hash_size: int = Field(default=16, ge=8, le=32, multiple_of=8, description="side of the hash: this squared is bits")
    max_distance: int = Field(default=16, ge=0, le=256, description="bits between hashes of the same picture")
    leak_distance: int = Field(
        default=40, ge=0, le=256, description="the same, against evaluation pictures, where a miss costs more"
    )
    evaluation_splits: tuple[str, ...] = Field(
        default=("val", "test"), description="splits of every task whose pictures are removed; empty: none"
    )

    @model_validator(mode="after")
    def _distances_mean_something(self) -> DeduplicateParams:
        limit = self.hash_size**2 // 4
        for name in ("max_distance", "leak_distance"):
            if getattr(self, name) > limit:
                raise ValueError(
                    f"{name} {getattr(self, name)} is more than a quarter of the {self.hash_size**2} bits of a hash "
                    f"(hash_size {self.hash_size}), where unlike pictures meet: at most {limit}"
                )
        return self


def deduplicate(
    params: DeduplicateParams, *, clean: Path, tasks: Path, unique: Path, runtime: Runtime = Runtime()
) -> None:
    """Remove evaluation pictures and duplicates from the records of `clean`; write the rest to `unique`.

    Reads `clean` and, for each split of `evaluation_splits`, every ``tasks/TASK/SPLIT`` (record folders). Writes
    ``records-*.arrow``, ``manifest.json``, ``outcomes.parquet`` over all rows of `clean`, and ``evidence.parquet``: for
    each row that did not stay as it was, what its picture was matched with, by which rule, at which distance.

    A kept picture takes over the captions of its duplicates: a row whose caption is new to it is kept as MERGED, one
    with a caption that it has already is rejected as DUPLICATE_EXACT or DUPLICATE_NEAR. The same holds within a record.

    Raises UserError when an input's stage has not finished, or when no task has any of the evaluation splits.
    """
    from components.data.duplicates.merging import (
        EVIDENCE_FILE,
        Files,
        hash_part,
        plan_name,
        plan_part,
        write_evidence,
        write_part,
    )
    from components.data.parts import assemble
    from components.io.records import read_manifest
    from components.io.work import map_partitions, run_partition, stage_work

    folders = evaluation_folders(tasks, params.evaluation_splits)
    evaluation = {folder: read_manifest(folder) for folder in folders}
    manifest = read_manifest(clean)
    inputs = {"clean": clean, **{f"{folder.parent.name}/{folder.name}": folder for folder in folders}}
    work = stage_work(runtime, "deduplicate", params, inputs)

    files = [clean / file.name for file in manifest.files]
    shown = [folder / file.name for folder, its in evaluation.items() for file in its.files]
    hashed = map_partitions(
        partial(hash_part, params),
        [*files, *shown],
        work=work,
        runtime=runtime,
        label="deduplicate: hash",
        name="hash",
    )
    plan = work / "plan"
    every = Files(files, shown, [folder for folder, _ in hashed])
    counts = run_partition(partial(plan_part, params), every, plan)
    parts = map_partitions(
        write_part,
        [(file, plan / plan_name(index)) for index, file in enumerate(files)],
        work=work,
        runtime=runtime,
        label="deduplicate: write",
        name="write",
    )
    evidence = work / EVIDENCE_FILE
    write_evidence([folder for folder, _ in parts], evidence)
    assemble(
        parts,
        work=work,
        out=unique,
        kind="unique",
        rows_in=manifest.captions,
        files=[evidence],
        pictures=counts,
        evaluation=[
            {"task": folder.parent.name, "split": folder.name, "pictures": its.rows}
            for folder, its in evaluation.items()
        ],
    )


def evaluation_folders(tasks: Path, splits: tuple[str, ...]) -> list[Path]:
    """The record folders ``TASK/SPLIT`` under `tasks` whose split is one of `splits`, by task, then split.

    Raises UserError when splits are asked for and no task has any: nothing would be protected, in silence.
    """
    found = [path for path in sorted(tasks.glob("*/*")) if path.is_dir() and path.name in splits]
    found = [path for path in found if not path.parent.name.startswith(".")]
    if splits and not found:
        raise UserError(
            f"{tasks} holds no task with a split named {' or '.join(splits)}: run `prepare_tasks` first, or set "
            "deduplicate.evaluation_splits to the names of yours ([] protects none)"
        )
    return found
