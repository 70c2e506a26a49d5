"""Data stages on a Ray cluster: the outputs of two nodes are those of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.io.errors import UserError
from components.io.spread import spread
from tests.data.making import encoded, folder_bytes, photo, record, record_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.ray
def test_two_nodes_give_the_outputs_of_one_process(tmp_path):
    pictures = [encoded(photo(seed % 9, (160, 120)), quality=60 + seed) for seed in range(14)]
    records = [record("web", 2 * n, data, [f"a red thing {n}", f"thing {n % 9}"]) for n, data in enumerate(pictures)]
    record_folder(tmp_path / "raw" / "web", records, per_file=3)
    sizes = {"width": 160, "height": 120}
    test = [record("demo", n, encoded(photo(n, (160, 120))), ["x"], url=f"{n}.jpg", **sizes) for n in (3, 50)]
    record_folder(tmp_path / "tasks" / "demo" / "test", test, per_file=1, kind="task")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("two_nodes.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nodes: 2" in done.stdout
    assert "error: True" in done.stdout
    for stage in ("clean", "unique", "shards"):
        here, there = (folder_bytes(tmp_path / where / stage) for where in ("here", "cluster"))
        assert len(here) >= 4
        assert here == there


def test_no_cluster_at_the_address():
    with pytest.raises(UserError, match=r"runtime\.ray_address is 127\.0\.0\.1:1, where no Ray cluster answers"):
        list(spread(sorted, [([],)], ray_address="127.0.0.1:1"))
