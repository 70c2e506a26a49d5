"""The commands of ``vlp`` that run the project rather than a stage: remotes, lineage, schedules, clusters, machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (pull, push, lineage, schedule):
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
