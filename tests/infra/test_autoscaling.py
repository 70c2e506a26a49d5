"""Ray's own autoscaler: a training brings two workers to a cluster that has none, and they leave when it is done.

The scaling settings are those of the file that `vlp launch aws` renders; machines are processes that Ray's
FakeMultiNodeProvider starts, and minutes pass faster.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from components.data.tokenizer import train_tokenizer
from pipelines.launch import local, render
from pipelines.launch.settings import load_clusters
from pipelines.params import read_yaml
from tests.training.conftest import MODEL, TRAINING, write_records

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 180.0  # seconds
HASTE = 100  # the rendered ten minutes without work become six seconds

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

# writes how many workers there are, whenever that changes; it asks for nothing that a worker could give. Into a file
# of its own, because Ray's autoscaler reports on every driver's standard output, whatever `log_to_driver` says
WATCH = """
import sys, time, ray
ray.init(log_to_driver=False)
seen = open(sys.argv[1], "a", buffering=1)
last = None
while True:
    workers = sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
    if workers != last:
        seen.write(f"{workers}\\n")
    last = workers
    time.sleep(0.1)
"""


def scaled_as_launched(address, head):
    """The cluster file of `vlp launch aws`, with processes for machines. A worker is one core, for want of GPUs."""
    from ray.autoscaler._private.util import prepare_config

    settings = load_clusters(ROOT / "infra/clusters.yaml")
    launched = render.aws(settings, {settings.aws.worker: {"CPU": 1}})
    kinds = launched["available_node_types"]
    kinds["ray.head.default"] = kinds.pop("head")  # the name that the provider gives its head
    for kind in kinds.values():
        kind["node_config"] = {}
    return prepare_config(
        {
            "cluster_name": launched["cluster_name"],
            "max_workers": launched["max_workers"],
            "idle_timeout_minutes": launched["idle_timeout_minutes"] / HASTE,
            "available_node_types": kinds,
            "head_node_type": "ray.head.default",
            # by its module: Ray's wheel lacks the defaults that its short name `fake_multinode` would read
            "provider": {
                "type": "external",
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "gcs_address": address,
                "head_node_id": head,
                "launch_multiple": True,
            },
            "auth": {},
            "file_mounts": {},
            "cluster_synced_files": [],
            **{f"{step}_commands": [] for step in ("initialization", "setup", "head_setup", "worker_setup")},
            **{f"{node}_start_ray_commands": [] for node in ("head", "worker")},
        }
    )


@pytest.fixture
def folder(tmp_path):
    captions = write_records(tmp_path / "shards", 13)
    train_tokenizer(lambda: iter(captions), 80, 1).save(tmp_path / "shards/tokenizer.json")
    content = read_yaml(ROOT / "params.yaml")
    content["pretrain"] = TRAINING | {"model": MODEL, "num_workers": 2}
    YAML().dump(content, tmp_path / "params.yaml")
    return tmp_path


@pytest.fixture
def given(folder):
    """The environment that runs use a cluster with, which is a head alone."""
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

    port = local._free_port()
    address = f"127.0.0.1:{port}"
    (folder / "token").write_text(secrets.token_hex(32))
    (folder / "cluster.json").write_text(json.dumps(scaled_as_launched(address, FAKE_HEAD_NODE_ID)))
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "RAY_ADDRESS": address}
    names = {
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_enable_autoscaler_v2": "1",  # as `ray up` and KubeRay start it
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "PYTHONPATH": str(ROOT),
    }
    log = folder / "head.log"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        options = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
        options += [f"--autoscaling-config={folder / 'cluster.json'}", f"--object-store-memory={80 << 20}"]
        head = local._start(folder, options, given, log)
    try:
        local._wait_for(log, head)
        yield given | {"VLP_RUNTIME_RAY_ADDRESS": address, "VLP_RUNTIME_WORK": str(folder / "work")}
    finally:
        local._end(head)


def test_two_workers_come_for_a_training_and_leave_when_it_is_done(folder, given):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **given}
    seen = folder / "seen"
    seen.touch()
    with (folder / "watch.log").open("wb") as log:
        command = [sys.executable, "-c", WATCH, str(seen)]
        watch = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    def wait_for(met):
        until = time.monotonic() + PATIENCE
        # a line may be half written: only what ends one counts
        while not met(workers := [int(line) for line in seen.read_text().split("\n")[:-1]]):
            assert watch.poll() is None, (folder / "watch.log").read_text()[-3000:]
            assert time.monotonic() < until, f"{workers} workers\n{(folder / 'head.log').read_text()[-3000:]}"
            time.sleep(0.05)
        return workers

    try:
        assert wait_for(bool) == [0]
        command = [str(Path(sys.executable).with_name("vlp")), "run", "pretrain"]
        command += ["--shards", "shards", "--weights", "weights", "--curves", "curves"]
        run = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        assert run.returncode == 0, run.stderr[-3000:]
        workers = wait_for(lambda workers: workers[-1] == 0 and len(workers) > 1)
    finally:
        watch.kill()
        watch.wait()
    assert max(workers) == 2
    assert sorted(set(workers)) in ([0, 2], [0, 1, 2])
    assert json.loads((folder / "weights/metrics.json").read_text())["steps"] == 6
