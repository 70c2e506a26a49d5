"""Starting a training through Ray Train. The one module of the training room that knows Ray.

`num_workers` 0 is Ray's local mode: the training function runs in this process and no cluster is started. More workers
run data-parallel (DDP over NCCL with GPUs, gloo without), on this machine or on `runtime.ray_address`; with
`min_workers` they go on as fewer when the cluster has lost some.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from components.io.errors import UserError
from components.io.runtime import Runtime
from components.training.loop import Worker
from components.training.saving import termination
from components.training.settings import TrainingParams

FAILURE_FILE, LEAVE_FILE = "failure.json", "leave"
# Ray asks once a minute for workers that are not there yet; a new machine that fetches a large image takes many minutes
TRIES, TRIES_WHILE_GROWING = 3, 30


def launch(train: Callable[[Worker], Any], params: TrainingParams, storage: Path, runtime: Runtime) -> Any:
    """Run `train(worker)` in every training process and return what the first one returns.

    `train` must be importable (a module's function or a `functools.partial` of one), and resume from what it left in
    `storage`, an absolute path that all workers share: after a lost worker all start again, up to
    `params.max_failures` times. A UserError is not tried again; it is raised here as it was raised there. On SIGTERM
    all save and end. Raises UserError also when workers are lost too often, or when the cluster has too little room.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")  # asks the dashboard, which is off
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    logging.getLogger("ray.train").setLevel(logging.WARNING)
    if params.num_workers == 0:
        trainer = TorchTrainer(partial(_in_worker, train, None), scaling_config=ScalingConfig(num_workers=0))
        return trainer.fit().return_value

    started = not ray.is_initialized()
    if started:
        _connect(params, runtime)
    try:
        least = params.min_workers or params.num_workers
        # a cluster that grows has few machines yet, or none: what it can start counts, not what it has
        use_gpu = max(ray.cluster_resources().get("GPU", 0), runtime.gpus or 0) >= least
        tries = TRIES if runtime.gpus is None else TRIES_WHILE_GROWING
        workers = params.num_workers if least == params.num_workers else (least, params.num_workers)
        launched = uuid.uuid4().hex
        trainer = TorchTrainer(
            partial(_in_worker, train, (storage, launched)),
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
            run_config=RunConfig(
                name=storage.name,
                storage_path=str(storage / "ray"),
                failure_config=FailureConfig(max_failures=params.max_failures, controller_failure_limit=tries),
            ),
        )
        with termination(lambda: _note(storage / LEAVE_FILE, launched)):
            return _result(trainer, params, storage)
    finally:
        if started:
            ray.shutdown()


def _connect(params: TrainingParams, runtime: Runtime) -> None:
    import ray

    quiet = {"logging_level": logging.ERROR, "log_to_driver": True}
    if runtime.ray_address is not None:
        ray.init(address=runtime.ray_address, **quiet)
        return
    cores = max(os.cpu_count() or 1, params.num_workers)
    # "local": without it Ray joins whatever cluster its notes in the temporary folder name, dead or alive
    ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)


def _result(trainer: Any, params: TrainingParams, storage: Path) -> Any:
    from ray.train import ControllerError, TrainingFailedError

    try:
        return trainer.fit().return_value
    except TrainingFailedError as error:
        for failure in getattr(error, "worker_failures", {}).values():
            cause = getattr(failure, "_base_exc", failure)
            if isinstance(cause, UserError):
                raise UserError(str(cause)) from None
        if isinstance(error, ControllerError):
            raise UserError(
                f"Ray could not start {params.num_workers} training workers ({error.controller_failure}): lower "
                "num_workers or give the cluster more cores or GPUs"
            ) from error
        raise UserError(
            f"the training lost its workers more than max_failures = {params.max_failures} times; the last error was: "
            f"{_last_line(error)}; run again to go on from the last checkpoint in {storage.name}"
        ) from error


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _in_worker(train: Callable[[Worker], Any], launch: tuple[Path, str] | None) -> Any:
    """The function that each of Ray's workers runs. `launch` is the training's storage and the name of this launch.

    Ray restarts the workers after any error; a UserError would only come again, so it is noted in the storage, and
    restarted workers of the same launch end with it.
    """
    import ray.train
    import ray.train.torch

    context = ray.train.get_context()
    worker = Worker(
        rank=context.get_world_rank(),
        world=context.get_world_size(),
        local_world=context.get_local_world_size(),
        device=ray.train.torch.get_device(),
    )
    if launch is None:
        return train(worker)
    storage, launched = launch
    worker = replace(
        worker,
        leaving=lambda: _noted(storage / LEAVE_FILE) == launched,
        endangered=lambda: ray.train.get_preemption_info() is not None,
    )
    failure = json.loads(_noted(storage / FAILURE_FILE) or "{}")
    if failure.get("launch") == launched:
        raise UserError(failure["message"])
    try:
        return train(worker)
    except UserError as error:
        _note(storage / FAILURE_FILE, json.dumps({"launch": launched, "message": str(error)}))
        raise


def _noted(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _note(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f".{path.name}.{os.getpid()}")
    partial_path.write_text(text, encoding="utf-8")
    partial_path.replace(path)
