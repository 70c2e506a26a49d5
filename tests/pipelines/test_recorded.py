"""What DVC notes of a stage is what ran: edits meanwhile leave it stale, and another clone runs its own code."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.io.errors import UserError
from pipelines import cli, stages

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PATIENCE = 120.0  # seconds


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Another clone of the project, which is the working folder; its corpus is small."""
    for package in ("pipelines", "components", "models"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", "params.yaml", ".dvcignore", ".dvc/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for old, new in (("train: 3000", "train: 310"), ("val: 200", "val: 40"), ("test: 200", "test: 40")):
        edit(tmp_path / "params.yaml", old, new)
    edit(tmp_path / "params.yaml", "  image_size: 96\n  relations", "  image_size: 80\n  relations")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, f"{path} holds {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new))


def edited_by(monkeypatch, address, *edits):
    """Run a stage as DVC would, while which files are edited."""
    monkeypatch.setenv("DVC_STAGE", address)
    monkeypatch.setattr(stages.Stage, "run", lambda *_, **__: [edit(Path(path), old, new) for path, old, new in edits])
    cli.run_stage(address, {}, Path("params.yaml"), [])


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        ([("params.yaml", "pictures_per_shard: 1000", "pictures_per_shard: 9")], "shard.pictures_per_shard"),
        ([("params.yaml", "  pictures_per_shard: 1000\n", "")], "shard.pictures_per_shard"),
        ([("params.yaml", "shard:\n", "shard: {\n")], "params.yaml"),
        ([("components/data/shard.py", "from __future__", "# x\nfrom __future__")], "components/data/shard.py"),
        ([("components/io/work.py", "from __future__", "# x\nfrom __future__")], "components/io/work.py"),
    ],
)
def test_an_edit_while_a_stage_runs_is_named(clone, monkeypatch, edits, named):
    with pytest.raises(UserError, match=rf"^{named}: edited while shard ran"):
        edited_by(monkeypatch, "shard", *edits)


def test_edits_that_the_stage_does_not_depend_on_are_nothing_to_it(clone, monkeypatch):
    others = [
        ("params.yaml", "top_k: 32", "top_k: 31"),
        ("params.yaml", "processes: 0", "processes: 1"),
        ("params.yaml", "pictures_per_shard: 1000", "pictures_per_shard: 1000 # as it was"),
        ("components/data/clean.py", "from __future__", "# x\nfrom __future__"),
    ]
    edited_by(monkeypatch, "shard", *others)


def test_by_hand_nothing_is_noted(clone, monkeypatch):
    monkeypatch.delenv("DVC_STAGE", raising=False)
    monkeypatch.setattr(stages.Stage, "run", lambda *_, **__: Path("params.yaml").unlink())
    cli.run_stage("clean", {}, Path("params.yaml"), [])


@pytest.mark.slow
def test_dvc_takes_no_outs_of_parameters_that_were_edited_meanwhile(clone):
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    command = [str(BIN / "dvc"), "repro", "synthesize"]
    run = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + PATIENCE
    while not list(Path("work/synthesize").glob("*/*")):
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)
    edit(Path("params.yaml"), "train: 310", "train: 311")
    _, said = run.communicate(timeout=PATIENCE)
    assert run.returncode != 0
    assert "vlp: synthesize.train: edited while synthesize ran" in said
    assert not Path("dvc.lock").exists(), "it is stale"


def test_in_another_clone_dvc_runs_that_clone_s_code(clone):
    edit(clone / "pipelines/cli.py", "Image-caption data to trained", "Another clone's way to trained")
    command = [str(BIN / "vlp"), "--help"]

    def said(**environment):
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    assert "Another clone's way" not in said()
    assert "Another clone's way" in said(DVC_STAGE="synthesize")
