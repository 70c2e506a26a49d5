"""What the stage `validate` found."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.evaluation.page.training import read_json

RESULTS_FILE = "results.json"
LONGEST = 600  # characters of a sentence: it can name offending captions
DOCS_INDEX = Path("docs") / "index.html"


@dataclass(frozen=True)
class Check:
    """One expectation, in words, and whether it holds."""

    sentence: str
    success: bool


@dataclass(frozen=True)
class Group:
    """One suite of expectations."""

    name: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> int:
        """Expectations that hold."""
        return sum(check.success for check in self.checks)

    @property
    def success(self) -> bool:
        """Whether all hold."""
        return self.passed == len(self.checks)


@dataclass(frozen=True)
class Validation:
    """All suites. `docs` is the way from the report to the data documentation, empty where there is none."""

    groups: tuple[Group, ...]
    docs: str

    @property
    def passed(self) -> int:
        """Expectations that hold, of all suites."""
        return sum(group.passed for group in self.groups)

    @property
    def total(self) -> int:
        """Expectations of all suites."""
        return sum(len(group.checks) for group in self.groups)

    @property
    def success(self) -> bool:
        """Whether every expectation holds."""
        return self.passed == self.total

    @property
    def warnings(self) -> list[str]:
        """A sentence per failed expectation."""
        return [
            f"Validation, {group.name}: {check.sentence}."
            for group in self.groups
            for check in group.checks
            if not check.success
        ]


def read_validation(folder: Path, report: Path) -> Validation | None:
    """``results.json`` in `folder`, seen from a page in `report`; None when the data were not validated."""
    suites = read_json(folder / RESULTS_FILE).get("suites")
    if not isinstance(suites, list):
        return None
    index = folder / DOCS_INDEX
    docs = Path(os.path.relpath(index, report)).as_posix() if index.is_file() else ""
    return Validation(tuple(_group(suite) for suite in suites), docs)


def _group(suite: dict[str, Any]) -> Group:
    checks = tuple(_check(item) for item in suite.get("expectations", []))
    return Group(str(suite.get("suite", "")), checks)


def _check(item: dict[str, Any]) -> Check:
    success = item.get("success") is True
    words = str(item.get("description" if success else "sentence") or item.get("expectation", ""))
    return Check(words[:1].upper() + words[1:LONGEST], success)
