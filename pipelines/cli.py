"""The command line, ``vlp``. Starts fast: a command's own imports are inside it."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from components.io.errors import UserError
from pipelines.checkpoint_cli import checkpoint
from pipelines.evaluation_cli import ParamsOption, register_evaluation
from pipelines.operations import register
from pipelines.quiet import be_quiet
from pipelines.recorded import run_as_recorded, steady

INTERRUPTED = 130

app = typer.Typer(
    help="Image-caption data to trained, evaluated vision-language retrieval models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
shards = typer.Typer(help="Look into folders of records.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(shards, name="shards")
register(app)
register_evaluation(app)
app.add_typer(checkpoint, name="checkpoint")

SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Another value for a parameter: clean.max_words=20.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Write over uncommitted edits.")]


class StageGroup(TyperGroup):
    """``vlp run``: a command for each stage, made from its function's signature when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        from pipelines.stages import STAGES

        return list(STAGES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return stage_command(cmd_name)


run = typer.Typer(
    cls=StageGroup,
    help="Run one stage now, whether or not it is up to date. Options that are left out are those of dvc.yaml.",
    no_args_is_help=True,
    subcommand_metavar="STAGE[@KEY] [OPTIONS]",
    rich_markup_mode=None,
)
app.add_typer(run, name="run")


@run.callback()
def _run() -> None:
    """Run one stage now, whether or not it is up to date. Options that are left out are those of dvc.yaml."""


def stage_command(address: str) -> Any:
    """The command that runs the stage of that address (``clean``, ``finetune@retrieval``).

    Raises UserError when there is no such stage.
    """
    from pipelines.messages import suggestion
    from pipelines.stages import STAGES

    name = address.partition("@")[0]
    if name not in STAGES:
        raise UserError(f"{name} is no stage; {suggestion(name, list(STAGES), 'stages')}")
    stage = STAGES[name]
    kinds = stage.options()

    def command(params: Path, set_: list[str], **options: Any) -> None:
        run_stage(address, options, params, set_)

    def keyword(option: str, annotation: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)

    parameters = [keyword(option, Annotated[kind | None, typer.Option()], None) for option, kind in kinds.items()]
    parameters += [keyword("params", ParamsOption, Path("params.yaml")), keyword("set_", SetOption, [])]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    one = typer.Typer(add_completion=False, rich_markup_mode=None)
    doc = (inspect.getdoc(stage.function()) or "").partition("\n\n")[0]
    one.command(address, help=" ".join(doc.split()))(command)
    return typer.main.get_command(one)


def run_stage(address: str, options: dict[str, Any], params: Path, overrides: list[str]) -> None:
    """Run a stage with the given options, the rest of which ``dvc.yaml``'s command for it supplies.

    Raises UserError for wrong parameters, an unknown address, and inputs that hold folders of no stage.
    """
    from pipelines.dvcfile import DVC_FILE, Entry, check_tracked, find_entry, read_entries, strangers
    from pipelines.environment import read_params
    from pipelines.stages import STAGES

    content, checked = read_params(params, overrides)
    stage = STAGES[address.partition("@")[0]]
    kinds = stage.options()
    missing = [name for name in kinds if options.get(name) is None]
    entries: dict[str, Entry] = {}
    if missing or DVC_FILE.is_file():
        entries = read_entries(content)
        check_tracked(entries, content, str(params))
        if missing:
            entry = find_entry(entries, address)
            known = entry.options()
            options.update({name: kinds[name](known[name]) for name in missing})
        for entry in entries.values():
            if entry.address.partition("@")[0] == stage.name and (found := strangers(entry, entries)):
                raise UserError(
                    f"{found[0]} is written by no stage of these parameters, yet {stage.name} would read it: "
                    f"delete it (rm -r {' '.join(found)}) or put its entry back into {params}"
                )
    with steady(entries, params, content):
        stage.run(checked, **options)


@app.command()
def flow(
    name: Annotated[str, typer.Argument(help="data, training, evaluation, end-to-end or ablation.")],
    retries: Annotated[int, typer.Option(min=0, help="How often a failed stage is tried again; it resumes.")] = 0,
    pull_first: Annotated[bool, typer.Option("--pull", help="First bring outs from DVC's remote.")] = False,
    push_after: Annotated[bool, typer.Option("--push", help="At the end send outs to DVC's remote.")] = False,
    commit: Annotated[str, typer.Option(metavar="BRANCH", help="Commit dvc.lock to this branch at the end.")] = "",
    table: Annotated[
        str, typer.Option(help="ablation: its name, the number of ALBEF's table, or a file; `list` lists them.")
    ] = "",
    seed: Annotated[
        list[int], typer.Option(min=0, help="ablation: this seed instead of its own; may be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Run the stages of a flow that are not up to date, or the variants of an ablation, as a Prefect flow."""
    if name == "ablation":
        run_table(table, seed, retries)
        return
    if table or seed:
        raise UserError(f"--table and --seed are for the flow ablation, not for {name}: leave them out")
    from pipelines.graph import check_flow
    from pipelines.params import load_params

    check_flow(name)
    load_params()  # what is wrong with them is said at once; importing Prefect takes seconds
    from pipelines.flows import run_flow

    run_flow(name, retries=retries, pull=pull_first, push=push_after, commit=commit)


def run_table(table: str, seeds: list[int], retries: int) -> None:
    """Run an ablation, or list all of them. Raises UserError when none or an unknown one is named."""
    from pipelines.ablation import describe_ablations, plan, read_ablation

    if table == "list":
        print(describe_ablations())
        return
    if not table:
        raise UserError("which ablation? name one by --table, `--table list` lists them")
    name, content = read_ablation(table)
    plan(content, name, seeds)  # what is wrong with them is said at once; importing Prefect takes seconds
    from pipelines.flows import run_ablation

    run_ablation(table, seeds, retries=retries)


@app.command()
def recipe(
    name: Annotated[str | None, typer.Argument(help="The recipe's name.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
    force: ForceOption = False,
) -> None:
    """Check a published recipe and write it to params.yaml."""
    from pipelines.recipe import describe_recipes, write_recipe

    if list_ or name is None:
        print(describe_recipes())
        return
    print(write_recipe(name, Path("params.yaml"), force=force))


@shards.command()
def verify(folder: Annotated[Path, typer.Argument(help="A folder with a manifest.json.")]) -> None:
    """Check every file of a folder of records against its manifest: present, whole, unchanged."""
    from components.io.shards import verify as verify_shards

    if found := verify_shards(folder):
        raise UserError("\n  ".join([f"{folder}: {len(found)} problems", *found]) if found[1:] else found[0])
    print(f"{folder}: all files are as the manifest says")


def main() -> None:
    """Run ``vlp``; exit with 2 and one message for what a user can mend, with 130 when interrupted."""
    run_as_recorded()
    sys.exit(guarded(lambda: app(standalone_mode=True)))


def guarded(call: Callable[[], Any]) -> int:
    """Call, and turn what it raises into an exit status and a message on standard error."""
    from pipelines.failure import leave_message

    be_quiet()
    try:
        call()
    except UserError as error:
        leave_message(str(error))
        print(f"vlp: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:  # typer's own: 0, 2 for wrong usage, 130 for an interrupt
        status = end.code if isinstance(end.code, int) else 1
        if status == INTERRUPTED:
            leave_message("interrupted")
            print("vlp: interrupted; run the same command to go on", file=sys.stderr)
        return status
    except Exception as error:
        leave_message("".join(traceback.format_exception_only(error)).strip())
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
