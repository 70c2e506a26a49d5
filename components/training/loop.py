"""The one training loop. It knows batches, losses, an optimiser and checkpoints; a `Task` knows the model.

Every random draw of a step comes from (seed, step, rank), so a checkpoint needs no random states, and a resumed run
draws exactly what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import math
import os
import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from components.io.errors import UserError
from components.io.progress import Advance, progress
from components.training.augment import normalise
from components.training.checkpoints import Checkpoints, save_whole
from components.training.curves import STEP, Curves
from components.training.data import Batch, PairData, Plan, batches
from components.training.schedule import check_warmup, learning_rate, ramped_alpha
from components.training.settings import TrainingParams

STEP_DRAWS = 3  # the random stream of a step's dropout, masks and negatives; 1 and 2 are the data's
BEST_FILE = "best.pt"
EXPORT = "export"  # folder in a training's storage where the first worker leaves the weights to publish


@dataclass(frozen=True)
class Worker:
    """A process's place in the training."""

    rank: int = 0
    world: int = 1
    local_world: int = 1  # workers on this machine
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class Task(Protocol):
    """What is trained, and on what."""

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


def fit(task: Task, params: TrainingParams, storage: Path, worker: Worker | None = None) -> Outcome:
    """Train `task.model` in place and return the curves; goes on from the newest checkpoint in `storage`.

    Writes ``storage/checkpoints`` and ``storage/curves`` (first worker only). The model ends with its last weights, or
    the best epoch's when the task scores epochs. Raises UserError when a loss is no longer a number, when the data hold
    no whole batch, and when the warm-up does not fit.
    """
    worker = worker or Worker()
    torch.set_num_threads(params.num_threads or max(1, _cores() // worker.local_world))
    plan = Plan(len(task.data), params.batch_size, params.seed, worker.rank, worker.world)
    if plan.per_epoch == 0:
        raise UserError(
            f"{task.data.reader.folder} holds {plan.samples} training samples, fewer than {task.label}.batch_size "
            f"{params.batch_size}: lower it or bring more data"
        )
    total = params.epochs * plan.per_epoch
    total = min(total, params.max_steps) if params.max_steps is not None else total
    check_warmup(params.schedule, per_epoch=plan.per_epoch, steps=total, section=task.label)

    model = task.model.to(worker.device).train()
    optimizer = adamw(model, params)
    checkpoints = Checkpoints(storage / "checkpoints", params.checkpoint.keep)
    start, outcome = _restore(checkpoints, model, optimizer, total)
    wrapped: nn.Module = model
    if worker.world > 1:
        # buffers (the queues) are equal on all ranks by construction, so there is nothing to send
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)

    run = _Run(task, params, plan, worker, wrapped, optimizer, checkpoints, storage, outcome)
    run.steps(start, total)
    if worker.rank == 0 and outcome.best is not None:
        best = torch.load(storage / BEST_FILE, map_location=worker.device, weights_only=True)
        model.load_state_dict(best["model"])
    return outcome


def adamw(model: nn.Module, params: TrainingParams) -> torch.optim.AdamW:
    """AdamW without decay for biases and one-dimensional weights.

    Position and class embeddings and the temperature (zero dimensions) do decay, as in the published training.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            (kept if weight.ndim == 1 or name.endswith(".bias") else decayed).append(weight)
    groups = [{"params": decayed, "weight_decay": params.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=params.schedule.lr, fused=True)


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def seed_step(seed: int, step: int, rank: int) -> int:
    """Seed Python, NumPy and torch for one step of one worker, and return a seed for the step's own generator."""
    mixed = np.random.SeedSequence((seed, STEP_DRAWS, step, rank)).generate_state(4, np.uint32)
    random.seed(int(mixed[0]))
    np.random.seed(mixed[1])
    torch.manual_seed(int(mixed[2]))
    return int(mixed[3])


def _restore(
    checkpoints: Checkpoints, model: nn.Module, optimizer: torch.optim.Optimizer, total: int
) -> tuple[int, Outcome]:
    state = checkpoints.latest()
    if state is None:
        return 0, Outcome(total, [], None)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]), Outcome(total, state["history"], state["best"])


@dataclass
class _Run:
    task: Task
    params: TrainingParams
    plan: Plan
    worker: Worker
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints
    storage: Path
    outcome: Outcome
    rows: list[torch.Tensor] = field(default_factory=list)  # the losses since the last report, (parts,) each
    names: tuple[str, ...] = ()

    def steps(self, start: int, total: int) -> None:
        params, plan, worker, first = self.params, self.plan, self.worker, self.worker.rank == 0
        generator = torch.Generator(worker.device)
        stream = batches(self.task.data, plan, start, total, params)
        curves = Curves(self.storage / "curves", self.outcome.history) if first else None
        saved_at, saved_step = time.monotonic(), start
        shown: AbstractContextManager[Advance | None] = (
            progress(self.task.label, total=total, unit="steps", done=start) if first else nullcontext()
        )
        with shown as advance:
            clock = _Clock(params.batch_size)
            for step in range(start, total):
                with clock.waiting():
                    batch = next(stream)
                epoch, iteration = divmod(step, plan.per_epoch)
                rate = learning_rate(
                    params.schedule, epoch, iteration, per_epoch=plan.per_epoch, steps=total, epochs=params.epochs
                )
                alpha = ramped_alpha(params.alpha, params.alpha_ramp, epoch, iteration, plan.per_epoch)
                generator.manual_seed(seed_step(params.seed, step, worker.rank))
                self._step(step, batch, rate, alpha, generator)
                clock.steps += 1
                done, epoch_ends = step + 1, iteration + 1 == plan.per_epoch
                note = ""
                if done % params.log_every == 0 or epoch_ends or done == total:
                    means = self._report(step)
                    point = {STEP: float(done), **means, "train/lr": rate, "train/alpha": alpha}
                    if first and (epoch_ends or done == total):
                        point |= self._validated(epoch)
                    if first and curves is not None:
                        self.outcome.history.append(point)
                        curves.add(point)
                    limit = params.checkpoint
                    due = time.monotonic() - saved_at >= 60 * limit.minutes or (
                        limit.steps is not None and done - saved_step >= limit.steps
                    )
                    if self._agreed(due) or done == total:
                        if first:
                            self._save(done)
                        saved_at, saved_step = time.monotonic(), done
                    note = f"{_losses_note(means)}  lr {rate:.2e}  {clock.note()}"
                if advance is not None:
                    advance(1, note)

    def _step(self, step: int, batch: Batch, rate: float, alpha: float, generator: torch.Generator) -> None:
        device, params = self.worker.device, self.params
        batch = type(batch)(*(part.to(device, non_blocking=True) for part in batch))
        try:
            with torch.autocast(device.type, torch.bfloat16, enabled=params.precision == "bfloat16"):
                parts = self.task.losses(self.wrapped, normalise(batch.images), batch, alpha, generator)
        except FloatingPointError as error:
            self._check(torch.stack(self.rows) if self.rows else torch.zeros(0, 0), step)  # it may have begun earlier
            raise UserError(f"{self.task.label} at step {step}: {error}") from None
        self.names = tuple(parts)
        values = torch.stack([part.float() for part in parts.values()])  # (parts,)
        self.optimizer.zero_grad(set_to_none=True)
        (values * values.new_tensor(self._weights())).sum().backward()
        if params.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.wrapped.parameters(), params.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.rows.append(values.detach())

    def _report(self, step: int) -> dict[str, float]:
        """Mean losses since the last report, over all workers. The device is waited for here only, not at each step."""
        losses = torch.stack(self.rows)  # (steps, parts)
        self.rows.clear()
        if self.worker.world > 1:
            dist.all_reduce(losses)
            losses /= self.worker.world
        table = self._check(losses, step + 1)
        means = {f"train/{name}": float(mean) for name, mean in zip(self.names, table.mean(axis=0), strict=True)}
        weighted = (weight * mean for weight, mean in zip(self._weights(), means.values(), strict=True))
        return {"train/loss": math.fsum(weighted), **means}

    def _weights(self) -> list[float]:
        return [self.task.weights.get(name, 1.0) for name in self.names]

    def _check(self, losses: torch.Tensor, stop: int) -> NDArray[np.float64]:
        """The losses (steps, parts) of the steps before `stop`; UserError for the first that is no number."""
        table: NDArray[np.float64] = losses.cpu().numpy().astype(np.float64)
        if not np.isfinite(table).all():
            row, part = (int(index) for index in np.argwhere(~np.isfinite(table))[0])
            raise UserError(
                f"{self.names[part]} became {table[row, part]} at step {stop - len(table) + row} of "
                f"{self.task.label}: lower {self.task.label}.schedule.lr, lengthen its warm-up or set clip_norm; "
                "the checkpoints from before are kept"
            )
        return table

    def _validated(self, epoch: int) -> dict[str, float]:
        metrics = self.task.validate()
        self.task.model.train()
        score, best = self.task.score(metrics), self.outcome.best
        if score is not None and (best is None or score > best["score"]):
            self.outcome.best = {"score": score, "epoch": float(epoch)}
            save_whole({"model": self.task.model.state_dict()}, self.storage / BEST_FILE)
        return {f"val/{name}": value for name, value in metrics.items()}

    def _agreed(self, due: bool) -> bool:
        """The first worker's word, since the workers' clocks differ."""
        if self.worker.world == 1:
            return due
        word = torch.tensor(int(due), device=self.worker.device)
        dist.broadcast(word, 0)
        return bool(word.item())

    def _save(self, step: int) -> None:
        state: dict[str, Any] = {
            "model": self.task.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.outcome.history,
            "best": self.outcome.best,
        }
        self.checkpoints.save(step, state)


class _Clock:
    """Speed and the share of time spent waiting for data, since the last note."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.steps = 0
        self.waited = 0.0
        self.since = time.monotonic()

    def waiting(self) -> AbstractContextManager[None]:
        return _Waiting(self)

    def note(self) -> str:
        now = time.monotonic()
        seconds = max(now - self.since, 1e-9)
        text = f"{self.steps * self.batch_size / seconds:.0f} pictures/s  waiting for data {self.waited / seconds:.0%}"
        self.since, self.steps, self.waited = now, 0, 0.0
        return text


class _Waiting(AbstractContextManager[None]):
    def __init__(self, clock: _Clock) -> None:
        self.clock = clock

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.clock.waited += time.monotonic() - self.started


def _losses_note(means: dict[str, float]) -> str:
    return "  ".join(f"{name.removeprefix('train/')} {value:.3f}" for name, value in means.items())
