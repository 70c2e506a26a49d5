"""Checkpoints that are whole or not there: written to a temporary name, renamed last; read without pickle."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from components.io.errors import UserError
from components.io.storage import Storage
from components.training.uploads import Uploads, complete, fetch

_STEP = re.compile(r"step-(\d{10})\.pt")
_BEST = re.compile(r"best-(\d{6})\.pt")
FORMAT = 2


class Checkpoints:
    """The checkpoints of one training in one folder, ``step-0000000120.pt`` …; the newest `keep` stay.

    Beside them lie the weights of the best epoch, ``best-000007.pt``, and of the best before it.

    With `uploads` they are copied to its storage too; what the folder lacks is fetched from there.
    """

    def __init__(self, folder: Path, keep: int = 2, uploads: Uploads | None = None) -> None:
        self.folder, self.keep, self.uploads = folder, keep, uploads

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write the state after `step` steps, and remove what is older than the newest `keep`.

        Raises OSError where it cannot be written (a full disk); what was there stays.
        """
        path = self.folder / _name(step)
        save_whole({"format": FORMAT, "step": step, **state}, path)
        for old in self._local()[self.keep :]:
            (self.folder / _name(old)).unlink(missing_ok=True)
        if state.get("best"):  # which ones no checkpoint can want any more is known only now
            known = [epoch for epoch in self._bests() if epoch <= state["best"]["epoch"]]
            for epoch in known[:-2]:
                (self.folder / _best_name(epoch)).unlink(missing_ok=True)
        if self.uploads is not None:
            self.uploads.add(path)
        return path

    def save_best(self, epoch: int, model: dict[str, Any]) -> None:
        """Keep a model's state as that of the best epoch so far. Raises OSError as `save`."""
        path = self.folder / _best_name(epoch)
        save_whole({"model": model}, path)
        if self.uploads is not None:
            self.uploads.add(path)

    def best(self, epoch: int, device: torch.device) -> dict[str, Any]:
        """The model's state that `save_best` kept. Raises UserError when it is lost."""
        path = self.folder / _best_name(epoch)
        try:
            if not path.is_file() and self.uploads is not None:
                fetch(self.uploads.storage, path.name, path)
            state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)["model"]
        except Exception as error:  # as in `read`
            raise UserError(
                f"{path}, the best weights so far, cannot be read ({type(error).__name__}): delete {self.folder} and "
                "train again"
            ) from None
        return state

    def latest(self) -> dict[str, Any] | None:
        """The newest readable state, tensors on the CPU, or None. An unreadable one is named and passed over."""
        storage = self.uploads.storage if self.uploads is not None else None
        for step in sorted({*self._local(), *(_remote(storage) if storage else ())}, reverse=True):
            state = self.read(step)
            if state is not None:
                return state
        return None

    def read(self, step: int) -> dict[str, Any] | None:
        """The state after `step` steps, tensors on the CPU; None, and a line that says so, where it is damaged."""
        path = self.folder / _name(step)
        try:
            if not path.is_file() and self.uploads is not None:
                fetch(self.uploads.storage, path.name, path)
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file raises whatever zipfile, pickle or torch make of it
            print(f"{path} is damaged ({type(error).__name__}): going back to the one before", file=sys.stderr)  # noqa: T201
            return None
        return state if state.get("format") == FORMAT else None

    def _local(self) -> list[int]:
        """Newest first."""
        return sorted(_numbers(_STEP, (path.name for path in self.folder.glob("step-*.pt"))), reverse=True)

    def _bests(self) -> list[int]:
        """Oldest first."""
        return sorted(_numbers(_BEST, (path.name for path in self.folder.glob("best-*.pt"))))


def _best_name(epoch: int) -> str:
    return f"best-{epoch:06d}.pt"


def _name(step: int) -> str:
    return f"step-{step:010d}.pt"


def _numbers(pattern: re.Pattern[str], names: Iterable[str]) -> list[int]:
    return [int(found[1]) for name in names if (found := pattern.fullmatch(name))]


def _remote(storage: Storage) -> list[int]:
    return _numbers(_STEP, complete(storage))


def save_whole(state: object, path: Path) -> None:
    """``torch.save`` that leaves either the whole new file or what stood there before, even when the power fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)  # on a full disk it would be in the way of the next
        raise
