"""``annotations.parquet``: what a task asks of the records beside it, an item a row; and reading it again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.data.tasks.answers import frequent_answers, normalise_answer
from components.data.tasks.items import load_json
from components.io.errors import UserError
from components.io.records import iter_batches, read_manifest, sha256_file

if TYPE_CHECKING:
    from components.data.tasks.collect import PlacedItem

ANNOTATIONS_FILE, ANSWERS_FILE = "annotations.parquet", "answers.json"
_COMMON = [
    ("pictures", pa.list_(pa.int32())),  # positions of the item's records in the split
    ("row_ids", pa.list_(pa.string())),  # as long as `pictures`
    ("text", pa.string()),  # cleaned as captions are
]
_OWN = {
    "vqa": [
        ("question_id", pa.string()),
        ("type", pa.string()),  # of the answer or the question, where the annotations say
        ("answers", pa.list_(pa.string())),  # as people gave them; empty where nobody did
        ("targets", pa.list_(pa.string())),  # the different answers, normalised
        ("weights", pa.list_(pa.float64())),  # as long as `targets`
    ],
    "entailment": [("label", pa.int64())],  # 0 contradiction, 1 neutral, 2 entailment
    "nlvr2": [("label", pa.int64())],  # 0 false, 1 true
    "grounding": [
        ("ref_id", pa.string()),
        ("subset", pa.string()),  # the split's name in the annotations, such as testA
        ("box", pa.list_(pa.float64())),  # left, top, width, height in pixels of the picture; null where unknown
        ("candidates", pa.list_(pa.list_(pa.float64()))),  # boxes to choose from
    ],
}
SCHEMAS = {kind: pa.schema([*_COMMON, *own]) for kind, own in _OWN.items()}


def write_annotations(folder: Path, kind: str, items: Sequence[PlacedItem], parts: Iterable[Path]) -> dict[str, Any]:
    """Write the items of a split whose rows were all kept; returns what the split's manifest says of them.

    `parts` are the split's record files in order.
    """
    kept: dict[str, tuple[int, str]] = {}  # row: position of its record, cleaned text
    position = 0
    for path in parts:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all().select(["row_ids", "captions"])
            for row in table.to_pylist():
                for row_id, caption in zip(row["row_ids"], row["captions"], strict=True):
                    kept[row_id] = (position, caption)
                position += 1
    rows = []
    for item, row_ids in items:
        found = [kept[row_id] for row_id in row_ids if row_id in kept]
        if len(found) == len(row_ids):
            pictures = [place for place, _ in found]
            rows.append({"pictures": pictures, "row_ids": list(row_ids), "text": found[0][1], **item.values})
    path = folder / ANNOTATIONS_FILE
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMAS[kind]), path, compression="zstd")
    return {
        "items": len(rows),
        "items_without_picture_or_text": len(items) - len(rows),
        "annotations": {"file": ANNOTATIONS_FILE, "sha256": sha256_file(path)},
    }


def write_answers(folder: Path, given: Path | None, targets: Iterable[str], count: int) -> None:
    """Write ``answers.json``, the candidates that answers are ranked among: a given list, or the most frequent."""
    if given is None:
        answers = frequent_answers(targets, count)
    else:
        content = load_json(given)
        if not isinstance(content, list) or not all(isinstance(answer, str) for answer in content):
            raise UserError(f"{given} is no list of answers: `answer_list` names a JSON list of texts")
        answers = list(dict.fromkeys(answer for raw in content if (answer := normalise_answer(raw))))
    text = json.dumps(answers, indent=0, ensure_ascii=False)
    (folder / ANSWERS_FILE).write_text(text + "\n", encoding="utf-8")


class Annotations:
    """The items of a split, ``folder`` being ``data/tasks/TASK/SPLIT``: a sequence of dictionaries by column.

    Raises UserError when the split is missing, or is of another kind of task than `kind`.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        found = task_kind(folder)
        if found != kind:
            raise UserError(f"{folder} is of a task of kind {found}, not {kind}: set prepare_tasks or the run's `kind`")
        self.folder = folder
        try:
            self.table = pq.read_table(folder / ANNOTATIONS_FILE)
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"{folder / ANNOTATIONS_FILE} is missing or damaged ({error}): run prepare_tasks") from None

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: dict[str, Any] = self.table.slice(index, 1).to_pylist()[0]
        return row

    def column(self, name: str) -> list[Any]:
        """One column of all items."""
        values: list[Any] = self.table[name].to_pylist()
        return values


def task_kind(folder: Path) -> str:
    """What the task of a split asks of a model: retrieval, vqa, … Raises UserError when the split is missing."""
    if not folder.is_dir():
        present = ", ".join(sorted(path.name for path in folder.parent.glob("*") if path.is_dir())) or "(none)"
        raise UserError(f"{folder.parent} has no split {folder.name!r}: set evaluate.split to one of {present}")
    return str(read_manifest(folder).extra.get("task_kind", "retrieval"))


def read_answers(task: Path) -> list[str]:
    """The candidate answers of a VQA task (``data/tasks/TASK``). Raises UserError when there are none."""
    path = task / ANSWERS_FILE
    if not path.is_file():
        raise UserError(f"{path} does not exist: run prepare_tasks for this task, with kind vqa")
    answers: list[str] = json.loads(path.read_text(encoding="utf-8"))
    if not answers:
        raise UserError(f"{path} lists no answer: the task's train split has none; set `answer_list`")
    return answers


def sizes(folder: Path) -> Iterator[tuple[int, int]]:
    """Width and height of the split's pictures, pixels."""
    for batch in iter_batches(folder, ["width", "height"], rows=4096):
        yield from zip(batch.column("width").to_pylist(), batch.column("height").to_pylist(), strict=True)
