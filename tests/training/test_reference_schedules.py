"""The published scheduler's rates, exactly."""

import json

import pytest

from components.training.schedule import learning_rate
from components.training.settings import ScheduleParams


def configurations(reference):
    return json.loads((reference / "albef" / "lr_schedules.json").read_text())


def test_every_published_rate_is_reproduced(reference):
    compared = 0
    for name, entry in configurations(reference).items():
        schedule, per_epoch = entry["schedule"], entry["iterations_per_epoch"]
        assert schedule["sched"] == "cosine"
        params = ScheduleParams(
            lr=schedule["lr"],
            min_lr=schedule["min_lr"],
            warmup_lr=schedule["warmup_lr"],
            warmup_iterations=100 * schedule["warmup_epochs"],
        )
        for epoch, iteration, expected in entry["lr_after_iteration"]:
            rate = learning_rate(
                params,
                epoch,
                iteration,
                per_epoch=per_epoch,
                steps=per_epoch * schedule["epochs"],
                epochs=schedule["epochs"],
            )
            assert rate == expected, (name, epoch, iteration)
            compared += 1
    assert compared > 0, "the file lists no rates"


@pytest.mark.parametrize("iteration", [1, 99])
def test_the_warm_up_rises_in_steps(reference, iteration):
    entry = configurations(reference)["Pretrain"]["schedule"]
    params = ScheduleParams(lr=entry["lr"], min_lr=entry["min_lr"], warmup_lr=entry["warmup_lr"])
    assert learning_rate(params, 0, iteration, per_epoch=2300, steps=2300 * 30, epochs=30) == entry["warmup_lr"]
