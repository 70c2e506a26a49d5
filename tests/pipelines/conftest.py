"""A copy of the project whose stages are cheap, and a Prefect server for the tests."""

import contextlib
import importlib
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.quiet import be_quiet
from pipelines.stages import STAGES

be_quiet()
importlib.import_module("dvc")  # its log keeps the standard output of its first import, which a test may close
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
    for name in (
        *modules,
        "params.yaml",
        ".dvcignore",
        "data/.gitignore",
        "data/ablations/.gitignore",
        ".dvc/config",
        ".dvc/.gitignore",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    fake = Path(__file__).with_name("fake_stage.py")
    shutil.copyfile(fake, folder / fake.name)
    text = (ROOT / "dvc.yaml").read_text().replace("vlp run ", f"{sys.executable} -P {fake.name} ")
    (folder / "dvc.yaml").write_text("".join(line for line in text.splitlines(True) if not _is_shared_code(line)))
    (folder / ".gitignore").write_text("work/\n/ran.log\n")
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
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real `prefect server start` with an empty database, for all tests of flows; yields its API's address.

    Unlike Prefect's own test harness it runs the services that scheduled runs need, and they look often.
    """
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    home = tmp_path_factory.mktemp("prefect")
    environment = {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
        "PREFECT_SERVER_SERVICES_SCHEDULER_DEPLOYMENT_BATCH_SIZE": "20",
        "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT1S",
        "PREFECT_SERVER_UI_ENABLED": "false",
    }
    command = [str(Path(sys.executable).with_name("prefect")), "server", "start", "--port", str(port)]
    with (home / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_for(url + "/health", server, home / "server.log")
        with temporary_settings({PREFECT_API_URL: url}):
            yield url
    finally:
        stop(server)


def _wait_for(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the server answers."""
    until = time.monotonic() + 180
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a process that leads its own group, and what it started there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
