"""``dvc.yaml`` read without DVC, whose import takes a second: the command, deps and outs of each stage.

Knows what this project's file uses: plain stages, and ``foreach`` over a mapping of ``params.yaml`` with ``${key}``,
``${item.…}`` and ``${section.…}``. A test holds it against DVC's own reading.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.io.errors import UserError
from pipelines.messages import suggestion
from pipelines.params import read_yaml

DVC_FILE = Path("dvc.yaml")


@dataclass(frozen=True)
class Entry:
    """A stage as `dvc repro` would run it."""

    address: str  # NAME or NAME@KEY
    cmd: str
    deps: tuple[str, ...]
    outs: tuple[str, ...]  # metrics and plots among them
    params: tuple[str, ...]  # keys of params.yaml

    def options(self) -> dict[str, str]:
        """The options of ``vlp run NAME --option value …`` by their Python names."""
        words = shlex.split(self.cmd)[3:]
        names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
        return dict(zip(names, words[1::2], strict=True))


def read_entries(content: Mapping[str, Any], path: Path = DVC_FILE) -> dict[str, Entry]:
    """All stages of ``dvc.yaml`` by address, with the values of a parameter file's `content` filled in.

    Raises UserError when the file is missing or names a parameter that is not in `content`.
    """
    entries: dict[str, Entry] = {}
    for name, definition in read_yaml(path)["stages"].items():
        if "foreach" not in definition:
            entries[name] = _entry(name, definition, content)
            continue
        items = fill(definition["foreach"], content)
        for key, item in items.items():
            address = f"{name}@{key}"
            entries[address] = _entry(address, definition["do"], {**content, "key": key, "item": item})
    return entries


def find_entry(entries: Mapping[str, Entry], address: str) -> Entry:
    """The stage of that address; the name of a ``foreach`` alone will do where it makes one stage only.

    Raises UserError that lists the addresses otherwise.
    """
    if address in entries:
        return entries[address]
    members = [name for name in entries if name.partition("@")[0] == address]
    if len(members) == 1:
        return entries[members[0]]
    if members:
        raise UserError(f"{address} stands for several stages: say which of {', '.join(members)}")
    raise UserError(f"{address} is no stage of {DVC_FILE}; {suggestion(address, list(entries), 'stages')}")


def strangers(entry: Entry, entries: Mapping[str, Entry]) -> list[str]:
    """Folders that stand inside one of the stage's inputs although no stage writes them any more.

    A stage that reads all of ``data/raw`` would take a source for one of its own that was taken out of
    ``params.yaml`` but whose folder DVC left there.
    """
    written = {Path(out) for other in entries.values() for out in other.outs}
    above = {parent for out in written for parent in out.parents}
    return sorted(
        str(found)
        for dep in map(Path, entry.deps)
        if dep in above - written and dep.is_dir()
        for found in dep.iterdir()
        if found.is_dir() and found not in written | above
    )


def check_tracked(entries: Mapping[str, Entry], content: Mapping[str, Any], name: str) -> None:
    """Raise UserError when a parameter that a stage tracks by its own key is not written out in the file `name`.

    DVC would run the stage and only then fail to note the parameter's value.
    """
    for entry in entries.values():
        for key in entry.params:
            value: Any = content
            for step in key.split("."):
                value = value.get(step) if isinstance(value, Mapping) else None
            if value is None:
                raise UserError(
                    f"{name}: {key} must be written out, with its default if need be: "
                    f"the stage {entry.address} tracks it by name in {DVC_FILE}"
                )


def fill(text: str, content: Mapping[str, Any]) -> Any:
    """`text` with each ``${a.b}`` replaced by that value of `content`; a text that is one ``${…}`` becomes the value.

    Raises UserError when `content` lacks it.
    """

    def look_up(match: re.Match[str]) -> Any:
        value: Any = content
        for step in match[1].strip().split("."):
            if not isinstance(value, Mapping) or step not in value:
                raise UserError(f"{DVC_FILE} names {match[0]}, which the parameters lack")
            value = value[step]
        return value

    whole = re.fullmatch(r"\$\{([^}]+)\}", text)
    return look_up(whole) if whole else re.sub(r"\$\{([^}]+)\}", lambda match: str(look_up(match)), text)


def _entry(address: str, definition: Mapping[str, Any], content: Mapping[str, Any]) -> Entry:
    def paths(kind: str) -> list[str]:
        listed = definition.get(kind, [])
        return [str(fill(next(iter(item)) if isinstance(item, Mapping) else item, content)) for item in listed]

    cmd = " ".join(str(fill(definition["cmd"], content)).split())
    outs = (*paths("outs"), *paths("metrics"), *paths("plots"))
    return Entry(address, cmd, tuple(paths("deps")), outs, tuple(paths("params")))
