"""Kill -9 at five moments of a training, then the same call again."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.io import work
from components.io.runtime import Runtime
from components.training.pretrain import pretrain

ROOT = Path(__file__).resolve().parents[2]

# what stands in the checkpoints' folder when the training is killed there; a checkpoint follows each step
MOMENTS = {
    "in a step": ["step-0000000001.pt", "step-0000000002.pt"],
    "after an update": ["step-0000000001.pt", "step-0000000002.pt"],
    "in a checkpoint": [".step-0000000003.pt.partial", "step-0000000001.pt", "step-0000000002.pt"],
    "before a checkpoint has its name": [".step-0000000003.pt.partial", "step-0000000001.pt", "step-0000000002.pt"],
    "before the weights are published": ["step-0000000005.pt", "step-0000000006.pt"],
}

# For each moment a fork of this process trains up to it, says so with a file, and waits to be killed. Forked, since
# imports take longer than all else; nothing has been computed before, so no thread is lost.
VICTIM = """
import json, os, signal, sys, time
import ray.train.torch
from pathlib import Path
import torch
from components.io import work
from components.io.runtime import Runtime
from components.training import albef_tasks, checkpoints, stage
from components.training.pretrain import PretrainParams, pretrain

folder, shards, params = Path(sys.argv[1]), Path(sys.argv[2]), PretrainParams.model_validate_json(sys.argv[3])
work.code_digest = lambda *_: "pinned"
calls = 0

def stop(home):
    (home / "there").touch()
    while True:
        signal.pause()

def third(owner, name, home, before=None):
    # the third call of a function ends the training: in its place, or after it
    real = getattr(owner, name)
    def counted(*arguments, **named):
        global calls
        calls += 1
        if calls == 3:
            if before is None:
                real(*arguments, **named)
            else:
                before(*arguments, **named)
            stop(home)
        return real(*arguments, **named)
    setattr(owner, name, counted)

def half(state, stream):
    stream.write(b"PK half a checkpoint")
    stream.flush()

def train(moment, home):
    if moment == "in a step":
        third(albef_tasks.PretrainingTask, "losses", home)
    elif moment == "after an update":
        third(torch.optim.AdamW, "step", home)
    elif moment == "in a checkpoint":
        third(torch, "save", home, half)
    elif moment == "before a checkpoint has its name":
        third(os, "fsync", home)
    else:
        stage.publish = lambda *_: stop(home)
    outs = {"weights": home / "weights", "curves": home / "curves"}
    pretrain(params, shards=shards, **outs, runtime=Runtime(work=home / "work"))
    os._exit(3)

for number, moment in enumerate(json.loads(sys.argv[4])):
    home = folder / str(number)
    home.mkdir()
    child = os.fork()
    if child == 0:
        train(moment, home)
    while not (home / "there").exists():
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            sys.exit(f"{moment}: the training ended before it was killed ({status})")
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
"""


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def killed(shards, tmp_path_factory):
    """A folder for each moment, with what a training that was killed then has left; and the parameters."""
    from components.training.pretrain import PretrainParams
    from tests.training.conftest import MODEL, TRAINING

    folder = tmp_path_factory.mktemp("killed")
    params = PretrainParams.model_validate(TRAINING | {"model": MODEL, "checkpoint": {"steps": 1}})
    text = json.dumps(json.loads(params.model_dump_json(exclude_defaults=True)))
    command = [sys.executable, "-c", VICTIM, str(folder), str(shards), text, json.dumps(list(MOMENTS))]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"after {time.monotonic() - started:.0f} s: {done.stderr[-3000:]}"
    return folder, params


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MOMENTS)), ids=list(MOMENTS))
def test_a_killed_pretraining_goes_on_and_leaves_the_same_bytes(number, killed, pretrained, shards, capfd, monkeypatch):
    monkeypatch.setattr(work, "code_digest", lambda *_: "pinned")  # who edits a file meanwhile must not fail this test
    folder, params = killed
    home = folder / str(number)
    (storage,) = (home / "work/pretrain").iterdir()
    assert not (home / "weights").exists()
    names = sorted(path.name for path in (storage / "checkpoints").iterdir() if path.suffix in (".pt", ".partial"))
    assert names == list(MOMENTS.values())[number]

    capfd.readouterr()
    outs = home / "weights", home / "curves"
    pretrain(params, shards=shards, weights=outs[0], curves=outs[1], runtime=Runtime(work=home / "work"))
    assert "pretrain: 6/6 steps" in capfd.readouterr().err
    assert list((home / "work/pretrain").iterdir()) == [storage]
    whole = content(pretrained / "weights") | {"lineage.json": b""}
    assert content(outs[0]) | {"lineage.json": b""} == whole
    assert content(outs[1]) == content(pretrained / "curves")
