"""Two processes against one: the same queue, and with the global pool the same matching loss and gradients."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from models.albef.config import AlbefConfig
from models.albef.losses import Negatives
from models.albef.retrieval import AlbefRetrieval

ROOT = Path(__file__).resolve().parents[2]
WORLD, ROWS, LENGTH = 2, 3, 8  # rows per rank
CONFIG = AlbefConfig(
    image_size=16,
    patch_size=8,
    vision_width=16,
    vision_depth=1,
    vision_heads=2,
    vocab_size=120,
    text_width=16,
    text_layers=2,
    fusion_layers=1,
    text_heads=2,
    text_intermediate=16,
    max_positions=12,
    text_dropout=0.0,
    embed_dim=8,
    queue_size=10,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs() -> dict[str, Any]:
    torch.manual_seed(0)
    total = WORLD * ROWS
    lengths = torch.tensor([8, 4, 6, 5, 5, 3])[:, None]  # the second rank's texts are shorter
    mask = (torch.arange(LENGTH) < lengths).long()
    return {
        "config": CONFIG.model_dump(),
        "model": AlbefRetrieval(CONFIG).state_dict(),
        "batch": {
            "images": torch.randn(total, 3, 16, 16),
            "input_ids": torch.randint(104, 120, (total, LENGTH)) * mask,
            "attention_mask": mask,
            "image_ids": torch.tensor([0, 1, 2, 3, 1, 5]),
        },
        "negatives": (torch.tensor([4, 5, 3, 0, 2, 1]), torch.tensor([3, 0, 5, 2, 3, 4])),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, inputs: dict[str, Any]) -> Path:
    """What the ranks saved."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(inputs, folder / "inputs.pt")
    script = Path(__file__).with_name("albef_two_processes.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, script, folder, str(WORLD)], env=environment, check=True, timeout=280)
    return folder


def results(folder: Path, pool: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{pool}{rank}.pt", weights_only=True) for rank in range(WORLD)]


def single(inputs: dict[str, Any]) -> AlbefRetrieval:
    model = AlbefRetrieval(CONFIG)
    model.load_state_dict(inputs["model"])
    return model


def test_global_pool_is_one_large_batch(folder: Path, inputs: dict[str, Any]) -> None:
    ranks = results(folder, "global")
    model = single(inputs)
    output = model(**inputs["batch"], alpha=0.4, negatives=Negatives(*inputs["negatives"]))
    output.loss_itm.backward()
    assert torch.allclose(torch.stack([r["loss_itm"] for r in ranks]).mean(), output.loss_itm, atol=1e-6)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            for rank in ranks:
                assert torch.allclose(rank["gradients"][name], parameter.grad, atol=1e-6), name
    assert [rank["pool"] for rank in ranks] == [WORLD * ROWS] * WORLD


def test_queue_takes_all_ranks_rows_in_rank_order(folder: Path, inputs: dict[str, Any]) -> None:
    ranks = results(folder, "local")
    model = single(inputs)
    model(**inputs["batch"], alpha=0.4, generator=torch.Generator().manual_seed(0))
    for rank in ranks:
        assert rank["pool"] == ROWS
        assert rank["drawn"].max() < ROWS
        for name, value in model.queue.state_dict().items():
            assert torch.allclose(rank["queue"][name], value, atol=1e-6), name
