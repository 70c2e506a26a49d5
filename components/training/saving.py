"""When a training saves, what it does when it cannot, and how it leaves when it is told to."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from components.io.errors import UserError
from components.training.checkpoints import Checkpoints
from components.training.protocol import Worker
from components.training.settings import CheckpointParams

ASK_EVERY = 10  # steps between two questions to the other workers, each of which costs a small reduction
PATIENT_SAVES = 3  # saves in a row that may fail before a training ends


class LeavingError(UserError):
    """The training has saved what it needs to go on, because its machine is going away."""


class Word(NamedTuple):
    """What the workers agree on after a step."""

    save: bool
    leave: bool


class Saver:
    """Saves on the first worker when it is due, and on all workers' word."""

    def __init__(self, checkpoints: Checkpoints, params: CheckpointParams, worker: Worker, section: str) -> None:
        self.checkpoints, self.params, self.worker, self.section = checkpoints, params, worker, section
        self._saved_at = time.monotonic()
        self._failures = 0
        self._in_danger = False

    def ask(self, done: int, last: bool, told: bool) -> Word:
        """Whether to save after `done` steps, and to leave after it: the same word on all workers.

        The first worker's clock counts, since clocks differ; anyone who has been `told` to leave takes all with it.
        """
        save = last or (self.params.steps is not None and done % self.params.steps == 0)
        often = done % ASK_EVERY == 0 or save
        if self.worker.world > 1 and not often:
            return Word(False, False)
        due = self.worker.rank == 0 and time.monotonic() - self._saved_at >= 60 * self.params.minutes
        leave, danger = told or self.worker.leaving(), self._in_danger
        if often:  # all workers must ask equally often
            danger = self.worker.endangered()
        due, self._in_danger = due or (danger and not self._in_danger), danger  # once for a danger, not at every step
        if self.worker.world > 1:
            words = torch.tensor([int(due), int(leave)], device=self.worker.device)
            dist.all_reduce(words, op=dist.ReduceOp.MAX)
            due, leave = (bool(word) for word in words.tolist())
        if save or due or leave:
            self._saved_at = time.monotonic()
        return Word(save or due or leave, leave)

    def save(self, done: int, state: Callable[[], dict[str, Any]], *, must: bool) -> None:
        """Save, on the first worker alone. Where that fails, the training goes on a while, unless it `must`.

        Raises UserError when it fails too often.
        """
        if self.worker.rank != 0:
            return
        try:
            self.checkpoints.save(done, state())
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a stream that it cannot write
            self._failures += 1
            reason = str(error).splitlines()[0]
            if must or self._failures >= PATIENT_SAVES:
                raise UserError(
                    f"the checkpoint of {self.section} after step {done} cannot be written to "
                    f"{self.checkpoints.folder} ({reason}): make room and run again; earlier ones are kept"
                ) from None
            print(  # noqa: T201
                f"the checkpoint of {self.section} after step {done} could not be written ({reason}): "
                "going on with the one before",
                file=sys.stderr,
            )
            return
        self._failures = 0


class Termination:
    """Whether this process was told to end, by SIGTERM."""

    told = False


@contextmanager
def termination(pass_on: Callable[[], None] | None = None) -> Iterator[Termination]:
    """Note SIGTERM, and `pass_on` the news, instead of ending; on the way out, end as it asked, if it came.

    Only a process's main thread can take signals; elsewhere nothing is changed.
    """
    state = Termination()
    if threading.current_thread() is not threading.main_thread():
        yield state
        return

    def note(*_: object) -> None:
        state.told = True
        if pass_on is not None:
            pass_on()

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield state
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
        if state.told:
            os.kill(os.getpid(), signal.SIGTERM)
