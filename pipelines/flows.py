"""Prefect flows: ``data``, ``training``, ``evaluation`` and ``end-to-end``, built from DVC's graph.

Each stage is a Prefect task of its name that DVC carries out; one at a time, since DVC locks its repository. Prefect
keeps the state and retries; whether a stage must run is DVC's to say, and one that need not shows as ``Cached``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipelines.quiet import be_quiet

be_quiet()  # before Prefect is imported: it reads its settings then

from prefect import Flow, Task  # noqa: E402
from prefect.states import Completed, State  # noqa: E402

from components.io.errors import UserError  # noqa: E402
from pipelines.graph import END_TO_END, FLOWS, Step, check_flow, is_current, read_graph, select  # noqa: E402
from pipelines.params import load_params  # noqa: E402
from pipelines.repro import StageError, reproduce  # noqa: E402

EVALUATION = Path("data/evaluation")
REPORT = Path("data/report/index.html")
DATA_DOCS = Path("data/validation/docs/index.html")
CACHED = "Cached"


def run_step(address: str) -> Any:
    """Run one stage unless it is up to date, and say which on standard error. Raises StageError."""
    root = Path.cwd()
    if is_current(address, root):
        say(f"{address}: up to date")
        return Completed(name=CACHED, message="DVC finds the stage up to date")
    say(f"{address}: running")
    reproduce(address, root)
    return Completed(message="run by DVC")


def stage_task(step: Step, retries: int = 0) -> Task[[str], Any]:
    """The Prefect task of a stage: the stage's name, and its address as the name of the run."""
    return Task(run_step, name=step.stage.name, task_run_name=step.address, retries=retries, persist_result=False)


def run_steps(name: str, retries: int) -> None:
    """What a flow does: check that what it builds on is there, run its stages in order, leave artifacts.

    Raises UserError for a stage of another flow that is out of date, StageError for the first stage that fails.
    """
    root = Path.cwd()
    own, needed = select(read_graph(root), name)
    stale = [step for step in needed if not is_current(step.address, root)]
    if stale:
        first = stale[0]
        raise UserError(
            f"{first.address} is not up to date, and the flow {name} builds on it: "
            f"run `vlp flow {first.stage.room}` or `vlp flow {END_TO_END}` first"
        )
    states: dict[str, State[Any]] = {}
    for step in own:
        before = [states[address] for address in step.upstream if address in states]
        state = stage_task(step, retries)(step.address, wait_for=before, return_state=True)
        states[step.address] = state
        if not state.is_completed():
            error = state.result(raise_on_failure=False)
            raise StageError(f"{step.address} failed: {error}")
    leave_artifacts()


def leave_artifacts() -> None:
    """Prefect artifacts for what there is: the table of metrics, links to the report and the data documentation."""
    from prefect.artifacts import create_link_artifact, create_table_artifact

    from components.evaluation.summary import HEADINGS, metrics_table

    rows = metrics_table(EVALUATION)
    if rows:
        table = [list(row) for row in (HEADINGS, *rows)]
        create_table_artifact(table, key="metrics", description="Recalls of all runs, in percent")
    for key, path, text in (("report", REPORT, "The report"), ("data-docs", DATA_DOCS, "Data documentation")):
        if path.is_file():
            create_link_artifact(path.absolute().as_uri(), link_text=text, key=key, description=str(path))


def _make(name: str) -> Flow[[int], None]:
    def run(retries: int = 0) -> None:
        run_steps(name, retries)

    run.__doc__ = f"The stages of the flow {name} that are not up to date."
    return Flow(run, name=name, persist_result=False)


# at module level by plain names, so that a deployment can point at them: pipelines/flows.py:end_to_end
data, training, evaluation, end_to_end = (_make(name) for name in FLOWS)
BY_NAME: dict[str, Flow[[int], None]] = {flow.name: flow for flow in (data, training, evaluation, end_to_end)}


def run_flow(name: str, *, retries: int = 0) -> None:
    """Run a flow and print what it made. Parameters are checked before anything starts.

    Raises UserError when there is no such flow, a parameter is wrong, no Prefect server answers, or a stage fails.
    """
    check_flow(name)
    load_params()
    read_graph(Path.cwd())
    check_server()
    state: Any = BY_NAME[name](retries, return_state=True)
    if not state.is_completed():
        error = state.result(raise_on_failure=False)
        if isinstance(error, (UserError, StageError)):
            raise UserError(str(error))
        if isinstance(error, BaseException):
            raise error
        raise UserError(f"the flow {name} ended as {state.name}: {state.message}")
    if name == END_TO_END:
        print_results()


def check_server() -> None:
    """Raise UserError unless the Prefect server that is set up, if any, answers."""
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url
    if not url:
        say("Prefect: no server is set up (PREFECT_API_URL), starting one for this run; it takes some 20 s")
        return
    with get_client(sync_client=True) as client:
        error = client.api_healthcheck()
    if error is not None:
        raise UserError(
            f"no Prefect server answers at {url} ({type(error).__name__}): "
            "start one (prefect server start) or unset PREFECT_API_URL"
        )


def print_results() -> None:
    """The table of metrics, and where the report and the data documentation are."""
    from rich.console import Console
    from rich.table import Table

    from components.evaluation.summary import HEADINGS, metrics_table

    table = Table(*HEADINGS, title="Recalls in percent")
    for row in metrics_table(EVALUATION):
        table.add_row(*row)
    Console().print(table)
    for text, path in (("Report", REPORT), ("Data documentation", DATA_DOCS)):
        if path.is_file():
            print(f"{text + ':':20} {path}")


def say(text: str) -> None:
    """A line about the flow itself, apart from the stages' output."""
    print(f"vlp: {text}", file=sys.stderr, flush=True)
