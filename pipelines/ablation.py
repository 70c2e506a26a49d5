"""Ablations: variants of a recipe over several seeds, each carried out by DVC in a workspace beside the project.

The workspace shares DVC's cache, so that what variants have in common runs once, what the project has run before is
taken from there, and an ablation that was stopped goes on where it was. The project's own ``data`` stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from ruamel.yaml import YAML

from components.evaluation.ablations import AblationResult, AblationRow
from components.evaluation.summary import METRICS_FILE
from components.io.errors import UserError
from pipelines.dvcfile import DVC_FILE, Entry, find_entry, read_entries
from pipelines.messages import suggestion
from pipelines.params import PARAMS_FILE, check_params, read_yaml
from pipelines.recipe import RECIPES, recipe_names

ABLATIONS = Path(__file__).parent / "ablations"
RESULTS = Path("data/ablations")
WORKSPACE = Path("work/ablations/project")
CODE = ("components/", "models/")
DIGITS = 4

Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Column(BaseModel, frozen=True, extra="forbid"):
    """A column of the table: the mean of some numbers of one run's ``metrics.json``."""

    run: str = Field(description="a run of finetune.runs")
    mean: tuple[str, ...] = Field(min_length=1, description="keys, with dots into sections: itm.txt_r1")


class Ablation(BaseModel, frozen=True, extra="forbid"):
    """One file of ``pipelines/ablations``."""

    title: str = Field(min_length=1, description="what is varied")
    paper: str = Field(default="", description="the paper and the table that it follows")
    note: str = Field(default="", description="what a reader must know of the numbers")
    recipe: str = Field(description="parameters that all variants start from: a recipe's name")
    seeds: tuple[Seed, ...] = Field(
        default=(1, 2, 3), min_length=1, description="of pretrain, its assign_text, and of all runs"
    )
    common: dict[str, Any] = Field(default={}, description="parameters of all variants, merged into the recipe's")
    variants: dict[str, dict[str, Any] | None] = Field(
        min_length=1, description="the rows of the table: parameters that differ, merged into those"
    )
    columns: dict[str, Column] = Field(min_length=1, description="the columns of the table")

    @model_validator(mode="after")
    def _once(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are {list(self.seeds)}: name each once")
        return self

    @property
    def runs(self) -> list[str]:
        """The runs that columns read."""
        return list(dict.fromkeys(column.run for column in self.columns.values()))


@dataclass(frozen=True)
class Cell:
    """One variant with one seed: a whole parameter file."""

    variant: str
    seed: int
    content: dict[str, Any]

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.variant}, seed {self.seed}"


def ablation_names() -> list[str]:
    """The names of all ablations."""
    return sorted(path.stem for path in ABLATIONS.glob("*.yaml"))


def describe_ablations() -> str:
    """One line for each ablation: its name, title and paper."""
    width = max(map(len, ablation_names()))
    found = [(name, read_ablation(name)[1]) for name in ablation_names()]
    return "\n".join(f"{name:{width}} {one.title} ({one.paper})" for name, one in found)


def read_ablation(table: str) -> tuple[str, Ablation]:
    """Name and content of an ablation: by its name, by the number of ALBEF's table, or from a .yaml file of yours.

    Raises UserError when there is none, or it is not what `Ablation` wants.
    """
    path = Path(table) if table.endswith((".yaml", ".yml")) else ABLATIONS / f"{_name(table)}.yaml"
    try:
        # as JSON, so that a list may be a tuple
        return path.stem, Ablation.model_validate_json(json.dumps(read_yaml(path)), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{path.name}: {place}{': ' if place else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from None


def _name(table: str) -> str:
    name = f"albef-{table}" if table.isdecimal() else table
    if name not in ablation_names():
        raise UserError(f"{table} is no ablation; {suggestion(name, ablation_names(), 'ablations')}")
    return name


def plan(ablation: Ablation, name: str, seeds: Sequence[int] = ()) -> list[Cell]:
    """All variants with all seeds (the file's, or `seeds`), checked before anything runs.

    Seeds come first, so that a table of one seed is there early. Raises UserError for parameters that are wrong.
    """
    if ablation.recipe not in recipe_names():
        raise UserError(
            f"{name}: {ablation.recipe} is no recipe; {suggestion(ablation.recipe, recipe_names(), 'recipes')}"
        )
    recipe = read_yaml(RECIPES / f"{ablation.recipe}.yaml")
    cells = []
    for seed in seeds or ablation.seeds:
        for variant, changes in ablation.variants.items():
            content = merged(merged(recipe, ablation.common), changes or {})
            missing = [run for run in ablation.runs if run not in content.get("finetune", {}).get("runs", {})]
            if missing:
                raise UserError(f"{name}: {variant} has no run {missing[0]}, which a column reads")
            pretrain = content.setdefault("pretrain", {})
            assign_text = pretrain.get("assign_text") or {}
            for training in (pretrain, assign_text, *content["finetune"]["runs"].values()):
                training["seed"] = seed
            check_params(content, f"{name}: {variant}")
            cells.append(Cell(variant, seed, content))
    return cells


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`: sections are merged, all else takes the place of what stood there."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return json.loads(json.dumps(result, default=str))  # type: ignore[no-any-return] # nothing shared with the inputs


def open_workspace(root: Path, cells: Sequence[Cell]) -> Path:
    """The workspace as a DVC repository with the project's code, graph and cache; returns its folder.

    Source lists and other inputs that no stage makes are linked under the paths that the parameters name.
    """
    workspace = root / WORKSPACE
    (workspace / ".dvc").mkdir(parents=True, exist_ok=True)
    (workspace / ".dvc" / "config").write_text(
        "[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n"
        # links, since features of gigabytes would be copied for each variant; stages never write into what is there
        f'[cache]\n    dir = {_cache(root)}\n    type = "reflink,hardlink,copy"\n',
        encoding="utf-8",
    )
    for path in (DVC_FILE, Path(".dvcignore")):
        _copy(root / path, workspace / path)
    entries = [entry for cell in cells for entry in read_entries(cell.content, root / DVC_FILE).values()]
    outs = {Path(out) for entry in entries for out in entry.outs}
    for dep in sorted({dep for entry in entries for dep in entry.deps}):
        path = Path(dep)
        if dep.startswith(CODE):
            _copy(root / path, workspace / path)
        elif not path.is_absolute() and not any(_related(path, out) for out in outs):
            _link(workspace / path, (root / path).resolve(), root / WORKSPACE.parts[0])
    return workspace


def targets(cell: Cell, runs: Sequence[str], workspace: Path) -> list[Entry]:
    """Write the cell's parameters into the workspace; returns the stages that evaluate its runs."""
    with (workspace / PARAMS_FILE).open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(cell.content, file)
    entries = read_entries(cell.content, workspace / DVC_FILE)
    return [find_entry(entries, f"evaluate@{run}") for run in runs]


def read_values(ablation: Ablation, workspace: Path) -> dict[str, float]:
    """The number of each column, from the workspace's evaluations. Raises UserError when a run has no such number."""
    values = {}
    for title, column in ablation.columns.items():
        path = workspace / "data/evaluation" / column.run / METRICS_FILE
        metrics = json.loads(path.read_text(encoding="utf-8"))
        numbers = []
        for key in column.mean:
            number: Any = metrics
            for step in key.split("."):
                number = number.get(step) if isinstance(number, dict) else None
            if not isinstance(number, (int, float)):
                raise UserError(f"the column {title} reads {key}, which the evaluation of {column.run} has not")
            numbers.append(float(number))
        values[title] = round(sum(numbers) / len(numbers), DIGITS)
    return values


def read_inputs(entries: Sequence[Entry], workspace: Path) -> dict[str, str]:
    """DVC's digests of the data that the evaluations read, by path."""
    lock = read_yaml(workspace / "dvc.lock")["stages"]
    deps = [dep for entry in entries for dep in lock[entry.address]["deps"]]
    return {dep["path"]: dep["md5"] for dep in deps if dep["path"].startswith("data/tasks")}


def assemble(
    name: str,
    ablation: Ablation,
    cells: Sequence[Cell],
    values: Sequence[Mapping[str, float]],
    inputs: Mapping[str, str],
) -> AblationResult:
    """The table from the numbers of each cell."""
    found = {(cell.variant, cell.seed): one for cell, one in zip(cells, values, strict=True)}
    seeds = tuple(dict.fromkeys(cell.seed for cell in cells))
    rows = [
        AblationRow(
            name=variant,
            values={column: tuple(found[variant, seed][column] for seed in seeds) for column in ablation.columns},
        )
        for variant in ablation.variants
    ]
    return AblationResult(
        name=name,
        title=ablation.title,
        paper=ablation.paper,
        note=ablation.note,
        recipe=ablation.recipe,
        seeds=seeds,
        columns=tuple(ablation.columns),
        rows=tuple(rows),
        inputs=dict(sorted(inputs.items())),
    )


def _cache(root: Path) -> Path:
    from dvc.repo import Repo

    with Repo(str(root)) as repository:
        return Path(repository.cache.local.path)


def _copy(source: Path, target: Path) -> None:
    """Copy a file unless it is there already, so that DVC need not look at it again."""
    if not source.is_file():
        return
    data = source.read_bytes()
    if not target.is_file() or target.read_bytes() != data:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copyfile(source, target)


def _related(path: Path, out: Path) -> bool:
    return path == out or path in out.parents or out in path.parents


def _link(link: Path, target: Path, work: Path) -> None:
    """Make `link`, which may lead out of the workspace as ``../shared`` does, lead to `target`; only within `work`."""
    place = Path(os.path.normpath(link))
    if work not in place.parents:
        raise UserError(f"an ablation cannot read {target} by a path that far up: name it by its absolute path")
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink() and place.resolve() != target:
        place.unlink()
    if not place.exists():
        place.symlink_to(target)
