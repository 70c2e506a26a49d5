"""JSON files that people read as well: indented, in the order given, with their letters as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write `content` as UTF-8 with a line's end; keys keep their order."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
