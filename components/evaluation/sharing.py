"""An evaluation cut into parts that any number of workers share, kept so that the next one need not begin anew.

Where a part begins does not depend on the workers, no part is padded to another's size, and results are put back by
their index: every picture and text is scored once, and any number of workers gives the same bytes. Parts are files
in ``work/evaluate/DIGEST``; the digest covers weights, split, code and an `Encoding`, but not what is done with the
scores. Finished parts carry the sha256 of their files: one that is damaged is made again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from pydantic import BaseModel

from components.io.errors import UserError
from components.io.progress import progress
from components.io.runtime import Runtime
from components.io.spread import cluster_gpus
from components.io.work import (
    DONE_FILE,
    drop_damaged,
    keep_within,
    map_partitions,
    partitions,
    run_partition,
    seal,
    stage_work,
)

if TYPE_CHECKING:  # else all that `evaluate` imports would be part of the code that scores depend on
    from components.evaluation.evaluate import EvaluateParams

STAGE = "evaluate"
CAPTIONS_A_PICTURE = 16  # of a part: a caption is read far sooner than a picture
WORTH_SECONDS = 60.0  # of work, below which processes that import torch and load weights are not worth starting
Device = Literal["cpu", "cuda"]


class Encoding(BaseModel, frozen=True, extra="forbid"):
    """What the bytes of features and scores depend on beside weights, split and code.

    Derive one in the module that computes them: that module and what it imports are the code.
    """

    split: str  # the folder's name
    pictures_per_part: int
    num_threads: int  # sums of several threads round otherwise
    device: Device
    torch: str = torch.__version__


class AlbefEncoding(Encoding, frozen=True):
    """That of an ALBEF, whatever its task."""

    image_size: int | None
    max_tokens: int
    batch_size: int


E = TypeVar("E", bound=Encoding)


@dataclass(frozen=True)
class Job(Generic[E]):
    """What a worker needs to know: paths are absolute, and `work` names weights and split by their digest."""

    encoding: E
    weights: Path
    split: Path
    work: Path


@dataclass(frozen=True)
class Shared:
    """An evaluation's folder of parts, and who works on them."""

    work: Path
    runtime: Runtime
    device: Device
    threads: int

    def map(
        self, run: Callable[[Any, Path], dict[str, Any]], items: Sequence[Any], *, name: str, label: str
    ) -> list[Path]:
        """The folders of the parts `name`, one for each of `items`, made by ``run(item, folder)`` where they lack.

        Without a cluster the first part is made by this process: others are started if it takes long.
        """
        sealed = partial(seal, partial(run_threaded, self.threads, run))
        processes = self._processes()
        if processes > 1:
            processes = self._worth(sealed, items, name, label, processes)
        done = map_partitions(
            sealed,
            items,
            work=self.work,
            runtime=self.runtime.model_copy(update={"processes": processes}),
            label=label,
            name=name,
            cpus=self.threads,
            gpus=int(self.device == "cuda"),
        )
        return [folder for folder, _ in done]

    def _processes(self) -> int:
        if self.device == "cuda" or self.runtime.ray_address is not None:
            return 1  # of one GPU; a cluster makes use of several
        return self.runtime.processes or max(1, (os.cpu_count() or 1) // self.threads)

    def _worth(
        self, run: Callable[[Any, Path], dict[str, Any]], items: Sequence[Any], name: str, label: str, processes: int
    ) -> int:
        """Make the first part that lacks; `processes` if the rest will take longer than to start these, else one."""
        pairs = zip(items, partitions(self.work, name, len(items)), strict=True)
        lacking = [(item, folder) for item, folder in pairs if not (folder / DONE_FILE).is_file()]
        if len(lacking) < 2:
            return 1
        started = time.monotonic()
        with progress(f"{label}, first part", 1, "parts") as advance:
            run_partition(run, *lacking[0])
            advance()
        rest = (time.monotonic() - started) * (len(lacking) - 1)
        return processes if rest > WORTH_SECONDS else 1


@contextmanager
def shared(
    encoding: Encoding, inputs: Mapping[str, Path], runtime: Runtime, release: Callable[[], None]
) -> Iterator[Shared]:
    """The parts of this evaluation, with those that are damaged removed.

    At the end `release` frees what this process has loaded, and the longest unused evaluations are given up until all
    take at most `runtime.evaluation_cache_gb`. Raises UserError when an input is missing.
    """
    for path in inputs.values():
        if not path.exists():
            raise UserError(f"{path} does not exist: run the stage that writes it first")
    work = stage_work(runtime, STAGE, encoding, inputs).resolve()
    drop_damaged(work)
    try:
        with threads(encoding.num_threads):
            yield Shared(work, runtime, encoding.device, encoding.num_threads)
    finally:
        release()
        os.utime(work)
        keep_within(work.parent, int(runtime.evaluation_cache_gb * 1e9))


def encoding_of(kind: type[E], params: EvaluateParams, runtime: Runtime) -> E:
    """What `params` say of the encoding, computed by the workers of `runtime`."""
    same = set(kind.model_fields) & set(type(params).model_fields)
    return kind(device=device_of(runtime), **params.model_dump(include=same))


def device_of(runtime: Runtime) -> Device:
    """Where the workers compute: on GPUs where the cluster, or without one this machine, has any."""
    if runtime.ray_address is not None:
        return "cuda" if cluster_gpus(runtime.ray_address) else "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads, then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_threaded(count: int, run: Callable[[Any, Path], dict[str, Any]], item: Any, folder: Path) -> dict[str, Any]:
    """Run a part in `count` threads."""
    with threads(count):
        return run(item, folder)


def ranges(length: int, size: int, multiple: int = 1) -> list[range]:
    """``range(length)`` in parts of `size`, rounded up to whole batches of `multiple`; the last may be shorter."""
    step = -(-size // multiple) * multiple
    return [range(start, min(start + step, length)) for start in range(0, length, step)]
