"""Several real Ray nodes on this machine: what a cluster would do, tried without one."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from components.io.errors import UserError

STATE = Path("work", "launch", "local.json")
STARTED = "Ray runtime started"  # what `ray start` says when its node has joined
START_SECONDS = 120.0
STOP_SECONDS = 30.0
DRAIN_SECONDS = 2  # that a node which is told to end leaves its tasks; the head's own helpers would take Ray's 30


def up(root: Path, nodes: int, *, cpus: int = 1) -> dict[str, str]:
    """Start a head without CPUs for tasks and `nodes` - 1 workers; returns the environment that runs use them with.

    Token authentication is on; the token lies beside the state, readable by its owner alone. Raises UserError when a
    cluster of this clone runs already, or a node does not start.
    """
    state_file = root / STATE
    if _alive(state_file):
        raise UserError("a local cluster of this clone runs already: `vlp launch down` ends it")
    folder = state_file.parent
    folder.mkdir(parents=True, exist_ok=True)
    token = folder / "token"
    token.unlink(missing_ok=True)
    descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    address = f"127.0.0.1:{_free_port()}"
    given = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token.absolute()),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": address,
        "VLP_RUNTIME_RAY_ADDRESS": address,
    }
    processes: list[dict[str, Any]] = []
    try:
        for number in range(nodes):
            options = (
                ["--head", f"--port={address.rpartition(':')[2]}", "--num-cpus=0", "--include-dashboard=false"]
                if number == 0
                else [f"--address={address}", f"--num-cpus={cpus}"]
            )
            processes.append(_start(root, options, given, folder / f"node-{number}.log"))
            state_file.write_text(json.dumps({"processes": processes, "environment": given}), encoding="utf-8")
            # one after the other: on a busy machine, nodes that start together overrun Ray's own 30 s
            _wait_for(folder / f"node-{number}.log", processes[-1])
    except BaseException:
        down(root)
        raise
    return given


def down(root: Path) -> bool:
    """End the nodes that `up` started, and nothing else; returns whether there were any."""
    state_file = root / STATE
    if not state_file.is_file():
        return False
    started = json.loads(state_file.read_text(encoding="utf-8"))["processes"]
    ended = [_end(process) for process in reversed(started)]  # the head last: without it no node ends by itself
    state_file.unlink()
    (state_file.parent / "token").unlink(missing_ok=True)
    return any(ended)


def _end(started: dict[str, Any]) -> bool:
    """End a node, by its first process, which ends the others; returns whether there was one."""
    import psutil

    tree = _tree(started)
    for one in tree[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    _, left = psutil.wait_procs(tree, timeout=STOP_SECONDS)
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(left, timeout=STOP_SECONDS)
    return bool(tree)


def running(root: Path) -> dict[str, str] | None:
    """The environment of this clone's cluster; None when there is none."""
    state_file = root / STATE
    if not _alive(state_file):
        return None
    found: dict[str, str] = json.loads(state_file.read_text(encoding="utf-8"))["environment"]
    return found


def _alive(state_file: Path) -> bool:
    if not state_file.is_file():
        return False
    state = json.loads(state_file.read_text(encoding="utf-8"))
    return any(_tree(process) for process in state["processes"])


def _tree(started: dict[str, Any]) -> list[Any]:
    """The process and all below it, if it is still the one that was started: numbers are used again."""
    import psutil

    try:
        process = psutil.Process(started["pid"])
        if abs(process.create_time() - started["created"]) > 1:
            return []
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _start(root: Path, options: list[str], given: dict[str, str], log: Path) -> dict[str, Any]:
    import psutil

    ray = str(Path(sys.executable).with_name("ray"))
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {key: value for key, value in given.items() if key != "RAY_ADDRESS"}
    environment.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", str(DRAIN_SECONDS))
    # workers import the clone's own code, and relative paths mean the same as for the driver
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root.absolute()), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as stream:
        child = subprocess.Popen(
            [ray, "start", *options, "--node-ip-address=127.0.0.1", "--block", "--disable-usage-stats"],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    return {"pid": child.pid, "created": psutil.Process(child.pid).create_time()}


def _wait_for(log: Path, process: dict[str, Any]) -> None:
    """Wait until a node says that it runs. Raises UserError with the end of its log when it ends or takes too long."""
    until = time.monotonic() + START_SECONDS
    while STARTED not in (said := log.read_text(encoding="utf-8", errors="replace")):
        ended = not _tree(process)
        if ended or time.monotonic() > until:
            last = " ".join(said.split())[-300:]
            raise UserError(f"a Ray node {'ended' if ended else 'did not start'} ({log}): {last}")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
