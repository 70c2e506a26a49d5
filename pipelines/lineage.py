"""Where a model comes from: its data version, code, parameters and parent weights, back to the source lists.

``dvc.lock`` holds the whole chain by content: the hash of each stage's outs, and the hashes of the deps that it ran on.
The git commit is not among a model's files: an out that named it would change with every commit, whatever that changed.
It is found here instead, as the commits whose code has the hashes that the stage ran on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.io.errors import UserError
from pipelines.deps import is_code
from pipelines.messages import suggestion
from pipelines.params import read_yaml
from pipelines.revisions import commits_of, git

LOCK_FILE = "dvc.lock"
MODELS = "data/models"


@dataclass(frozen=True)
class Origin:
    """One stage of a model's history, as it ran."""

    stage: str
    out: str
    md5: str
    params: Mapping[str, Any]  # by dotted key
    code: Mapping[str, str]  # path to md5
    inputs: tuple[tuple[str, str, str | None], ...]  # path, md5, and the stage that wrote it; None for a source
    commits: tuple[str, ...] = field(default=())  # newest first


def lineage(name: str, root: Path) -> list[Origin]:
    """The stages behind the model `name`, itself first, then each stage whose out another one here was made from.

    Raises UserError when ``dvc.lock`` knows no such model, or when one stage has run again since another used its out.
    """
    lock = root / LOCK_FILE
    if not lock.is_file():
        raise UserError(f"{LOCK_FILE} is not here, which tells where models come from: run `dvc repro`, or `vlp pull`")
    stages: dict[str, Any] = read_yaml(lock)["stages"]
    writers = {out["path"]: address for address, stage in stages.items() for out in stage.get("outs", [])}
    out = f"{MODELS}/{name}"
    if out not in writers:
        known = [path.removeprefix(f"{MODELS}/") for path in writers if path.startswith(f"{MODELS}/")]
        raise UserError(f"{name} is no model of {LOCK_FILE}; {suggestion(name, known, 'models')}")
    found: dict[str, Origin] = {}
    waiting = [(writers[out], out)]
    while waiting:
        address, path = waiting.pop(0)
        if address in found:
            continue
        origin = _origin(address, path, stages[address], writers, root)
        found[address] = origin
        for used, md5, writer in origin.inputs:
            if writer is None:
                continue
            written = _written(used, writers)
            now = next(one["md5"] for one in stages[writer]["outs"] if one["path"] == written)
            if written == used and md5 not in ("", now):
                raise UserError(
                    f"{address} ran on {used} as it was before {writer} ran again: its history is that of an earlier "
                    f"commit of {LOCK_FILE}; check that out, or bring the model up to date with `dvc repro {address}`"
                )
            waiting.append((writer, written))
    return list(found.values())


def _origin(address: str, path: str, stage: Mapping[str, Any], writers: Mapping[str, str], root: Path) -> Origin:
    deps = stage.get("deps", [])
    code = {dep["path"]: dep["md5"] for dep in deps if is_code(dep["path"])}
    inputs = [input_ for dep in deps if not is_code(dep["path"]) for input_ in _inputs(dep, writers)]
    params = {key: value for values in stage.get("params", {}).values() for key, value in values.items()}
    md5 = next(out["md5"] for out in stage["outs"] if out["path"] == path)
    return Origin(address, path, md5, params, code, tuple(inputs), tuple(commits_of(root, code)))


def _inputs(dep: Mapping[str, Any], writers: Mapping[str, str]) -> Iterator[tuple[str, str, str | None]]:
    """The dep, or the outs that lie in it where it is a folder of several stages' outs."""
    path = dep["path"]
    inside = [out for out in writers if out.startswith(f"{path}/")]
    if path not in writers and inside:
        for out in inside:
            yield out, "", writers[out]  # the hash of the whole folder says nothing of one of its parts
        return
    written = _written(path, writers)
    yield path, dep.get("md5", ""), writers.get(written)


def _written(path: str, writers: Mapping[str, str]) -> str:
    """The out that is the path or holds it; the path itself where none does."""
    above = [path, *(parent.as_posix() for parent in Path(path).parents)]
    return next((one for one in above if one in writers), path)


def describe(origins: list[Origin], root: Path) -> str:
    """The history as text, one paragraph a stage."""
    return "\n\n".join("\n".join(_lines(origin, root)) for origin in origins)


def _lines(origin: Origin, root: Path) -> Iterator[str]:
    yield f"{origin.out}  {origin.md5}"
    yield f"  stage   {origin.stage}"
    for path, md5, writer in origin.inputs:
        yield f"  from    {path}  {md5}".rstrip() + (f"  (by {writer})" if writer else "  (a source)")
    if origin.commits:
        newest = git(root, "log", "-1", "--format=%h %cs %s", origin.commits[0])
        yield f"  code    {newest}"
    elif origin.code:
        yield f"  code    {len(origin.code)} files that no commit holds as they were"
    for key, value in origin.params.items():
        yield f"  params  {key}: {value}"


def as_json(origins: list[Origin]) -> list[dict[str, Any]]:
    """The history for other programs."""
    return [
        {
            "stage": one.stage,
            "out": one.out,
            "md5": one.md5,
            "inputs": [{"path": path, "md5": md5 or None, "stage": writer} for path, md5, writer in one.inputs],
            "params": dict(one.params),
            "code": dict(one.code),
            "commits": list(one.commits),
        }
        for one in origins
    ]
