import json
from typing import ClassVar

import pytest
import torch
from torch import nn

from components.io.errors import UserError
from components.training.albef_tasks import PretrainingTask, RetrievalTask
from components.training.checkpoints import Checkpoints
from components.training.curves import Curves
from components.training.loop import fit
from components.training.optimisers import make_optimizer
from components.training.settings import TrainingParams


class StoppedError(Exception):
    """The plug is pulled."""


class Interrupted:
    """A task that stops, or spoils its losses, at one step."""

    def __init__(self, task, *, stop_at=None, spoil=None):
        self.inner, self.stop_at, self.spoil, self.count = task, stop_at, spoil or {}, 0
        self.label, self.model, self.data = task.label, task.model, task.data
        self.validate, self.score, self.weights = task.validate, task.score, task.weights

    def losses(self, *arguments):
        if self.count == self.stop_at:
            raise StoppedError
        parts = self.inner.losses(*arguments)
        for name, (step, value) in self.spoil.items():
            if step == self.count:
                parts[name] = parts[name] * value
        self.count += 1
        return parts


def states_equal(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def run(shards, pretrain_params, tmp_path):
    """Pre-train in `tmp_path/NAME`, perhaps stopping at a step of this call; returns task and outcome."""

    def go(name, *, stop_at=None, spoil=None, **changes):
        params = pretrain_params(**changes)
        task = PretrainingTask(params, shards)
        wrapped = Interrupted(task, stop_at=stop_at, spoil=spoil)
        try:
            return task, fit(wrapped, params, tmp_path / name)
        except StoppedError:
            return task, None

    return go


EVERY_TWO = {"checkpoint": {"steps": 2}}


@pytest.mark.parametrize("stop_at", [2, 3, 5])  # on a checkpoint, after one, and in the second epoch
def test_a_resumed_training_equals_the_uninterrupted_one_bit_for_bit(run, tmp_path, stop_at):
    whole, expected = run("whole", **EVERY_TWO)
    assert len(expected.history) == 6
    assert run("stopped", stop_at=stop_at, **EVERY_TWO)[1] is None
    resumed, outcome = run("stopped", **EVERY_TWO)
    assert outcome.history == expected.history
    assert states_equal(whole.model, resumed.model)
    for name in ("metrics.json", "plots/metrics/train/loss.tsv", "plots/metrics/train/lr.tsv"):
        assert (tmp_path / "whole/curves" / name).read_bytes() == (tmp_path / "stopped/curves" / name).read_bytes()


def test_dropout_masks_and_negatives_are_drawn_anew_at_each_step_and_by_seed(run):
    frozen = {"schedule": {"kind": "cosine_by_iteration", "lr": 1e-12, "min_lr": 0, "warmup_lr": 0}}
    frozen["schedule"]["warmup_iterations"] = 0
    _, outcome = run("a", model={"text_dropout": 0.3}, **frozen)
    _, other = run("b", model={"text_dropout": 0.3}, seed=1, **frozen)
    assert len({point["train/loss_mlm"] for point in outcome.history}) == 6
    assert outcome.history[0]["train/loss_mlm"] != other.history[0]["train/loss_mlm"]


def test_a_damaged_newest_checkpoint_is_passed_over(run, tmp_path, capsys):
    whole, expected = run("whole")
    run("stopped", stop_at=5, **EVERY_TWO)
    folder = tmp_path / "stopped/checkpoints"
    newest = folder / "step-0000000004.pt"
    newest.write_bytes(newest.read_bytes()[:-500])
    (folder / ".step-0000000006.pt.partial").write_bytes(b"half")
    resumed, outcome = run("stopped", **EVERY_TWO)
    assert "step-0000000004.pt is damaged" in capsys.readouterr().err
    assert outcome.history == expected.history
    assert states_equal(whole.model, resumed.model)


def test_only_the_newest_checkpoints_stay_and_a_finished_training_is_not_repeated(run, tmp_path):
    task, outcome = run("a", checkpoint={"steps": 1, "keep": 3})
    kept = sorted(path.name for path in (tmp_path / "a/checkpoints").iterdir())
    assert kept == ["step-0000000004.pt", "step-0000000005.pt", "step-0000000006.pt"]
    again, repeated = run("a", stop_at=0)
    assert repeated.history == outcome.history
    assert states_equal(task.model, again.model)


def test_a_failing_save_leaves_what_was_there(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"model": {"weight": torch.ones(3)}})

    def full_disk(state, stream):
        stream.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(2, {"model": {"weight": torch.zeros(3)}})
    assert torch.equal(checkpoints.latest()["model"]["weight"], torch.ones(3))


def test_a_pickled_checkpoint_is_not_executed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    torch.save({"format": 1, "step": 9, "model": Curves}, tmp_path / "checkpoints" / "step-0000000009.pt")
    assert checkpoints.latest() is None


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_loss_that_is_no_number_is_named_with_its_step(run, tmp_path, log_every):
    params = {"spoil": {"loss_itm": (3, float("nan"))}, "log_every": log_every, "clip_norm": 1.0}
    with pytest.raises(UserError, match=r"loss_itm became nan at step 3 of pretrain: lower pretrain\.schedule\.lr"):
        run("a", checkpoint={"steps": 1}, **params)
    saved = Checkpoints(tmp_path / "a/checkpoints").latest()
    assert saved is None or all(tensor.isfinite().all() for tensor in saved["model"].values())


def test_too_few_pictures_for_a_batch(run):
    with pytest.raises(UserError, match=r"holds 13 training samples, fewer than pretrain\.batch_size 16"):
        run("a", batch_size=16)


def test_max_steps_ends_early_and_the_curves_say_so(run, tmp_path):
    _, outcome = run("a", max_steps=5, log_every=2)
    assert [point["step"] for point in outcome.history] == [2, 3, 4, 5]  # every 2, the epoch's end, the last
    table = (tmp_path / "a/curves/plots/metrics/train/loss.tsv").read_text().splitlines()
    assert table[0].split("\t") == ["step", "loss"]
    assert [line.split("\t")[0] for line in table[1:]] == ["2", "3", "4", "5"]
    assert json.loads((tmp_path / "a/curves/metrics.json").read_text())["step"] == 5


def test_several_threads_sum_gradients_in_one_order(shards, pretrain_params, tmp_path):
    """The gradient of rows that are read many times over, which threads would add up as they come."""

    class Gathering:
        label = "pretrain"
        weights: ClassVar = {}

        def __init__(self, params):
            self.data = PretrainingTask(params, shards).data
            torch.manual_seed(0)
            self.model = nn.Embedding(64, 512)

        def losses(self, model, images, batch, alpha, generator):
            read = model.weight[torch.arange(8192) % 61].square() * torch.linspace(0.1, 3, 8192)[:, None]
            assert torch.are_deterministic_algorithms_enabled()
            return {"loss_a": read.mean() + images.mean() * 0}

        def validate(self):
            return {}

        def score(self, metrics):
            return None

    params = pretrain_params(num_threads=4, epochs=3)
    states = []
    for name in "ab":
        task = Gathering(params)
        fit(task, params, tmp_path / name)
        states.append(task.model.weight.detach().clone())
    assert torch.equal(*states)
    assert not torch.are_deterministic_algorithms_enabled()


def test_clipping_bounds_the_gradients(run, monkeypatch):
    norms = []
    original = torch.optim.AdamW.step

    def watch(self, *arguments):
        grads = [weight.grad for group in self.param_groups for weight in group["params"]]
        assert all(grad is not None for grad in grads), "every trained weight gets a gradient (DDP waits for it)"
        norms.append(float(torch.stack([grad.norm() for grad in grads]).norm()))
        return original(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", watch)
    run("free")
    free, norms[:] = max(norms), []
    run("clipped", clip_norm=free / 10)
    assert max(norms) == pytest.approx(free / 10, rel=1e-3)


def test_bfloat16_trains(run):
    _, outcome = run("a", precision="bfloat16")
    _, exact = run("b")
    assert outcome.history[0]["train/loss"] != exact.history[0]["train/loss"]
    assert outcome.history[0]["train/loss"] == pytest.approx(exact.history[0]["train/loss"], rel=0.05)


def test_only_biases_and_one_dimensional_weights_do_not_decay():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 3)
            self.norm = nn.LayerNorm(3)
            self.positions = nn.Parameter(torch.zeros(1, 4, 3))
            self.temp = nn.Parameter(torch.tensor(0.07))
            self.teacher = nn.Linear(2, 3).requires_grad_(False)

    model = Model()
    decayed, kept = make_optimizer(model, TrainingParams(weight_decay=0.02)).param_groups
    assert decayed["weight_decay"] == 0.02
    assert kept["weight_decay"] == 0.0
    assert {id(weight) for weight in decayed["params"]} == {
        id(model.linear.weight),
        id(model.positions),
        id(model.temp),
    }
    assert {id(weight) for weight in kept["params"]} == {id(model.linear.bias), *map(id, model.norm.parameters())}


def test_the_best_epoch_is_kept_and_survives_a_stop(shards, task, pretrained, finetune_params, tmp_path):
    params = finetune_params(epochs=3, checkpoint={"steps": 1}).runs["tiny"]
    scores = [1.0, 5.0, 2.0]

    def go(name, stop_at=None):
        retrieval = RetrievalTask(params, "tiny", task / "train", task / "val", pretrained / "weights")
        wrapped = Interrupted(retrieval, stop_at=stop_at)
        at_epoch = []

        def validate():
            epoch = done[name]
            done[name] += 1
            at_epoch.append({key: value.clone() for key, value in retrieval.model.state_dict().items()})
            return {"r_mean": scores[epoch]}

        wrapped.validate = validate
        try:
            return retrieval, fit(wrapped, params, tmp_path / name), at_epoch
        except StoppedError:
            return None, None, at_epoch

    done = {"whole": 0, "stopped": 0}
    whole, outcome, at_epoch = go("whole")
    assert outcome.best == {"score": 5.0, "epoch": 1.0}
    kept = whole.model.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in at_epoch[1].items())
    assert not all(torch.equal(kept[name], value) for name, value in at_epoch[2].items())

    steps = outcome.steps // 3
    assert go("stopped", stop_at=2 * steps + 1)[1] is None  # in the third epoch, after the best
    resumed, again, _ = go("stopped")
    assert again.best == outcome.best
    assert again.history == outcome.history
    assert states_equal(whole.model, resumed.model)
