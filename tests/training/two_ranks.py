"""The ranks of test_training_two_ranks.py: `python two_ranks.py PARAMS SHARDS STORAGE WORLD LEAVE_AFTER`.

They are forked from here, where torch has been imported once and has started no threads. All leave after a step, if
that is not 0, because the last of them is told to.
"""

import json
import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from components.training.albef_tasks import PretrainingTask
from components.training.loop import fit
from components.training.pretrain import PretrainParams
from components.training.protocol import Worker
from components.training.saving import LeavingError

FROZEN = ("visual_encoder.",)


def train(params: PretrainParams, shards: Path, storage: Path, worker: Worker, leave_after: int) -> None:
    task = PretrainingTask(params, shards)
    task.frozen = FROZEN
    losses, steps = task.losses, []

    def counted(*arguments):
        steps.append(1)
        return losses(*arguments)

    def leaving():
        return worker.rank == worker.world - 1 and len(steps) == leave_after

    task.losses = counted
    place = Worker(worker.rank, worker.world, worker.world, worker.device, leaving)
    try:
        outcome = fit(task, params, storage, place)
    except LeavingError:
        return
    torch.save(task.model.state_dict(), storage / f"rank-{worker.world}-{worker.rank}.pt")
    if worker.rank == 0:
        (storage / f"history-{worker.world}.json").write_text(json.dumps(outcome.history))


def rank_main(rank: int, world: int, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    params, shards, storage = PretrainParams.model_validate_json(arguments[0]), *map(Path, arguments[1:3])
    dist.init_process_group("gloo", init_method=(storage / "meet").as_uri(), rank=rank, world_size=world)
    train(params, shards, storage, Worker(rank, world), int(arguments[4]))


if __name__ == "__main__":
    world = int(sys.argv[4])
    Path(sys.argv[3]).mkdir(parents=True, exist_ok=True)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank_main, args=(rank, world, sys.argv[1:]), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
