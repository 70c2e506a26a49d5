"""Precision, memory, freezing: what must not change the results, and what may change them a little."""

import itertools

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from components.io.errors import UserError
from components.training.albef_tasks import PretrainingTask
from components.training.blocks import blocks_of, prepare_blocks
from components.training.data import PairData
from components.training.loop import fit
from components.training.optimisers import Stepper, make_optimizer
from components.training.settings import TrainingParams
from models.albef.config import AlbefConfig
from models.albef.vision import ImageEncoder

MODEL = {"image_size": 32, "patch_size": 16, "vision_width": 24, "vision_heads": 2, "text_width": 24, "text_heads": 2}


class StoppedError(Exception):
    """The plug is pulled."""


@pytest.fixture
def run(shards, pretrain_params, tmp_path):
    def go(name, *, frozen=(), stop_at=None, **changes):
        params = pretrain_params(**{"max_steps": 4} | changes)
        task = PretrainingTask(params, shards)
        task.frozen, losses, count = frozen, task.losses, itertools.count()

        def stopping(*arguments):
            if next(count) == stop_at:
                raise StoppedError
            return losses(*arguments)

        task.losses = stopping
        return task.model, fit(task, params, tmp_path / name)

    return go


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_recomputed_activations_change_nothing_dropout_included(run):
    dropout = {"model": {"text_dropout": 0.3}}
    plain, expected = run("plain", **dropout)
    recomputed, outcome = run("recomputed", activation_checkpointing=True, **dropout)
    assert outcome.history == expected.history
    assert all(torch.equal(value, weights(recomputed)[name]) for name, value in weights(plain).items())


def test_recomputing_keeps_fewer_activations_for_the_backward_pass():
    def kept(recomputed):
        torch.manual_seed(0)
        blocks = nn.Module()
        blocks.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3))
        prepare_blocks(blocks, compiled=False, recomputed=recomputed)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor.numel()) or tensor, lambda t: t
        ):
            hidden = torch.ones(4, 8, requires_grad=True)
            for layer in blocks.layers:
                hidden = layer(hidden)
        hidden.sum().backward()
        return sum(saved)

    assert kept(True) < kept(False) / 2


def test_only_the_innermost_blocks_are_taken_and_each_once():
    stage = nn.Module()
    stage.blocks = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model = nn.Module()
    model.layers = nn.ModuleList([stage])
    model.again = nn.Module()
    model.again.layer = nn.ModuleList([stage.blocks[0]])
    assert blocks_of(model) == [stage.blocks[0], stage.blocks[1]]


def test_compiled_blocks_compute_the_same_and_are_compiled_once_for_all(monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend=backend))
    torch._dynamo.reset()
    sizes = MODEL | {"vision_depth": 3, "vocab_size": 80, "mask_id": 4, "cls_id": 2, "sep_id": 3}
    encoder = ImageEncoder(AlbefConfig.model_validate(sizes))
    pictures = torch.randn(2, 3, 32, 32)
    expected, names = encoder(pictures), list(encoder.state_dict())
    prepare_blocks(encoder, compiled=True, recomputed=True)
    out = encoder(pictures)
    assert torch.allclose(out, expected, atol=1e-5)
    out.sum().backward()
    assert all(weight.grad is not None for weight in encoder.blocks.parameters())
    assert list(encoder.state_dict()) == names
    assert len(graphs) == 1, "three blocks need no more graphs than one"


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_stays_near_and_resumes_bit_for_bit(run, precision):
    _, exact = run("exact")
    half = {"precision": precision, "clip_norm": 1.0}
    _, outcome = run("half", **half)
    assert outcome.history != exact.history
    assert outcome.history[0]["train/loss"] == pytest.approx(exact.history[0]["train/loss"], rel=0.05)
    with pytest.raises(StoppedError):
        run("stopped", stop_at=2, checkpoint={"steps": 1}, **half)
    _, resumed = run("stopped", **half)
    assert resumed.history == outcome.history


def test_an_overflow_is_stepped_over_and_the_scale_falls_and_is_kept():
    model = nn.Linear(2, 1)
    params = TrainingParams(precision="float16")
    stepper = Stepper(make_optimizer(model, params), params, torch.device("cpu"))
    before = weights(model)
    stepper.backward(model(torch.full((1, 2), 1e36)).sum())
    stepper.step(0.1)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert stepper.scaler.get_scale() == 2.0**15
    other = Stepper(make_optimizer(model, params), params, torch.device("cpu"))
    other.load_state_dict(stepper.state_dict())
    assert other.scaler.get_scale() == 2.0**15
    stepper.check("pretrain", 1)
    for _ in range(40):
        stepper.backward(model(torch.full((1, 2), torch.inf)).sum())
        stepper.step(0.1)
    with pytest.raises(UserError, match="float16 gradients of pretrain are not finite at any scale at step 41"):
        stepper.check("pretrain", 41)


class Mean:
    """A linear task whose loss is a mean, so that a batch's parts cannot matter."""

    label, weights, shared_draws = "pretrain", {}, False

    def __init__(self, params, shards):
        self.data: PairData = PretrainingTask(params, shards).data
        torch.manual_seed(0)
        self.model = nn.Linear(3 * 32 * 32, 2)
        self.sizes = []

    def losses(self, model, images, batch, alpha, generator):
        self.sizes.append(len(images))
        return {"loss": model(images.flatten(1)).square().mean()}

    def validate(self):
        return {}

    def score(self, metrics):
        return None


def test_a_batch_in_parts_gives_the_gradients_of_the_whole(shards, pretrain_params, tmp_path):
    histories, tasks = [], []
    for parts in (1, 3):
        params = pretrain_params(accumulate=parts, batch_size=6, clip_norm=0.5)
        task = Mean(params, shards)
        histories.append([point["train/loss"] for point in fit(task, params, tmp_path / str(parts)).history])
        tasks.append(task)
    assert [set(task.sizes) for task in tasks] == [{6}, {2}]
    assert histories[1] == pytest.approx(histories[0], rel=1e-5)


def test_parts_must_be_equal_and_hold_a_negative():
    with pytest.raises(ValidationError, match="cannot be cut into accumulate 3 equal parts"):
        TrainingParams(batch_size=8, accumulate=3)
    with pytest.raises(ValidationError, match="in accumulate 4 parts leaves one pair"):
        TrainingParams(batch_size=8, num_workers=2, accumulate=4)


def test_towers_rest_for_the_first_epochs_then_learn(run, shards, pretrain_params):
    frozen = ("visual_encoder.", "text_encoder.bert.embeddings.")
    start = weights(PretrainingTask(pretrain_params(), shards).model)
    resting, _ = run("resting", frozen=frozen, freeze_epochs=1, max_steps=3)
    learning, _ = run("learning", frozen=frozen, freeze_epochs=1, max_steps=6)  # into the second epoch

    def moved(model):
        return {name for name, value in model.named_parameters() if not torch.equal(value, start[name])}

    student = {name for name, _ in resting.named_parameters() if not name.startswith("teacher.")}
    assert not any(name.startswith(frozen) for name in moved(resting))
    assert "image_proj.weight" in moved(resting) or len(moved(resting) & student) > 5
    assert any(name.startswith("visual_encoder.") for name in moved(learning))
    assert all(not weight.requires_grad for name, weight in learning.named_parameters() if name.startswith("teacher."))


def test_freezing_what_a_task_does_not_have_is_refused(run):
    with pytest.raises(UserError, match=r"pretrain\.freeze_epochs is 1, but this task has no towers to freeze"):
        run("a", freeze_epochs=1)


def test_adam_takes_the_same_groups(run):
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(model, TrainingParams(optimizer="adam", weight_decay=0.1))
    assert type(optimizer) is torch.optim.Adam
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    _, outcome = run("adam", optimizer="adam")
    assert outcome.history[-1]["train/loss"] < outcome.history[0]["train/loss"]


def test_channels_last_computes_the_same(run):
    _, expected = run("plain")
    model, outcome = run("last", channels_last=True)
    assert model.visual_encoder.patch_embed.proj.weight.is_contiguous(memory_format=torch.channels_last)
    assert [point["train/loss"] for point in outcome.history] == pytest.approx(
        [point["train/loss"] for point in expected.history], rel=1e-4
    )
