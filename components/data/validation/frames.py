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

from components.data.duplicates.names import names_of
from components.io.errors import UserError
from components.io.outcomes import Reason, Status, read_outcomes
from components.io.records import RECORD_SCHEMA, iter_batches, open_records, read_manifest

ROWS = 8192  # records looked at together
COLUMNS = ["id", "source", "url", "image", "sha256", "width", "height", "captions", "row_ids"]
WORDS_CAP = 60  # captions of more words share the histogram's last bin
SIDE_BIN, SIDES_CAP = 32, 1024  # pixels; longer short sides share the last bin
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
    "rows": "int64",  # as many as captions, or the two do not belong together
    "null_captions": "int64",
    "words": "int64",  # of all captions together
    "words_min": "float64",  # of the shortest caption; NaN where there is none
    "words_max": "float64",
    "protected": "int64",  # 1 where its URL, file name or COCO id is that of a protected picture
}


FUNNEL_COLUMNS = ["part", "rows", "kept", "captions", "reject_share", "duplicate_share", "repeated", "unknown"]


@dataclass
class Pictures:
    """One line per picture, and how many captions of each source have how many words."""

    frame: pd.DataFrame
    words: dict[str, NDArray[np.int64]] = field(default_factory=dict)  # source -> (WORDS_CAP + 1,) counts


def read_pictures(folders: Iterable[Path], protected: frozenset[str] = frozenset()) -> Pictures:
    """The records of some folders, some 200 bytes of memory for each; picture bytes are measured, never read.

    `protected` are names that no picture may bear (`components.data.duplicates.names`). Raises UserError when a column
    is missing.
    """
    frames: list[pd.DataFrame] = []
    words: dict[str, NDArray[np.int64]] = {}
    for folder in folders:
        _require_columns(folder)
        for batch in iter_batches(folder, rows=ROWS):
            frames.append(_frame(batch, words, protected))
    empty = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in PICTURE_COLUMNS.items()})
    frame = pd.concat(frames, ignore_index=True) if frames else empty
    return Pictures(frame, words)


def _require_columns(folder: Path) -> None:
    for file in read_manifest(folder).files:
        names = open_records(folder / file.name).schema.names
        missing = [column for column in COLUMNS if column not in names]
        if missing:
            raise UserError(f"{folder / file.name} has no column {missing[0]!r}: run the stage that writes it again")


def schema_problems(folders: Iterable[tuple[str, Path]]) -> pd.DataFrame:
    """One line for each record file whose columns are not the record schema's: `problem` says which and how."""
    problems = []
    for name, folder in folders:
        for file in read_manifest(folder).files:
            schema = open_records(folder / file.name).schema
            if not schema.equals(RECORD_SCHEMA):
                wrong = [field.name for field in RECORD_SCHEMA if field not in list(schema)]
                wrong += [column for column in schema.names if column not in RECORD_SCHEMA.names]
                problems.append(f"{name}/{file.name}: {', '.join(wrong) or 'the order of columns'}")
    return pd.DataFrame({"problem": pd.Series(problems, dtype="str")})


def _protected(batch: pa.RecordBatch, protected: frozenset[str]) -> NDArray[np.int64]:
    """(n,) 1 for records that bear a protected name."""
    found = np.zeros(batch.num_rows, np.int64)
    if protected:
        numbers = batch["coco_id"].to_pylist() if "coco_id" in batch.schema.names else [None] * batch.num_rows
        for row, (url, source, number) in enumerate(
            zip(batch["url"].to_pylist(), batch["source"].to_pylist(), numbers, strict=True)
        ):
            found[row] = f"coco:{number}" in protected or not protected.isdisjoint(names_of(url or "", source or ""))
    return found


def _frame(batch: pa.RecordBatch, words: dict[str, NDArray[np.int64]], protected: frozenset[str]) -> pd.DataFrame:
    captions = batch["captions"]
    owner = pc.list_parent_indices(captions).to_numpy()  # (C,) the picture of each caption
    texts = pc.list_flatten(captions)
    nulls = np.bincount(owner, pc.is_null(texts).to_numpy(zero_copy_only=False), batch.num_rows)
    counts = pc.count_substring_regex(texts.fill_null(""), r"\S+").to_numpy(zero_copy_only=False)  # (C,)
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
            "rows": pc.list_value_length(batch["row_ids"]).to_numpy(zero_copy_only=False),
            "null_captions": nulls,
            "words": per_picture["sum"].fillna(0),
            "words_min": per_picture["min"],
            "words_max": per_picture["max"],
            "protected": _protected(batch, protected),
        }
    ).astype(PICTURE_COLUMNS)


def row_problems(folder: Path, by: str | None = None) -> dict[str, dict[str, int]]:
    """What is wrong with a stage's outcomes, for each value of the column `by` (``all`` without one).

    `repeated` counts outcomes of rows that have one already, `unknown` those of no known status or reason.
    """
    table = read_outcomes(folder, ["row_id", "status", "reason", *([by] if by else [])])
    known = pc.and_(
        pc.is_in(table["status"], pa.array([each.value for each in Status])),
        pc.is_in(table["reason"], pa.array([each.value for each in Reason])),
    )
    found: dict[str, dict[str, int]] = {}
    for part in pc.unique(table[by]).to_pylist() if by else ["all"]:
        mask = pc.equal(table[by], part) if by else pa.chunked_array([pa.repeat(True, len(table))])
        rows = table["row_id"].filter(mask)
        found[part] = {
            "repeated": len(rows) - pc.count_distinct(rows, mode="all").as_py(),
            "unknown": pc.sum(pc.invert(known.filter(mask))).as_py() or 0,
        }
    return found


def count_outcomes(folder: Path, by: str | None = None) -> dict[str, Counter[tuple[str, str]]]:
    """Rows per (status, reason) of a stage's outcomes, for each value of the column `by` (``all`` without one)."""
    keys = ["status", "reason", *([by] if by else [])]
    table = read_outcomes(folder, keys)
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for row in table.group_by(keys).aggregate([([], "count_all")]).to_pylist():
        part = counts.setdefault(row[by] if by else "all", Counter())
        part[row["status"], row["reason"]] += row["count_all"]
    return counts


def funnel_frame(
    parts: Mapping[str, tuple[Counter[tuple[str, str]], int]],
    rows_before: int | None,
    problems: Mapping[str, Mapping[str, int]] | None = None,
) -> pd.DataFrame:
    """What became of a stage's rows: one line per part (a source, a split, or all).

    `parts` gives for each the counts of `count_outcomes` and the number of captions in its records; `rows_before` is
    the number of rows that the stage before kept, where there is one (the column is left out otherwise); `problems` are
    those of `row_problems`.
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
            **{"repeated": 0, "unknown": 0, **(problems or {}).get(part, {})},
        }
        lines.append(line)
    frame = pd.DataFrame(lines, columns=FUNNEL_COLUMNS)
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
            # pictures whose short side has 0 to 31, 32 to 63, … pixels; the last bin: as many or more
            "short_side": {**_spread(frame["short_side"]), "histogram": _side_histogram(frame["short_side"])},
            "bytes": {**_spread(frame["bytes"]), "sum": int(frame["bytes"].sum())},
        }
    return statistics


def _side_histogram(sides: pd.Series[Any]) -> list[int]:
    bins = np.minimum(sides.dropna().to_numpy(), SIDES_CAP).astype(np.int64) // SIDE_BIN
    return np.bincount(bins, minlength=SIDES_CAP // SIDE_BIN + 1).tolist()


def drift_frame(statistics: Mapping[str, Any], baseline: Mapping[str, Any], stages: Iterable[str]) -> pd.DataFrame:
    """How far each source's captions and pictures have moved from an earlier run's: one line per stage and source.

    `words_drift` and `size_drift` are total variation distances of histograms: the share of captions (pictures) that
    would have to change their length (short side) for the two to agree. 1 where one of the two has no such source.
    """
    lines = []
    for stage in stages:
        now, before = statistics.get(stage, {}), baseline.get(stage, {})
        for source in sorted({*now, *before}):
            words, sizes = (
                _distance(*(run.get(source, {}).get(of, {}).get("histogram", []) for run in (now, before)))
                for of in ("words_per_caption", "short_side")
            )
            lines.append({"part": f"{stage}/{source}", "words_drift": words, "size_drift": sizes})
    return pd.DataFrame(lines, columns=["part", "words_drift", "size_drift"])


def _distance(one: list[int], other: list[int]) -> float:
    if not sum(one) or not sum(other):
        return 0.0 if sum(one) == sum(other) else 1.0
    shares = [
        np.pad(np.asarray(counts, float), (0, max(len(one), len(other)) - len(counts))) for counts in (one, other)
    ]
    return round(float(np.abs(shares[0] / shares[0].sum() - shares[1] / shares[1].sum()).sum() / 2), 6)


def _spread(values: pd.Series[Any]) -> dict[str, float | None]:
    names = {"min": values.min(), "median": values.median(), "mean": values.mean(), "max": values.max()}
    return {name: _number(value) for name, value in names.items()}


def _number(value: Any) -> float | None:
    if pd.isna(value):
        return None
    number = round(float(value), 4)
    return int(number) if number.is_integer() else number
