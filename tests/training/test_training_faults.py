"""Checkpoints elsewhere, and trainings that cannot save, must leave, or find another training's checkpoints."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from components.io.errors import UserError
from components.io.storage import FolderStorage, open_storage
from components.training.albef_tasks import PretrainingTask
from components.training.checkpoints import Checkpoints
from components.training.loop import fit
from components.training.protocol import Worker
from components.training.saving import LeavingError
from components.training.uploads import Uploads, complete, fetch

pytest_plugins = ["tests.buckets"]
ROOT = Path(__file__).resolve().parents[2]


class StoppedError(Exception):
    """The plug is pulled."""


@pytest.fixture
def run(shards, pretrain_params, tmp_path):
    def go(name, *, before=None, worker=None, data=None, **changes):
        params = pretrain_params(**changes)
        task = PretrainingTask(params, data or shards)
        losses, state = task.losses, {"step": -1}

        def watched(*arguments):
            state["step"] += 1
            if before is not None:
                before(state["step"])
            return losses(*arguments)

        task.losses = watched
        return fit(task, params, tmp_path / name, worker)

    return go


def stop_at(step):
    def stop(now):
        if now == step:
            raise StoppedError

    return stop


# -- elsewhere


def test_a_training_whose_machine_is_lost_goes_on_from_the_bucket(run, bucket, tmp_path, capsys):
    expected = run("whole/run")
    place = {"checkpoint": {"steps": 1, "storage_path": f"s3://{bucket}/trainings"}}
    with pytest.raises(StoppedError):
        run("first/run", before=stop_at(4), **place)
    (tmp_path / "first").rename(tmp_path / "gone")
    names = sorted(entry.name for entry in open_storage(f"s3://{bucket}/trainings/first-run").list())
    newest = "step-0000000004.pt"
    assert {newest, f"{newest}.json"} <= set(names)
    assert len(names) <= 4, "the newest two and their notes"
    outcome = run("first/run", before=stop_at(3), **place)  # two more steps are left
    assert outcome.history == expected.history
    assert "damaged" not in capsys.readouterr().err


def test_half_copied_and_altered_checkpoints_are_passed_over(tmp_path, capsys):
    storage = FolderStorage(tmp_path / "bucket")
    for step in (1, 2, 3):
        uploads = Uploads(storage, 9)
        Checkpoints(tmp_path / "here", 9, uploads).save(step, {"training": {}, "value": torch.tensor(step)})
        uploads.close()
    (tmp_path / "bucket/step-0000000003.pt.json").unlink()  # its copy was still going on
    altered = tmp_path / "bucket/step-0000000002.pt"
    altered.write_bytes(altered.read_bytes()[:-9] + b"123456789")
    assert sorted(complete(storage)) == ["step-0000000001.pt", "step-0000000002.pt"]
    uploads = Uploads(storage, 9)
    state = Checkpoints(tmp_path / "there", 9, uploads).latest()
    uploads.close()
    assert state["step"] == 1
    assert "step-0000000002.pt is damaged" in capsys.readouterr().err
    with pytest.raises(UserError, match="is not the file that was copied there"):
        fetch(storage, "step-0000000002.pt", tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


class Refusing(FolderStorage):
    """A storage that refuses so many times."""

    def __init__(self, folder, times):
        super().__init__(folder)
        self.left, self.refused = times, threading.Event()

    def upload(self, path, name):
        if self.left:
            self.left -= 1
            self.refused.set()
            raise UserError(f"{self.place}/{name} cannot be used (SlowDown)")
        super().upload(path, name)


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr("components.training.uploads.FIRST_WAIT", 0.01)
    monkeypatch.setattr("components.training.uploads.LONGEST_WAIT", 0.02)


def test_a_storage_that_refuses_a_while_gets_the_newest_in_the_end(tmp_path, capsys, short_waits):
    storage = Refusing(tmp_path / "bucket", 5)
    uploads = Uploads(storage, 2)
    checkpoints = Checkpoints(tmp_path / "here", 2, uploads)
    checkpoints.save(1, {"training": {}})
    assert storage.refused.wait(10)
    for step in (2, 3, 4):
        checkpoints.save(step, {"training": {}})
    uploads.close()
    assert storage.left == 0
    assert "step-0000000004.pt" in complete(storage)
    err = capsys.readouterr().err
    assert err.count("is not copied yet") == 1, "said once, not at every try"
    assert "could not be copied" not in err


def test_what_could_not_be_copied_is_said_and_harms_nothing(run, tmp_path, capsys, monkeypatch, short_waits):
    monkeypatch.setattr("components.training.uploads.PATIENCE", 0.2)
    storage = Refusing(tmp_path / "bucket", 10**9)
    before = set(threading.enumerate())
    uploads = Uploads(storage, 2, patience=0.2)
    (thread,) = set(threading.enumerate()) - before
    Checkpoints(tmp_path / "here", 2, uploads).save(1, {"training": {}})
    uploads.close()
    thread.join(60)
    assert not thread.is_alive(), "what is given up is not tried again"
    assert re.search(r"step-0000000001.pt could not be copied to .*bucket within 0 s", capsys.readouterr().err)


# -- what cannot be written


def full_disk(monkeypatch, steps):
    save, count = torch.save, {"now": 0}

    def failing(state, stream):
        count["now"] += 1
        if count["now"] in steps:
            stream.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, stream)

    monkeypatch.setattr(torch, "save", failing)


def test_a_disk_that_is_full_once_costs_one_checkpoint(run, tmp_path, monkeypatch, capsys):
    expected = run("whole")
    full_disk(monkeypatch, {2, 3})
    outcome = run("full", checkpoint={"steps": 1, "keep": 9})
    assert outcome.history == expected.history
    names = sorted(path.name for path in (tmp_path / "full/checkpoints").iterdir())
    assert names == [f"step-{step:010d}.pt" for step in (1, 4, 5, 6)]
    assert "after step 2 could not be written ([Errno 28] No space left on device): going on" in capsys.readouterr().err


def test_a_disk_that_stays_full_ends_the_training_and_earlier_checkpoints_stay(run, tmp_path, monkeypatch):
    full_disk(monkeypatch, set(range(2, 99)))
    with pytest.raises(
        UserError, match=r"after step 4 cannot be written to .* \(\[Errno 28\].*make room and run again"
    ):
        run("full", checkpoint={"steps": 1})
    assert [path.name for path in (tmp_path / "full/checkpoints").iterdir()] == ["step-0000000001.pt"]


def test_weights_that_are_no_numbers_do_not_take_the_place_of_good_ones(run, shards, pretrain_params, tmp_path):
    params = pretrain_params(checkpoint={"steps": 1, "keep": 1})
    task = PretrainingTask(params, shards)
    losses, steps = task.losses, []

    def spoilt(*arguments):
        parts = losses(*arguments)
        steps.append(1)
        if len(steps) == 3:  # a finite loss whose gradient is none
            weight = task.model.image_proj.bias if hasattr(task.model, "image_proj") else next(task.model.parameters())
            parts["loss_itm"] = parts["loss_itm"] + torch.sqrt(weight.sum() * 0)
        return parts

    task.losses = spoilt
    with pytest.raises(UserError, match=r"weights of pretrain are no longer numbers after step 3"):
        fit(task, params, tmp_path / "a")
    assert [path.name for path in (tmp_path / "a/checkpoints").iterdir()] == ["step-0000000002.pt"]


def test_a_corrupt_shard_ends_with_its_name(run, shards, tmp_path):
    import shutil

    shutil.copytree(shards, tmp_path / "damaged")
    path = tmp_path / "damaged/00001.arrow"
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(UserError, match=r"00001\.arrow"):
        run("a", data=tmp_path / "damaged")


# -- leaving


def test_a_machine_that_is_going_away_gets_its_checkpoint_first(run, tmp_path):
    expected = run("whole")
    leave = {"now": False}

    def before(step):
        leave["now"] = step == 3

    with pytest.raises(LeavingError, match=r"told to end after step 4 of 6 and has saved its checkpoint: run again"):
        run("left", before=before, worker=Worker(leaving=lambda: leave["now"]), log_every=5)
    assert [path.name for path in (tmp_path / "left/checkpoints").iterdir()] == ["step-0000000004.pt"]
    outcome = run("left", log_every=5)
    whole = run("whole-5", log_every=5)
    assert outcome.history == whole.history, "losses since the last point of the curves are in the checkpoint too"
    assert expected.history[-1]["train/lr"] == outcome.history[-1]["train/lr"]


VICTIM = """
import os, signal, sys
from pathlib import Path
from components.training.albef_tasks import PretrainingTask
from components.training.loop import fit
from components.training.pretrain import PretrainParams

params = PretrainParams.model_validate_json(sys.argv[1])
task = PretrainingTask(params, Path(sys.argv[2]))
losses, count = task.losses, []

def told(*arguments):
    count.append(1)
    if len(count) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return losses(*arguments)

task.losses = told
fit(task, params, Path(sys.argv[3]))
"""


@pytest.mark.slow
def test_sigterm_writes_a_checkpoint_and_then_ends_the_process(shards, pretrain_params, tmp_path):
    text = pretrain_params().model_dump_json(exclude_defaults=True)
    victim = subprocess.run(
        [sys.executable, "-c", VICTIM, text, str(shards), str(tmp_path / "a")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert victim.returncode == -signal.SIGTERM, victim.stderr
    assert Checkpoints(tmp_path / "a/checkpoints").latest()["step"] == 3


# -- another training


def test_checkpoints_of_another_training_are_refused_with_what_changed(run, shards, tmp_path):
    import shutil

    run("a", max_steps=3)
    with pytest.raises(
        UserError, match=r"another training: pretrain\.augment\.flip was True and is False; pretrain\.seed"
    ):
        run("a", seed=1, augment={"flip": False})
    shutil.copytree(shards, tmp_path / "other")
    manifest = tmp_path / "other/manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    with pytest.raises(UserError, match=r"the data were [0-9a-f]{12} and are [0-9a-f]{12}"):
        run("a", data=tmp_path / "other")
    run("a", max_steps=3, cache_mb=0, checkpoint={"steps": 5})  # how it runs may change


def test_more_epochs_go_on_with_the_longer_schedule_and_say_so(run, capsys):
    run("a")
    expected = run("anew", epochs=4)
    capsys.readouterr()
    outcome = run("a", epochs=4)
    said = capsys.readouterr().err
    assert "goes on from step 6 of a training of 2 epochs, now 4: the rate follows the longer schedule" in said
    assert len(outcome.history) == 12
    assert [point["train/lr"] for point in outcome.history[6:]] == [point["train/lr"] for point in expected.history[6:]]
    assert outcome.history[5]["train/lr"] < outcome.history[6]["train/lr"]
    with pytest.raises(UserError, match="holds a checkpoint after step 12, but pretrain is to end after 6"):
        run("a")


def test_where_rates_do_not_depend_on_the_length_more_epochs_give_what_a_training_anew_does(run):
    steps = {"schedule": {"kind": "step", "lr": 1e-3, "warmup_iterations": 0, "decay_epochs": 1}}
    run("a", epochs=2, **steps)
    assert run("a", epochs=3, **steps).history == run("anew", epochs=3, **steps).history
