"""The optimiser with the published groups, resting towers, and one step from losses to weights in any precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from components.io.errors import UserError
from components.training.settings import TrainingParams

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMALLEST_SCALE = 2.0**-14  # of float16 gradients; below it they never were finite


def make_optimizer(
    model: nn.Module, params: TrainingParams, rates: Mapping[str, float] | None = None
) -> torch.optim.Optimizer:
    """AdamW or Adam without decay for biases and one-dimensional weights.

    Position and class embeddings and the temperature (zero dimensions) do decay, as in the published training.
    `rates` gives the weights below a prefix a share of the learning rate; all others have the whole.
    """
    found: dict[float, tuple[list[nn.Parameter], list[nn.Parameter]]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            share = next((share for prefix, share in (rates or {}).items() if name.startswith(prefix)), 1.0)
            decayed, kept = found.setdefault(share, ([], []))
            (kept if weight.ndim == 1 or name.endswith(".bias") else decayed).append(weight)
    groups = [
        {"params": weights, "weight_decay": decay, "share": share}
        for share, parts in found.items()
        for weights, decay in zip(parts, (params.weight_decay, 0.0), strict=True)
    ]
    kind = torch.optim.AdamW if params.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=params.schedule.lr, fused=True)


class Towers:
    """Parameters that rest for the first epochs. Whoever never learns (a teacher) is left alone."""

    def __init__(self, model: nn.Module, prefixes: Sequence[str], epochs: int, section: str) -> None:
        """Raises UserError where epochs are asked for and nothing is there to rest, or nothing is left to learn."""
        self.epochs = epochs
        named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self._weights = [weight for name, weight in named if name.startswith(tuple(prefixes))] if epochs else []
        if epochs and not 0 < len(self._weights) < len(named):
            raise UserError(f"{section}.freeze_epochs is {epochs}, but this task has no towers to freeze: set it to 0")

    def rest(self, epoch: int) -> bool:
        """Let them rest or learn as in `epoch`; whether that is a change."""
        learn = epoch >= self.epochs
        changes = bool(self._weights) and self._weights[0].requires_grad != learn
        for weight in self._weights:
            weight.requires_grad_(learn)
            weight.grad = None
        return changes


class Stepper:
    """Autocast, loss scaling, clipping, and the optimiser's step."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: TrainingParams, device: torch.device) -> None:
        self.optimizer, self.params, self.device = optimizer, params, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=params.precision == "float16")

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of the forward pass."""
        precision = PRECISIONS[self.params.precision]
        return torch.autocast(self.device.type, precision, enabled=self.params.precision != "float32")

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, a scalar."""
        self.scaler.scale(loss).backward()

    def step(self, rate: float) -> None:
        """Change the weights; with float16 not where gradients overflowed, whose scale then falls."""
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        if self.params.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(weights, self.params.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["share"]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def check(self, section: str, step: int) -> None:
        """UserError when float16 gradients overflow at any scale."""
        if self.scaler.is_enabled() and self.scaler.get_scale() < SMALLEST_SCALE:
            raise UserError(
                f"the float16 gradients of {section} are not finite at any scale at step {step}: set precision to "
                "bfloat16 or float32"
            )

    def state_dict(self) -> dict[str, Any]:
        """Optimiser and scaler."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
