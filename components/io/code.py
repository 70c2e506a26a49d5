"""Which of the project's modules a stage consists of, and a digest of them: other code must not resume its work."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grimp import ImportGraph

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("components", "models")


@cache
def import_graph() -> ImportGraph:
    """Who imports whom among the project's modules; imports for type checkers alone do not count."""
    import grimp

    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


def closure(module: str, graph: ImportGraph) -> set[str]:
    """The module, all that it imports at any depth, and the packages whose ``__init__`` runs on the way."""
    found: set[str] = set()
    waiting = {module}
    while waiting:
        found |= waiting
        imported = {other for one in waiting for other in graph.find_modules_directly_imported_by(one)}
        packages = {parent for one in waiting for parent in _parents(one)}
        waiting = (imported | packages) - found
    return found


def module_file(module: str, root: Path | None = None) -> Path:
    """The file, below the project's root or another, of a module or of a package's ``__init__``."""
    path = (root or ROOT) / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def code_digest(module: str | None = None) -> str:
    """Hex sha256 of the source that a module of the project consists of; of all of it without a `module`.

    A module that is not the project's (a test's) counts as all of it.
    """
    graph = import_graph() if module is not None else None
    if module is None or graph is None or module not in graph.modules:
        return _digest(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return _digest(module_file(name) for name in closure(module, graph))


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _parents(module: str) -> Iterable[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module
