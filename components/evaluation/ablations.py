"""Results of ablations: variants of a run over several seeds, a file each; written by the flow, read by the report."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from components.io.documents import write_json
from components.io.errors import UserError


class AblationRow(BaseModel, frozen=True, extra="forbid"):
    """One variant: its numbers by column, a number for each seed in the order of the seeds."""

    name: str
    values: dict[str, tuple[float, ...]]


class AblationResult(BaseModel, frozen=True, extra="forbid"):
    """What an ablation found. Percent, unless a column says otherwise."""

    name: str
    title: str
    paper: str = ""
    note: str = ""
    recipe: str
    seeds: tuple[int, ...] = Field(min_length=1)
    columns: tuple[str, ...] = Field(min_length=1)
    rows: tuple[AblationRow, ...]
    inputs: dict[str, str] = Field(default={}, description="what all variants read: path to DVC's digest")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for row in self.rows:
            if set(row.values) != set(self.columns):
                raise ValueError(f"{row.name} has not the columns {', '.join(self.columns)}")
            if any(len(numbers) != len(self.seeds) for numbers in row.values.values()):
                raise ValueError(f"{row.name} has not a number for each of the seeds {self.seeds}")
        return self


def cell(numbers: tuple[float, ...]) -> str:
    """Mean and standard deviation over seeds (n - 1), as `43.2 ± 1.1`; one seed has no deviation."""
    mean = f"{statistics.fmean(numbers):.1f}"
    return f"{mean} ± {statistics.stdev(numbers):.1f}" if len(numbers) > 1 else mean


def write_ablation(result: AblationResult, folder: Path) -> Path:
    """Write ``NAME.json`` into the folder; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    write_json(path, result.model_dump(mode="json"))
    return path


def read_ablations(folder: Path) -> list[AblationResult]:
    """All results in the folder, by name. Raises UserError for a file that is none."""
    return [read_ablation_result(path) for path in sorted(folder.glob("*.json"))]


def read_ablation_result(path: Path) -> AblationResult:
    """One result, of the file that `write_ablation` wrote. Raises UserError when it is none."""
    try:
        return AblationResult.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is no result of `vlp flow ablation` ({reason}): delete it, or run it again") from None
