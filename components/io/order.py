"""The order in which records are read: another one each epoch from one seed, resumable anywhere, equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ORDER = 1  # keeps this stream of random numbers apart from others of the same seed


class Position(NamedTuple):
    """How far a reader is: batches done in an epoch. All that a checkpoint needs to keep of it."""

    epoch: int
    step: int


START = Position(0, 0)


def epoch_order(rows_per_shard: Sequence[int], seed: int, epoch: int, window: int = 0) -> NDArray[np.int64]:
    """All N records, each once, in the order of `epoch`: (N,) int64.

    With `window` 0 any record may follow any other. Otherwise shards come in random order and the records of `window`
    of them at a time are mixed, so that a reader needs no more than that many shards at once.
    """
    rng = np.random.default_rng((seed, ORDER, epoch))
    total = sum(rows_per_shard)
    if window == 0:
        return rng.permutation(total)
    starts = np.cumsum([0, *rows_per_shard])
    shards = rng.permutation(len(rows_per_shard))
    parts = []
    for first in range(0, len(shards), window):
        rows = [np.arange(starts[shard], starts[shard + 1]) for shard in shards[first : first + window]]
        parts.append(rng.permutation(np.concatenate(rows)))
    return np.concatenate([np.empty(0, np.int64), *parts])


@dataclass(frozen=True)
class ReadPlan:
    """Which records each rank reads at each step.

    Every rank has `steps_per_epoch` steps of `batch_size` / `world` records, whatever the sizes of the shards: the
    ranks' shares of a step are cut from one batch of the common order. Records that do not fill an epoch's last batch
    are left to other epochs, whose order is another.
    """

    rows_per_shard: tuple[int, ...]
    batch_size: int  # of all ranks together
    seed: int
    rank: int = 0
    world: int = 1
    window: int = 0  # shards mixed at a time; 0: all

    def __post_init__(self) -> None:
        if self.batch_size % self.world:
            raise ValueError(f"a batch of {self.batch_size} cannot be shared by {self.world} ranks")
        if not self.steps_per_epoch:
            raise ValueError(f"{sum(self.rows_per_shard)} records do not fill a batch of {self.batch_size}")

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch, the same on every rank."""
        return sum(self.rows_per_shard) // self.batch_size

    def batches(self, start: Position = START) -> Iterator[tuple[Position, NDArray[np.int64]]]:
        """From `start` on without end: the position after each batch, and this rank's records, (batch_size / world,).

        Going on from a position that was yielded gives exactly what would have followed.
        """
        share = self.batch_size // self.world
        epoch, step = divmod(start.epoch * self.steps_per_epoch + start.step, self.steps_per_epoch)
        while True:
            order = epoch_order(self.rows_per_shard, self.seed, epoch, self.window)
            for at in range(step, self.steps_per_epoch):
                first = at * self.batch_size + self.rank * share
                done = Position(epoch, at + 1) if at + 1 < self.steps_per_epoch else Position(epoch + 1, 0)
                yield done, order[first : first + share]
            epoch, step = epoch + 1, 0
