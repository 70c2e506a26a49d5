"""A stage has one name everywhere: module, function, parameters, dvc.yaml, Prefect task, command. Layers keep apart."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from pipelines import cli
from pipelines.dvcfile import read_entries
from pipelines.params import params_model, read_yaml
from pipelines.recipe import RECIPES, recipe_names
from pipelines.stages import ROOMS, STAGES

ROOT = Path(__file__).resolve().parents[2]

each_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=list(STAGES))
each_recipe = pytest.mark.parametrize("recipe", recipe_names())


def entries_of(recipe):
    return read_entries(read_yaml(RECIPES / f"{recipe}.yaml"), ROOT / "dvc.yaml")


@each_stage
def test_module_holds_function_and_parameters_of_the_name(stage):
    assert issubclass(stage.params_class(), BaseModel)
    assert stage.params_class().__module__ == stage.module
    assert (stage.function().__name__, stage.function().__module__) == (stage.name, stage.module)


def test_modules_that_look_like_stages_are_stages():
    like_stages = {
        path.stem
        for room in ROOMS
        for path in (ROOT / "components" / room).glob("*.py")
        if f"class {''.join(word.capitalize() for word in path.stem.split('_'))}Params(" in path.read_text()
    }
    assert like_stages == set(STAGES)


def test_sections_are_the_stages_and_runtime():
    assert set(params_model().model_fields) == {*STAGES, "runtime"}


@each_recipe
def test_recipe_sections_are_the_stages_in_order(recipe):
    assert list(read_yaml(RECIPES / f"{recipe}.yaml")) == [*STAGES, "runtime"]


@each_recipe
def test_dvc_stages_are_the_stages(recipe):
    none = set() if read_yaml(RECIPES / f"{recipe}.yaml")["features"]["towers"] else {"features"}
    assert {address.partition("@")[0] for address in entries_of(recipe)} == set(STAGES) - none


@each_recipe
def test_dvc_commands_are_vlp_run_with_every_option_of_the_function(recipe):
    for address, entry in entries_of(recipe).items():
        name = address.partition("@")[0]
        assert shlex.split(entry.cmd)[:3] == ["vlp", "run", name]
        assert list(entry.options()) == list(STAGES[name].options()), address


@each_recipe
def test_dvc_tracks_each_stage_s_own_parameters_and_no_others(recipe):
    for address, entry in entries_of(recipe).items():
        name = address.partition("@")[0]
        assert entry.params, address
        assert {key.partition(".")[0] for key in entry.params} == {name}


@each_recipe
def test_dvc_paths_are_the_command_s(recipe):
    for address, entry in entries_of(recipe).items():
        paths = {
            value
            for name, value in entry.options().items()
            if STAGES[address.partition("@")[0]].options()[name] is Path
        }
        used = {*entry.deps, *entry.outs}
        for path in paths:
            inside = any(Path(path) == Path(one) or Path(path) in Path(one).parents for one in used)
            assert inside, f"{address}: {path} is neither dep nor out"


def test_download_tracks_all_that_shapes_what_it_writes():
    from components.data.download import DownloadParams

    narrow = {key.split(".")[1] for key in entries_of("demo")["download@corpus"].params} - {"sources"}
    only_speed = {"concurrency", "per_host"}
    assert narrow == set(DownloadParams.model_fields) - {"sources"} - only_speed


def test_commands_are_the_stages():
    group = typer.main.get_command(cli.run)
    context = group.make_context("run", ["clean"], resilient_parsing=True)
    assert group.list_commands(context) == list(STAGES)
    for name, stage in STAGES.items():
        command = group.get_command(context, name)
        assert command.name == name
        assert {parameter.name for parameter in command.params} == {*stage.options(), "params", "set_"}


def test_prefect_tasks_are_the_stages():
    from pipelines.flows import stage_task
    from pipelines.graph import Step

    for name in STAGES:
        task = stage_task(Step(f"{name}@x", ()))
        assert (task.name, task.task_run_name) == (name, f"{name}@x")


@pytest.mark.parametrize("contract", ["One direction", "neither DVC nor Prefect", "Ray in two modules"])
def test_layers_keep_apart(contract):
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if contract in line]
    assert len(lines) == 1, done.stdout + done.stderr
    assert "KEPT" in lines[0], done.stdout
