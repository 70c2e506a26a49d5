"""The training engine on this machine: steps/s and waiting share at 1 and 2 workers, what checkpoints cost, the loader.

The model is the demo's. Workers are forked from here and talk over gloo, without Ray, whose start is not measured.
"""

import io
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from ruamel.yaml import YAML

from components.data.tokenizer import load_tokenizer, train_tokenizer
from components.io.records import RecordWriter, write_manifest
from components.io.shards import ShardReader
from components.training import loop
from components.training.albef_tasks import PretrainingTask
from components.training.checkpoints import Checkpoints
from components.training.data import PairData, Plan, batches
from components.training.loop import fit
from components.training.pretrain import PretrainParams
from components.training.protocol import Worker
from components.training.settings import AugmentParams, TrainingParams

ROOT = Path(__file__).resolve().parents[1]
STEPS, BATCH, PICTURES = 10, 32, 256


def write_shards(folder, size):
    """Smooth random JPEG pictures of (width, height), with captions."""
    folder.mkdir(parents=True)
    rng, records = np.random.default_rng(0), []
    for index in range(PICTURES):
        coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize(
            size, Image.Resampling.BICUBIC
        )
        data = io.BytesIO()
        coarse.save(data, "JPEG", quality=85)
        record = {"id": f"b/{index}", "source": "b", "url": "x", "image": data.getvalue(), "sha256": ""}
        captions = {"captions": [f"a thing numbered {index} beside another one"], "row_ids": [f"b/{index}"]}
        records.append(record | captions | {"width": size[0], "height": size[1]})
    with RecordWriter(folder / "00000.arrow") as writer:
        writer.write(records)
    write_manifest(folder, "shards", [writer.entry()])
    texts = [record["captions"][0] for record in records]
    train_tokenizer(lambda: iter(texts), 200, 1).save(folder / "tokenizer.json")
    return folder


class Watch(loop.Clock):
    """Remembers the whole training's time and waiting, the first batch left out."""

    seconds = waiting_seconds = 0.0

    def note(self):
        Watch.seconds += time.monotonic() - self.since
        Watch.waiting_seconds += self.waited
        return super().note()


def params(**changes):
    recipe = YAML(typ="safe").load((ROOT / "pipelines/recipes/demo.yaml").read_text())["pretrain"]
    size = {
        "epochs": 99,
        "max_steps": STEPS,
        "num_threads": 1,
        "batch_size": BATCH,
        "log_every": STEPS,
        "checkpoint": {"minutes": 9999},
    }
    recipe["schedule"]["warmup_iterations"] = 2
    return PretrainParams.model_validate(recipe | size | changes)


def rank_main(rank, world, shards, folder, changes):
    if world > 1:
        dist.init_process_group("gloo", init_method=(folder / "meet").as_uri(), rank=rank, world_size=world)
    loop.Clock = Watch
    chosen = params(num_workers=world if world > 1 else 0, **changes)
    fit(PretrainingTask(chosen, shards), chosen, folder, Worker(rank, world, world))
    if rank == 0:
        (folder / "watch.json").write_text(json.dumps([Watch.seconds, Watch.waiting_seconds]))


def train(world, shards, folder, **changes):
    """Seconds of the steps after the first batch, and those of them spent waiting for data."""
    folder.mkdir()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank_main, args=(rank, world, shards, folder, changes)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return json.loads((folder / "watch.json").read_text())


def loader_speed(shards, image_size, workers):
    """Pictures a second that come out of the loader, decoded, cropped and with RandAugment; its start left out."""
    tokenizer = load_tokenizer(shards)
    data = PairData(
        ShardReader(shards), tokenizer, image_size=image_size, max_tokens=25, augment=AugmentParams(), seed=0
    )
    chosen = TrainingParams(batch_size=32, loader_workers=workers)
    stream, started, count = batches(data, Plan(PICTURES, 32, 0), 0, 7, chosen), 0.0, 0
    for batch in stream:
        count += len(batch.images) if started else 0
        started = started or time.perf_counter()
    return count / (time.perf_counter() - started)


def main():
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; one torch thread a worker")
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        small = write_shards(here / "small", (96, 96))
        large = write_shards(here / "large", (500, 375))

        print(f"\n{'demo model, batch ' + str(BATCH):34} {'steps/s':>8} {'pictures/s':>11} {'waiting':>8}")
        appetite = 0.0
        for world in (1, 2):
            for name, changes in (("decoded pictures kept", {}), ("decoded each time", {"cache_mb": 0})):
                seconds, waiting = train(world, small, here / f"{world}{name[-4:]}", **changes)
                speed = STEPS / seconds
                appetite = max(appetite, speed * BATCH)
                print(f"{f'{world} workers, {name}':34} {speed:8.2f} {speed * BATCH:11.0f} {waiting / seconds:8.1%}")

        print(f"\n{'checkpoints':34} {'MB':>8} {'seconds':>11} {'at one a minute':>16}")
        task = PretrainingTask(params(), small)
        optimizer = torch.optim.AdamW(task.model.parameters())
        for parameter in task.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        checkpoints, times = Checkpoints(here / "checkpoints"), []
        for step in range(1, 6):
            start = time.perf_counter()
            path = checkpoints.save(step, {"model": task.model.state_dict(), "optimizer": optimizer.state_dict()})
            times.append(time.perf_counter() - start)
        took = sorted(times)[2]
        print(f"{'demo model':34} {path.stat().st_size / 1e6:8.1f} {took:11.3f} {took / 60:16.2%}")
        big = {"value": torch.zeros(50_000_000)}
        start = time.perf_counter()
        size = checkpoints.save(9, big).stat().st_size
        speed = size / (time.perf_counter() - start)
        print(f"{'200 MB of numbers, this disk':34} {size / 1e6:8.1f} {size / speed:11.3f} {size / speed / 60:16.2%}")
        print(f"disk: {speed / 1e6:.0f} MB/s")

        print(f"\n{'loader, RandAugment':34} {'pictures/s':>11}   (the demo model's appetite: {appetite:.0f})")
        for name, shards, image_size in (("96 px of 96 x 96", small, 96), ("256 px of 500 x 375", large, 256)):
            for workers in (0, 1, 2):
                print(f"{f'{name}, {workers} loader workers':34} {loader_speed(shards, image_size, workers):11.0f}")


if __name__ == "__main__":
    main()
