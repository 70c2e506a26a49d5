"""A copy of the project whose stages are cheap, and a Prefect server for the tests."""

import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.quiet import be_quiet
from pipelines.stages import STAGES

be_quiet()
ROOT = Path(__file__).resolve().parents[2]


class Project:
    """A DVC repository with this project's graph and parameters, and stages that take no time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def repro(self) -> list[str]:
        """Run `dvc repro`, the stages in this process; the addresses of those that ran, in order."""
        import dvc.stage.run
        from dvc.repo import Repo

        log = self.folder / "ran.log"
        log.unlink(missing_ok=True)
        with pytest.MonkeyPatch.context() as patch, Repo(str(self.folder)) as repository:
            fake = runpy.run_path(str(self.folder / "fake_stage.py"))["fake"]
            patch.setattr(dvc.stage.run, "_run", lambda *_, env, **__: fake(env["DVC_STAGE"]))
            repository.reproduce()
        return log.read_text().split() if log.is_file() else []

    def replace(self, old: str, new: str, name: str = "params.yaml") -> None:
        """Change a text that stands once in a file."""
        path = self.folder / name
        text = path.read_text()
        assert text.count(old) == 1, f"{name} holds {old!r} {text.count(old)} times"
        path.write_text(text.replace(old, new))


def _is_shared_code(line: str) -> bool:
    """Whether the line is a code dep but no stage's own module: long lists of them cost DVC a second a stage."""
    dep = line.strip().removeprefix("- ")
    return dep.startswith(("components/", "models/")) and dep.removesuffix(".py").replace("/", ".") not in {
        stage.module for stage in STAGES.values()
    }


def make_project(folder: Path) -> Project:
    folder.mkdir(parents=True, exist_ok=True)
    modules = [stage.module.replace(".", "/") + ".py" for stage in STAGES.values()]
    for name in (*modules, "params.yaml", ".dvcignore", "data/.gitignore", ".dvc/config", ".dvc/.gitignore"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    fake = Path(__file__).with_name("fake_stage.py")
    shutil.copyfile(fake, folder / fake.name)
    text = (ROOT / "dvc.yaml").read_text().replace("vlp run ", f"{sys.executable} {fake.name} ")
    (folder / "dvc.yaml").write_text("".join(line for line in text.splitlines(True) if not _is_shared_code(line)))
    (folder / ".gitignore").write_text("/work/\n/ran.log\n")
    for command in (
        ["git", "init", "-q"],
        ["git", "add", "-A"],
        ["git", "-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit", "-qm", "copy"],
    ):
        subprocess.run(command, cwd=folder, check=True)
    return Project(folder)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A fresh copy, which is also the working folder."""
    made = make_project(tmp_path / "project")
    monkeypatch.chdir(made.folder)
    return made


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in which every stage has run; tests copy it again."""
    made = make_project(tmp_path_factory.mktemp("finished") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.folder)
        made.repro()
    return made.folder


@pytest.fixture
def finished_project(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy in which every stage has run, which is also the working folder."""
    shutil.copytree(finished, tmp_path / "project", symlinks=True)
    monkeypatch.chdir(tmp_path / "project")
    return Project(tmp_path / "project")


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server of its own with an empty database, for all tests of flows."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield
