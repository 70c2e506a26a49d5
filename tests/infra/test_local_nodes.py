"""Three real Ray nodes on this machine: nobody without the token, no work on the head, a node lost in training."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from components.data.tokenizer import train_tokenizer
from components.io.errors import UserError
from pipelines.launch import local
from pipelines.params import read_yaml
from tests.training.conftest import MODEL, TRAINING, write_records

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
PATIENCE = 180.0  # seconds

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

# each worker notes its process; before the fifth step all wait until one of them is no longer there
TRAINING_RUN = """
import json, os, sys, time
from functools import partial
from pathlib import Path

from components.io.runtime import Runtime
from components.training.pretrain import PretrainParams

def train(params, shards, storage, worker):
    from components.training.albef_tasks import PretrainingTask
    from components.training.loop import fit
    starts = len(list(storage.glob(f"start-*-{worker.rank}")))
    partial_path = storage / f".start-{starts}-{worker.rank}"
    partial_path.write_text(f"{os.getpid()} {worker.world}")
    partial_path.rename(storage / partial_path.name[1:])
    task = PretrainingTask(params, shards)
    losses, steps = task.losses, []

    def watched(*arguments):
        steps.append(1)
        while len(steps) == 5 and not (storage / "lost").exists():
            time.sleep(0.05)
        return losses(*arguments)

    task.losses = watched
    outcome = fit(task, params, storage / "run", worker)
    return {"world": worker.world, "steps": len(steps), "history": outcome.history}

if __name__ == "__main__":
    import node_training  # by its name, not as __main__: the workers import it too
    from components.training.ray_launch import launch
    params, folder = PretrainParams.model_validate_json(sys.argv[2]), Path(sys.argv[3])
    call = partial(node_training.train, params, folder / "shards", folder / "training")
    result = launch(call, params, folder / "training", Runtime(ray_address=sys.argv[1]))
    (folder / "result.json").write_text(json.dumps(result))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("cluster")
    (made / "node_training.py").write_text(TRAINING_RUN)
    (made / "training").mkdir()
    captions = write_records(made / "shards", 13)
    train_tokenizer(lambda: iter(captions), 80, 1).save(made / "shards/tokenizer.json")
    return made


@pytest.fixture(scope="module")
def given(folder):
    """The environment of a cluster of three nodes, whose head looks for lost ones more often than by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_health_check_period_ms", "1000")
        patch.setenv("RAY_health_check_failure_threshold", "3")
        given = local.up(folder, 3)
    try:
        yield given
    finally:
        assert local.down(folder)
    assert local.running(folder) is None
    assert not local.down(folder), "and nothing is left to take down"


def environment(given):
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **given}


def wait_for(met, process):
    until = time.monotonic() + PATIENCE
    while not met():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < until, f"waited {PATIENCE} s in vain"
        time.sleep(0.05)


def test_the_cluster_runs_once_and_lets_nobody_in_without_its_token(folder, given):
    assert local.running(folder) == given
    assert (Path(given["RAY_AUTH_TOKEN_PATH"]).stat().st_mode & 0o777) == 0o600
    with pytest.raises(UserError, match="runs already"):
        local.up(folder, 1)
    (folder / "wrong").write_text("f" * 64)
    wrong = environment(given) | {"RAY_AUTH_TOKEN_PATH": str(folder / "wrong")}
    command = [sys.executable, "-c", "import ray, sys; ray.init(sys.argv[1])", given["RAY_ADDRESS"]]
    refused = subprocess.run(command, cwd=folder, env=wrong, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "token" in refused.stderr.lower()


def test_the_doctor_looks_at_every_node(folder, given, tmp_path):
    storage = tmp_path / "checkpoints"
    content = read_yaml(ROOT / "pipelines/recipes/demo.yaml")
    content["pretrain"]["checkpoint"] = {"storage_path": str(storage)}
    content["finetune"]["runs"]["retrieval"]["checkpoint"] = {"storage_path": "/proc/nowhere"}
    (tmp_path / "params.yaml").write_text(json.dumps(content))
    command = [sys.executable, "-c", "from pipelines.cli import main; main()", "doctor"]
    asked = subprocess.run(
        command, cwd=tmp_path, env=environment(given), capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert asked.returncode == 2, "one place cannot be written to, and this is no repository"
    for line in (
        f"ok   Ray cluster at {given['RAY_ADDRESS']}: 3 nodes",
        "ok   all nodes have the same versions as this machine",
        "ok   gloo: all 3 nodes reach each other",
        f"ok   {storage} can be written to from all nodes",
        "BAD  /proc/nowhere cannot be written to from node ",
    ):
        assert line in asked.stdout, asked.stdout + asked.stderr
    assert list(storage.iterdir()) == []


def test_a_training_goes_on_from_its_checkpoint_on_the_node_that_is_left(folder, given):
    params = TRAINING | {
        "model": MODEL,
        "epochs": 4,
        "num_workers": 2,
        "min_workers": 1,
        "max_failures": 1,
        "checkpoint": {"steps": 1},
    }
    training = folder / "training"
    driver = subprocess.Popen(
        [sys.executable, "node_training.py", given["RAY_ADDRESS"], json.dumps(params), str(folder)],
        cwd=folder,
        # Ray counts a lost node's cores for up to 20 s more, and asks so many times for as many workers as before
        env=environment(given) | {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "12"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        starts = [training / f"start-0-{rank}" for rank in range(2)]
        wait_for(lambda: all(path.exists() for path in starts), driver)
        wait_for(lambda: (training / "run/checkpoints/step-0000000004.pt").exists(), driver)
        pids = [int(path.read_text().split()[0]) for path in starts]
        _, *workers = json.loads((folder / local.STATE).read_text())["processes"]
        trees = [local._tree(node) for node in workers]
        homes = [next(place for place, tree in enumerate(trees) if pid in {one.pid for one in tree}) for pid in pids]
        assert sorted(homes) == [0, 1], "one on each worker, none on the head"
        lost = trees[homes[1]]
        for process in lost:  # a machine that loses its power: nobody says good-bye
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(lost, timeout=PATIENCE)
        (training / "lost").touch()
        _, said = driver.communicate(timeout=PATIENCE)
    finally:
        driver.kill()
    assert driver.returncode == 0, said[-3000:]
    result = json.loads((folder / "result.json").read_text())
    assert result["world"] == 1
    assert result["steps"] == STEPS - 4, "it went on from the checkpoint after the fourth step"
    assert [point["step"] for point in result["history"]] == list(range(1, STEPS + 1))
    assert all(math.isfinite(value) for point in result["history"] for value in point.values())
    assert (training / "start-1-0").exists()
    assert not (training / "start-2-0").exists(), "one failure was enough"
