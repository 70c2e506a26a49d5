"""One row of a source list, and the few rules that all readers share."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.io.outcomes import Reason

SHA256 = re.compile(r"[0-9a-f]{64}")
CONTENT_CHARACTERS = 2000  # of a malformed row, kept for the person who mends the list


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
    sha256: str | None = None  # what the picture's bytes must have, hex, where the list says so
    coco_id: int | None = None  # COCO's number of the picture, where the list says so
    content: str | None = None  # what stands there instead, when the row is malformed


def is_text(value: Any) -> bool:
    """Whether `value` is text that UTF-8 can hold (JSON and file names can bring lone surrogates)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def web_row(row: int, location: str, url: str | None, caption: str | None, sha256: str | None = None) -> SourceRow:
    """A row of a list of URLs; an empty caption is a caption, an empty URL is none."""
    error = Reason.MISSING_CAPTION if caption is None else None if url and url.strip() else Reason.MISSING_URL
    if sha256 is not None:
        sha256 = sha256.strip().lower()
        if error is None and SHA256.fullmatch(sha256) is None:
            return malformed_row(row, location, "its sha256 is not 64 hexadecimal digits", content=sha256)
    return SourceRow(row, location, url or None, None, caption, None, error, sha256=sha256)


def malformed_row(row: int, location: str, note: str, split: str | None = None, content: Any = None) -> SourceRow:
    """A row that is not what the list's format promises; `content` is what stands there, of whatever type."""
    return SourceRow(row, location, None, None, None, split, Reason.MALFORMED_ROW, note=note, content=_shown(content))


def _shown(content: Any) -> str | None:
    """The beginning of anything as text that UTF-8 can hold; bytes and surrogates that it cannot stand escaped."""
    if content is None:
        return None
    if isinstance(content, bytes):
        return content[: 4 * CONTENT_CHARACTERS].decode("utf-8", "backslashreplace")[:CONTENT_CHARACTERS]
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False, default=repr)
    return content[:CONTENT_CHARACTERS].encode("utf-8", "backslashreplace").decode("utf-8")
