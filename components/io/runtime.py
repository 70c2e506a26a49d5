"""Where and how wide to run. Light to import, so that parameters can be read without Arrow."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field


class Runtime(BaseModel, frozen=True, extra="forbid"):
    """Where and how wide to run. Nothing here changes a stage's output, so no stage depends on it in DVC."""

    processes: int = Field(
        default=0, ge=0, description="worker processes for data stages and evaluation; 0: one per core"
    )
    ray_address: str | None = Field(
        default=None, description="Ray cluster that runs data stages, training and evaluation; local: one is started"
    )
    gpus: int | None = Field(
        default=None,
        ge=0,
        description="GPUs that the Ray cluster starts when they are asked for; null: it does not grow",
    )
    work: Path = Field(default=Path("work"), description="unfinished work and checkpoints; shared by all nodes")
    evaluation_cache_gb: float = Field(
        default=8,
        ge=0,
        allow_inf_nan=False,
        description="features and scores of past evaluations kept below `work`, GB; the longest unused go first",
    )
