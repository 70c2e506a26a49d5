"""Recipes: whole parameter files that are published with the project, ``pipelines/recipes/NAME.yaml``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from components.io.errors import UserError
from pipelines.dvcfile import DVC_FILE, check_tracked, read_entries
from pipelines.messages import suggestion
from pipelines.params import check_params, parse_yaml, read_yaml

RECIPES = Path(__file__).parent / "recipes"
LOCK_FILE = Path("dvc.lock")


def recipe_names() -> list[str]:
    """The names of all recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def describe_recipes() -> str:
    """One line for each recipe: its name and the comment that its file begins with."""
    lines = []
    width = max(map(len, recipe_names()))
    for name in recipe_names():
        first = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"{name:{width}} {first.removeprefix('#').strip()}")
    return "\n".join(lines)


def write_recipe(name: str, target: Path, *, force: bool = False) -> str:
    """Check the recipe and write it to `target`; returns what was done, in a sentence.

    Folders in ``data/`` of sources, tasks and runs that the recipe does not have are removed when DVC's cache holds
    them, since stages that read all sources would read those too; `dvc checkout` brings them back with their lock file.

    Raises UserError when there is no such recipe, it is not valid, or `target` has edits that no commit holds.
    """
    source = RECIPES / f"{name}.yaml"
    if name not in recipe_names():
        raise UserError(f"{name} is no recipe; {suggestion(name, recipe_names(), 'recipes')}")
    text = source.read_text(encoding="utf-8")
    content = parse_yaml(text, str(source.relative_to(RECIPES.parents[1])))
    check_params(content, source.name)
    if DVC_FILE.is_file():
        check_tracked(read_entries(content), content, source.name)
    if target.is_file() and target.read_text(encoding="utf-8") == text:
        return f"{target} is the recipe {name} already"
    if not force and edited(target):
        raise UserError(f"{target} has edits that no commit holds: commit or save them, or add --force to lose them")
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(target)
    removed = remove_left_over(content)
    return f"{target} is now the recipe {name}" + (f"; removed {', '.join(removed)}" if removed else "")


def edited(path: Path) -> bool:
    """Whether the file holds something that neither a commit nor a recipe holds."""
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    if any(text == recipe.read_text(encoding="utf-8") for recipe in RECIPES.glob("*.yaml")):
        return False
    git = ["git", "status", "--porcelain", "--", path.name]
    try:
        done = subprocess.run(git, cwd=path.absolute().parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine: nothing holds the edits
        return True
    return done.returncode != 0 or bool(done.stdout.strip())


def remove_left_over(content: dict[str, Any]) -> list[str]:
    """Remove the outs of stages that ran before but that the parameters `content` do not make; returns their paths."""
    if not (LOCK_FILE.is_file() and DVC_FILE.is_file()):
        return []
    wanted = {out for entry in read_entries(content).values() for out in entry.outs}
    ran: dict[str, Any] = read_yaml(LOCK_FILE).get("stages", {})
    removed = []
    for stage in ran.values():
        for out in stage.get("outs", []):
            path = Path(out["path"])
            if out["path"] not in wanted and path.parts[:1] == ("data",) and ".." not in path.parts and path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                removed.append(out["path"])
                _remove_empty(path.parent)
    return removed


def _remove_empty(folder: Path) -> None:
    """Remove the folder and those above it as far as they are empty, but for ``data/`` itself."""
    while len(folder.parts) > 1 and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
