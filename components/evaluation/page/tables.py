"""Tables of results in rows of text: a task's parts with the papers beside them, ablations, the rules of `clean`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from components.evaluation.ablations import AblationResult, cell
from components.evaluation.papers.compare import Comparison, compare
from components.evaluation.summary import METRICS_FILE, task_runs
from components.io.records import MANIFEST_FILE

MISSING = "not available"
PARTS = {"by_type": "type of answer", "by_class": "class", "by_subset": "subset", "without_proposals": "no proposals"}
SINGLE = {"consistency": "consistency per sentence", "ceiling": "with a right proposal at all"}
METRIC_NAMES = {
    "txt_r1": "text R@1",
    "txt_r5": "text R@5",
    "txt_r10": "text R@10",
    "img_r1": "image R@1",
    "img_r5": "image R@5",
    "img_r10": "image R@10",
    "pointing": "hottest pixel in the box",
    "box": "box around the hottest region",
}


@dataclass(frozen=True)
class TaskDetail:
    """One run on a task other than retrieval: (part, name, percent or "not available"), a note, and the papers."""

    name: str
    rows: tuple[tuple[str, str, str], ...]
    note: str
    comparison: Comparison


@dataclass(frozen=True)
class RuleCount:
    """How many pictures, captions or rows one rule of `clean` changed or rejected."""

    rule: str
    count: int


@dataclass(frozen=True)
class AblationTable:
    """An ablation's rows: a variant's name, then the text of each column and whether it is the column's best mean."""

    result: AblationResult
    rows: tuple[tuple[str, tuple[tuple[str, bool], ...]], ...]


def ablation_table(result: AblationResult) -> AblationTable:
    """The texts of an ablation: means and deviations over seeds."""
    columns = [[row.values[column] for row in result.rows] for column in result.columns]
    marked = []
    for column in columns:
        means = [fmean(numbers) for numbers in column]
        marked.append([(cell(numbers), mean == max(means)) for numbers, mean in zip(column, means, strict=True)])
    names = [row.name for row in result.rows]
    return AblationTable(result, tuple(zip(names, zip(*marked, strict=True), strict=True)))


def task_details(evaluation: Path, models: Path, shards: Path) -> list[TaskDetail]:
    """The parts of each task run's accuracy, and the papers' beside it."""
    found = []
    for folder in task_runs(evaluation):
        metrics = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
        rows = [
            (title, METRIC_NAMES.get(name, name), _percent(value))
            for part, title in PARTS.items()
            for name, value in metrics.get(part, {}).items()
        ]
        rows += [("all", title, _percent(metrics[name])) for name, title in SINGLE.items() if name in metrics]
        comparison = compare(metrics, models / folder.name, shards)
        found.append(TaskDetail(folder.name, tuple(rows), str(metrics.get("note", "")), comparison))
    return found


def clean_rules(clean: Path) -> dict[str, tuple[RuleCount, ...]]:
    """`changes` and `rejects` from the manifest of ``data/clean``, the most frequent first; empty without one."""
    try:
        manifest: Mapping[str, Any] = json.loads((clean / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = {}
    for part in ("changes", "rejects"):
        counts = manifest.get(part)
        if isinstance(counts, Mapping) and counts:
            ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
            found[part] = tuple(RuleCount(rule, count) for rule, count in ordered)
    return found


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1f}"
