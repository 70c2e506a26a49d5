"""Learning rate and alpha as pure functions of the position in a training, so that a resumed run cannot drift."""

from __future__ import annotations

import math

from components.io.errors import UserError
from components.training.settings import ScheduleParams


def learning_rate(
    params: ScheduleParams, epoch: int, iteration: int, *, per_epoch: int, steps: int, epochs: int
) -> float:
    """The rate used at `iteration` (0-based, within `epoch`) of a training of `steps` steps and `epochs` epochs.

    `cosine_by_epoch` is the schedule that ALBEF's published code runs. In epoch 0 the rate rises from `warmup_lr` once
    per `warmup_step_size` iterations and then stays at `lr`; epoch e > 0 has one rate, the cosine at e / `epochs`.
    `cosine_by_iteration` rises at every iteration, then follows the cosine from the end of the warm-up on. `step` (HAT)
    and `late_decay` (VITR) rise likewise, then hold one rate per epoch that does not depend on how many there are.
    """
    if params.kind == "cosine_by_epoch":
        if epoch > 0:
            return _cosine(params, epoch, epochs)
        if iteration >= params.warmup_iterations:
            return params.lr
        step_up = (params.lr - params.warmup_lr) / (params.warmup_iterations // params.warmup_step_size)
        return params.warmup_lr + iteration // params.warmup_step_size * step_up
    step = epoch * per_epoch + iteration
    if step < params.warmup_iterations:
        return params.warmup_lr + (params.lr - params.warmup_lr) * step / params.warmup_iterations
    if params.kind == "step":
        return params.lr * params.decay ** (epoch // params.decay_epochs)
    if params.kind == "late_decay":
        return params.lr * (params.decay if epoch >= params.decay_epochs else 1.0)
    return _cosine(params, step - params.warmup_iterations, max(1, steps - params.warmup_iterations))


def _cosine(params: ScheduleParams, position: int, length: int) -> float:
    return params.min_lr + 0.5 * (params.lr - params.min_lr) * (1 + math.cos(math.pi * position / length))


def check_warmup(params: ScheduleParams, *, per_epoch: int, steps: int, section: str) -> None:
    """Raise UserError when the warm-up does not end within the training (by epoch: within its first epoch)."""
    by_epoch = params.kind == "cosine_by_epoch"
    room = min(per_epoch, steps) if by_epoch else steps
    if params.warmup_iterations >= room and params.warmup_lr != params.lr and params.warmup_iterations > 0:
        raise UserError(
            f"{section}.schedule.warmup_iterations is {params.warmup_iterations}, but "
            f"{'the first epoch' if by_epoch else 'the training'} has only {room} iterations with these data and this "
            f"batch_size: lower it{' or choose kind cosine_by_iteration' if by_epoch else ''}"
        )


def ramped_alpha(alpha: float, ramp: bool, epoch: int, iteration: int, per_epoch: int) -> float:
    """Weight of the teacher's targets: linear from 0 over the first epoch, then `alpha` (ALBEF 3.5)."""
    return alpha * min(1.0, iteration / per_epoch) if ramp and epoch == 0 else alpha
