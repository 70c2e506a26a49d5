"""Several workers on one small Ray cluster."""

import os
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from components.io.errors import UserError
from components.io.runtime import Runtime
from components.training.albef_tasks import PretrainingTask
from components.training.loop import fit
from components.training.ray_launch import launch

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]


class ColourTask:
    """A loss that is a mean over the batch and draws nothing, so that workers and batch shares cannot matter."""

    label = "pretrain"
    weights: ClassVar = {}

    def __init__(self, params, shards):
        self.data = PretrainingTask(params, shards).data
        torch.manual_seed(0)
        self.model = nn.Linear(3 * 32 * 32, 8)

    def losses(self, model, images, batch, alpha, generator):
        out = model(images.flatten(1))
        target = torch.stack([batch.input_ids[:, 1 + place] for place in range(2)], dim=1).float()
        return {"loss_a": (out[:, :2] - target / 10).square().mean(), "loss_b": out[:, 2:].abs().mean()}

    def validate(self):
        return {}

    def score(self, metrics):
        return None


def train_both(params, shards, storage, worker):
    """Losses of the linear task, and whether all workers end with the same ALBEF."""
    linear = fit(ColourTask(params, shards), params, storage / "linear", worker)
    albef = PretrainingTask(params, shards)
    outcome = fit(albef, params, storage / "albef", worker)
    state = {name: tensor.numpy() for name, tensor in albef.model.state_dict().items()}
    states = [state]
    if worker.world > 1:
        states = [None] * worker.world
        dist.all_gather_object(states, state)
    different = [name for name in state if any(not np.array_equal(state[name], other[name]) for other in states)]
    return {
        "world": worker.world,
        "linear": [point["train/loss"] for point in linear.history],
        "albef": [point["train/loss_itc"] for point in outcome.history],
        "different": different,
        "queue": state["queue.images"],
    }


def test_two_workers_learn_as_one_and_stay_equal(ray_cluster, shards, pretrain_params, tmp_path):
    results = {}
    for workers in (0, 2):
        params = pretrain_params(num_workers=workers, epochs=4, batch_size=6, model={"text_dropout": 0.0})
        storage = tmp_path / str(workers)
        results[workers] = launch(partial(train_both, params, shards, storage), params, storage, Runtime())
    one, two = results[0], results[2]
    assert (one["world"], two["world"]) == (1, 2)
    assert len(one["linear"]) == 8
    assert two["linear"] == pytest.approx(one["linear"], rel=1e-4)
    assert one["linear"][-1] < one["linear"][0]
    assert two["different"] == [], "students, teachers and queues must be equal on all workers"
    # the queue holds the teacher's features of all workers in rank order: those that one worker alone computes, but
    # for the steps that its student has taken (eq. 6 contrasts with this worker's own rows, as published)
    cosines = (one["queue"] * two["queue"]).sum(axis=0)
    assert cosines.min() > 0.95


class Faulty:
    """The linear task, whose second worker dies once, and whose loss later is no number."""

    def __init__(self, inner, worker, marks):
        self.inner, self.worker, self.marks, self.count = inner, worker, marks, 0
        self.label, self.model, self.data = inner.label, inner.model, inner.data
        self.validate, self.score, self.weights = inner.validate, inner.score, inner.weights

    def losses(self, *arguments):
        died = self.marks / "died"
        if self.worker.rank == 1 and self.count == 3 and not died.exists():
            died.touch()
            os._exit(1)
        parts = self.inner.losses(*arguments)
        if died.exists() and self.count == 2:
            parts["loss_b"] = parts["loss_b"] * float("inf")
        self.count += 1
        return parts


def train_faulty(params, shards, storage, worker):
    with (storage / f"starts-{worker.rank}").open("a") as stream:
        stream.write("x")
    return fit(Faulty(ColourTask(params, shards), worker, storage), params, storage, worker)


def test_a_lost_worker_resumes_and_a_user_error_arrives_as_it_was_raised(
    ray_cluster, shards, pretrain_params, tmp_path
):
    params = pretrain_params(num_workers=2, epochs=4, batch_size=6, checkpoint={"steps": 1}, max_failures=2)
    with pytest.raises(UserError) as raised:
        launch(partial(train_faulty, params, shards, tmp_path), params, tmp_path, Runtime())
    assert (tmp_path / "died").exists()
    message = str(raised.value)
    assert message.startswith("loss_b became inf at step ")
    assert "\n" not in message
    step = int(message.split("at step ")[1].split()[0])
    assert step >= 4, "the restarted workers went on from the checkpoint after step 2 or 3, not from the start"
    assert (tmp_path / "starts-0").read_text() == "xx", "a user's error is not tried again"


def test_in_process_an_error_is_raised_as_it_is_and_no_cluster_is_asked(tmp_path):
    def fail(worker):
        assert worker.world == 1
        raise UserError("one sentence")

    with pytest.raises(UserError, match=r"^one sentence$"):
        launch(fail, SimpleNamespace(num_workers=0), tmp_path, Runtime())


@pytest.mark.parametrize(("gpus", "asked"), [(None, (False, 3)), (1, (False, 30)), (2, (True, 30))])
def test_a_cluster_that_grows_is_asked_for_the_gpus_that_it_has_yet_to_start(
    ray_cluster, pretrain_params, tmp_path, monkeypatch, gpus, asked
):
    found = []

    class Asked:
        def __init__(self, train, *, scaling_config, run_config):
            found.append((scaling_config.use_gpu, run_config.failure_config.controller_failure_limit))

        def fit(self):
            return SimpleNamespace(return_value="done")

    monkeypatch.setattr("ray.train.torch.TorchTrainer", Asked)
    assert launch(len, pretrain_params(num_workers=2), tmp_path, Runtime(gpus=gpus)) == "done"
    assert found == [asked]
