"""Stage `prepare_tasks`: annotations of a task to records by split; evaluation pictures are never lost in silence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from components.data.cleaning.rules import CaptionParams, PictureParams
from components.io.errors import UserError
from components.io.runtime import Runtime

if TYPE_CHECKING:
    import pyarrow as pa

    from components.data.parts import PartWriter
    from components.data.sources.lists import SourceRow
    from components.data.tasks.collect import TaskRows
    from components.io.records import FileEntry

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
KARPATHY_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train", "restval"), "val": ("val",), "test": ("test",)}
_KEYS_OF = {
    "answers": "vqa",
    "answer_list": "vqa",
    "answer_count": "vqa",
    "image_name": "vqa",
    "instances": "grounding",
    "proposals": "grounding",
    "format": "retrieval",
}
BATCH = 64  # pictures decoded and written at a time


class TaskPictureParams(PictureParams, frozen=True, extra="forbid"):
    """As `PictureParams`, but lenient: a small or narrow picture of an evaluation set still counts in its recall."""

    min_side: int = Field(default=1, ge=1, le=8192, description="shortest side in pixels; smaller is rejected")
    max_aspect: float = Field(default=1000.0, ge=1.0, le=1000.0, description="longest side over shortest side")


class TaskParams(BaseModel, frozen=True, extra="forbid"):
    """One task: where its annotations and pictures are, and what is done to them."""

    kind: Literal["retrieval", "vqa", "entailment", "nlvr2", "grounding"] = Field(
        default="retrieval", description="what the task asks of a model"
    )
    path: Path = Field(description="folder that holds annotations and pictures, or one annotation file")
    annotations: tuple[str, ...] = Field(
        default=(), description="annotation files within `path`, one or a list; may be left out where there is but one"
    )
    images: str | None = Field(default=None, description="folder of pictures within `path`; `path` itself if left out")
    format: Literal["auto", "albef", "karpathy", "refcoco", "clevr"] = Field(
        default="auto",
        description="layout of a retrieval task's annotations; other kinds' tell themselves apart. refcoco: refs(…).p "
        "with instances.json beside it; clevr: CLEVR_…_scenes.json",
    )
    answers: tuple[str, ...] = Field(default=(), description="vqa: VQA v2's annotation files within `path`")
    answer_list: str | None = Field(
        default=None, description="vqa: JSON list of candidate answers within `path`; null: the most frequent of train"
    )
    answer_count: int = Field(default=3128, ge=1, le=1_000_000, description="vqa: so many of the most frequent answers")
    image_name: str | None = Field(
        default=None,
        description="vqa: a picture's name by {image_id} and {subtype}; null: COCO's "
        "{subtype}/COCO_{subtype}_{image_id:012d}.jpg or Visual Genome's {image_id}.jpg",
    )
    instances: str | None = Field(default=None, description="grounding: COCO's instances.json within `path`")
    proposals: str | None = Field(
        default=None, description="grounding: a detector's boxes by picture, JSON within `path`; null: the true boxes"
    )
    splits: dict[Split, tuple[str, ...]] = Field(
        default=KARPATHY_SPLITS,
        description="for each of train, val and test, the splits of the annotations that go there, or the names of "
        "annotation files whose rows name no split",
    )
    ignore_splits: tuple[str, ...] = Field(default=(), description="splits or annotation files to leave out")
    picture: TaskPictureParams = Field(default=TaskPictureParams(), description="which pictures are kept, in what form")
    caption: CaptionParams = Field(default=CaptionParams(), description="how captions are cleaned")
    pictures_per_file: int = Field(default=1000, ge=1, le=1_000_000, description="pictures in one record file")

    @field_validator("annotations", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value  # strictly checked, a list is no tuple

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> Self:
        for name, kind in _KEYS_OF.items():
            if name in self.model_fields_set and self.kind != kind:
                raise ValueError(
                    f"{name} is a key of tasks of kind {kind}: remove it from this one, of kind {self.kind}"
                )
        if self.kind == "grounding" and self.picture.max_side is not None:
            raise ValueError("picture.max_side would scale pictures but not their boxes: leave it null for grounding")
        return self

    @model_validator(mode="after")
    def _each_split_once(self) -> Self:
        names = [*self.ignore_splits, *(name for split in SPLITS for name in self.splits.get(split, ()))]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"the split {min(twice)!r} is given two places to go to: leave one")
        return self

    def place(self, names: tuple[str | None, ...]) -> Split | Literal["ignored"] | None:
        """Where rows go whose split or annotation file has one of `names`; None when nothing is said about it."""
        for name in names:
            if name in self.ignore_splits:
                return "ignored"
            for split in SPLITS:
                if name in self.splits.get(split, ()):
                    return split
        return None


class PrepareTasksParams(BaseModel, frozen=True, extra="forbid"):
    """All tasks by name."""

    tasks: dict[str, TaskParams] = Field(default={}, description="the tasks, by name")

    @field_validator("tasks")
    @classmethod
    def _names_are_folders(cls, value: dict[str, TaskParams]) -> dict[str, TaskParams]:
        for name in value:
            if not name.isidentifier():
                raise ValueError(f"the task name {name!r} names a folder: use letters, digits and _ alone")
        return value


class Caption(NamedTuple):
    """One row that has a picture and a caption."""

    row_id: str
    text: str


class PictureRows(NamedTuple):
    """A picture of a split with the rows that name it."""

    path: Path
    name: str
    captions: list[Caption]


def prepare_tasks(
    params: PrepareTasksParams, *, task: str, input: Path, tasks: Path, runtime: Runtime = Runtime()
) -> None:
    """Prepare `task` from `input` (its `path`): record folders ``train``, ``val``, ``test`` and outcomes in `tasks`.

    A record is a picture of the split with all its captions, named by its first row (``TASK/000000017``), in the order
    of the annotations; its `sha256` is that of the file. Every row stands once in ``tasks/outcomes.parquet`` with its
    `split`; rows of `ignore_splits` do not count as rows of the task. Kinds other than retrieval have
    ``annotations.parquet`` beside the records, and vqa ``answers.json`` (see `components.data.tasks.annotations`); an
    item about two pictures is two rows.

    Raises UserError when the task is not in the parameters, the annotations are missing or of another layout, name a
    split that has no place to go to, or hold no row of any split.
    """
    from components.data.parts import RECORDS_FILE, link
    from components.io.outcomes import read_outcomes, write_outcomes
    from components.io.records import FileEntry as Entry
    from components.io.records import write_manifest
    from components.io.work import discard, map_partitions, publish, stage_work

    if task not in params.tasks:
        known = ", ".join(params.tasks) or "none"
        raise UserError(f"prepare_tasks.tasks has no task {task!r}: use one of those it has ({known}) or add it")
    of_task = params.tasks[task]
    if not input.exists():
        raise UserError(f"{input} does not exist: set prepare_tasks.tasks.{task}.path to the folder of annotations")
    work = stage_work(runtime, f"prepare_tasks-{task}", of_task, {"input": input})

    rows: _Rows | TaskRows
    if of_task.kind == "retrieval":
        rows = _Rows(task, of_task, input)
    else:
        from components.data.tasks.collect import TaskRows as Collected

        rows = Collected(task, of_task, input)
    items = [(split, rows.pictures[split][start:end]) for split, start, end in rows.cut()]
    parts = map_partitions(
        partial(prepare_part, task, of_task), items, work=work, runtime=runtime, label=f"prepare {task}"
    )

    built = work / "built"
    shutil.rmtree(built, ignore_errors=True)
    for split in SPLITS:
        (built / split).mkdir(parents=True)
        entries: list[FileEntry] = []
        for (of_split, _), (folder, report) in zip(items, parts, strict=True):
            entry = Entry(**report["file"])
            if of_split == split and entry.rows:
                name = f"records-{len(entries):05d}.arrow"
                link(folder / RECORDS_FILE, built / split / name)
                entries.append(Entry(name, entry.rows, entry.captions, entry.bytes, entry.sha256))
        extra = {} if isinstance(rows, _Rows) else _annotate(rows, split, built, entries)
        write_manifest(built / split, "task", entries, task=task, task_kind=of_task.kind, split=split, **extra)
    if of_task.kind == "vqa" and not isinstance(rows, _Rows):
        _list_answers(rows, of_task, input, built)
    count = write_outcomes(built, [rows.rejected(), *(read_outcomes(folder) for folder, _ in parts)])
    if count != rows.count:
        raise ValueError(f"prepare_tasks: {rows.count} rows came in, {count} have an outcome")
    publish(built, tasks)
    discard(work)


def _annotate(rows: TaskRows, split: Split, built: Path, entries: list[FileEntry]) -> dict[str, Any]:
    from components.data.tasks.annotations import write_annotations

    files = [built / split / entry.name for entry in entries]
    return write_annotations(built / split, rows.params.kind, rows.items[split], files)


def _list_answers(rows: TaskRows, params: TaskParams, folder: Path, built: Path) -> None:
    from components.data.tasks.annotations import write_answers

    base = folder if folder.is_dir() else folder.parent
    given = base / params.answer_list if params.answer_list is not None else None
    targets = (target for item, _ in rows.items["train"] for target in item.values["targets"])
    write_answers(built, given, targets, params.answer_count)


class _Rows:
    """The rows of a task's annotations, sorted into pictures of the three splits and rows that are no pair."""

    def __init__(self, task: str, params: TaskParams, folder: Path) -> None:
        from components.io.records import row_name

        self.params = params
        self.pictures: dict[Split, list[PictureRows]] = {split: [] for split in SPLITS}
        self.count = 0
        self._rejected: list[tuple[str, str, str, str, str]] = []
        at: dict[tuple[Split, Path], int] = {}
        for number, file, row in self._read(folder):
            place = params.place((row.split, file))
            if place is None:
                split = row.split if row.split is not None else file
                raise UserError(
                    f"{row.location} is of split {split!r}, which prepare_tasks.tasks.{task}.splits names nowhere: "
                    "add it there or to `ignore_splits`"
                )
            if place == "ignored":
                continue
            self.count += 1
            name = row_name(task, number)
            refused = _refuse(row)
            if refused is not None:
                self._rejected.append((name, "rejected", *refused, place))
                continue
            assert row.path is not None  # what `_refuse` has seen to
            assert row.caption is not None
            if (place, row.path) not in at:
                at[place, row.path] = len(self.pictures[place])
                self.pictures[place].append(PictureRows(row.path, row.name or row.path.name, []))
            self.pictures[place][at[place, row.path]].captions.append(Caption(name, row.caption))
        if not self.count:
            raise UserError(f"the annotations of task {task} in {folder} hold no row: check `annotations` and `splits`")

    def _read(self, folder: Path) -> Iterator[tuple[int, str, SourceRow]]:
        """Rows with their number over all annotation files and the name of theirs."""
        from components.data.sources.lists import read_source

        start = 0
        for file in self.params.annotations or (None,):
            last = -1
            rows = read_source(folder, format=self.params.format, list=file, images=self.params.images)
            for row in rows:
                last = row.row
                yield start + row.row, file or folder.name, row
            start += last + 1

    def cut(self) -> Iterator[tuple[Split, int, int]]:
        """Ranges of pictures, each of which becomes one record file."""
        return cut_ranges(self.pictures, self.params.pictures_per_file)

    def rejected(self) -> pa.Table:
        """Outcomes of the rows that are no pair of a picture on this machine and a caption."""
        return rejected_table(self._rejected)


def cut_ranges(pictures: dict[Split, list[PictureRows]], step: int) -> Iterator[tuple[Split, int, int]]:
    """Split, start and end of ranges of `step` pictures."""
    for split in SPLITS:
        size = len(pictures[split])
        for start in range(0, size, step):
            yield split, start, min(start + step, size)


def rejected_table(rows: list[tuple[str, str, str, str, str]]) -> pa.Table:
    """Outcomes (row, status, reason, detail, split) as a table of the stage's schema."""
    import pyarrow as pa

    columns = zip(*rows, strict=True) if rows else [[] for _ in _schema()]
    return pa.table([pa.array(column, pa.string()) for column in columns], schema=_schema())


def _schema() -> pa.Schema:
    import pyarrow as pa

    from components.io.outcomes import outcome_schema

    return outcome_schema(("split", pa.string()))


def _refuse(row: SourceRow) -> tuple[str, str] | None:
    """Reason and detail where a row is no pair of a local picture and a caption."""
    from components.io.outcomes import Reason

    if row.error is not None:
        return row.error.value, f"{row.location}: {row.note}" if row.note else row.location
    if row.path is None:
        return Reason.NOT_FETCHED.value, f"{row.location}: a URL; tasks take pictures from local files"
    return None


def prepare_part(task: str, params: TaskParams, item: tuple[Split, list[PictureRows]], folder: Path) -> dict[str, Any]:
    """Partition function: read, normalise and write the pictures of one record file."""
    import pyarrow as pa

    from components.data.parts import PartWriter

    split, pictures = item
    with PartWriter(folder, ("split", pa.string())) as part:
        for start in range(0, len(pictures), BATCH):
            records = [_record(task, params, split, picture, part) for picture in pictures[start : start + BATCH]]
            part.write([record for record in records if record is not None])
    return part.report()


def _record(task: str, params: TaskParams, split: Split, rows: PictureRows, part: PartWriter) -> dict[str, Any] | None:
    """The record of one picture, or None when it or all of its captions are rejected; outcomes go to `part`."""
    import hashlib

    from components.data.cleaning.captions import clean_caption
    from components.data.cleaning.pictures import Picture, normalise
    from components.io.outcomes import Reason, Status

    picture: Picture | Reason
    data, detail = b"", None
    try:
        data = rows.path.read_bytes()
    except OSError as error:
        picture, detail = Reason.FILE_MISSING, error.strerror
    else:
        picture = normalise(data, params.picture) if data else Reason.EMPTY_BODY
    if isinstance(picture, Reason):
        detail = f"{rows.name}: {detail}" if detail else rows.name
        for row_id, _ in rows.captions:
            part.outcome(row_id, Status.REJECTED, picture, detail, split)
        return None

    kept: list[Caption] = []
    for row_id, raw in rows.captions:
        caption, reason = clean_caption(raw, params.caption)
        if caption:
            kept.append(Caption(row_id, caption))
        part.outcome(row_id, Status.KEPT if caption else Status.REJECTED, reason, None, split)
    if not kept:
        return None
    return {
        "id": rows.captions[0].row_id,
        "source": task,
        "url": rows.name,
        "image": picture.data,
        "sha256": hashlib.sha256(data).hexdigest(),
        "width": picture.width,
        "height": picture.height,
        "captions": [caption.text for caption in kept],
        "row_ids": [caption.row_id for caption in kept],
    }
