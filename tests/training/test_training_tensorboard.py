"""TensorBoard's files beside the curves, where the package is installed; a sentence where it is not."""

import sys
from types import ModuleType

import pytest

from components.io.errors import UserError
from components.training.albef_tasks import PretrainingTask
from components.training.loop import fit


class Writer:
    """Holds what TensorBoard's writer is given."""

    boards: dict

    def __init__(self, folder):
        self.points, self.written = [], []
        self.boards[folder] = self

    def add_scalar(self, name, value, step):
        self.points.append((step, name, value))

    def flush(self):
        self.written = list(self.points)


@pytest.fixture
def boards(monkeypatch):
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = type("Writer", (Writer,), {"boards": {}})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return module.SummaryWriter.boards


def points(history):
    return [(point["step"], name, value) for point in history for name, value in point.items() if name != "step"]


def test_the_board_gets_the_curves_whole_after_a_resumption_too(boards, shards, pretrain_params, tmp_path):
    params = {"tensorboard": True, "checkpoint": {"steps": 1}}
    for stop in (3, None):
        made = pretrain_params(max_steps=stop, **params)
        outcome = fit(PretrainingTask(made, shards), made, tmp_path / "run")
        board = boards[str(tmp_path / "run/tensorboard")]
        assert board.written == points(outcome.history)
    assert len(outcome.history) == 6
    assert not (tmp_path / "run/curves/tensorboard").exists(), "clock times are no part of an out"


def test_the_true_package_writes_its_files(shards, pretrain_params, tmp_path):
    pytest.importorskip("tensorboard", reason="optional, not in the lock: .venv/bin/uv pip install tensorboard")
    params = pretrain_params(tensorboard=True, max_steps=3)
    outcome = fit(PretrainingTask(params, shards), params, tmp_path / "run")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    found = [(event.step, pytest.approx(event.value)) for event in events.Scalars("train/loss")]
    assert [(point["step"], point["train/loss"]) for point in outcome.history] == found


def test_without_the_package_a_sentence_says_so_before_the_first_step(monkeypatch, shards, pretrain_params, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    params = pretrain_params(tensorboard=True)
    with pytest.raises(
        UserError, match=r"^tensorboard: true needs the package tensorboard.*uv pip install tensorboard"
    ):
        fit(PretrainingTask(params, shards), params, tmp_path / "run")
    assert not (tmp_path / "run/curves").exists()
