"""Resumable work: partitions that are finished once and for all, then published as a stage's out.

DVC deletes a stage's outs before it runs the stage, so what an interrupted run had finished must lie elsewhere: under
``work/STAGE/DIGEST``, where the digest covers parameters, inputs and code. Other parameters work in another folder and
never see stale pieces.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from components.io.code import code_digest
from components.io.progress import progress
from components.io.records import MANIFEST_FILE, sha256_file
from components.io.runtime import Runtime
from components.io.spread import spread

DONE_FILE = "done.json"
SEALED = "sha256"  # in what a partition reported: the digests of its files
DISCARDED = ".discarded"  # ends the names of folders that are being removed


def input_digest(path: Path) -> str:
    """Hex sha256 of an input: of its manifest where it has one, else of every file's name and content."""
    if path.is_file():
        return sha256_file(path)
    if (path / MANIFEST_FILE).is_file():
        return sha256_file(path / MANIFEST_FILE)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            # the name's own bytes: they may be no UTF-8, and the locale may not be
            digest.update(os.fsencode(file.relative_to(path).as_posix()) + b"\0" + sha256_file(file).encode() + b"\0")
    return digest.hexdigest()


def run_digest(stage: str, params: BaseModel, inputs: Mapping[str, Path]) -> str:
    """Twelve hex digits that name this work: stage, parameters, inputs, and the code that the parameters belong to."""
    content = {
        "stage": stage,
        "params": params.model_dump(mode="json"),
        "inputs": {name: input_digest(path) for name, path in sorted(inputs.items())},
        "code": code_digest(type(params).__module__),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def stage_work(runtime: Runtime, stage: str, params: BaseModel, inputs: Mapping[str, Path]) -> Path:
    """The folder for this stage's unfinished work, made if it is not there yet."""
    folder = runtime.work / stage / run_digest(stage, params, inputs)
    for left in folder.parent.glob(f".*{DISCARDED}"):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def discard(work: Path) -> None:
    """Remove a folder of work that is no longer wanted; a kill on the way leaves none that looks whole.

    Without the new name, a later run would take what is left of its parts for finished ones.
    """
    gone = work.with_name(f".{work.name}{DISCARDED}")
    shutil.rmtree(gone, ignore_errors=True)
    work.rename(gone)
    shutil.rmtree(gone)


def run_partition(run: Callable[[Any, Path], dict[str, Any]], item: Any, folder: Path) -> dict[str, Any]:
    """Run one partition unless it is finished; return what it reported.

    `run(item, folder)` writes its files into an empty `folder` and returns a JSON dictionary. The partition counts as
    finished when its folder has its final name, which it gets last: a killed run leaves only a ``.partial`` behind.
    """
    if (folder / DONE_FILE).is_file():
        done: dict[str, Any] = json.loads((folder / DONE_FILE).read_text(encoding="utf-8"))
        return done
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    result = run(item, partial)
    (partial / DONE_FILE).write_text(json.dumps(result), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)  # unfinished, whoever left it
    partial.rename(folder)
    return result


def partitions(work: Path, name: str, count: int) -> list[Path]:
    """The folders of `count` partitions in `work`."""
    return [work / f"{name}-{index:05d}" for index in range(count)]


def map_partitions(
    run: Callable[[Any, Path], dict[str, Any]],
    items: Sequence[Any],
    *,
    work: Path,
    runtime: Runtime,
    label: str,
    name: str = "part",
    cpus: int = 1,
    gpus: int = 0,
) -> list[tuple[Path, dict[str, Any]]]:
    """Run `run` over `items` on the runtime's processes or Ray cluster, skipping what an earlier run finished.

    `run` must be importable (a module's function or a `functools.partial` of one); on a cluster each partition asks for
    `cpus` and `gpus`. Returns, in the order of `items`, each partition's folder (``work/NAME-00000`` …) and what `run`
    returned for it.
    """
    folders = partitions(work, name, len(items))
    jobs = [
        (run, item, folder) for item, folder in zip(items, folders, strict=True) if not (folder / DONE_FILE).is_file()
    ]
    with progress(label, total=len(items), unit="parts", done=len(items) - len(jobs)) as advance:
        for _ in spread(
            run_partition, jobs, processes=runtime.processes, ray_address=runtime.ray_address, cpus=cpus, gpus=gpus
        ):
            advance()
    return [(folder, json.loads((folder / DONE_FILE).read_text(encoding="utf-8"))) for folder in folders]


def seal(run: Callable[[Any, Path], dict[str, Any]], item: Any, folder: Path) -> dict[str, Any]:
    """Run a partition and report the sha256 of each file it wrote, for `drop_damaged`: use ``partial(seal, run)``."""
    result = run(item, folder)
    return {**result, SEALED: {path.name: sha256_file(path) for path in sorted(folder.iterdir())}}


def drop_damaged(work: Path) -> list[str]:
    """Remove the finished partitions in `work` whose files are not those that `seal` saw; their names, sorted."""
    damaged = [done.parent for done in sorted(work.glob(f"*/{DONE_FILE}")) if not _whole(done.parent)]
    for folder in damaged:
        shutil.rmtree(folder)
    return [folder.name for folder in damaged]


def _whole(folder: Path) -> bool:
    try:
        sealed = json.loads((folder / DONE_FILE).read_text(encoding="utf-8"))[SEALED]
        present = {path.name: sha256_file(path) for path in folder.iterdir() if path.name != DONE_FILE}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(sealed == present)


def keep_within(folder: Path, limit: int) -> None:
    """Remove the longest unused work folders in `folder` until what they hold together is within `limit` bytes.

    A folder is used when a partition is finished in it, or when it is touched (`os.utime`).
    """
    sizes = {}
    for work in folder.iterdir() if folder.is_dir() else ():
        if work.is_dir() and not work.name.startswith("."):
            files = [path.stat().st_size for path in work.rglob("*") if path.is_file()]
            sizes[work] = (work.stat().st_mtime_ns, sum(files))
    total = sum(size for _, size in sizes.values())
    for work, (_, size) in sorted(sizes.items(), key=lambda entry: entry[1]):
        if total <= limit:
            break
        discard(work)
        total -= size


def publish(built: Path, out: Path) -> None:
    """Move a finished folder to a stage's out, replacing what stands there.

    `built` should lie in the stage's work folder. Across file systems it is copied first, so that `out` appears whole.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        shutil.rmtree(out)
    try:
        built.rename(out)
    except OSError:
        staged = out.with_name(f".{out.name}.partial")
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(built, staged)
        staged.rename(out)
        shutil.rmtree(built)
