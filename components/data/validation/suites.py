"""What is expected of every stage's data, as Great Expectations suites in code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import great_expectations.expectations as gxe

if TYPE_CHECKING:
    import pandas as pd

    from components.data.validate import ValidateParams


@dataclass
class Suite:
    """Expectations of one data frame. `description` of each is a sentence that says what should hold."""

    name: str
    frame: pd.DataFrame
    label: str  # the column that names a line of the frame in messages
    expectations: list[Any]


def picture_suite(
    name: str,
    frame: pd.DataFrame,
    params: ValidateParams,
    *,
    decoded: bool = True,
    distinct: bool = False,
    rows: int | None = None,
    least: int = 0,
) -> Suite:
    """Of pictures: `decoded` ones have sizes and clean captions, `distinct` ones differ in their bytes.

    `rows` is the exact number of pictures where it is known, `least` the smallest that will do.
    """
    expectations: list[Any] = [
        gxe.ExpectColumnValuesToNotBeNull(column="id", description="Every picture has a name"),
        gxe.ExpectColumnValuesToBeUnique(column="id", description="No two pictures have the same name"),
        gxe.ExpectColumnValuesToNotBeNull(column="source", description="Every picture names its source"),
        gxe.ExpectColumnValuesToBeBetween(
            column="bytes",
            min_value=1,
            max_value=params.max_bytes,
            description=f"Every picture has 1 to {params.max_bytes} bytes",
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="captions", min_value=1, description="Every picture has at least one caption"
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="null_captions", max_value=0, description="No caption is missing (null)"
        ),
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A="captions", column_B="rows", description="Every caption names the row that it came from"
        ),
        gxe.ExpectColumnValuesToNotBeNull(column="sha256", description="Every picture has a sha256"),
        gxe.ExpectColumnValuesToMatchRegex(
            column="sha256", regex="^[0-9a-f]{64}$", description="Every sha256 has 64 hexadecimal digits"
        ),
    ]
    if rows is not None:
        text = f"There are {rows} pictures, as many as the stage before handed on"
        expectations.append(gxe.ExpectTableRowCountToEqual(value=rows, description=text))
    if least:
        text = f"There are at least {least} pictures"
        expectations.append(gxe.ExpectTableRowCountToBeBetween(min_value=least, description=text))
    if distinct:
        text = "No two pictures have the same bytes"
        expectations.append(gxe.ExpectColumnValuesToBeUnique(column="sha256", description=text))
    if decoded:
        expectations += _decoded(params)
    if "leak" in frame:
        text = "No picture stands in an evaluation split (by the sha256 of its file)"
        expectations.append(
            gxe.ExpectColumnValuesToBeBetween(column="leak", min_value=0, max_value=0, description=text)
        )
        text = "No picture bears a protected name (a COCO, Visual Genome or Flickr id, or a URL)"
        expectations.append(
            gxe.ExpectColumnValuesToBeBetween(column="protected", min_value=0, max_value=0, description=text)
        )
    return Suite(name, frame, "id", expectations)


def _decoded(params: ValidateParams) -> list[Any]:
    low, high = params.min_words, params.max_words
    return [
        gxe.ExpectColumnValuesToBeBetween(
            column="words_min",
            min_value=low,
            description=f"Every caption has at least {low} word{'s' * (low > 1)} (of each picture, the shortest)",
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="words_max",
            max_value=high,
            description=f"Every caption has at most {high} words (of each picture, the longest)",
        ),
        gxe.ExpectColumnValuesToNotBeNull(column="width", description="Every picture has a width"),
        gxe.ExpectColumnValuesToNotBeNull(column="height", description="Every picture has a height"),
        gxe.ExpectColumnValuesToBeBetween(
            column="short_side",
            min_value=params.min_side,
            description=f"The short side of every picture has at least {params.min_side} pixels",
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="long_side",
            max_value=params.max_side,
            description=f"The long side of every picture has at most {params.max_side} pixels",
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="aspect",
            max_value=params.max_aspect,
            description=f"The long side of every picture is at most {params.max_aspect:g} times its short side",
        ),
    ]


def row_suite(name: str, frame: pd.DataFrame, max_reject_share: float, max_duplicate_share: float | None) -> Suite:
    """Of a stage's outcomes: no row is lost or invented, and no more are rejected than is allowed."""
    expectations: list[Any] = [
        gxe.ExpectTableRowCountToBeBetween(min_value=1, description="The stage has outcomes"),
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A="kept",
            column_B="captions",
            description="The records hold one caption for every row that was kept",
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="reject_share",
            max_value=max_reject_share,
            description=f"At most {max_reject_share:.1%} of the rows are rejected",
        ),
        gxe.ExpectColumnValuesToBeBetween(column="repeated", max_value=0, description="No row has two outcomes"),
        gxe.ExpectColumnValuesToBeBetween(
            column="unknown", max_value=0, description="Every outcome has a known status and reason"
        ),
    ]
    if "rows_before" in frame:
        text = "Every row that the stage before handed on has one outcome"
        expectations.append(
            gxe.ExpectColumnPairValuesToBeEqual(column_A="rows", column_B="rows_before", description=text)
        )
    if max_duplicate_share is not None:
        expectations.append(
            gxe.ExpectColumnValuesToBeBetween(
                column="duplicate_share",
                max_value=max_duplicate_share,
                description=f"At most {max_duplicate_share:.1%} of the rows are duplicates",
            )
        )
    return Suite(name, frame, "part", expectations)


def file_suite(name: str, frame: pd.DataFrame) -> Suite:
    """Of the shards' files: each is there with the bytes of its manifest entry."""
    text = "Every file of the shards has the bytes that the manifest says"
    return Suite(
        name,
        frame,
        "problem",
        [gxe.ExpectTableRowCountToEqual(value=0, description=text)],
    )


def schema_suite(name: str, frame: pd.DataFrame) -> Suite:
    """Of all record files: each has the columns that records have."""
    text = "Every record file has the columns and types of records"
    return Suite(name, frame, "problem", [gxe.ExpectTableRowCountToEqual(value=0, description=text)])


def drift_suite(name: str, frame: pd.DataFrame, max_words: float, max_size: float) -> Suite:
    """Of the distances to the baseline: none is too far."""
    return Suite(
        name,
        frame,
        "part",
        [
            gxe.ExpectColumnValuesToBeBetween(
                column="words_drift",
                max_value=max_words,
                description=f"At most {max_words:.1%} of each source's captions differ in length from the baseline's",
            ),
            gxe.ExpectColumnValuesToBeBetween(
                column="size_drift",
                max_value=max_size,
                description=f"At most {max_size:.1%} of each source's pictures differ in size from the baseline's",
            ),
        ],
    )
