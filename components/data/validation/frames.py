"""Records and outcomes as data frames without picture bytes, which is what validation and statistics look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from components.io.outcomes import Status, read_outcomes
from components.io.records import iter_batches

ROWS = 8192  # records looked at together
COLUMNS = ["id", "source", "image", "sha256", "width", "height", "captions"]
WORDS_CAP = 60  # captions of more words share the histogram's last bin
PICTURE_COLUMNS: dict[str, str] = {
    "id": "str",
    "source": "str",
    "sha256": "str",
    "width": "float64",  # pixels; NaN until `clean` has decoded the picture
    "height": "float64",
    "short_side": "float64",
    "long_side": "float64",
    "aspect": "float64",  # long side over short side
    "bytes": "int64",
    "captions": "int64",
    "words": "int64",  # of all captions together
    "words_min": "float64",  # of the shortest caption; NaN where there is none
    "words_max": "float64",
}


@dataclass
class Pictures:
    """One line per picture, and how many captions of each source have how many words."""

    frame: pd.DataFrame
    words: dict[str, NDArray[np.int64]] = field(default_factory=dict)  # source -> (WORDS_CAP + 1,) counts


def read_pictures(folders: Iterable[Path]) -> Pictures:
    """The records of some folders, some 200 bytes of memory for each; picture bytes are measured, never read."""
    frames: list[pd.DataFrame] = []
    words: dict[str, NDArray[np.int64]] = {}
    for folder in folders:
        for batch in iter_batches(folder, COLUMNS, rows=ROWS):
            frames.append(_frame(batch, words))
    empty = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in PICTURE_COLUMNS.items()})
    frame = pd.concat(frames, ignore_index=True) if frames else empty
    return Pictures(frame, words)


def _frame(batch: pa.RecordBatch, words: dict[str, NDArray[np.int64]]) -> pd.DataFrame:
    captions = batch["captions"]
    owner = pc.list_parent_indices(captions).to_numpy()  # (C,) the picture of each caption
    counts = pc.count_substring_regex(pc.list_flatten(captions), r"\S+").to_numpy(zero_copy_only=False)  # (C,)
    sources = batch["source"].to_numpy(zero_copy_only=False)
    for source in dict.fromkeys(sources):
        of_source = np.minimum(counts[sources[owner] == source], WORDS_CAP)
        words[source] = words.get(source, 0) + np.bincount(of_source, minlength=WORDS_CAP + 1)
    per_picture = pd.Series(counts).groupby(owner).agg(["sum", "min", "max"]).reindex(range(batch.num_rows))
    width, height = (batch[name].to_numpy(zero_copy_only=False).astype("float64") for name in ("width", "height"))
    short, long = np.minimum(width, height), np.maximum(width, height)
    with np.errstate(divide="ignore", invalid="ignore"):
        aspect = long / short
    return pd.DataFrame(
        {
            "id": batch["id"].to_pandas(),
            "source": batch["source"].to_pandas(),
            "sha256": batch["sha256"].to_pandas(),
            "width": width,
            "height": height,
            "short_side": short,
            "long_side": long,
            "aspect": aspect,
            "bytes": pc.binary_length(batch["image"]).to_numpy(zero_copy_only=False),
            "captions": pc.list_value_length(captions).to_numpy(zero_copy_only=False),
            "words": per_picture["sum"].fillna(0),
            "words_min": per_picture["min"],
            "words_max": per_picture["max"],
        }
    ).astype(PICTURE_COLUMNS)


def count_outcomes(folder: Path, by: str | None = None) -> dict[str, Counter[tuple[str, str]]]:
    """Rows per (status, reason) of a stage's outcomes, for each value of the column `by` (``all`` without one)."""
    keys = ["status", "reason", *([by] if by else [])]
    table = read_outcomes(folder, keys)
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for row in table.group_by(keys).aggregate([([], "count_all")]).to_pylist():
        part = counts.setdefault(row[by] if by else "all", Counter())
        part[row["status"], row["reason"]] += row["count_all"]
    return counts


def funnel_frame(parts: Mapping[str, tuple[Counter[tuple[str, str]], int]], rows_before: int | None) -> pd.DataFrame:
    """What became of a stage's rows: one line per part (a source, a split, or all).

    `parts` gives for each the counts of `count_outcomes` and the number of captions in its records; `rows_before` is
    the number of rows that the stage before kept, where there is one (the column is left out otherwise).
    """
    lines: list[dict[str, Any]] = []
    for part, (counts, captions) in sorted(parts.items()):
        rows = sum(counts.values())
        kept = sum(count for (status, _), count in counts.items() if status == Status.KEPT)
        duplicates = sum(
            count
            for (status, reason), count in counts.items()
            if status == Status.REJECTED and reason.startswith("duplicate_")
        )
        line = {
            "part": part,
            "rows": rows,
            "kept": kept,
            "captions": captions,
            "reject_share": round((rows - kept) / rows, 6) if rows else 0.0,
            "duplicate_share": round(duplicates / rows, 6) if rows else 0.0,
        }
        lines.append(line)
    frame = pd.DataFrame(lines, columns=["part", "rows", "kept", "captions", "reject_share", "duplicate_share"])
    return frame if rows_before is None else frame.assign(rows_before=rows_before)


def describe(pictures: Pictures) -> dict[str, Any]:
    """Statistics by source: pictures, captions, words per caption, sizes in pixels and bytes. JSON, no clock."""
    statistics: dict[str, Any] = {}
    for source, frame in pictures.frame.groupby("source", sort=True):
        histogram = pictures.words.get(str(source), np.zeros(WORDS_CAP + 1, np.int64))
        captions = int(frame["captions"].sum())
        statistics[str(source)] = {
            "pictures": len(frame),
            "captions": captions,
            "captions_per_picture": _spread(frame["captions"]),
            "words_per_caption": {
                "mean": round(float(frame["words"].sum()) / captions, 4) if captions else None,
                "min": _number(frame["words_min"].min()),
                "max": _number(frame["words_max"].max()),
                "histogram": histogram.tolist(),  # captions of 0, 1, 2, … words; the last bin: as many or more
            },
            "width": _spread(frame["width"]),
            "height": _spread(frame["height"]),
            "bytes": {**_spread(frame["bytes"]), "sum": int(frame["bytes"].sum())},
        }
    return statistics


def _spread(values: pd.Series[Any]) -> dict[str, float | None]:
    names = {"min": values.min(), "median": values.median(), "mean": values.mean(), "max": values.max()}
    return {name: _number(value) for name, value in names.items()}


def _number(value: Any) -> float | None:
    if pd.isna(value):
        return None
    number = round(float(value), 4)
    return int(number) if number.is_integer() else number
