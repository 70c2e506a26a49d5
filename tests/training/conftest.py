"""Tiny shards, a tiny task, tiny parameters."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from components.data.tokenizer import train_tokenizer
from components.io.records import RecordWriter, write_manifest
from components.io.runtime import Runtime
from components.training.finetune import FinetuneParams
from components.training.pretrain import PretrainParams, pretrain
from pipelines.params import read_yaml

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "yellow": (220, 210, 30)}
CAPTIONS = ["a {0} square left of a {1} one", "{0} and {1} squares", "the square on the right is {1}"]

MODEL = {
    "image_size": 32,
    "patch_size": 16,
    "vision_width": 24,
    "vision_depth": 1,
    "vision_heads": 2,
    "text_width": 24,
    "text_layers": 2,
    "fusion_layers": 1,
    "text_heads": 2,
    "text_intermediate": 32,
    "max_positions": 32,
    "text_dropout": 0.1,
    "embed_dim": 8,
    "queue_size": 16,
}
TRAINING = {
    "epochs": 2,
    "batch_size": 4,
    "schedule": {"kind": "cosine_by_iteration", "lr": 1e-3, "min_lr": 1e-5, "warmup_lr": 1e-5, "warmup_iterations": 2},
    "log_every": 1,
    "num_threads": 1,
}


def outs_of_evaluate() -> set[str]:
    """What DVC tracks in an evaluation's folder; anything else would be missing in a fresh clone."""
    stage = read_yaml(Path(__file__).resolve().parents[2] / "dvc.yaml")["stages"]["evaluate"]["do"]
    return {Path(out).name for out in (*stage["outs"], *stage["metrics"])}


def write_records(folder, count, seed=0):
    """Pictures of two squares, with captions that name their colours; returns the captions."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    names = list(COLOURS)
    records, captions = [], []
    for index in range(count):
        first, second = names[rng.integers(4)], names[rng.integers(4)]
        pixels = rng.integers(0, 60, (40, 48, 3), dtype=np.uint8)
        pixels[10:30, 4:20], pixels[10:30, 28:44] = COLOURS[first], COLOURS[second]
        data = io.BytesIO()
        Image.fromarray(pixels).save(data, "PNG")
        texts = [text.format(first, second) for text in CAPTIONS[: 1 + index % 3]]
        captions += texts
        records.append(
            {
                "id": f"test/{index:09d}",
                "source": "test",
                "url": f"{index}.png",
                "image": data.getvalue(),
                "sha256": "",
                "width": 48,
                "height": 40,
                "captions": texts,
                "row_ids": [f"test/{index:09d}-{place}" for place in range(len(texts))],
            }
        )
    middle = count // 2
    entries = []
    for number, part in enumerate([records[:middle], records[middle:]]):
        with RecordWriter(folder / f"{number:05d}.arrow") as writer:
            writer.write(part)
        entries.append(writer.entry())
    write_manifest(folder, "shards", entries)
    return captions


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "shards"
    captions = write_records(folder, 13)
    train_tokenizer(lambda: iter(captions), 80, 1).save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "task"
    write_records(folder / "train", 9, seed=1)
    write_records(folder / "val", 5, seed=2)
    return folder


@pytest.fixture(scope="session")
def pretrained(shards, tmp_path_factory):
    """A folder with `weights` and `curves` of the tiny pre-training."""
    folder = tmp_path_factory.mktemp("pretrained")
    params = PretrainParams.model_validate(TRAINING | {"model": MODEL})
    runtime = Runtime(work=folder / "work")
    pretrain(params, shards=shards, weights=folder / "weights", curves=folder / "curves", runtime=runtime)
    return folder


@pytest.fixture
def pretrain_params():
    def make(**changes):
        model = MODEL | changes.pop("model", {})
        return PretrainParams.model_validate(TRAINING | {"model": model} | changes)

    return make


@pytest.fixture
def finetune_params(task):
    def make(**changes):
        run = TRAINING | {"task": str(task), "queue_size": 16} | changes
        return FinetuneParams.model_validate({"runs": {"tiny": run}})

    return make
