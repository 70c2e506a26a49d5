"""A task's items sorted into pictures of the three splits, and rows that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from components.data.prepare_tasks import SPLITS, Caption, PictureRows, Split, TaskParams, cut_ranges, rejected_table
from components.data.tasks.items import Item, inside
from components.data.tasks.readers import PICTURES, read_items
from components.io.errors import UserError
from components.io.outcomes import Reason
from components.io.records import row_name


class PlacedItem(NamedTuple):
    """An item of a split and the names of its rows, one for each of its pictures."""

    item: Item
    row_ids: tuple[str, ...]


class TaskRows:
    """All items of a task. A row is a picture with the item's text, so an item about two pictures makes two rows.

    Raises UserError when a file is missing or of another layout, an item's split has no place to go to, or there is no
    item at all.
    """

    def __init__(self, task: str, params: TaskParams, folder: Path) -> None:
        self.params = params
        self.pictures: dict[Split, list[PictureRows]] = {split: [] for split in SPLITS}
        self.items: dict[Split, list[PlacedItem]] = {split: [] for split in SPLITS}
        self.count = 0
        self._rejected: list[tuple[str, str, str, str, str]] = []
        base = folder if folder.is_dir() else folder.parent
        root = base / params.images if params.images else base
        of_picture: dict[tuple[Split, Path], PictureRows] = {}
        each, number = PICTURES[params.kind], 0
        for file, item in self._read(base, folder):
            row_ids = tuple(row_name(task, number + place) for place in range(each))
            number += each
            place = params.place((item.split, file))
            if place is None and item.error is not None:
                place = "train"  # nobody can say where a broken item belongs, and it must not be lost in silence
            if place is None:
                split = item.split if item.split is not None else file
                raise UserError(
                    f"{item.location} is of split {split!r}, which prepare_tasks.tasks.{task}.splits names nowhere: "
                    "add it there or to `ignore_splits`"
                )
            if place == "ignored":
                continue
            self.count += each
            found = [inside(root, names) for names in item.pictures]
            if item.error is not None or item.text is None or any(one is None for one in found):
                reason = item.error or Reason.MALFORMED_ROW
                note = item.note or "a picture's name leads out of the images folder"
                for row_id in row_ids:
                    self._rejected.append((row_id, "rejected", reason.value, f"{item.location}: {note}", place))
                continue
            for row_id, one in zip(row_ids, found, strict=True):
                assert one is not None
                path, name = one
                rows = of_picture.get((place, path))
                if rows is None:
                    rows = of_picture[place, path] = PictureRows(path, name, [])
                    self.pictures[place].append(rows)
                rows.captions.append(Caption(row_id, item.text))
            self.items[place].append(PlacedItem(item, row_ids))
        if not self.count:
            raise UserError(
                f"the annotations of task {task} in {folder} hold no item: check `annotations` and `splits`"
            )

    def _read(self, base: Path, folder: Path) -> Iterator[tuple[str, Item]]:
        files = self.params.annotations or ((folder.name,) if folder.is_file() else ())
        if not files:
            raise UserError(f"{folder} is a folder: set the task's `annotations` to the annotation files within it")
        for file in files:
            for item in read_items(self.params, base, base / file):
                yield file, item

    def cut(self) -> Iterator[tuple[Split, int, int]]:
        """Ranges of pictures, each of which becomes one record file."""
        return cut_ranges(self.pictures, self.params.pictures_per_file)

    def rejected(self) -> pa.Table:
        """Outcomes of the rows of items that cannot be used."""
        return rejected_table(self._rejected)
