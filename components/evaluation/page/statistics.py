"""What the records are like: per source, and over all."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from components.evaluation.page.funnel import outcome_folders
from components.io.outcomes import Status, count_reasons
from components.io.records import MANIFEST_FILE, iter_batches

COLUMNS = ["source", "image", "width", "height", "captions"]


@dataclass
class SourceStatistics:
    """One source. `rows_in` counts rows of its list; the rest describes its records that are left."""

    name: str
    rows_in: int = 0
    downloaded: int = 0  # rows
    pictures: int = 0
    captions: int = 0
    bytes: int = 0
    words: Counter[int] = field(default_factory=Counter)  # captions per number of words
    sides: Counter[int] = field(default_factory=Counter)  # pictures per shorter side, pixels

    @property
    def captions_per_picture(self) -> float:
        """Mean; 0 without pictures."""
        return self.captions / self.pictures if self.pictures else 0.0

    @property
    def mean_words(self) -> float:
        """Of a caption; 0 without captions."""
        return sum(words * times for words, times in self.words.items()) / self.captions if self.captions else 0.0

    @property
    def median_side(self) -> int:
        """Of the pictures' shorter sides, pixels; 0 where sizes are unknown."""
        return _median(self.sides)

    @property
    def mean_bytes(self) -> float:
        """Of a picture's file; 0 without pictures."""
        return self.bytes / self.pictures if self.pictures else 0.0


def read_statistics(raw: Path, unique: Path) -> list[SourceStatistics]:
    """Statistics of every source that has outcomes in `raw` or records in `unique`, by name. Pictures aren't read."""
    found: defaultdict[str, SourceStatistics] = defaultdict(lambda: SourceStatistics(""))
    for folder in outcome_folders(raw):
        counts = count_reasons(folder)
        source = found[folder.name]
        source.rows_in = counts.total()
        source.downloaded = sum(rows for (status, _), rows in counts.items() if status == Status.KEPT)
    if (unique / MANIFEST_FILE).is_file():
        for batch in iter_batches(unique, COLUMNS, rows=8192):
            for name in pc.unique(batch.column("source")).to_pylist():
                _add(found[name], batch.filter(pc.equal(batch.column("source"), name)))
    for name, source in found.items():
        source.name = name
    return [found[name] for name in sorted(found)]


def _add(source: SourceStatistics, records: pa.RecordBatch) -> None:
    captions = pc.list_flatten(records.column("captions"))
    source.pictures += records.num_rows
    source.captions += len(captions)
    source.bytes += pc.sum(pc.binary_length(records.column("image"))).as_py() or 0
    source.words.update(_counts(pc.list_value_length(pc.utf8_split_whitespace(captions))))
    width, height = records.column("width"), records.column("height")
    source.sides.update(_counts(pc.min_element_wise(width, height, skip_nulls=False).drop_null()))


def _counts(values: pa.Array) -> dict[int, int]:
    return {row["values"]: row["counts"] for row in pc.value_counts(values).to_pylist()}


def _median(values: Counter[int]) -> int:
    middle, seen = (values.total() + 1) // 2, 0
    for value in sorted(values):
        seen += values[value]
        if seen >= middle:
            return value
    return 0
