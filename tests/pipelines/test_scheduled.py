"""Deployments on a real Prefect server and worker: a schedule, an overlap, a machine that dies, the run after."""

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from components.io.errors import UserError
from pipelines import schedule as module
from pipelines.params import read_yaml
from pipelines.schedule import schedule
from tests.data.web import Handler, serving
from tests.pipelines.server import eventually, task_runs

ROOT = Path(__file__).resolve().parents[2]
SILENT_SECONDS = 25  # Prefect's heartbeats are at least 30 s apart, so this is for runs that beat once

pytestmark = [pytest.mark.slow, pytest.mark.prefect]


@contextlib.contextmanager
def worker(folder: Path, url: str, log: Path) -> Iterator[psutil.Process]:
    """`prefect worker start` in a folder that is not the project's."""
    environment = {
        **os.environ,
        "PREFECT_API_URL": url,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
    }
    prefect = str(Path(sys.executable).with_name("prefect"))
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [prefect, "worker", "start", "--pool", "vlp"], cwd=folder, env=environment, stdout=stream, stderr=stream
        )
    here = psutil.Process(process.pid)
    try:
        yield here
    finally:
        kill(here)
        process.wait()


def kill(process: psutil.Process) -> None:
    """SIGKILL to the process and all below it at once, as when a machine dies."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


@pytest.fixture
def deployed(finished_project, prefect_server):
    """The project's deployments, the nightly one every few seconds; and impatience with silent runs."""
    for package in ("pipelines", "components", "models"):  # the rest of what a clone holds
        shutil.copytree(ROOT / package, package, dirs_exist_ok=True)
    Path("infra").mkdir()
    described = read_yaml(ROOT / module.DEPLOYMENTS)
    nightly = described["deployments"][0]
    nightly["schedules"] = [{"interval": 4, "slug": "nightly"}]
    YAML().dump(described, module.DEPLOYMENTS)
    automations = read_yaml(ROOT / module.AUTOMATIONS)
    automations["automations"][0]["trigger"]["within"] = SILENT_SECONDS
    YAML().dump(automations, module.AUTOMATIONS)
    finished_project.replace("pictures_per_shard: 1000", "pictures_per_shard: 999")
    Path("hold").write_text("shard")
    return finished_project


def test_a_schedule_an_overlap_and_a_dead_machine(deployed, prefect_server, tmp_path):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId

    assert schedule(deployed.folder).startswith("deployed")
    with get_client(sync_client=True) as client:

        def there() -> set[Any]:
            return {(one.id, one.name) for one in [*client.read_deployments(), *client.read_automations()]}

        before = there()
        assert {"nightly", "weekly", "on-demand", "vlp: no sign of life", "vlp: take up"} <= {
            name for _, name in before
        }
        nightly = client.read_deployment_by_name("data/nightly")
        own = DeploymentFilter(id=DeploymentFilterId(any_=[nightly.id]))

        def runs(*names: str) -> list[Any]:
            found = client.read_flow_runs(deployment_filter=own, limit=200)
            return [run for run in found if run.state.name in names]

        with worker(tmp_path, prefect_server, tmp_path / "worker.log") as first:
            eventually(Path("held").is_file, "stage that is held")
            (run,) = runs("Running")
            eventually(lambda: runs("Cancelled"), "run that is cancelled for the one before")
            client.update_deployment_schedule(nightly.id, nightly.schedules[0].id, active=False)
            kill(first)
        assert client.read_flow_run(run.id).state.is_running(), "a dead machine says nothing"
        for other in runs("Scheduled", "Late"):
            client.delete_flow_run(other.id)

        eventually(lambda: client.read_flow_run(run.id).state.name == "AwaitingRetry", "run that is taken up")
        client.pause_automation(client.find_automation("vlp: no sign of life").id)
        Path("hold").unlink()
        with worker(tmp_path, prefect_server, tmp_path / "worker.log"):
            run = eventually(
                lambda: (now := client.read_flow_run(run.id)).state.is_final() and now, "end of the run taken up"
            )
        assert (run.state.name, run.run_count) == ("Completed", 2), (tmp_path / "worker.log").read_text()
        ended = dict(task_runs(client, run.id, ["shard", "validate"]))
        schedule(deployed.folder)
        assert there() == before, "deployed again, not twice"
    assert ended["deduplicate"] == "Cached"
    assert (ended["shard"], ended["validate"]) == ("Completed", "Completed")


def test_a_block_hears_of_runs_that_fail(deployed, prefect_server):
    from prefect.blocks.notifications import CustomWebhookNotificationBlock
    from prefect.client.orchestration import get_client
    from prefect.states import Failed

    heard = queue.Queue()

    class Listener(Handler):
        def do_POST(self):  # noqa: N802
            heard.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send()

    with serving(Listener) as server, get_client(sync_client=True) as client:
        block = CustomWebhookNotificationBlock(
            name="alarm",
            url=f"http://127.0.0.1:{server.server_port}/",
            json_data={"subject": "{{subject}}", "body": "{{body}}"},
        )
        block.save("alarm")
        schedule(deployed.folder, notify="custom-webhook/alarm")
        nightly = client.read_deployment_by_name("data/nightly")
        client.update_deployment_schedule(nightly.id, nightly.schedules[0].id, active=False)
        run = client.create_flow_run_from_deployment(nightly.id)
        client.set_flow_run_state(run.id, Failed(message="shard: the disk is full"), force=True)
        told = heard.get(timeout=120)
        client.delete_automation(client.find_automation(module.FAILED).id)
    assert told["subject"] == "vlp: data Failed"
    assert told["body"] == f"nightly: shard: the disk is full\n{run.id}"


def test_no_such_block(deployed, prefect_server):
    with pytest.raises(UserError, match="Prefect has no block slack-webhook/nobody: create it"):
        schedule(deployed.folder, notify="slack-webhook/nobody")
    with pytest.raises(UserError, match="write the notification block as TYPE/NAME"):
        schedule(deployed.folder, notify="slack")
