"""How many rows each data stage took in, kept and rejected, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from components.io.outcomes import OUTCOMES_FILE, Reason, Status, count_reasons

ILLS_FILE = "ills.json"


@dataclass(frozen=True)
class ReasonCount:
    """One reason of one stage. `planted` is what the built-in corpus says that the stage should find, if it is one."""

    reason: str
    status: str
    rows: int
    planted: int | None


@dataclass(frozen=True)
class Step:
    """One data stage. `share_kept` and `share_rejected` are parts of the rows that entered the first stage."""

    name: str
    rows_in: int
    kept: int
    rejected: int
    share_kept: float
    share_rejected: float
    reasons: tuple[ReasonCount, ...]

    @property
    def checked(self) -> bool:
        """Whether there are planted numbers to compare with."""
        return any(reason.planted is not None for reason in self.reasons)


def outcome_folders(folder: Path) -> list[Path]:
    """The folders with outcomes: `folder` itself, or those below it (``data/raw/SOURCE``), by name."""
    if (folder / OUTCOMES_FILE).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{OUTCOMES_FILE}"))


def read_funnel(stages: Mapping[str, Path], corpus: Path) -> list[Step]:
    """The steps of the data's way, for those of `stages` (name to folder, in order) that have outcomes."""
    counted: list[tuple[str, Counter[tuple[str, str]]]] = []
    for name, folder in stages.items():
        folders = outcome_folders(folder)
        if folders:
            counted.append((name, sum((count_reasons(each) for each in folders), Counter())))
    if not counted:
        return []
    first = max(1, counted[0][1].total())
    planted = _planted(corpus, {name: counts.total() for name, counts in counted})
    return [_step(name, counts, first, planted.get(name)) for name, counts in counted]


def _step(name: str, counts: Counter[tuple[str, str]], first: int, planted: Mapping[str, int] | None) -> Step:
    kept = sum(rows for (status, _), rows in counts.items() if status == Status.KEPT)
    rejected = counts.total() - kept
    reasons = [
        ReasonCount(reason, status, rows, None if planted is None else planted.get(reason, 0))
        for (status, reason), rows in counts.items()
    ]
    found = {reason.reason for reason in reasons}
    reasons += [
        ReasonCount(reason, Status.REJECTED, 0, rows)
        for reason, rows in (planted or {}).items()
        if rows and reason not in found
    ]
    # kept first (ok at the very top), then the most frequent; names settle ties
    reasons.sort(key=lambda r: (r.status != Status.KEPT, r.reason != Reason.OK, -r.rows, r.reason))
    return Step(name, counts.total(), kept, rejected, kept / first, rejected / first, tuple(reasons))


def _planted(corpus: Path, rows_in: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """What ``ills.json`` says of each stage, when the rows that came in are this corpus's and no others."""
    try:
        content: dict[str, Any] = json.loads((corpus / ILLS_FILE).read_text(encoding="utf-8"))
        if content["rows_in"] != rows_in.get("download"):
            return {}
        return {name: dict(content[name]["counts"]) for name in rows_in if name in content}
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return {}  # other data than the built-in corpus: nothing was planted


def funnel_warnings(steps: list[Step]) -> list[str]:
    """Sentences on rows that were lost between stages and on reasons that are not as planted."""
    warnings = [
        f"{later.name} took in {later.rows_in:,} rows, but {earlier.name} handed on {earlier.kept:,}."
        for earlier, later in pairwise(steps)
        if earlier.kept != later.rows_in
    ]
    for step in steps:
        for reason in step.reasons:
            if reason.planted is not None and reason.planted != reason.rows:
                name = reason.reason.replace("_", " ")
                warnings.append(
                    f"{step.name}: {reason.rows:,} rows are “{name}”, the corpus planted {reason.planted:,}."
                )
    return warnings
