"""Killed at twenty random moments, `download` and `clean` end with the bytes of a run that was left alone."""

import json
import random
import signal
import time
from multiprocessing import get_context

import pytest

from tests.data.hostile import noise
from tests.data.killing import PRELOAD, both
from tests.data.making import encoded, folder_bytes

KILLS = 20


@pytest.fixture
def site(tmp_path):
    """A list and its web: pictures with captions far apart, among them ills of both stages."""
    web = tmp_path / "site/web"
    web.mkdir(parents=True)
    lines = []
    for number in range(100):
        data = encoded(noise(number % 90, (90, 70)), ("JPEG", "PNG")[number % 2])
        (web / f"{number}.jpg").write_bytes(data[: len(data) // 2] if number % 17 == 3 else data)
        lines.append(f"picture {number}, the first\thttp://corpus.test/{number}.jpg")
    for number in range(5):
        (web / f"same{number}.jpg").write_bytes(encoded(noise(999, (90, 70))))
        lines += [f"no longer here\thttp://corpus.test/same{number}.jpg", "no tab", f"x\thttp://corpus.test/no{number}"]
    lines += [f"picture {number} again\thttp://corpus.test/{number}.jpg" for number in range(100)]
    (web / "responses.json").write_text(json.dumps({"/7.jpg": {"status": 503}, "/9.jpg": {"status": 403}}))
    (tmp_path / "site/pairs.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path / "site"


def outs(folder):
    return [folder_bytes(folder / out) for out in ("raw/src", "clean")]


@pytest.mark.slow
def test_twenty_kills(tmp_path, site):
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)

    def start(folder):
        child = context.Process(target=both, args=(str(site), str(folder)))
        child.start()
        return child

    warm = start(tmp_path / "warm")  # the server that children are forked from has loaded everything then
    warm.join()
    assert warm.exitcode == 0
    whole, started = outs(tmp_path / "warm"), time.monotonic()
    timed = start(tmp_path / "timed")
    timed.join()
    seconds = time.monotonic() - started
    assert outs(tmp_path / "timed") == whole

    rng = random.Random(5)
    kills = rounds = 0
    while kills < KILLS:
        folder, finished = tmp_path / f"round{rounds}", False
        rounds += 1
        while not finished:
            child = start(folder)
            child.join(timeout=rng.uniform(0.05, 0.8) * seconds if kills < KILLS else None)
            if child.exitcode is None:
                child.kill()
                child.join()
            finished = child.exitcode == 0
            kills += child.exitcode == -signal.SIGKILL
            assert child.exitcode in (0, -signal.SIGKILL)
        assert outs(folder) == whole, f"after {kills} kills"
