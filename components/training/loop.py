"""The one training loop. It knows batches, losses, an optimiser and checkpoints; a `Task` knows the model.

Every random draw of a step comes from (seed, step, rank), so a checkpoint needs no random states, and a resumed run
draws exactly what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from components.io.errors import UserError
from components.io.progress import Advance, progress
from components.io.storage import open_storage
from components.training.augment import normalise
from components.training.blocks import prepare_blocks
from components.training.checkpoints import Checkpoints
from components.training.clock import Clock
from components.training.curves import STEP, Curves
from components.training.data import Batch, Plan, batches
from components.training.optimisers import Stepper, Towers, make_optimizer
from components.training.protocol import CHECKPOINTS as CHECKPOINTS
from components.training.protocol import EXPORT as EXPORT
from components.training.protocol import Outcome as Outcome
from components.training.protocol import Task as Task
from components.training.protocol import Worker as Worker
from components.training.sameness import check_same, describe
from components.training.saving import LeavingError, Saver, Termination, termination
from components.training.schedule import check_warmup, learning_rate, ramped_alpha
from components.training.settings import TrainingParams
from components.training.uploads import Uploads

STEP_DRAWS = 3  # the random stream of a step's dropout, masks and negatives; 1 and 2 are the data's
NOTHING = -1  # the step of a checkpoint that is not there


def fit(task: Task, params: TrainingParams, storage: Path, worker: Worker | None = None) -> Outcome:
    """Train `task.model` in place and return the curves; goes on from the newest checkpoint in `storage`.

    Writes ``storage/checkpoints`` and ``storage/curves`` (first worker only), and copies checkpoints to
    ``checkpoint.storage_path/STAGE-DIGEST``, from which it goes on where `storage` has none. The model ends with its
    last weights, or the best epoch's when the task scores epochs. With more epochs than the checkpoint was made for,
    the rates follow the longer schedule from there, and a better earlier best stays the best.

    On SIGTERM a checkpoint is written first. Raises UserError when a loss or a weight is no longer a number, when the
    data hold no whole batch, when the warm-up does not fit, when the checkpoints are those of another training, and
    when none can be written.
    """
    worker = worker or Worker()
    torch.set_num_threads(params.num_threads or max(1, _cores() // worker.local_world))
    plan = Plan(
        len(task.data),
        params.batch_size,
        params.seed,
        worker.rank,
        worker.world,
        params.accumulate,
        task.data.samples_per_shard,
        params.shuffle_shards,
    )
    if plan.per_epoch == 0:
        raise UserError(
            f"{task.data.reader.folder} holds {plan.samples} training samples, fewer than {task.label}.batch_size "
            f"{params.batch_size}: lower it or bring more data"
        )
    total = params.epochs * plan.per_epoch
    total = min(total, params.max_steps) if params.max_steps is not None else total
    check_warmup(params.schedule, per_epoch=plan.per_epoch, steps=total, section=task.label)

    model = task.model.to(worker.device).train()
    if params.channels_last:
        model.to(memory_format=torch.channels_last)
    prepare_blocks(model, compiled=params.compile, recomputed=params.activation_checkpointing)
    stepper = Stepper(make_optimizer(model, params, getattr(task, "rates", None)), params, worker.device)
    towers = Towers(model, getattr(task, "frozen", ()), params.freeze_epochs, task.label)
    with _ordered_sums(worker.device), termination() as told, _uploads(params, storage) as uploads:
        checkpoints = Checkpoints(storage / CHECKPOINTS, params.checkpoint.keep, uploads)
        run = _Run(task, params, plan, worker, stepper, towers, checkpoints, storage, total)
        run.steps(run.restore(), told)
    outcome = run.outcome
    if worker.rank == 0 and outcome.best is not None:
        model.load_state_dict(checkpoints.best(int(outcome.best["epoch"]), worker.device))
    return outcome


@contextmanager
def _ordered_sums(device: torch.device) -> Iterator[None]:
    """The same bytes from several threads of a processor, at no cost that could be measured.

    Else the gradient of a gather (each picture's keys and values, for all its pairs) is summed in the order in which
    threads arrive. A GPU keeps its default: some of its operations have no ordered form.
    """
    options: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), options.fill_uninitialized_memory
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        options.fill_uninitialized_memory = False  # a twentieth of a small step, against others' bugs
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        options.fill_uninitialized_memory = filled


def _uploads(params: TrainingParams, storage: Path) -> AbstractContextManager[Uploads | None]:
    place = params.checkpoint.storage_path
    if place is None:
        return nullcontext()
    name = f"{storage.parent.name}-{storage.name}"
    return closing(Uploads(open_storage(f"{place.rstrip('/')}/{name}"), params.checkpoint.keep))


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


@dataclass
class _Run:
    task: Task
    params: TrainingParams
    plan: Plan
    worker: Worker
    stepper: Stepper
    towers: Towers
    checkpoints: Checkpoints
    storage: Path
    total: int
    outcome: Outcome = field(init=False)
    wrapped: nn.Module = field(init=False)
    rows: list[torch.Tensor] = field(default_factory=list)  # the losses since the last report, (parts,) each
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.outcome = Outcome(self.total, [], None)
        self.saver = Saver(self.checkpoints, self.params.checkpoint, self.worker, self.task.label)
        self.description = describe(self.params, self.task.data.version)

    def restore(self) -> int:
        """Go on from the newest checkpoint; the steps that it has done."""
        state = self.checkpoints.latest() if self.worker.rank == 0 else None
        if self.worker.world > 1:  # the first worker's word: a copy may have become whole since
            word = torch.tensor(NOTHING if state is None else state["step"], device=self.worker.device)
            dist.broadcast(word, 0)
            if self.worker.rank != 0 and (step := int(word)) != NOTHING:
                state = self.checkpoints.read(step)
                if state is None:
                    raise UserError(
                        f"worker {self.worker.rank} has no checkpoint of step {step} in {self.checkpoints.folder}: let "
                        "runtime.work be a folder that all nodes share, or set checkpoint.storage_path"
                    )
        if state is None:
            return 0
        before, start = state["training"], int(state["step"])
        check_same(before, self.description, section=self.task.label, place=str(self.checkpoints.folder))
        if start > self.total:
            raise UserError(
                f"{self.checkpoints.folder} holds a checkpoint after step {start}, but {self.task.label} is to end "
                f"after {self.total}: ask for as many, or remove the folder to train anew"
            )
        self.task.model.load_state_dict(state["model"])
        self.stepper.load_state_dict(state)
        self.outcome.history, self.outcome.best = state["history"], state["best"]
        self.names, self.rows = tuple(state["names"]), list(state["rows"].to(self.worker.device))
        if before["epochs"] != self.params.epochs and start < self.total and self.worker.rank == 0:
            had = state["history"][-1]["train/lr"] if state["history"] else math.nan
            print(  # noqa: T201
                f"{self.task.label} goes on from step {start} of a training of {before['epochs']} epochs, now "
                f"{self.params.epochs}: the rate follows the longer schedule from here, {had:.2e} before and "
                f"{self._rate(start):.2e} next; a training anew would have had that all along",
                file=sys.stderr,
            )
        return start

    def steps(self, start: int, told: Termination) -> None:
        """The steps from `start` on."""
        params, plan, worker, total, first = self.params, self.plan, self.worker, self.total, self.worker.rank == 0
        generator = torch.Generator(worker.device)
        stream = batches(self.task.data, plan, start, total, params)
        curves = Curves(self.storage / "curves", self.outcome.history, board=params.tensorboard) if first else None
        shown: AbstractContextManager[Advance | None] = (
            progress(self.task.label, total=total, unit="steps", done=start) if first else nullcontext()
        )
        self._wrap(start // plan.per_epoch)
        with shown as advance:
            clock = Clock(params.batch_size, self.task.label)
            for step in range(start, total):
                with clock.waiting():
                    batch = next(stream)
                epoch, iteration = divmod(step, plan.per_epoch)
                if iteration == 0 and self.towers.rest(epoch):
                    self._wrap(epoch)
                rate = self._rate(step)
                alpha = ramped_alpha(params.alpha, params.alpha_ramp, epoch, iteration, plan.per_epoch)
                own = seed_step(params.seed, step, worker.rank)
                generator.manual_seed(self._shared_seed(step) if getattr(self.task, "shared_draws", False) else own)
                self._step(step, batch, stream, clock, alpha, generator)
                self.stepper.step(rate)
                clock.steps += 1
                done, epoch_ends = step + 1, iteration + 1 == plan.per_epoch
                note = ""
                if done % params.log_every == 0 or epoch_ends or done == total:
                    means = self._report(step)
                    point = {STEP: float(done), **means, "train/lr": rate, "train/alpha": alpha}
                    if first and (epoch_ends or done == total):
                        point |= self._validated(epoch)
                    if curves is not None:
                        self.outcome.history.append(point)
                        curves.add(point)
                    note = f"{_losses_note(means)}  lr {rate:.2e}  {clock.note()}"
                word = self.saver.ask(done, done == total, told.told)
                if word.save:
                    self._save(done, must=done == total)
                if word.leave and done < total:
                    raise LeavingError(
                        f"{self.task.label} was told to end after step {done} of {total} and has saved its checkpoint: "
                        "run again to go on"
                    )
                if advance is not None:
                    advance(1, note)

    def _rate(self, step: int) -> float:
        epoch, iteration = divmod(step, self.plan.per_epoch)
        return learning_rate(
            self.params.schedule,
            epoch,
            iteration,
            per_epoch=self.plan.per_epoch,
            steps=self.total,
            epochs=self.params.epochs,
        )

    def _shared_seed(self, step: int) -> int:
        """The first worker's seed of the step's generator, on any worker."""
        mixed = np.random.SeedSequence((self.params.seed, STEP_DRAWS, step, 0)).generate_state(4, np.uint32)
        return int(mixed[3])

    def _wrap(self, epoch: int) -> None:
        """Wrap the model for several workers, anew when other weights learn than before: DDP fixes that at first."""
        self.towers.rest(epoch)
        self.wrapped = self.task.model
        if self.worker.world > 1:
            # buffers (the queues) are equal on all ranks by construction, so there is nothing to send
            self.wrapped = DistributedDataParallel(self.task.model, broadcast_buffers=False)

    def _step(
        self,
        step: int,
        batch: Batch,
        stream: Iterator[Batch],
        clock: Clock,
        alpha: float,
        generator: torch.Generator,
    ) -> None:
        """Losses and gradients of a step, part by part; `batch` is the first part, the others come from `stream`."""
        parts, total = self.plan.parts, None
        for part in range(parts):
            if part:
                with clock.waiting():
                    batch = next(stream)
            last = part + 1 == parts
            alone: Callable[[], AbstractContextManager[None]] = getattr(self.wrapped, "no_sync", nullcontext)
            with nullcontext() if last else alone():
                values = self._losses(step, batch, alpha, generator)
                self.stepper.backward((values * values.new_tensor(self._weights())).sum() / parts)
            total = values.detach() / parts if total is None else total + values.detach() / parts
        assert total is not None
        self.rows.append(total)

    def _losses(self, step: int, batch: Batch, alpha: float, generator: torch.Generator) -> torch.Tensor:
        """The parts of the loss, (parts,) float32."""
        device = self.worker.device
        batch = type(batch)(*(part.to(device, non_blocking=True) for part in batch))
        images = normalise(batch.images)
        if self.params.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        try:
            with self.stepper.autocast():
                parts = self.task.losses(self.wrapped, images, batch, alpha, generator)
        except FloatingPointError as error:
            self._check(torch.stack(self.rows) if self.rows else torch.zeros(0, 0), step)  # it may have begun earlier
            raise UserError(f"{self.task.label} at step {step}: {error}") from None
        self.names = tuple(parts)
        return torch.stack([part.float() for part in parts.values()])

    def _report(self, step: int) -> dict[str, float]:
        """Mean losses since the last report, over all workers. The device is waited for here only, not at each step."""
        losses = self._mean_rows()
        self.rows.clear()
        table = self._check(losses, step + 1)
        self.stepper.check(self.task.label, step)
        means = {f"train/{name}": float(mean) for name, mean in zip(self.names, table.mean(axis=0), strict=True)}
        weighted = (weight * mean for weight, mean in zip(self._weights(), means.values(), strict=True))
        return {"train/loss": math.fsum(weighted), **means}

    def _mean_rows(self) -> torch.Tensor:
        """The losses since the last report, averaged over all workers: (steps, parts)."""
        losses = torch.stack(self.rows)
        if self.worker.world > 1:
            dist.all_reduce(losses)
            losses /= self.worker.world
        return losses

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
            self._finite(f"epoch {epoch}")
            try:
                self.checkpoints.save_best(epoch, self.task.model.state_dict())
            except (OSError, RuntimeError) as error:
                raise UserError(
                    f"the weights of {self.task.label} after epoch {epoch} cannot be written to "
                    f"{self.checkpoints.folder} ({str(error).splitlines()[0]}): make room and run again"
                ) from None
            self.outcome.best = {"score": score, "epoch": float(epoch)}
        return {f"val/{name}": value for name, value in metrics.items()}

    def _save(self, done: int, *, must: bool) -> None:
        """Save, once it is sure that losses and weights are numbers."""
        rows = self._mean_rows() if self.rows else torch.zeros(0, len(self.names))
        self._check(rows, done)
        self._finite(f"step {done}")
        self.saver.save(
            done,
            lambda: {
                "training": self.description,
                "model": self.task.model.state_dict(),
                **self.stepper.state_dict(),
                "history": self.outcome.history,
                "best": self.outcome.best,
                "names": list(self.names),
                "rows": rows.cpu(),
            },
            must=must,
        )

    def _finite(self, when: str) -> None:
        """UserError when a weight is no number: such weights must not take the place of good ones."""
        norms = torch._foreach_norm([weight.detach() for weight in self.task.model.parameters()], math.inf)
        if not torch.stack([norm.float() for norm in norms]).isfinite().all():
            raise UserError(
                f"weights of {self.task.label} are no longer numbers after {when}: lower {self.task.label}.schedule.lr "
                "or set clip_norm; the checkpoints from before are kept"
            )


def _losses_note(means: dict[str, float]) -> str:
    return "  ".join(f"{name.removeprefix('train/')} {value:.3f}" for name, value in means.items())
