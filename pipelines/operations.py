"""The commands of ``vlp`` that run the project rather than a stage: remotes, lineage, schedules, clusters, machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (pull, push, lineage, schedule, launch, doctor):
        app.command()(command)


def pull() -> None:
    """Bring the outs of all stages from DVC's remote; names the stage whose objects the remote lacks."""
    from pipelines import remote

    print(f"{remote.pull(Path.cwd())} files fetched")


def push() -> None:
    """Send the outs of all stages and the run cache to DVC's remote."""
    from pipelines import remote

    print(f"{remote.push(Path.cwd())} files sent")


def lineage(
    model: Annotated[str, typer.Argument(help="A folder of data/models.")],
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Name the data, code, parameters and parent weights that made a model, back to the source lists."""
    import json

    from pipelines.lineage import as_json, describe
    from pipelines.lineage import lineage as history

    origins = history(model, Path.cwd())
    print(json.dumps(as_json(origins), indent=1) if json_ else describe(origins, Path.cwd()))


def schedule(
    notify: Annotated[
        str, typer.Option(metavar="TYPE/NAME", help="A Prefect notification block that hears of failed runs.")
    ] = "",
) -> None:
    """Put the deployments and automations of infra/ on the Prefect server."""
    from pipelines.schedule import schedule as deploy

    print(deploy(Path.cwd(), notify=notify))


def launch(
    target: Annotated[str, typer.Argument(help="aws, kubernetes, on-premise, local; or down, which ends them.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Render, check and say what would be done.")] = False,
    nodes: Annotated[int, typer.Option(min=1, max=16, help="How many nodes `local` starts.")] = 3,
    flow: Annotated[bool, typer.Option("--flow/--no-flow", help="Run the flow of infra/clusters.yaml on it.")] = False,
) -> None:
    """Start a Ray cluster as infra/clusters.yaml describes it, after checking what can be checked from here."""
    from components.io.errors import UserError
    from pipelines.launch import plan
    from pipelines.messages import suggestion

    if target == "down":
        print(plan.down(Path.cwd()))
        return
    if target not in plan.TARGETS:
        raise UserError(f"{target} is no target; {suggestion(target, [*plan.TARGETS, 'down'], 'targets')}")
    plan.launch(target, Path.cwd(), dry_run=dry_run, nodes=nodes, flow=flow)


def doctor() -> None:
    """Look for what would stop a run, here and on a cluster's nodes: versions, room, folders, reachability."""
    from pipelines.doctor import report

    report(Path.cwd())
