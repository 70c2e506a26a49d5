"""What DVC notes of a stage is what ran: the working folder's code, and parameters that stayed as they were.

DVC hashes code and reads parameters for ``dvc.lock`` when a stage has ended. Without this, what was edited meanwhile
would be noted as what made the outs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.io.errors import UserError

if TYPE_CHECKING:
    from pipelines.dvcfile import Entry

STAGE = "DVC_STAGE"  # DVC sets it for the commands of dvc.yaml
NAMED = 3  # edits that a message lists


def run_as_recorded() -> None:
    """Where DVC runs a stage of another copy of the project than the installed one, go on with that copy's code.

    DVC notes the code of its working folder. In another clone, or in the folders that queued experiments run in, the
    installed ``vlp`` would run its own.
    """
    if STAGE not in os.environ:
        return
    here = Path.cwd() / "pipelines" / "cli.py"
    if not here.is_file() or here.samefile(Path(__file__).with_name("cli.py")):
        return
    paths = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    os.execve(sys.executable, [sys.executable, "-m", "pipelines.cli", *sys.argv[1:]], environment)


@contextmanager
def steady(entries: Mapping[str, Entry], params: Path, content: Mapping[str, Any]) -> Iterator[None]:
    """Where DVC runs the stage, hold what it was started with against what DVC is about to note.

    `content` is that of the file `params` as it was read for the stage. Raises UserError at the end, so that DVC notes
    nothing, when a parameter or a module that the stage depends on is another by then.
    """
    entry = entries.get(os.environ.get(STAGE, ""))
    if entry is None:
        yield
        return
    from pipelines.params import read_yaml  # pydantic with it, which `vlp --help` does without

    before = _state(entry, content)
    yield
    try:
        after = _state(entry, read_yaml(params))
    except UserError:  # caught in the middle of an edit
        after = {**before, str(params): "unreadable"}
    edited = [key for key in before | after if before.get(key) != after.get(key)]
    if edited:
        more = f" and {len(edited) - NAMED} more" if edited[NAMED:] else ""
        raise UserError(
            f"{', '.join(edited[:NAMED])}{more}: edited while {entry.address} ran, so that its outs are not of what "
            "stands there now. Run again; or put it back first, and what is finished is taken up"
        )


def _state(entry: Entry, content: Mapping[str, Any]) -> dict[str, Any]:
    """The stage's parameters by their leaves' keys, and its modules' texts by their paths."""
    found: dict[str, Any] = {}
    for key in entry.params:
        value: Any = content
        for step in key.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        found |= dict(_leaves(key, value))
    files = [Path(dep) for dep in entry.deps if dep.endswith(".py")]
    return found | {str(file): file.read_bytes() if file.is_file() else None for file in files}


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value
