"""Prefect flows over a copy of the project whose stages are cheap."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.io.errors import UserError
from pipelines import flows
from pipelines.graph import FLOWS, Step, is_current, read_graph, read_state, select
from pipelines.policies import POLICIES, Policy
from pipelines.repro import StageError, explain, reproduce
from tests.pipelines.server import task_runs

pytestmark = pytest.mark.slow

DATA = ["synthesize", "download@corpus", "prepare_tasks@retrieval", "clean", "deduplicate", "shard", "validate"]
ALL = [*DATA, "pretrain", "finetune@retrieval", "evaluate@retrieval", "report"]


# -- the graph


def test_graph_is_dvc_s_in_an_order_that_works(project):
    steps = read_graph(project.folder)
    addresses = [step.address for step in steps]
    assert sorted(addresses) == sorted(ALL)
    for step in steps:
        assert all(addresses.index(other) < addresses.index(step.address) for other in step.upstream)
    upstream = {step.address: set(step.upstream) for step in steps}
    assert upstream["pretrain"] == {"shard", "validate"}, "validation is a gate"
    assert upstream["deduplicate"] == {"clean", "prepare_tasks@retrieval"}
    assert upstream["evaluate@retrieval"] == {"finetune@retrieval", "prepare_tasks@retrieval"}


def test_flows_share_the_stages_out(project):
    steps = read_graph(project.folder)
    chosen = {name: [step.address for step in select(steps, name)[0]] for name in FLOWS}
    assert sorted(chosen["data"]) == sorted(DATA)
    assert chosen["training"] == ["pretrain", "finetune@retrieval"]
    assert chosen["evaluation"] == ["evaluate@retrieval", "report"]
    assert sorted(chosen["end-to-end"]) == sorted(ALL)
    assert {step.address for step in select(steps, "training")[1]} == set(DATA)
    assert select(steps, "data")[1] == []


def test_outside_a_repository(tmp_path):
    with pytest.raises(UserError, match="is not a DVC repository"):
        read_graph(tmp_path)


# -- one stage


def test_reproduce_and_up_to_date(project):
    assert not is_current("synthesize", project.folder)
    reproduce("synthesize", project.folder)
    assert is_current("synthesize", project.folder)
    steps, stale = read_state(project.folder)
    assert stale == {step.address for step in steps if not is_current(step.address, project.folder)}
    assert "synthesize" not in stale
    assert not Path("data/raw").exists(), "one stage only"


def test_the_stage_s_own_message(project, monkeypatch):
    monkeypatch.setenv("FAIL_STAGE", "synthesize")
    with pytest.raises(StageError, match=r"^the disk is full: free some space$"):
        reproduce("synthesize", project.folder)


def test_a_killed_stage_says_so(project, monkeypatch):
    monkeypatch.setenv("KILL_STAGE", "synthesize")
    with pytest.raises(StageError, match="was ended by SIGKILL"):
        reproduce("synthesize", project.folder)


def test_dvc_s_message_where_no_stage_ran(project):
    with pytest.raises(StageError, match="data/raw"):
        reproduce("clean", project.folder)


def test_explain():
    lines = ["failed to reproduce 'clean'", "failed to run: vlp run clean, exited with 3"]
    assert explain(lines) == "`vlp run clean` ended with status 3; its output is above"
    assert explain(["a", "b", "a", ""]) == "a: b"
    for status in (-9, 137):  # from a shell that became the command, and from one that waited for it
        lines = [f"failed to run: vlp run clean, exited with {status}"]
        assert explain(lines) == "`vlp run clean` was ended by SIGKILL (often for want of memory)"
    assert explain(["failed to run: x, exited with 255"]) == "`x` ended with status 255; its output is above"


def test_an_interrupt_ends_the_stage(project):
    waiting = "import os, time; open('started', 'w').write(str(os.getpid())); time.sleep(600)"
    project.replace(
        f"cmd: {sys.executable} -P fake_stage.py synthesize", f'cmd: {sys.executable} -c "{waiting}" ', "dvc.yaml"
    )
    code = "from pathlib import Path\nfrom pipelines.repro import reproduce\nreproduce('synthesize', Path.cwd())"
    flow = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    until = time.monotonic() + 120
    while not (Path("started").is_file() and Path("started").read_text()):
        assert flow.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    stage = int(Path("started").read_text())
    flow.send_signal(signal.SIGINT)
    assert flow.wait(60) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(stage, 0)


# -- flows on a server


def last_run(name, tasks):
    """The newest run of a flow: its state, and (name, state) of its tasks in order of start, those named among them."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[name])), sort=FlowRunSort.START_TIME_DESC, limit=1
        )
        return run.state, task_runs(client, run.id, tasks)


@pytest.mark.prefect
def test_end_to_end_then_cached_then_only_what_changed(project, prefect_server, capsys):
    flows.run_flow("end-to-end")
    state, tasks = last_run("end-to-end", ALL)
    assert state.is_completed()
    assert sorted(tasks) == sorted((address, "Completed") for address in ALL)
    assert "50.0" in capsys.readouterr().out

    flows.run_flow("end-to-end")
    assert sorted(last_run("end-to-end", ALL)[1]) == sorted((address, "Cached") for address in ALL)

    project.replace("top_k: 32", "top_k: 31")
    flows.run_flow("evaluation")
    evaluation = ["evaluate@retrieval", "report"]
    assert last_run("evaluation", evaluation)[1] == [(address, "Completed") for address in evaluation]

    project.replace("max_words: 30", "max_words: 29")
    with pytest.raises(UserError, match=r"clean is not up to date, and the flow training builds on it"):
        flows.run_flow("training")
    assert last_run("training", [])[0].is_failed()


@pytest.mark.prefect
def test_a_failed_stage_fails_the_flow_with_its_message(project, prefect_server, monkeypatch):
    monkeypatch.setenv("FAIL_STAGE", "clean")
    with pytest.raises(UserError, match=r"^clean failed: the disk is full: free some space$"):
        flows.run_flow("data")
    state, tasks = last_run("data", ["clean"])
    assert state.is_failed()
    assert "the disk is full" in state.message
    assert dict(tasks)["clean"] == "Failed"
    assert not {"deduplicate", "shard", "validate"} & set(dict(tasks))
    monkeypatch.delenv("FAIL_STAGE")
    flows.run_flow("data")
    tasks = dict(last_run("data", DATA)[1])
    assert (tasks["download@corpus"], tasks["clean"]) == ("Cached", "Completed")


@pytest.mark.prefect
def test_artifacts(finished_project, prefect_server):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    for path in (flows.REPORT, flows.DATA_DOCS):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("<html></html>")
    import prefect

    @prefect.flow
    def leave():
        flows.leave_artifacts()
        return str(prefect.context.get_run_context().flow_run.id)

    run = leave()
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run])))
    by_key = {artifact.key: artifact for artifact in found}
    assert set(by_key) == {"metrics", "report", "data-docs"}
    assert "retrieval" in by_key["metrics"].data
    assert flows.REPORT.absolute().as_uri() in by_key["report"].data


@pytest.mark.prefect
def test_a_stage_that_is_tried_again(project, prefect_server, monkeypatch):
    attempts = []

    def flaky(address, root, **options):
        attempts.append(address)
        if len(attempts) == 1:
            raise StageError("the network is down")
        reproduce(address, root, **options)

    monkeypatch.setitem(POLICIES, "data", Policy((0.1,), hours=1))

    monkeypatch.setattr(flows, "reproduce", flaky)
    monkeypatch.setattr(flows, "read_state", lambda root: ([Step("synthesize", ())], frozenset({"synthesize"})))
    flows.run_flow("data", retries=None)
    assert attempts == ["synthesize", "synthesize"]


def test_parameters_are_checked_before_anything_starts(project):
    project.replace("top_k: 32", "top_k: 0")
    with pytest.raises(UserError, match=r"evaluate.top_k: 0 is not allowed"):
        flows.run_flow("data")
    assert not Path("ran.log").exists()


def test_a_server_that_does_not_answer(project, monkeypatch):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    nobody = {PREFECT_API_URL: "http://127.0.0.1:9/api"}
    with (
        temporary_settings(nobody),
        pytest.raises(UserError, match=r"no Prefect server answers at http://127.0.0.1:9/api"),
    ):
        flows.run_flow("data")


@pytest.mark.prefect
def test_no_server_at_all(project, tmp_path):
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "prefect"), "FAIL_STAGE": "prepare_tasks"}
    environment.pop("PREFECT_API_URL", None)
    command = [str(Path(sys.executable).with_name("vlp")), "flow", "data"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "vlp: synthesize: running" in done.stderr
    assert done.stderr.splitlines()[-1] == "vlp: prepare_tasks@retrieval failed: the disk is full: free some space"
    assert "Traceback" not in done.stderr
