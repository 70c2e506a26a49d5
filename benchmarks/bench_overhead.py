"""What it costs to have nothing to do: ``vlp --help`` (goal 0.5 s), ``dvc repro`` and the end-to-end flow (goal 30 s).

Times a copy of the project in which every stage has run, with stages that cost nothing; prints a table. The flow uses
the Prefect server that PREFECT_API_URL names, or starts one as ``vlp flow`` does.
"""

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def finished_project(folder):
    """The tests' project: the real graph, and stages that take no time."""
    spec = importlib.util.spec_from_file_location("project_for_tests", ROOT / "tests/pipelines/conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    project = module.make_project(folder)
    before = Path.cwd()
    os.chdir(folder)
    project.repro()
    os.chdir(before)
    return folder


def seconds(command, folder, times):
    # a relative PYTHONPATH would mean the copy's own, partial packages
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    measured = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run(command, cwd=folder, env=environment, check=True, **quiet)
        measured.append(time.perf_counter() - start)
    return measured


def main():
    with tempfile.TemporaryDirectory() as scratch:
        folder = finished_project(Path(scratch, "project"))
        rows = [
            ("vlp --help", [BIN / "vlp", "--help"], 5, 0.5),
            ("vlp run clean --help", [BIN / "vlp", "run", "clean", "--help"], 3, None),
            ("dvc repro, nothing to do", [BIN / "dvc", "repro"], 3, None),
            ("vlp flow end-to-end, nothing to do", [BIN / "vlp", "flow", "end-to-end"], 1, 30.0),
        ]
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print(f"{'':36} {'median s':>9} {'goal s':>7}")
        for name, command, times, goal in rows:
            median = statistics.median(seconds([str(word) for word in command], folder, times))
            print(f"{name:36} {median:9.2f} {'' if goal is None else f'{goal:7.1f}'}")


if __name__ == "__main__":
    main()
