"""Time, counts and peak memory of the data stages over Flickr8k: 8,000 photographs, 40,000 captions.

Run by `make bench`. Reads the photographs from ../shared/data/flickr8k (or VLP_SHARED), writes to a temporary folder.
Peak memory is that of the largest single process of a stage (the kernel's high-water mark of resident memory).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("VLP_SHARED", ROOT.parent / "shared")) / "data" / "flickr8k"


def run(arguments: list[str]) -> tuple[float, float]:
    """Run `vlp` with `arguments`; returns wall seconds and the largest process's peak in MiB."""
    started = time.perf_counter()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-m", "pipelines.cli", *arguments], dict(os.environ))
    _, status, usage = os.wait4(pid, 0)
    if status != 0:
        sys.exit(f"vlp {' '.join(arguments)} failed")
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def main() -> None:
    """Print one line a stage."""
    if not SHARED.is_dir():
        print(f"skipped: {SHARED} is not there")
        return
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        params = ["--params", str(ROOT / "pipelines/recipes/flickr8k.yaml"), "--set", f"runtime.work={data / 'work'}"]
        paths = {name: str(data / name) for name in ("raw", "tasks", "clean", "unique", "shards", "validation")}
        stages = {
            "download": ["--source", "flickr8k", "--input", str(SHARED), "--raw", str(data / "raw" / "flickr8k")],
            "prepare_tasks": ["--task", "retrieval", "--input", str(SHARED), "--tasks", str(data / "tasks/retrieval")],
            "clean": ["--raw", paths["raw"], "--clean", paths["clean"]],
            "deduplicate": ["--clean", paths["clean"], "--tasks", paths["tasks"], "--unique", paths["unique"]],
            "shard": ["--unique", paths["unique"], "--shards", paths["shards"]],
            "validate": [part for name, path in paths.items() for part in (f"--{name}", path)],
        }
        out = {"download": data / "raw/flickr8k", "clean": data / "clean", "deduplicate": data / "unique"}
        out |= {"shard": data / "shards"}
        print(f"{'stage':14}{'seconds':>9}{'peak MiB':>10}{'pictures':>10}{'captions':>10}")
        for stage, options in stages.items():
            seconds, peak = run(["run", stage, *options, *params])
            counts = ""
            if stage in out:
                manifest = json.loads((out[stage] / "manifest.json").read_text())
                counts = f"{manifest['rows']:>10,}{manifest['captions']:>10,}"
            print(f"{stage:14}{seconds:>9.1f}{peak:>10.0f}{counts}", flush=True)


if __name__ == "__main__":
    main()
