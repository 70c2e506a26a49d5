"""What the loop and its tasks say to each other: a worker's place, what a task offers, what a training reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from components.training.data import PairData

CHECKPOINTS = "checkpoints"  # folder in a training's storage
EXPORT = "export"  # folder in a training's storage where the first worker leaves the weights to publish


def never() -> bool:
    """A machine that stays."""
    return False


@dataclass(frozen=True)
class Worker:
    """A process's place in the training."""

    rank: int = 0
    world: int = 1
    local_world: int = 1  # workers on this machine
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    leaving: Callable[[], bool] = never  # whether the training was told to end here
    endangered: Callable[[], bool] = never  # whether a machine of this training is about to be taken away


class Task(Protocol):
    """What is trained, and on what.

    Two further attributes are looked for: `frozen`, prefixes of the names of parameters that rest for the first
    `freeze_epochs`; and `shared_draws`, true where `generator` must be in the same state on all workers.
    """

    @property
    def label(self) -> str:
        """The section of params.yaml, for the progress bar and messages."""
        ...

    @property
    def model(self) -> nn.Module:
        """What learns."""
        ...

    @property
    def data(self) -> PairData:
        """What it learns from; its batches are named tuples of tensors, `images` first."""
        ...

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the losses in the sum; a part that is not named weighs 1."""
        ...

    def losses(
        self, model: nn.Module, images: torch.Tensor, batch: Any, alpha: float, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        """The parts whose weighted sum is minimised, scalars by name.

        `model` is `self.model`, wrapped when there are workers; `images` (B, 3, S, S) float32 normalised; `generator`
        draws whatever the step draws beside dropout.
        """
        ...

    def validate(self) -> dict[str, float]:
        """Metrics after an epoch, for the curves; empty when there are none. Called on the first worker."""
        ...

    def score(self, metrics: dict[str, float]) -> float | None:
        """What to keep the best epoch by (higher is better), or None to keep the last."""
        ...


@dataclass
class Outcome:
    """What a finished training reports."""

    steps: int
    history: list[dict[str, float]]
    best: dict[str, float] | None  # `score`, `epoch`; None when the last weights are kept
