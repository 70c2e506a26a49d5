"""One row of a source list, and the few rules that all readers share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.io.outcomes import Reason


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One (picture, caption) pair of a source, or the reason why there is none.

    A row without `error` has a `caption` and either a `url` (not yet checked) or a `path` (inside the images folder,
    not yet opened: the file may be missing). With `splits`, `row` still counts the whole list, so that a row keeps its
    number whatever is selected.
    """

    row: int  # 0-based position in the whole source
    location: str  # for a person: "pairs.tsv:17" (1-based), "dataset.json:images[3].sentences[0]"
    url: str | None
    path: Path | None
    caption: str | None
    split: str | None
    error: Reason | None
    name: str | None = None  # of a local picture: its name within the images folder, with "/"
    note: str = ""  # what exactly is wrong, when `error` is set


def is_text(value: Any) -> bool:
    """Whether `value` is text that UTF-8 can hold (JSON and file names can bring lone surrogates)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def web_row(row: int, location: str, url: str | None, caption: str | None) -> SourceRow:
    """A row of a list of URLs; an empty caption is a caption, an empty URL is none."""
    error = Reason.MISSING_CAPTION if caption is None else None if url and url.strip() else Reason.MISSING_URL
    return SourceRow(row, location, url or None, None, caption, None, error)


def malformed_row(row: int, location: str, note: str, split: str | None = None) -> SourceRow:
    """A row that is not what the list's format promises."""
    return SourceRow(row, location, None, None, None, split, Reason.MALFORMED_ROW, note=note)
