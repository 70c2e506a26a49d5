"""What the evaluation of a task other than retrieval leaves behind, in the files that every evaluation has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from components.evaluation.results import DIGITS, EXAMPLES_FILE, RANKS_FILE, empty_extra
from components.evaluation.submission import SUBMISSION_FILE, write_submission
from components.evaluation.summary import METRICS_FILE
from components.io.documents import write_json

SCHEMA = pa.schema(
    [
        ("item", pa.string()),  # the annotations' own id where they have one, else the item's first row
        ("picture", pa.string()),  # record id of the (first) picture
        ("rank", pa.int32()),  # from 1, of the right answer among all; null where nobody knows it
        ("prediction", pa.string()),
        ("score", pa.float64()),  # of the prediction: probability, or heat
    ]
)


class Verdict(NamedTuple):
    """One item's outcome: its name, its pictures and text, what was said, what is right, and the right one's rank."""

    item: str
    about: dict[str, Any]
    prediction: str
    answer: str | None
    score: float
    rank: int | None


def write_task_results(
    folder: Path,
    verdicts: Sequence[Verdict],
    metrics: dict[str, Any],
    examples: int,
    question_ids: Sequence[str] | None = None,
) -> None:
    """Write ``metrics.json``, ``ranks.parquet`` (`SCHEMA`, a row per item) and ``examples.json`` into `folder`.

    Examples are the surest right answers and the surest wrong ones. With `question_ids` (VQA's, an item's each) the
    predictions are written as ``extra/submission.json`` too. The metrics come last, so a folder that has them is
    complete. Raises UserError as `write_submission` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS_FILE).unlink(missing_ok=True)
    extra = empty_extra(folder)
    if question_ids is not None:
        write_submission(extra / SUBMISSION_FILE, question_ids, [one.prediction for one in verdicts])
    rows = [
        {
            "item": one.item,
            "picture": one.about["pictures"][0],
            "rank": one.rank,
            "prediction": one.prediction,
            "score": one.score,
        }
        for one in verdicts
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), folder / RANKS_FILE, compression="zstd")
    known = sorted((one for one in verdicts if one.rank is not None), key=lambda one: (-one.score, one.item))
    found = {
        "best": [_example(one) for one in known if one.rank == 1][:examples],
        "worst": [_example(one) for one in known if one.rank != 1][:examples],
    }
    write_json(folder / EXAMPLES_FILE, found)
    write_json(folder / METRICS_FILE, metrics)


def _example(one: Verdict) -> dict[str, Any]:
    said = {"prediction": one.prediction, "answer": one.answer, "score": round(one.score, DIGITS), "rank": one.rank}
    return {"item": one.item, **one.about, **said}
