"""Kill -9 in the middle of writing a checkpoint, then the same call again."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.io import work
from components.io.runtime import Runtime
from components.training.pretrain import pretrain

ROOT = Path(__file__).resolve().parents[2]

# pre-trains as it is told; at the third checkpoint it writes half of it, says so with a file, and waits to be killed
VICTIM = """
import signal, sys
from pathlib import Path
import torch
from components.io import work
from components.io.runtime import Runtime
from components.training.pretrain import PretrainParams, pretrain

folder, shards, params = Path(sys.argv[1]), Path(sys.argv[2]), PretrainParams.model_validate_json(sys.argv[3])
saves, save = 0, torch.save

def save_half(state, stream):
    global saves
    saves += 1
    if saves < 3:
        return save(state, stream)
    stream.write(b"PK half a checkpoint")
    stream.flush()
    (folder / "half").touch()
    signal.pause()

torch.save = save_half
work.code_digest = lambda *_: "pinned"
outs = {"weights": folder / "weights", "curves": folder / "curves"}
pretrain(params, shards=shards, **outs, runtime=Runtime(work=folder / "work"))
"""


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_killed_pretraining_goes_on_and_leaves_the_same_bytes(
    pretrained, shards, pretrain_params, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(work, "code_digest", lambda *_: "pinned")  # who edits a file meanwhile must not fail this test
    params = pretrain_params(checkpoint={"steps": 1})
    text = json.dumps(json.loads(params.model_dump_json(exclude_defaults=True)))
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, str(tmp_path), str(shards), text], cwd=ROOT)
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "half").exists():
            assert victim.poll() is None, "the training ended before it was killed"
            assert time.monotonic() < deadline, "the training wrote no third checkpoint"
            time.sleep(0.05)
    finally:
        victim.kill()
    assert victim.wait() == -signal.SIGKILL
    (storage,) = (tmp_path / "work/pretrain").iterdir()
    assert not (tmp_path / "weights").exists()
    names = sorted(path.name for path in (storage / "checkpoints").iterdir())
    assert names == [".step-0000000003.pt.partial", "step-0000000001.pt", "step-0000000002.pt"]

    capfd.readouterr()
    outs = tmp_path / "weights", tmp_path / "curves"
    pretrain(params, shards=shards, weights=outs[0], curves=outs[1], runtime=Runtime(work=tmp_path / "work"))
    assert "pretrain: 6/6 steps" in capfd.readouterr().err
    assert list((tmp_path / "work/pretrain").iterdir()) == [storage]
    whole = content(pretrained / "weights") | {"lineage.json": b""}
    assert content(outs[0]) | {"lineage.json": b""} == whole
    assert content(outs[1]) == content(pretrained / "curves")
