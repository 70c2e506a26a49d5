"""How a failed stage's message reaches the flow, while the stage's own output goes straight to the terminal.

The flow names a file in ``VLP_MESSAGE_FILE``; the ``vlp run`` that DVC starts below it leaves its message there.
"""

from __future__ import annotations

import os
from pathlib import Path

MESSAGE_FILE = "VLP_MESSAGE_FILE"


def leave_message(message: str) -> None:
    """Write the message where the flow that started this process looks for it, if one did."""
    if name := os.environ.get(MESSAGE_FILE):
        Path(name).write_text(message, encoding="utf-8")


def read_message(path: Path) -> str:
    """The message that was left, or nothing."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""
