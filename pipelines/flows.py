"""Prefect flows: ``data``, ``training``, ``evaluation`` and ``end-to-end``, built from DVC's graph; ``ablation``.

Each stage is a Prefect task of its name that DVC carries out; one at a time, since DVC locks its repository. Prefect
keeps the state and retries; whether a stage must run is DVC's to say, and one that need not shows as ``Cached``. So a
run that crashed is taken up by running the same flow again. A flow's parameters are those of the Prefect page and of
the deployments in ``infra/prefect.yaml``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pipelines.quiet import be_quiet

be_quiet()  # before Prefect is imported: it reads its settings then

from prefect import Flow, Task  # noqa: E402
from prefect.states import Cancelled, Completed, State  # noqa: E402
from pydantic import Field  # noqa: E402

from components.evaluation.ablations import cell, read_ablation_result, write_ablation  # noqa: E402
from components.io.errors import UserError  # noqa: E402
from pipelines.ablation import (  # noqa: E402
    RESULTS,
    WORKSPACE,
    Ablation,
    Cell,
    assemble,
    open_workspace,
    plan,
    read_ablation,
    read_inputs,
    read_values,
    targets,
)
from pipelines.exclusive import BusyError, WhenBusy, exclusive  # noqa: E402
from pipelines.graph import END_TO_END, FLOWS, Step, check_flow, is_current, read_graph, read_state, select  # noqa: E402
from pipelines.params import load_params  # noqa: E402
from pipelines.policies import POLICIES, policy_of  # noqa: E402
from pipelines.repro import StageError, reproduce  # noqa: E402

EVALUATION = Path("data/evaluation")
REPORT = Path("data/report/index.html")
DATA_DOCS = Path("data/validation/docs/index.html")
CACHED = "Cached"
MOST_ATTEMPTS = 10  # of one run that crashes again and again, as one that needs more memory than there is


def run_step(address: str, *, lock: int | None = None, known: bool = False) -> Any:
    """Run one stage unless it is up to date, and say which on standard error; `known`: it is. Raises StageError."""
    root = Path.cwd()
    if known or is_current(address, root):
        say(f"{address}: up to date")
        return Completed(name=CACHED, message="DVC finds the stage up to date")
    say(f"{address}: running")
    stage = Step(address, ()).stage
    seconds = policy_of(stage.name, stage.room).hours * 3600
    reproduce(address, root, seconds=seconds, keep_open=() if lock is None else (lock,))
    return Completed(message="run by DVC")


def stage_task(step: Step, retries: int | None = None) -> Task[..., Any]:
    """The Prefect task of a stage: the stage's name, and its address as the name of the run.

    A failed one is tried again as the policy of its kind says, but `retries` times where that is given.
    """
    return _task(run_step, step.stage.name, step.address, policy_of(step.stage.name, step.stage.room).limited(retries))


def _task(call: Any, name: str, run_name: str, policy: Any) -> Task[..., Any]:
    return Task(
        call,
        name=name,
        task_run_name=run_name,
        retries=policy.retries,
        retry_delay_seconds=list(policy.delays) or None,
        persist_result=False,
    )


def run_steps(name: str, retries: int | None = None, lock: int | None = None) -> None:
    """Check that what a flow builds on is there, run its stages in order, leave artifacts.

    Raises UserError for a stage of another flow that is out of date, StageError for the first stage that fails.
    """
    root = Path.cwd()
    steps, stale = read_state(root)
    own, needed = select(steps, name)
    if first := next((step for step in needed if step.address in stale), None):
        raise UserError(
            f"{first.address} is not up to date, and the flow {name} builds on it: "
            f"run `vlp flow {first.stage.room}` or `vlp flow {END_TO_END}` first"
        )
    states: dict[str, State[Any]] = {}
    for step in own:
        before = [states[address] for address in step.upstream if address in states]
        # what was found at the start holds until a stage has run
        known = step.address not in stale and all(state.name == CACHED for state in states.values())
        state = stage_task(step, retries)(step.address, lock=lock, known=known, wait_for=before, return_state=True)
        states[step.address] = state
        _raise_failure(step.address, state)


def transfer(title: str, call: Any, retries: int | None) -> None:
    """Run `call` as a task of its own, which is tried again as transfers are. Raises StageError when it fails."""
    state: Any = _task(call, title, title, POLICIES["transfer"].limited(retries))(return_state=True)
    _raise_failure(title, state)


def _raise_failure(title: str, state: State[Any]) -> None:
    if not state.is_completed():
        error = state.result(raise_on_failure=False)
        raise StageError(f"{title} failed: {error}")


def pull_state() -> Any:
    """Bring the outs of earlier runs from DVC's remote; what it lacks is made again by the stages."""
    from pipelines import remote

    try:
        return Completed(message=f"{remote.pull(Path.cwd())} files")
    except remote.MissingObjectsError as error:
        say(str(error))
        return Completed(name="Incomplete", message=str(error))


def push_state() -> Any:
    """Send the outs to DVC's remote."""
    from pipelines import remote

    return Completed(message=f"{remote.push(Path.cwd())} files")


def refresh_sources() -> Any:
    """Bring the source lists that DVC imports up to date."""
    from pipelines import remote

    return Completed(message=", ".join(remote.refresh(Path.cwd())) or "no source list is imported")


def commit_state(name: str, branch: str, git_remote: str) -> Any:
    """Commit ``dvc.lock`` to the branch for runs."""
    from pipelines.revisions import commit_run

    commit = commit_run(Path.cwd(), branch, f"Run of the flow {name}", push_to=git_remote)
    return Completed(message=f"{branch} {commit[:10]}")


def leave_artifacts(published: dict[str, str] | None = None) -> None:
    """Prefect artifacts for what there is: the table of metrics, links to the report and the data documentation.

    `published` holds the addresses of pages that were published, by their artifact's key.
    """
    from prefect.artifacts import create_link_artifact, create_table_artifact

    from components.evaluation.summary import HEADINGS, metrics_table

    rows = metrics_table(EVALUATION)
    if rows:
        table = [list(row) for row in (HEADINGS, *rows)]
        create_table_artifact(table, key="metrics", description="Recalls of all runs, in percent")
    for key, path, text in (("report", REPORT, "The report"), ("data-docs", DATA_DOCS, "Data documentation")):
        if path.is_file():
            address = (published or {}).get(key, path.absolute().as_uri())
            create_link_artifact(address, link_text=text, key=key, description=str(path))


def check_attempts(name: str) -> None:
    """Raise UserError when this run has crashed so often that another attempt is not worth its while."""
    from prefect.runtime import flow_run

    attempts = int(flow_run.run_count or 0)
    if attempts > MOST_ATTEMPTS:
        raise UserError(f"{name} was begun {MOST_ATTEMPTS} times and crashed each time: see the logs of its attempts")


def _make(name: str) -> Flow[..., Any]:
    def run(
        retries: Annotated[
            int | None, Field(ge=0, description="how often a failed stage is tried again; none: as its kind is")
        ] = None,
        when_busy: Annotated[
            WhenBusy, Field(description="while another flow runs in the repository: wait for it, or be cancelled")
        ] = "queue",
        pull: Annotated[bool, Field(description="first bring the outs of earlier runs from DVC's remote")] = False,
        refresh: Annotated[bool, Field(description="first bring imported source lists up to date")] = False,
        push: Annotated[bool, Field(description="at the end send all outs to DVC's remote")] = False,
        commit: Annotated[str, Field(description="a git branch that dvc.lock is committed to at the end")] = "",
        git_remote: Annotated[str, Field(description="a git remote that the branch is pushed to")] = "",
        publish: Annotated[str, Field(description="a folder or s3:// prefix for the report and Data Docs")] = "",
    ) -> Any:
        check_attempts(name)
        load_params()
        try:
            with exclusive(Path.cwd(), name, when_busy=when_busy, say=say) as lock:
                again = partial(transfer, retries=retries)
                if pull:
                    again("pull", pull_state)
                if refresh:
                    again("refresh", refresh_sources)
                run_steps(name, retries, lock)
                if push:
                    again("push", push_state)
                if commit:
                    again("commit", partial(commit_state, name, commit, git_remote))
                leave_artifacts(published(publish) if publish else None)
        except BusyError as error:
            return Cancelled(message=str(error))
        return None

    run.__doc__ = f"The stages of the flow {name} that are not up to date."
    return Flow(run, name=name, persist_result=False)


def published(target: str) -> dict[str, str]:
    """Publish the report and the data documentation; returns their addresses by artifact key."""
    from pipelines.publish import publish_pages

    return publish_pages({"report": REPORT.parent, "data-docs": DATA_DOCS.parent}, target)


def run_cells(name: str, table: Ablation, cells: Sequence[Cell], retries: int | None = None) -> None:
    """Carry out an ablation's cells one after the other, each a task; its table is written after each seed.

    Raises StageError for the first that fails; what was done is kept, and the same call goes on from there.
    """
    root = Path.cwd()
    # held before it is opened: another ablation's stages run on the code that lies there
    with exclusive(root / WORKSPACE, f"ablation {name}", when_busy="queue", say=say) as lock:
        workspace = open_workspace(root, cells)
        values: list[dict[str, float]] = []
        inputs: dict[str, str] = {}
        for number, one in enumerate(cells, 1):
            say(f"{name}, {number} of {len(cells)}: {one.title}")
            entries = targets(one, table.runs, workspace)
            for entry in entries:
                again = partial(reproduce, entry.address, workspace, upstream=True, keep_open=(lock,))
                policy = POLICIES["training"].limited(retries)
                state: Any = _task(again, ABLATION, f"{one.title}: {entry.address}", policy)(return_state=True)
                _raise_failure(f"{one.title}: {entry.address}", state)
            values.append(read_values(table, workspace))
            inputs |= read_inputs(entries, workspace)
            say(f"{one.title}: {', '.join(f'{column} {value:.1f}' for column, value in values[-1].items())}")
            if number % len(table.variants) == 0:
                write_ablation(assemble(name, table, cells[:number], values, inputs), root / RESULTS)


def _ablation(
    table: Annotated[str, Field(description="an ablation's name, or the number of ALBEF's table")],
    seeds: Annotated[list[int], Field(description="seeds; none: the ablation's own")] = [],  # noqa: B006 - Prefect copies
    retries: Annotated[int | None, Field(ge=0, description="how often a failed variant is tried again")] = None,
) -> None:
    """The variants of an ablation that DVC's cache does not hold yet, and the table of all."""
    name, content = read_ablation(table)
    run_cells(name, content, plan(content, name, seeds), retries)


ABLATION = "ablation"
ablation: Flow[..., Any] = Flow(_ablation, name=ABLATION, persist_result=False)

# at module level by plain names, so that a deployment can point at them: pipelines/flows.py:end_to_end
data, training, evaluation, end_to_end = (_make(name) for name in FLOWS)
BY_NAME: dict[str, Flow[..., Any]] = {flow.name: flow for flow in (data, training, evaluation, end_to_end)}


def run_flow(name: str, *, retries: int | None = 0, **parameters: Any) -> None:
    """Run a flow with its `parameters` and print what it made. All is checked before anything starts.

    Raises UserError when there is no such flow, a parameter is wrong, no Prefect server answers, or a stage fails.
    """
    check_flow(name)
    load_params()
    read_graph(Path.cwd())
    check_server()
    _finish(name, BY_NAME[name](retries, **parameters, return_state=True))
    if name == END_TO_END:
        print_results()


def run_ablation(table: str, seeds: Sequence[int] = (), *, retries: int = 0) -> None:
    """Run the flow ``ablation`` and print its table. All is checked before anything starts.

    Raises UserError when there is no such ablation, a parameter is wrong, no Prefect server answers, or a stage fails.
    """
    from rich.console import Console
    from rich.table import Table

    name, content = read_ablation(table)
    plan(content, name, seeds)
    check_server()
    _finish(ABLATION, ablation(table, list(seeds), retries, return_state=True))
    path = RESULTS / f"{name}.json"
    result = read_ablation_result(path)
    shown = Table("", *result.columns, title=f"{result.title} ({result.paper or result.recipe})")
    for row in result.rows:
        shown.add_row(row.name, *(cell(row.values[column]) for column in result.columns))
    Console().print(shown)
    print(f"Mean ± standard deviation over the seeds {', '.join(map(str, result.seeds))}: {path}")
    print("`dvc repro report` puts it into the report")


def _finish(name: str, state: Any) -> None:
    """Raise what ended a flow without its result; UserError for what a user can mend."""
    if state.is_completed():
        return
    error = state.result(raise_on_failure=False)
    if isinstance(error, (UserError, StageError)):
        raise UserError(str(error))
    if isinstance(error, BaseException):
        raise error
    raise UserError(f"the flow {name} ended as {state.name}: {state.message}")


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

    from components.evaluation.papers.compare import summary
    from components.evaluation.summary import HEADINGS, TASK_HEADINGS, metrics_table, task_table

    table = Table(*HEADINGS, title="Recalls in percent")
    for row in metrics_table(EVALUATION):
        table.add_row(*row)
    if table.row_count:
        Console().print(table)
    if tasks := task_table(EVALUATION):
        table = Table(*TASK_HEADINGS, title="Accuracies in percent")
        for row in tasks:
            table.add_row(*row)
        Console().print(table)
    for line in summary(EVALUATION, EVALUATION.parent / "models", EVALUATION.parent / "shards"):
        print(line)
    for text, path in (("Report", REPORT), ("Data documentation", DATA_DOCS)):
        if path.is_file():
            print(f"{text + ':':20} {path}")


def say(text: str) -> None:
    """A line about the flow itself, apart from the stages' output."""
    print(f"vlp: {text}", file=sys.stderr, flush=True)
