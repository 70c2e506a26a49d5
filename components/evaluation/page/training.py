"""Trained models: their curves, and what they were made from."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINEAGE_FILE = "lineage.json"
CURVES = Path("plots") / "metrics"  # DVCLive's place for them
ORDER = ("train/loss", "train/loss_itc", "train/loss_itm", "train/loss_mlm", "val/r_mean")  # the rest by name


@dataclass(frozen=True)
class Curve:
    """One metric of one training: points (step, value), in order of steps."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Training:
    """One training. `lineage` is the content of lineage.json, empty where there is none."""

    name: str
    curves: tuple[Curve, ...]
    lineage: Mapping[str, Any]

    @property
    def params(self) -> list[tuple[str, str]]:
        """Parameters by dotted name, as text."""
        return flatten(self.lineage.get("params", {}))


def read_trainings(curves: Path, models: Path) -> list[Training]:
    """All trainings with curves or weights: pre-training first, then by name."""
    names = {path.name for folder in (curves, models) for path in folder.glob("*") if path.is_dir()}
    return [
        Training(name, tuple(read_curves(curves / name)), read_json(models / name / LINEAGE_FILE))
        for name in sorted(names, key=lambda name: (name != "pretrain", name))
    ]


def read_curves(folder: Path) -> list[Curve]:
    """The curves of one DVCLive folder; files that are not DVCLive's are passed over."""
    root = folder / CURVES
    found = []
    for path in root.rglob("*.tsv"):
        curve = _read_curve(path, path.relative_to(root).with_suffix("").as_posix())
        if curve is not None:
            found.append(curve)
    place = {name: index for index, name in enumerate(ORDER)}
    return sorted(found, key=lambda curve: (place.get(curve.name, len(ORDER)), curve.name))


def _read_curve(path: Path, name: str) -> Curve | None:
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    try:
        points = [(int(row["step"]), float(row[path.stem])) for row in rows]
    except (KeyError, TypeError, ValueError):
        return None
    return Curve(name, tuple(step for step, _ in points), tuple(value for _, value in points)) if points else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is none or it is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def flatten(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, text)."""
    rows: list[tuple[str, str]] = []
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append((f"{prefix}{name}", text))
    return rows
