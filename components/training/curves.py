"""Training curves in DVCLive's layout, without clock times: what `dvc plots` and `dvc metrics` read.

DVCLive's own writer is used, without its `Live`, which looks for a DVC repository and makes one where there is none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dvclive.plots import Metric

from components.io.errors import UserError

STEP = "step"


class Curves:
    """``plots/metrics/NAME.tsv`` for each metric and ``metrics.json`` with the last values, in one folder.

    With `board` the same points go to TensorBoard's files too, in the folder ``tensorboard`` beside `folder`: those
    hold clock times and the machine's name, so that they must not be part of an out.
    """

    def __init__(self, folder: Path, history: Sequence[Mapping[str, float]] = (), *, board: bool = False) -> None:
        """Start anew with the points that a resumed training already has. Raises UserError without TensorBoard."""
        self.folder = folder
        self._board = _open_board(folder.with_name("tensorboard")) if board else None
        self._metrics: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for point in history:
            self._add(point)
        self._summarise()

    def add(self, point: Mapping[str, float]) -> None:
        """Add one point: `step` (steps done so far) and any metrics, whose names may have parts: ``train/loss``."""
        self._add(point)
        self._summarise()

    def _add(self, point: Mapping[str, float]) -> None:
        for name, value in point.items():
            if name == STEP:
                continue
            metric = self._metrics.setdefault(name, Metric(name, str(self.folder / "plots")))
            metric.step = int(point[STEP])
            metric.dump(value)
            *groups, leaf = name.split("/")
            place = self._last
            for group in groups:
                place = place.setdefault(group, {})
            place[leaf] = value
            if self._board is not None:
                self._board.add_scalar(name, value, int(point[STEP]))
        self._last[STEP] = int(point[STEP])

    def _summarise(self) -> None:
        if self._board is not None:
            self._board.flush()
        text = json.dumps(self._last, indent=1, sort_keys=True)
        (self.folder / "metrics.json").write_text(text + "\n", encoding="utf-8")


def _open_board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "tensorboard: true needs the package tensorboard, which is not part of the lock: "
            "`.venv/bin/uv pip install tensorboard`, or set it to false"
        ) from None
    shutil.rmtree(folder, ignore_errors=True)
    writer: Any = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]
    return writer
