"""Whether a cluster's nodes fit together: versions, processes that reach each other, a place for checkpoints."""

from __future__ import annotations

import datetime
import platform
import secrets
import socket
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from components.io.errors import UserError
from components.io.spread import ask_nodes
from components.io.storage import open_storage

REACH_SECONDS = 60.0


def check_nodes(address: str, work: Path, places: Sequence[str], packages: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """Findings, as (fine, sentence) pairs, of the Ray cluster at `address`, as `vlp doctor` prints them.

    `work` is the folder that all nodes must share, `places` are folders or buckets that each must be able to write.
    Starts short tasks on every node, which need no core; leaves nothing behind.
    """
    try:
        met = ask_nodes(meet, address, packages)
    except (UserError, ConnectionError, RuntimeError) as error:
        yield False, f"Ray cluster: {' '.join(str(error).split())}"
        return
    yield True, f"Ray cluster at {address}: {len(met)} nodes"
    here = meet(0, 1, packages)
    answers = {name: answer for name, answer in met.items() if isinstance(answer, dict)}
    for name, answer in met.items():
        if name not in answers:
            yield False, f"node {name} cannot run this project: {said(answer)}"
            continue
        for package, wanted in here["versions"].items():
            found = answer["versions"].get(package)
            if found != wanted:
                yield False, f"node {name} has {package} {found or 'not at all'}, this machine has {wanted}"
    if len(answers) < len(met):
        return
    if all(answer["versions"] == here["versions"] for answer in answers.values()):
        yield True, "all nodes have the same versions as this machine"
    yield from _together(address, "gloo", met)
    with_gpus = ask_nodes(meet, address, packages, gpus=True)
    if len(with_gpus) > 1:
        yield from _together(address, "nccl", with_gpus)
    yield from _shared(address, work, answers)
    for place in places:
        failed = _failures(ask_nodes(write_there, address, place))
        yield (
            not failed,
            f"{place} can be written to from all nodes"
            if not failed
            else (f"{place} cannot be written to from {failed[0]}"),
        )


def _together(address: str, backend: str, met: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    first, answer = next(iter(met.items()))  # where the others meet
    host, _, _ = first.partition(" ")
    failed = _failures(ask_nodes(reach, address, host, answer["port"], backend, gpus=backend == "nccl"))
    yield (
        not failed,
        f"{backend}: all {len(met)} nodes reach each other"
        if not failed
        else (f"{backend}: the nodes do not reach each other ({failed[0]}): open their firewalls to each other"),
    )


def _shared(address: str, work: Path, answers: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    if len({answer["machine"] for answer in answers.values()}) == 1:
        return  # one machine's nodes share all its folders
    token = work / f".vlp-doctor-{secrets.token_hex(8)}"
    work.mkdir(parents=True, exist_ok=True)
    token.write_bytes(b"vlp")
    try:
        blind = [name for name, sees in ask_nodes(sees_file, address, str(token)).items() if sees is not True]
    finally:
        token.unlink()
    yield (
        not blind,
        f"{work} is shared by all nodes"
        if not blind
        else (
            f"node {blind[0]} does not see {work} of this machine: let runtime.work be a folder that all nodes share"
        ),
    )


def _failures(answers: dict[str, Any]) -> list[str]:
    return [f"node {name}: {said(answer)}" for name, answer in answers.items() if answer is not True]


def said(answer: Any) -> str:
    """What went wrong on a node, in a line."""
    if isinstance(answer, Exception):
        lines = str(answer).strip().splitlines()
        return f"{type(answer).__name__}: {lines[-1] if lines else 'no word'}"
    return str(answer)


def meet(rank: int, count: int, packages: Sequence[str]) -> dict[str, Any]:
    """A node's versions, its machine, and a port at which others may meet it."""
    versions = {"Python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "versions": versions,
        "port": port,
        "machine": boot.read_text(encoding="ascii").strip() if boot.is_file() else socket.gethostname(),
    }


def reach(rank: int, count: int, host: str, port: int, backend: str) -> bool:
    """Add up a number over all nodes. Raises what torch raises when one cannot be reached."""
    import torch
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=REACH_SECONDS)
    store = dist.TCPStore(host, port, count, rank == 0, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
    try:
        total = torch.ones(1, device="cuda" if backend == "nccl" else "cpu") * (rank + 1)
        dist.all_reduce(total)
        return bool(total.item() == count * (count + 1) / 2)
    finally:
        dist.destroy_process_group()


def write_there(rank: int, count: int, place: str) -> bool:
    """Write, read and remove a small file in a folder or bucket."""
    storage, name = open_storage(place), f"vlp-doctor-{secrets.token_hex(8)}"
    storage.write(name, b"vlp")
    try:
        return storage.read(name) == b"vlp"
    finally:
        storage.delete(name)


def sees_file(rank: int, count: int, path: str) -> bool:
    """Whether a file of the machine that asks is there."""
    return Path(path).is_file()
