"""The code that each stage depends on, written into ``dvc.yaml``: ``python -m pipelines.deps --write`` (`make deps`).

DVC does not follow imports: a module that a stage imports but ``deps`` does not name may change without the stage
running again. So ``deps`` names every project module that the stage's module imports, however deep and wherever (most
imports stand inside functions), the packages around them, and files beside them that they name, such as templates.
"""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

from components.io.code import PACKAGES, closure, import_graph, module_file
from pipelines.dvcfile import DVC_FILE
from pipelines.stages import STAGES, Stage

if TYPE_CHECKING:
    from grimp import ImportGraph


def code_deps(stage: Stage, graph: ImportGraph, root: Path) -> list[str]:
    """The files below `root` that the stage's code consists of, sorted, with forward slashes."""
    modules = closure(stage.module, graph)
    files = {module: module_file(module, root) for module in modules}
    data_files = {path for package in PACKAGES for path in (root / package).rglob("*") if _is_data(path)}
    named = {
        path
        for file in files.values()
        for path in _named(file, (found for found in data_files if file.parent in found.parents))
    }
    return sorted(path.relative_to(root).as_posix() for path in {*files.values(), *named})


def with_code_deps(text: str, root: Path) -> str:
    """``dvc.yaml``'s text with the code among each stage's deps brought up to date; all else stays as it is."""
    yaml = YAML()
    yaml.width = 120
    yaml.preserve_quotes = True
    content = yaml.load(text)
    graph = import_graph()
    changed = False
    for name, definition in content["stages"].items():
        target = definition.get("do", definition)
        deps = target.setdefault("deps", [])
        code = code_deps(STAGES[name], graph, root)
        if [dep for dep in deps if is_code(dep)] != code:
            _replace_code(deps, code)
            changed = True
    if not changed:
        return text
    stream = io.StringIO()
    yaml.dump(content, stream)
    return stream.getvalue()


def is_code(dep: str) -> bool:
    """Whether a dep is one that this module keeps."""
    return dep.partition("/")[0] in PACKAGES


def _replace_code(deps: Any, code: list[str]) -> None:
    """Put `code` in front of the other deps, in place, so that comments at those stay where they are."""
    for index in reversed(range(len(deps))):
        if is_code(deps[index]):
            del deps[index]
    for index, dep in enumerate(code):
        deps.insert(index, dep)


def _is_data(path: Path) -> bool:
    return path.is_file() and path.suffix not in (".py", ".pyc", ".pyi")


def _named(file: Path, data_files: Iterable[Path]) -> set[Path]:
    """Those of `data_files` whose name, or path from the module's folder, ends a text in the module."""
    texts = [
        node.value
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return {path for path in data_files if any(text.rpartition("/")[2] == path.name for text in texts)}


def main(arguments: list[str]) -> int:
    """Write the deps (``--write``), or say whether they are as they should be; returns the exit status."""
    text = DVC_FILE.read_text(encoding="utf-8")
    wanted = with_code_deps(text, Path.cwd())
    if wanted == text:
        print(f"{DVC_FILE}: the deps are as the code imports")
        return 0
    if "--write" not in arguments:
        print(f"{DVC_FILE}: the deps are not as the code imports: run `make deps`", file=sys.stderr)
        return 1
    DVC_FILE.write_text(wanted, encoding="utf-8")
    print(f"{DVC_FILE}: deps rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
