"""Checkpoints that are whole or not there: written to a temporary name, renamed last; read without pickle."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

_STEP = re.compile(r"step-(\d{10})\.pt")
FORMAT = 1


class Checkpoints:
    """The checkpoints of one training in one folder, ``step-0000000120.pt`` …; the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write the state after `step` steps, and remove what is older than the newest `keep`."""
        path = self.folder / f"step-{step:010d}.pt"
        save_whole({"format": FORMAT, "step": step, **state}, path)
        for old in self._paths()[self.keep :]:
            old.unlink(missing_ok=True)
        return path

    def latest(self) -> dict[str, Any] | None:
        """The newest readable state, tensors on the CPU, or None. An unreadable one is named and passed over."""
        for path in self._paths():
            try:
                state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # a damaged file raises whatever zipfile, pickle or torch make of it
                print(f"{path} is damaged ({type(error).__name__}): going back to the one before", file=sys.stderr)  # noqa: T201
                continue
            if state.get("format") == FORMAT:
                return state
        return None

    def _paths(self) -> list[Path]:
        """Newest first."""
        found = [path for path in self.folder.glob("step-*.pt") if _STEP.fullmatch(path.name)]
        return sorted(found, reverse=True)


def save_whole(state: object, path: Path) -> None:
    """``torch.save`` that leaves either the whole new file or what stood there before, even when the power fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
