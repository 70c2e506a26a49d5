"""Stage `deduplicate`: no picture of an evaluation split, each other picture once, with all its captions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from components.io.errors import UserError
from components.io.runtime import Runtime


class ProtectedList(BaseModel, frozen=True, extra="forbid"):
    """A list of pictures to keep out, whether the pictures themselves are on this machine or not."""

    path: Path = Field(
        description="JSON (Karpathy, COCO, VQA, ALBEF, NLVR2, {split: [ids]}), JSON lines, RefCOCO's refs(unc).p, or "
        "text with one name or id a line"
    )
    splits: tuple[str, ...] = Field(default=(), description="splits of the list that count; empty: all of it")
    ids: Literal["coco", "flickr", "visual_genome"] = Field(
        default="coco", description="whose ids bare numbers in it are; flickr for Flickr30K and SNLI-VE"
    )
    images: Path | None = Field(
        default=None,
        description="folder with pictures of the list, if there is one: for hashes of those not known by name",
    )


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
    leak_crop: float = Field(
        default=0.05, ge=0, le=0.2, description="share that may be cut off each side of an evaluation picture; 0: none"
    )
    leak_crop_steps: int = Field(
        default=3, ge=2, le=5, description="shares from 0 to leak_crop that are tried on each side: 2·steps⁴ hashes"
    )
    leak_crop_distance: int = Field(
        default=24, ge=0, le=256, description="bits between hashes of a picture and of such a crop"
    )
    protected: dict[str, ProtectedList] = Field(
        default={}, description="lists of pictures to keep out beside the tasks' own, by name"
    )
    synonyms: tuple[Path, ...] = Field(
        default=(),
        description="files that give a picture's ids in several data sets: Visual Genome's image_data.json, COCO's "
        "annotations",
    )
    evaluation_splits: tuple[str, ...] = Field(
        default=("val", "test"), description="splits of every task whose pictures are removed; empty: none"
    )

    @model_validator(mode="after")
    def _distances_mean_something(self) -> DeduplicateParams:
        limit = self.hash_size**2 // 4
        for name in ("max_distance", "leak_distance", "leak_crop_distance"):
            if getattr(self, name) > limit:
                raise ValueError(
                    f"{name} {getattr(self, name)} is more than a quarter of the {self.hash_size**2} bits of a hash "
                    f"(hash_size {self.hash_size}), where unlike pictures meet: at most {limit}"
                )
        return self

    @field_validator("protected")
    @classmethod
    def _names_are_plain(cls, value: dict[str, ProtectedList]) -> dict[str, ProtectedList]:
        for name in value:
            if not name.isidentifier():
                raise ValueError(f"the list's name {name!r} is no plain word: use letters, digits and _ alone")
        return value

    @property
    def cuts(self) -> tuple[float, ...]:
        """The shares cut off each side, the whole picture's 0 first; empty: no crops."""
        if not (self.near and self.leak_crop):
            return ()
        return tuple(
            round(self.leak_crop * step / (self.leak_crop_steps - 1), 6) for step in range(self.leak_crop_steps)
        )


def deduplicate(
    params: DeduplicateParams, *, clean: Path, tasks: Path, unique: Path, runtime: Runtime = Runtime()
) -> None:
    """Remove evaluation pictures and duplicates from the records of `clean`; write the rest to `unique`.

    Protected are the pictures of each ``tasks/TASK/SPLIT`` (record folders) whose split is in `evaluation_splits`, and
    those of `protected`'s lists. A record leaks whose bytes are a protected picture's, which bears one of its names
    (COCO, Visual Genome or Flickr id, URL; see `components.data.duplicates.names`), or whose perceptual hash is near
    that of a protected picture, of its mirror image, or of a crop of either. Records found by bytes or by name stand in
    for protected pictures that are not on this machine: what is near them leaks too. The reasons, the first that holds:
    LEAK_EXACT by bytes, LEAK_NAMED by name, LEAK_NEAR by hash.

    Writes ``records-*.arrow``, ``manifest.json``, ``outcomes.parquet`` over all rows of `clean`, ``protected.parquet``
    (every protected name), and ``evidence.parquet``: for each row that did not stay as it was, what its picture was
    matched with, by which rule, at which distance.

    A kept picture takes over the captions of its duplicates: a row whose caption is new to it is kept as MERGED, one
    with a caption that it has already is rejected as DUPLICATE_EXACT or DUPLICATE_NEAR. The same holds within a record.

    Raises UserError when an input's stage has not finished, when no task has any of the evaluation splits and no list
    is given, and when a list cannot be read or names no picture.
    """
    from components.data.duplicates.hash_parts import (
        hash_list_part,
        hash_part,
        hash_task_part,
        list_parts,
        protect_part,
    )
    from components.data.duplicates.merging import (
        EVIDENCE_FILE,
        Files,
        plan_name,
        plan_part,
        write_evidence,
        write_part,
    )
    from components.data.duplicates.protected import PROTECTED_FILE
    from components.data.parts import assemble
    from components.io.records import read_manifest
    from components.io.work import map_partitions, run_partition, stage_work

    folders = evaluation_folders(tasks, params.evaluation_splits, needed=not params.protected)
    evaluation = {folder: read_manifest(folder) for folder in folders}
    manifest = read_manifest(clean)
    inputs = {"clean": clean, **{f"{folder.parent.name}/{folder.name}": folder for folder in folders}}
    inputs |= {f"protected/{name}": _existing(name, each) for name, each in params.protected.items()}
    inputs |= {f"synonyms/{number}": path for number, path in enumerate(params.synonyms) if path.is_file()}
    work = stage_work(runtime, "deduplicate", params, inputs)
    spread = partial(map_partitions, work=work, runtime=runtime)

    files = [clean / file.name for file in manifest.files]
    shown = [folder / file.name for folder, its in evaluation.items() for file in its.files]
    of_tasks = spread(partial(hash_task_part, params), shown, label="deduplicate: hash tasks", name="task")
    listed = list_parts(params)
    of_lists = (
        spread(partial(hash_list_part, params), listed, label="deduplicate: hash lists", name="list") if listed else []
    )
    known = [folder for folder, _ in [*of_tasks, *of_lists]]
    names = work / "names"
    run_partition(partial(protect_part, params), known, names)
    hashed = spread(partial(hash_part, params, names), files, label="deduplicate: hash", name="hash")
    plan = work / "plan"
    every = Files(files, [folder for folder, _ in hashed], known, names)
    counts = run_partition(partial(plan_part, params), every, plan)
    parts = spread(
        write_part,
        [(file, plan / plan_name(index)) for index, file in enumerate(files)],
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
        files=[evidence, names / PROTECTED_FILE],
        pictures=counts,
        evaluation=[
            {"task": folder.parent.name, "split": folder.name, "pictures": its.rows}
            for folder, its in evaluation.items()
        ],
    )


def _existing(name: str, protected: ProtectedList) -> Path:
    """The list's file. Raises UserError when there is none."""
    if not protected.path.is_file():
        raise UserError(f"deduplicate.protected.{name}.path is {protected.path}, where no file is: correct it")
    return protected.path


def evaluation_folders(tasks: Path, splits: tuple[str, ...], *, needed: bool = True) -> list[Path]:
    """The record folders ``TASK/SPLIT`` under `tasks` whose split is one of `splits`, by task, then split.

    Raises UserError when splits are asked for, no task has any and one is `needed`: nothing would be protected, in
    silence.
    """
    found = [path for path in sorted(tasks.glob("*/*")) if path.is_dir() and path.name in splits]
    found = [path for path in found if not path.parent.name.startswith(".")]
    if needed and splits and not found:
        raise UserError(
            f"{tasks} holds no task with a split named {' or '.join(splits)}: run `prepare_tasks` first, or set "
            "deduplicate.evaluation_splits to the names of yours ([] protects none)"
        )
    return found
