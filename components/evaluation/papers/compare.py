"""A run's results beside the papers' numbers: "paper, here, difference", or a sentence on why not.

**The rule.** A run may stand beside a reported number when all of this holds: the same kind of task; a task folder of
the data set's name (``data/tasks/flickr30k``) and the split's; a test set of the paper's size, where it gives one;
the paper's model sizes and picture size; and, where the run's own pre-training data are here, as many pictures as the
paper's to within a fifth. Anything else is another experiment, and its difference would mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from components.io.records import MANIFEST_FILE

FOLDER = Path(__file__).parent
FILES = ("albef.yaml", "hat.yaml", "vitr.yaml")  # by name, so that DVC knows that stages depend on them
SCORES = ("itm", "itc")  # of a retrieval run's metrics, the first that is there stands beside the paper
TOLERANCE = 0.2  # of the number of pre-training pictures
CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Line:
    """One number: `metric` as in metrics.json, percent; `source` says where the paper's was read."""

    reference: str  # the paper's table and its model
    metric: str
    paper: float
    here: float
    source: str

    @property
    def difference(self) -> float:
        """Points of percent that the run is above the paper."""
        return self.here - self.paper


@dataclass(frozen=True)
class Comparison:
    """Lines where the run may be compared; else none, and `sentence` says why. `sentence` may also qualify lines."""

    lines: tuple[Line, ...]
    sentence: str


@cache
def papers() -> Mapping[str, Mapping[str, Any]]:
    """The papers' numbers by name (albef, hat, vitr), each as in its YAML file."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe")
    return {Path(name).stem: yaml.load((FOLDER / name).read_text(encoding="utf-8")) for name in FILES}


def compare(metrics: Mapping[str, Any], model: Path, shards: Path) -> Comparison:
    """A run's `metrics` (its metrics.json) beside the papers', by the rule above.

    `model` is the folder of its weights, `shards` that of the pre-training data; either may be missing.
    """
    config = _read(model / CONFIG_FILE)
    if not config:
        return Comparison((), f"Not comparable with a paper: {model.name} has no readable {CONFIG_FILE}.")
    name = str(config.get("kind", "albef"))  # an ALBEF's configuration names no head
    paper = papers().get(name)
    if paper is None:
        return Comparison((), f"Not comparable with a paper: none here reports on a model of kind {name}.")
    rows = _dataset_rows(metrics, paper)
    if not rows:
        return Comparison((), _unknown(metrics, name, paper))
    pictures = _pictures(shards)
    reasons = [_differences(metrics, config, paper, row, pictures) for row in rows]
    lines = [
        line for row, why in zip(rows, reasons, strict=True) if not why for line in _lines(metrics, name, paper, row)
    ]
    if lines:
        note = "" if pictures is not None else "The pre-training data of these weights are not here to be counted."
        return Comparison(tuple(lines), note)
    return Comparison((), f"Not comparable with {name.upper()}'s tables: {_nearest(reasons)}.")


def summary(evaluation: Path, models: Path, shards: Path) -> list[str]:
    """Lines for the command line: each run of ``data/evaluation`` beside the papers, or why it is not."""
    found = []
    for path in sorted(evaluation.glob("*/metrics.json")):
        comparison = compare(_read(path), models / path.parent.name, shards)
        found += [
            f"{path.parent.name}: {line.metric} {line.here:.1f}, {line.reference} {line.paper:.1f}, "
            f"difference {line.difference:+.1f}"
            for line in comparison.lines
        ]
        found += [f"{path.parent.name}: {comparison.sentence}"] if comparison.sentence else []
    return found


def _dataset_rows(metrics: Mapping[str, Any], paper: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    kind, task = metrics.get("kind", "retrieval"), str(metrics.get("task", "")).lower().replace("-", "_")
    return [row for row in paper["results"] if row["kind"] == kind and row["dataset"] == task]


def _unknown(metrics: Mapping[str, Any], name: str, paper: Mapping[str, Any]) -> str:
    known = ", ".join(sorted({row["dataset"] for row in paper["results"]})) or "none"
    return (
        f"Not comparable with {name.upper()}'s tables: a task {metrics.get('task')!s} stands in none of them "
        f"(they have {known})."
    )


def _differences(
    metrics: Mapping[str, Any],
    config: Mapping[str, Any],
    paper: Mapping[str, Any],
    row: Mapping[str, Any],
    pictures: int | None,
) -> str:
    """What of the run is not as in the paper's row; empty where all is."""
    size = metrics.get("pictures", metrics.get("items"))
    pairs: list[tuple[str, Any, Any]] = [("split", metrics.get("split"), row["split"])]
    if "size" in row:
        pairs.append(("test items", size, row["size"]))
    if "image_size" in row:
        pairs.append(("image size", metrics.get("image_size"), row["image_size"]))
    model = paper["scale"]["model"] | row.get("model", {})
    pairs += [(key.replace("_", " "), _value(config, key), value) for key, value in model.items()]
    wrong = [f"{name} {_shown(here)} (paper {_shown(there)})" for name, here, there in pairs if here != there]
    wanted = paper["scale"].get("pretraining", {}).get(row["data"])
    if pictures is not None and wanted and abs(pictures - wanted) > TOLERANCE * wanted:
        wrong.append(f"pre-training pictures {pictures:,} (paper {wanted:,})")
    return ", ".join(wrong)


def _value(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    return "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _nearest(reasons: list[str]) -> str:
    """The reason with the fewest differences: what would have to change."""
    return min(reasons, key=lambda reason: (reason.count("(paper"), reason))


def _lines(metrics: Mapping[str, Any], name: str, paper: Mapping[str, Any], row: Mapping[str, Any]) -> list[Line]:
    scores = next((metrics[key] for key in SCORES if key in metrics), metrics)
    setting = f", {row['setting']}" if "setting" in row else ""
    reference = f"{name.upper()} {row['data']}, table {row['table']}{setting}"
    return [
        Line(reference, metric, float(value), float(scores[metric]), paper["sources"][row["source"]])
        for metric, value in row["values"].items()
        if scores.get(metric) is not None
    ]


def _pictures(shards: Path) -> int | None:
    """Pictures that the pre-training read, where its shards are here."""
    manifest = _read(shards / MANIFEST_FILE)
    rows = manifest.get("rows")
    return rows if isinstance(rows, int) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
