"""Spreading a data stage's partitions over processes or over a Ray cluster. Ray's one place among the data stages."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from components.io.errors import UserError

CONNECT_SECONDS = 10.0


def spread(
    run: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    *,
    processes: int = 0,
    ray_address: str | None = None,
    cpus: int = 1,
    gpus: int = 0,
) -> Iterator[int]:
    """Call ``run(*job)`` for every job, side by side; yields 0, 1, 2 … as jobs finish, in whatever order.

    Jobs communicate through files, so no result is returned. The first error stops the rest and is raised here.
    `processes` 0 means one per core; one process (or one job) runs in this process, which debuggers like. On a cluster
    each job asks for `cpus` and `gpus`, and is done again, up to three times, when its worker or node is lost.
    """
    if ray_address is not None:
        yield from _spread_on_ray(run, jobs, ray_address, cpus, gpus)
        return
    processes = min(processes or os.cpu_count() or 1, len(jobs))
    if processes <= 1:
        for index, job in enumerate(jobs):
            run(*job)
            yield index
        return
    # forkserver: a fork of a process that has threads (Arrow, torch) can deadlock
    with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
        futures = [pool.submit(run, *job) for job in jobs]
        try:
            for index, future in enumerate(as_completed(futures)):
                future.result()
                yield index
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed, probably for want of memory: lower `runtime.processes` and run again; "
                "finished parts are kept"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def cluster_gpus(address: str) -> int:
    """GPUs of the Ray cluster at `address`. Raises UserError when none answers."""
    import ray

    _connect(address)
    return int(ray.cluster_resources().get("GPU", 0))


def _spread_on_ray(
    run: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], address: str, cpus: int, gpus: int
) -> Iterator[int]:
    import ray
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError

    _connect(address)
    # max_calls 0: else Ray starts a new process for each job that asks for a GPU, which loads its weights anew
    remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_calls=0)(run)
    waiting = [remote.remote(*job) for job in jobs]
    finished = 0
    try:
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            try:
                ray.get(ready)
            except RayTaskError as error:
                if isinstance(error.cause, UserError):  # whose message here holds a traceback
                    raise UserError(str(error.cause)) from None
                raise
            except (WorkerCrashedError, OutOfMemoryError, NodeDiedError) as error:
                raise UserError(
                    f"the cluster at {address} lost a worker at every try of a part ({type(error).__name__}), probably "
                    "for want of memory: give it more, or smaller batches, and run again; finished parts are kept"
                ) from None
            yield finished
            finished += 1
    finally:
        for reference in waiting:
            ray.cancel(reference)


def _connect(address: str, **options: Any) -> None:
    """Join the cluster unless this process has; `options` are Ray's. Raises UserError where none answers."""
    import ray

    if not ray.is_initialized():
        _require_answer(address)
        ray.init(address=address, log_to_driver=False, **options)


def _require_answer(address: str) -> None:
    """Raise UserError unless something answers at HOST:PORT; Ray itself would try for minutes, then end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # `auto` and the like, which Ray looks up
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"runtime.ray_address is {address}, where no Ray cluster answers ({error}): start one, or set it to null"
        ) from None


def ask_nodes(
    run: Callable[..., Any], address: str, *arguments: Any, gpus: bool = False, seconds: float = 120.0
) -> dict[str, Any]:
    """Call ``run(rank, count, *arguments)`` on every node of a Ray cluster at once; what each returned, by its address.

    An exception stands for a node's answer where it raised one, or gave none within `seconds`. With `gpus` only nodes
    that have some are asked, for one each. Raises UserError where no cluster answers.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    _connect(address, logging_level=logging.ERROR)
    nodes = [node for node in ray.nodes() if node["Alive"] and (not gpus or node["Resources"].get("GPU", 0) >= 1)]
    nodes.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    asked = {}
    for rank, node in enumerate(nodes):
        name = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        remote = ray.remote(run).options(num_cpus=0, num_gpus=int(gpus), max_retries=0, scheduling_strategy=place)
        asked[name] = remote.remote(rank, len(nodes), *arguments)
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)
    answers: dict[str, Any] = {}
    for name, reference in asked.items():
        try:
            answers[name] = ray.get(reference, timeout=0)
        except Exception as error:  # its answer; whoever asked says what it means
            answers[name] = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            ray.cancel(reference, force=True)
    return answers
