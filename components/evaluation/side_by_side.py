"""Two runs side by side: parameters that differ, what the data stages kept, and results with their differences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.io.errors import UserError
from components.io.records import MANIFEST_FILE

LINEAGE_FILE, METRICS_FILE, CONFIG_FILE = "lineage.json", "metrics.json", "config.json"
SKIPPED = {"intervals", "images", "level", "resamples", "seed"}  # of metrics: how sure they are, not how good
ABSENT = "–"


@dataclass(frozen=True)
class Row:
    """One thing of both runs as text, "–" where a run has none; `difference` is the second less the first."""

    name: str
    first: str
    second: str
    difference: str = ""


@dataclass(frozen=True)
class SideBySide:
    """What differs in `settings`, and everything of `data` and `metrics`."""

    settings: tuple[Row, ...]
    data: tuple[Row, ...]
    metrics: tuple[Row, ...]


def side_by_side(first: Path, second: Path) -> SideBySide:
    """Compare two runs by their ``data`` folders, or by folders that hold one.

    Raises UserError when a folder holds no run: neither models, nor evaluations, nor data.
    """
    one, other = _Outs(first), _Outs(second)
    return SideBySide(
        settings=tuple(row for row in _rows(one.settings(), other.settings()) if row.first != row.second),
        data=tuple(_rows(one.counts(), other.counts())),
        metrics=tuple(_rows(one.metrics(), other.metrics())),
    )


class _Outs:
    """A run's outs."""

    def __init__(self, folder: Path) -> None:
        root = folder / "data" if (folder / "data").is_dir() else folder
        self.root = root
        if not any((root / name).is_dir() for name in ("models", "evaluation", "shards", "unique", "clean", "raw")):
            raise UserError(f"{folder} holds no run: name a data folder, or the folder of a project that has one")

    def settings(self) -> dict[str, Any]:
        """Parameters of the trainings and configurations of the models, by dotted name."""
        found: dict[str, Any] = {}
        for path in sorted((self.root / "models").glob(f"*/{LINEAGE_FILE}")):
            found |= dict(_flat(_read(path).get("params", {}), f"{path.parent.name}."))
        for path in sorted((self.root / "models").glob(f"*/{CONFIG_FILE}")):
            found |= dict(_flat(_read(path), f"{path.parent.name} model."))
        return found

    def counts(self) -> dict[str, Any]:
        """Pictures and captions of each folder of records."""
        found: dict[str, Any] = {}
        places = [place for name in ("raw/*", "clean", "unique", "shards", "tasks/*/*") for place in self._at(name)]
        for folder in places:
            name = folder.relative_to(self.root).as_posix()
            manifest = _read(folder / MANIFEST_FILE)
            found |= {f"{name} pictures": manifest.get("rows"), f"{name} captions": manifest.get("captions")}
        return found

    def metrics(self) -> dict[str, Any]:
        """Every number of every evaluation, by run and name."""
        found: dict[str, Any] = {}
        for path in sorted((self.root / "evaluation").glob(f"*/{METRICS_FILE}")):
            content = {name: value for name, value in _read(path).items() if name not in SKIPPED}
            numbers = _flat(content, f"{path.parent.name}.")
            found |= {name: value for name, value in numbers if isinstance(value, int | float)}
        return found

    def _at(self, pattern: str) -> list[Path]:
        return sorted(path for path in self.root.glob(pattern) if (path / MANIFEST_FILE).is_file())


def as_text(found: SideBySide, names: tuple[str, str]) -> str:
    """Tables for a terminal, under the two names."""
    parts = []
    for title, rows in (
        ("Parameters that differ", found.settings),
        ("Data", found.data),
        ("Results", found.metrics),
    ):
        parts.append(f"{title}\n{_table(rows, names)}" if rows else f"{title}: none")
    return "\n\n".join(parts)


def _table(rows: tuple[Row, ...], names: tuple[str, str]) -> str:
    differing = any(row.difference for row in rows)
    lines = [("", *names, *(["difference"] if differing else []))]
    lines += [(row.name, row.first, row.second, *([row.difference] if differing else [])) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _rows(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Row]:
    """The first's order, then what only the second has."""
    for name in [*first, *(name for name in second if name not in first)]:
        one, other = first.get(name), second.get(name)
        numbers = [value for value in (one, other) if isinstance(value, int | float) and not isinstance(value, bool)]
        difference = ""
        if len(numbers) == 2:
            gap = numbers[1] - numbers[0]
            difference = f"{gap:+,}" if isinstance(gap, int) else f"{gap:+.3g}"
        yield Row(name, _shown(one), _shown(other), difference)


def _shown(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _flat(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): run the stage that writes it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object: run the stage that writes it again")
    return content
