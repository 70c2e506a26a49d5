"""Stands in for ``vlp run`` in tests: writes a stage's outs from a digest of its deps and parameters.

``python fake_stage.py NAME --option value …``; FAIL_STAGE=NAME makes that one fail with a message of its own. While
there is a file ``hold`` that names the stage, it waits, after writing ``held``.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from pipelines.dvcfile import Entry, read_entries
from pipelines.failure import leave_message
from pipelines.params import read_yaml

RECALLS = dict.fromkeys(("txt_r1", "txt_r5", "txt_r10", "img_r1", "img_r5", "img_r10", "r_mean"), 50.0)


def digest_of(entry: Entry, content: dict) -> str:
    digest = hashlib.sha256(entry.cmd.encode())
    for dep in entry.deps:
        path = Path(dep)
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file():
                digest.update(str(file).encode() + file.read_bytes())
    for key in entry.params:
        value = content
        for step in key.split("."):
            value = value[step]
        digest.update(json.dumps(value, sort_keys=True).encode())
    return digest.hexdigest()


def write(out: Path, digest: str) -> None:
    if out.name == "metrics.json":
        recalls = {**RECALLS, "digest": int(digest[:6], 16)}
        content = json.dumps({"chance": recalls, "itc": recalls, "itm": recalls})
    elif out.suffix:
        content = json.dumps(digest)
    else:
        out.mkdir(parents=True, exist_ok=True)
        if out.name == "metrics":
            (out / "loss.tsv").write_text(f"step\tloss\n0\t{int(digest[:6], 16)}\n")
        else:
            (out / "results.json").write_text(json.dumps(digest))
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(content)


def fake(address: str) -> None:
    """Write the outs of the stage of that address."""
    content = read_yaml(Path("params.yaml"))
    entry = read_entries(content)[address]
    with Path("ran.log").open("a") as log:
        log.write(f"{address}\n")
    digest = digest_of(entry, content)
    for out in entry.outs:
        write(Path(out), digest)


def main() -> int:
    if os.environ.get("FAIL_STAGE") == sys.argv[1]:
        leave_message("the disk is full: free some space")
        return 2
    if os.environ.get("KILL_STAGE") == sys.argv[1]:
        os.kill(os.getpid(), 9)
    hold = Path("hold")
    if hold.is_file() and hold.read_text() == sys.argv[1]:
        Path("held").write_text(str(os.getpid()))
        while hold.is_file():
            time.sleep(0.05)
    fake(os.environ["DVC_STAGE"])  # which DVC sets
    return 0


if __name__ == "__main__":
    sys.exit(main())
