"""The result of an evaluation in a few rows, for the command line. Light to import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from components.io.errors import UserError

METRICS_FILE = "metrics.json"
ROWS = (("chance", "chance"), ("itc", "ITC"), ("itm", "ITC + ITM"))
COLUMNS = ("txt_r1", "txt_r5", "txt_r10", "img_r1", "img_r5", "img_r10", "r_mean")
TASK_HEADINGS = ("run", "kind", "items", "accuracy", "commonest answer", "chance")
HEADINGS = ("run", "scores", "text R@1", "R@5", "R@10", "image R@1", "R@5", "R@10", "mean")


def read_metrics(folder: Path) -> dict[str, Any]:
    """``metrics.json`` of ``data/evaluation/RUN``.

    Raises UserError when it is missing or not what `evaluate` writes.
    """
    path = folder / METRICS_FILE
    try:
        metrics: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name, _ in ROWS:
            for key in COLUMNS:
                float(metrics[name][key])
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: run the stage evaluate first") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what evaluate writes ({error!r}): run the stage evaluate again") from None
    return metrics


def task_runs(evaluation: Path) -> list[Path]:
    """The folders in `evaluation` of runs on tasks other than retrieval, which have accuracies and no recalls."""
    return [folder for folder in _evaluated(evaluation) if _kind(folder) != "retrieval"]


def retrieval_runs(evaluation: Path) -> list[Path]:
    """The folders in `evaluation` (``data/evaluation``) of runs on retrieval tasks."""
    return [folder for folder in _evaluated(evaluation) if _kind(folder) == "retrieval"]


def task_table(evaluation: Path) -> list[tuple[str, ...]]:
    """Rows of text under `TASK_HEADINGS` for each run of `task_runs`, accuracies in percent."""
    rows: list[tuple[str, ...]] = []
    for folder in task_runs(evaluation):
        metrics = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
        numbers = (metrics.get(name) for name in ("accuracy", "majority", "chance"))
        shown = ("–" if number is None else f"{number:.1f}" for number in numbers)
        rows.append((folder.name, str(metrics["kind"]), str(metrics.get("items", "")), *shown))
    return rows


def _evaluated(evaluation: Path) -> list[Path]:
    return sorted(path.parent for path in evaluation.glob(f"*/{METRICS_FILE}"))


def _kind(folder: Path) -> str:
    try:
        content = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
    except ValueError:
        return "retrieval"  # `read_metrics` says what is wrong
    return str(content.get("kind", "retrieval")) if isinstance(content, dict) else "retrieval"


def metrics_table(evaluation: Path) -> list[tuple[str, ...]]:
    """Rows of text under `HEADINGS` for each retrieval run in `evaluation` (``data/evaluation``), recalls in percent.

    Three rows a run: chance, ITC alone, ITC re-ranked by ITM; or chance and each score of a model over two towers.
    Runs that are not evaluated yet are left out.
    """
    rows: list[tuple[str, ...]] = []
    for folder in retrieval_runs(evaluation):
        metrics = read_metrics(folder)
        named = {label: metrics[name] for name, label in ROWS}
        if isinstance(metrics.get("scores"), dict):
            named = {"chance": metrics["chance"], **metrics["scores"]}
        for label, recalls in named.items():
            rows.append((folder.name, label, *(f"{recalls[key]:.1f}" for key in COLUMNS)))
    return rows
