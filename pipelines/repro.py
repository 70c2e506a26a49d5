"""``dvc repro --single-item STAGE`` in a process of its own, whose error message the flow gets.

The output of DVC and of the stage goes straight to the terminal, so that progress bars remain bars.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from pipelines.failure import MESSAGE_FILE, leave_message, read_message

UPSTREAM = "--upstream"
STOP_SECONDS = 20.0  # that an interrupted stage has to end by itself

_COMMAND_FAILED = re.compile(r"failed to run: (.*), exited with (-?\d+)", re.DOTALL)


class StageError(Exception):
    """A stage ended without its outs. The message is the stage's own."""


def reproduce(
    address: str,
    root: Path,
    *,
    upstream: bool = False,
    seconds: float | None = None,
    keep_open: tuple[int, ...] = (),
) -> None:
    """Run one stage of the DVC repository at `root` unless DVC finds it up to date, for at most `seconds`.

    With `upstream` the stages that it waits for come first.

    The child processes inherit the file descriptors `keep_open`. Raises StageError with the stage's message, or DVC's
    where the stage did not run, or when the time is up; what the stage had finished is kept for the next attempt.
    """
    with tempfile.TemporaryDirectory(prefix="vlp-") as scratch:
        message_file = Path(scratch, "message")
        environment = {
            **os.environ,
            # so that `vlp` in dvc.yaml is the one of this installation, activated or not
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            MESSAGE_FILE: str(message_file),
        }
        command = [sys.executable, "-m", "pipelines.repro", address, *([UPSTREAM] if upstream else [])]
        # a group of its own: an interrupt reaches the stage from here, in order, and nothing outlives the flow
        child = subprocess.Popen(command, cwd=root, env=environment, process_group=0, pass_fds=keep_open)
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            _stop(child)
            raise StageError(f"interrupted after {seconds:g} s, the most that a stage of its kind may take") from None
        except BaseException:
            _stop(child)
            raise
        if status != 0:
            raise StageError(read_message(message_file) or f"DVC ended with status {status}")


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Interrupt the child and all that it started; kill what does not end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGINT)
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def explain(lines: list[str]) -> str:
    """DVC's error and its causes as one sentence; for a command that failed, how it ended."""
    text = ": ".join(dict.fromkeys(line.strip() for line in lines if line.strip()))
    failed = _COMMAND_FAILED.search(text)
    if failed is None:
        return text
    status = int(failed[2])
    ended_by = _signal(status)
    if ended_by is None:
        return f"`{failed[1]}` ended with status {status}; its output is above"
    reason = " (often for want of memory)" if ended_by is signal.SIGKILL else ""
    return f"`{failed[1]}` was ended by {ended_by.name}{reason}"


def _signal(status: int) -> signal.Signals | None:
    """The signal that ended a command, if one did: -N for the command itself, 128 + N from a shell that waited for it.

    Which of the two DVC sees depends on whether the system's shell replaces itself by its last command.
    """
    number = -status if status < 0 else status - 128
    return signal.Signals(number) if number in set(signal.Signals) else None


def main(address: str, *, upstream: bool) -> int:
    """Do what ``dvc repro`` does, with ``--single-item`` unless `upstream`, without its hints; returns the status."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.WARNING)
    try:
        with Repo() as repository:
            repository.reproduce(targets=address, single_item=not upstream)
    except DvcException as error:
        if not read_message(Path(os.environ.get(MESSAGE_FILE, os.devnull))):
            message = explain(_chain(error))
            leave_message(message)
            print(f"dvc: {message}", file=sys.stderr)
        return 1
    except Exception as error:  # a full disk, a bug: the flow gets the line, the terminal the traceback
        leave_message("".join(traceback.format_exception_only(error)).strip())
        raise
    return 0


def _chain(error: BaseException | None) -> list[str]:
    """What an error and those that caused it say, outermost first."""
    lines = []
    while error is not None:
        lines.append(str(error))
        error = error.__cause__
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], upstream=UPSTREAM in sys.argv[2:]))
