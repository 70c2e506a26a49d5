"""One flow at a time in a clone, also when its holder dies; retries and time limits by kind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.exclusive import LOCK_FILE, BusyError, exclusive
from pipelines.policies import POLICIES, Policy, policy_of
from pipelines.repro import StageError, reproduce
from pipelines.stages import STAGES

HOLD = """
import subprocess, sys
from pathlib import Path
from pipelines.exclusive import exclusive
with exclusive(Path(sys.argv[1]), "data", when_busy="queue", say=print) as lock:
    child = subprocess.Popen(["sleep", "300"], pass_fds=(lock,)) if sys.argv[2:] else None
    if child:
        print(child.pid, flush=True)
    Path(sys.argv[1], "held").touch()
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the lock until its standard input ends."""
    started = []

    def start(*extra):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path), *extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        until = time.monotonic() + 60
        while not (tmp_path / "held").is_file():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_later_flow_is_cancelled(tmp_path, holder):
    process = holder()
    with (
        pytest.raises(BusyError, match=rf"the flow data \(process {process.pid}\) runs in this repository"),
        exclusive(tmp_path, "evaluation", when_busy="cancel", say=print),
    ):
        pytest.fail("two at once")


def test_a_later_flow_waits(tmp_path, holder):
    process = holder()
    said = []

    def say(text):
        said.append(text)
        process.stdin.close()  # the first ends only once the second waits

    with exclusive(tmp_path, "evaluation", when_busy="queue", say=say):
        assert "evaluation" in (tmp_path / LOCK_FILE).read_text()
    assert said == [f"evaluation: waiting for the flow data (process {process.pid})"]


def test_a_dead_holder_holds_nothing(tmp_path, holder):
    process = holder()
    process.kill()
    process.wait()
    with exclusive(tmp_path, "evaluation", when_busy="cancel", say=print):
        pass
    with exclusive(tmp_path, "evaluation", when_busy="cancel", say=print):
        pass


def test_the_stage_of_a_dead_flow_still_holds(tmp_path, holder):
    process = holder("with a stage")
    stage = int(process.stdout.readline())
    process.kill()
    process.wait()
    try:
        with pytest.raises(BusyError), exclusive(tmp_path, "evaluation", when_busy="cancel", say=print):
            pytest.fail("the stage is still at work")
    finally:
        os.kill(stage, signal.SIGKILL)
    with exclusive(tmp_path, "evaluation", when_busy="queue", say=print):
        pass


def test_every_stage_has_a_policy():
    for stage in STAGES.values():
        policy = policy_of(stage.name, stage.room)
        assert policy.hours > 0
        assert list(policy.delays) == sorted(policy.delays), "each wait is at least as long as the one before"
    assert policy_of("download", "data").retries > policy_of("clean", "data").retries
    assert policy_of("validate", "data").retries == 0
    assert set(POLICIES) >= {stage.room for stage in STAGES.values()}


def test_another_number_of_retries():
    policy = Policy((1.0, 5.0), hours=1)
    assert policy.limited(None) is policy
    assert policy.limited(0).delays == ()
    assert policy.limited(1).delays == (1.0,)
    assert policy.limited(4).delays == (1.0, 5.0, 5.0, 5.0)
    assert Policy((), hours=1).limited(1).delays == (60.0,)


@pytest.mark.slow
def test_a_stage_that_takes_too_long_is_interrupted(project):
    Path("hold").write_text("synthesize")
    with pytest.raises(StageError, match="interrupted after 8 s, the most that a stage of its kind may take"):
        reproduce("synthesize", project.folder, seconds=8)
    Path("hold").unlink()
    reproduce("synthesize", project.folder, seconds=600)
