"""Progress for long steps: a bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LOG_SECONDS = 5.0  # between two lines where there is no terminal


class Advance(Protocol):
    """Called with the number of finished items and, if there is something to say, a short note."""

    def __call__(self, items: int = 1, note: str = "") -> None: ...


def silent(items: int = 1) -> None:
    """An `advance` for callers that show no progress."""


@contextmanager
def progress(label: str, total: int | None, unit: str = "items", done: int = 0) -> Iterator[Advance]:
    """Show a long step on standard error. `done` items count as finished from an earlier, stopped run."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console) as bars:
            task = bars.add_task(label, total=total, completed=done, note="")

            def advance_bar(items: int = 1, note: str = "") -> None:
                bars.advance(task, items)
                if note:
                    bars.update(task, note=note)

            yield advance_bar
        return

    started = shown = time.monotonic()
    count, last_note = done, ""
    of = "" if total is None else f"/{total}"

    def say() -> None:
        seconds = time.monotonic() - started
        left = (
            "" if total is None or not done < count < total else f", {_span(seconds, count - done, total - count)} left"
        )
        note = "  " + last_note if last_note else ""
        print(f"{label}: {count}{of} {unit}, {seconds:.0f} s{left}{note}", file=sys.stderr)

    def advance_log(items: int = 1, note: str = "") -> None:
        nonlocal shown, count, last_note
        count += items
        last_note = note or last_note
        if time.monotonic() - shown >= LOG_SECONDS:
            shown = time.monotonic()
            say()

    yield advance_log
    say()


def _span(seconds: float, finished: int, left: int) -> str:
    """How long the items that are left will take, if they take as long as those before."""
    rest = seconds / finished * left
    return f"{rest:.0f} s" if rest < 120 else f"{rest / 60:.0f} min" if rest < 7200 else f"{rest / 3600:.1f} h"
