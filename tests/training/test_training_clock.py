"""What the progress line says of speed and waiting."""

import pytest

from components.training import clock as module
from components.training.clock import Clock


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still until it is moved."""
    time = {"now": 100.0}
    monkeypatch.setattr(module.time, "monotonic", lambda: time["now"])
    return time


def steps(clock, now, count, *, waits, works):
    for _ in range(count):
        with clock.waiting():
            now["now"] += waits
        now["now"] += works
        clock.steps += 1


def test_the_line_says_speed_and_share_without_the_loaders_start(now):
    clock = Clock(8, "pretrain")
    with clock.waiting():
        now["now"] += 50  # the first batch
    now["now"] += 0.9
    clock.steps += 1
    steps(clock, now, 9, waits=0.1, works=0.9)
    assert clock.note() == f"{10 * 8 / 9.9:.0f} pictures/s  waiting for data 9%"
    steps(clock, now, 10, waits=0, works=1)
    assert clock.note() == "8 pictures/s  waiting for data 0%"


@pytest.mark.parametrize(("waits", "said"), [(0.1, 0), (0.5, 1)])
def test_a_slow_loader_is_named_once_with_what_to_do(now, capsys, waits, said):
    clock = Clock(8, "finetune.runs.x")
    for _ in range(10):
        steps(clock, now, 10, waits=waits, works=1 - waits)
        clock.note()
    err = capsys.readouterr().err
    assert err.count("finetune.runs.x waits for data") == said
    assert err.count("raise finetune.runs.x.loader_workers") == said
