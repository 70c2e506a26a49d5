"""Two workers with half the batch each against one, and against each other; two that become one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from components.training.protocol import Worker
from tests.training.two_ranks import train as train_rank

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
PARTS = ("train/loss_itc", "train/loss_itm", "train/loss_mlm", "train/loss", "train/lr")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture
def train(shards, pretrain_params, folder):
    """Train 20 steps in `folder/NAME` with so many ranks, unless that was done; returns the curves."""

    def go(name, world, *, leave_after=0):
        params = pretrain_params(
            model={"text_dropout": 0.0, "negative_pool": "global"},
            epochs=7,
            max_steps=STEPS,
            num_workers=world if world > 1 else 0,
            freeze_epochs=2,
            activation_checkpointing=True,
            clip_norm=5.0,
        )
        done = folder / name / f"history-{world}.json"
        if not done.is_file() and world == 1:
            (folder / name).mkdir(exist_ok=True)
            train_rank(params, shards, folder / name, Worker(), leave_after)
        elif not done.is_file():
            script, text = Path(__file__).with_name("two_ranks.py"), params.model_dump_json(exclude_defaults=True)
            command = [sys.executable, script, text, shards, folder / name, str(world), str(leave_after)]
            environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, check=True, timeout=280)
        return json.loads(done.read_text()) if done.is_file() else None

    return go


def test_two_workers_learn_what_one_does(train):
    one, two = train("one", 1), train("two", 2)
    assert len(one) == len(two) == STEPS
    for mine, theirs in zip(one, two, strict=True):
        assert [theirs[part] for part in PARTS] == pytest.approx([mine[part] for part in PARTS], rel=1e-4)


def test_students_teachers_and_queues_stay_equal_on_all_workers(train, folder):
    train("two", 2)
    first, second = (torch.load(folder / f"two/rank-2-{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_two_workers_that_are_told_to_leave_go_on_as_one(train, folder):
    expected = train("one", 1)
    assert train("shrunk", 2, leave_after=10) is None
    assert [path.name for path in (folder / "shrunk/checkpoints").iterdir()] == ["step-0000000010.pt"]
    shrunk = train("shrunk", 1)
    assert len(shrunk) == STEPS
    for mine, theirs in zip(expected, shrunk, strict=True):
        assert [theirs[part] for part in PARTS] == pytest.approx([mine[part] for part in PARTS], rel=1e-4)
