"""The ranks of test_albef_distributed.py: `python albef_two_processes.py FOLDER WORLD`.

Each rank takes its rows of FOLDER/inputs.pt, makes one DDP step per negative pool and saves what came out. The ranks
are forked from here, where torch has been imported once and has started no threads.
"""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from models.albef.config import AlbefConfig
from models.albef.losses import Negatives
from models.albef.retrieval import AlbefRetrieval


def rank_main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "meet").as_uri(), rank=rank, world_size=world)
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    for pool in ("global", "local"):
        torch.save(step(rank, world, pool, inputs), folder / f"{pool}{rank}.pt")
    dist.destroy_process_group()


def step(rank: int, world: int, pool: str, inputs: dict[str, Any]) -> dict[str, Any]:
    config = AlbefConfig.model_validate(inputs["config"] | {"negative_pool": pool})
    torch.manual_seed(rank)  # DDP must make the ranks equal, not the seed
    model = AlbefRetrieval(config)
    if rank == 0:
        model.load_state_dict(inputs["model"])
    mine = {k: v.chunk(world)[rank] for k, v in inputs["batch"].items()}
    negatives = None
    if pool == "global":
        negatives = Negatives(*(n.chunk(world)[rank] for n in inputs["negatives"]))
        longest = int(mine["attention_mask"].sum(1).max())  # each rank pads to its own longest text
        mine |= {k: mine[k][:, :longest] for k in ("input_ids", "attention_mask")}
    parallel = DistributedDataParallel(model)
    output = parallel(**mine, alpha=0.4, generator=torch.Generator().manual_seed(rank), negatives=negatives)
    # DDP reduces once every parameter has a gradient, so ITC takes part with weight zero.
    (output.loss_itm + 0 * output.loss_itc).backward()
    return {
        "loss_itm": output.loss_itm.detach(),
        "drawn": output.negatives.text_per_image,
        "pool": output.similarity_i2t.shape[1],
        "gradients": {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        "queue": model.queue.state_dict(),
    }


if __name__ == "__main__":
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank_main, args=(rank, world, folder), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
