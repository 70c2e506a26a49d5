"""``vlp doctor``: what of this machine, or of the cluster that runs use, would stop a run, found before the run."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from components.io.errors import UserError

PACKAGES = ("torch", "timm", "transformers", "ray", "prefect", "dvc", "pyarrow", "boto3", "great-expectations")
LEAST_FREE = 10 * 2**30  # bytes, for the built-in corpus, its weights and DVC's cache of both
REACH = """
import datetime, os, sys, torch, torch.distributed as dist
rank, port, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, datetime.timedelta(seconds=60))
dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
device = f"cuda:{rank}" if backend == "nccl" else "cpu"
total = torch.ones(1, device=device) * (rank + 1)
dist.all_reduce(total)
dist.destroy_process_group()
sys.exit(0 if total.item() == 3 else 1)
"""


def doctor(root: Path) -> list[tuple[bool, str]]:
    """What was looked at, as (fine, sentence) pairs; nothing is changed."""
    return [
        finding for look in (_machine, _packages, _folders, _repository, _torch, _cluster) for finding in look(root)
    ]


def report(root: Path) -> None:
    """Print the findings. Raises UserError when something would stop a run."""
    bad = 0
    for fine, sentence in doctor(root):
        print(f"{'ok  ' if fine else 'BAD '} {sentence}")
        bad += not fine
    if bad:
        raise UserError(f"{bad} of these would stop a run: mend the lines marked BAD")


def _machine(root: Path) -> Iterator[tuple[bool, str]]:
    yield sys.version_info >= (3, 11), f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    import psutil

    memory = psutil.virtual_memory()
    yield True, f"{os.cpu_count()} cores, {memory.total / 2**30:.0f} GiB of memory, {memory.available / 2**30:.0f} free"
    free = shutil.disk_usage(root).free
    yield free >= LEAST_FREE, f"{free / 2**30:.0f} GiB of disk free here; {LEAST_FREE / 2**30:.0f} are wanted"
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total / 2**30
        yield size >= 1, f"/dev/shm holds {size:.1f} GiB; Ray wants at least 1 (docker run --shm-size)"


def _packages(root: Path) -> Iterator[tuple[bool, str]]:
    missing = []
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    yield not missing, ", ".join(found) + (f"; missing: {', '.join(missing)} (make install)" if missing else "")


def _folders(root: Path) -> Iterator[tuple[bool, str]]:
    from pipelines.environment import read_params
    from pipelines.params import PARAMS_FILE

    folders = [root / "data"]
    if (root / PARAMS_FILE).is_file():
        try:
            folders.append(root / read_params(root / PARAMS_FILE)[1].runtime.work)
            yield True, f"{PARAMS_FILE} is valid"
        except UserError as error:
            yield False, str(error)
    for folder in folders:
        there = next(one for one in (folder, *folder.parents) if one.is_dir())
        try:
            with tempfile.TemporaryDirectory(dir=there, prefix=".vlp-doctor-") as scratch:
                (Path(scratch) / "a").write_bytes(b"vlp")
                (Path(scratch) / "a").rename(Path(scratch) / "b")
            yield True, f"{folder} can be written to"
        except OSError as error:
            yield False, f"{folder} cannot be written to: {error.strerror}"


def _repository(root: Path) -> Iterator[tuple[bool, str]]:
    git = shutil.which("git")
    yield git is not None, "git is installed" if git else "git is not installed"
    yield (root / ".dvc").is_dir(), f"{root} {'is' if (root / '.dvc').is_dir() else 'is not'} a DVC repository"
    url = os.environ.get("PREFECT_API_URL")
    yield True, f"Prefect: {url}" if url else "Prefect: no server is set up; each flow starts one of its own"


def _torch(root: Path) -> Iterator[tuple[bool, str]]:
    import torch

    gpus = torch.cuda.device_count()
    yield True, f"{gpus} GPUs: {torch.cuda.get_device_name()}" if gpus else "no GPU: training runs on the cores"
    yield _reach("gloo")
    if gpus > 1:
        yield _reach("nccl")


def _cluster(root: Path) -> Iterator[tuple[bool, str]]:
    """The nodes of ``runtime.ray_address``, of the parameters or the environment, where there is one."""
    from pipelines.environment import read_params
    from pipelines.params import PARAMS_FILE

    try:
        _, params = read_params(root / PARAMS_FILE)
    except UserError:  # `_folders` has said it
        return
    trainings = [params.pretrain, *params.finetune.runs.values()]  # type: ignore[attr-defined]
    places = list(dict.fromkeys(one.checkpoint.storage_path for one in trainings if one.checkpoint.storage_path))
    if params.runtime.ray_address is None:
        from pipelines.launch.nodes import said, write_there

        for place in places:
            try:
                write_there(0, 1, place)
                yield True, f"{place} can be written to"
            except (UserError, OSError) as error:
                yield False, f"{place} cannot be written to: {said(error)}"
        return
    from pipelines.launch.nodes import check_nodes

    yield from check_nodes(params.runtime.ray_address, (root / params.runtime.work).resolve(), places, PACKAGES)


def _reach(backend: str) -> tuple[bool, str]:
    """Whether two processes of this machine can add up a number over `backend`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start: Callable[[int], subprocess.Popen[bytes]] = lambda rank: subprocess.Popen(  # noqa: E731
        [sys.executable, "-c", REACH, str(rank), str(port), backend], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    both = [start(0), start(1)]
    errors = []
    for process in both:
        try:
            _, error = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            _, error = process.communicate()
        if process.returncode != 0:
            errors.append((error.decode(errors="replace").strip().splitlines() or ["no word"])[-1])
    if errors:
        return False, f"{backend}: two processes of this machine cannot reach each other: {errors[0]}"
    return True, f"{backend}: two processes of this machine reach each other"
