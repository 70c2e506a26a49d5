"""Settings of different stages that cannot both be meant."""

from __future__ import annotations

from typing import Any


def contradictions(params: Any) -> list[str]:
    """One sentence for each contradiction between sections, naming both keys; empty when there is none."""
    return [*_tasks(params)]


def _tasks(params: Any) -> list[str]:
    """Each fine-tuning run reads a task that `prepare_tasks` writes."""
    finetune, prepare = getattr(params, "finetune", None), getattr(params, "prepare_tasks", None)
    if finetune is None or prepare is None:
        return []
    written = {f"data/tasks/{name}" for name in prepare.tasks}
    return [
        f"finetune.runs.{name}.task: {run.task} is written by no task of prepare_tasks.tasks; "
        f"allowed: {', '.join(sorted(written)) or 'nothing'}"
        for name, run in finetune.runs.items()
        if str(run.task) not in written
    ]
