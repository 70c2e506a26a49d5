import os
import signal

import pytest
from pydantic import BaseModel

from components.io.errors import UserError
from components.io.runtime import Runtime
from components.io.work import discard, map_partitions, publish, run_digest, stage_work


class P(BaseModel, frozen=True):
    size: int = 1


def double(item, folder):
    (folder / "number.txt").write_text(str(2 * item))
    return {"pid": os.getpid(), "value": 2 * item}


def fail_on_three(item, folder):
    (folder / "number.txt").write_text("half")
    if item == 3 and not (folder.parent / "mended").exists():
        raise UserError("three is refused")
    return double(item, folder)


def kill_worker(item, folder):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("processes", [1, 2])
def test_partitions_come_back_in_order(tmp_path, processes):
    parts = map_partitions(double, [1, 2, 3], work=tmp_path, runtime=Runtime(processes=processes), label="doubling")
    assert [result["value"] for _, result in parts] == [2, 4, 6]
    assert [(folder / "number.txt").read_text() for folder, _ in parts] == ["2", "4", "6"]


def test_finished_partitions_are_not_run_again(tmp_path):
    runtime = Runtime(processes=1)
    with pytest.raises(UserError, match="three"):
        map_partitions(fail_on_three, [1, 2, 3, 4], work=tmp_path, runtime=runtime, label="first try")
    finished = sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".partial"))
    assert finished == ["part-00000", "part-00001"]
    before = (tmp_path / "part-00000" / "number.txt").stat().st_mtime_ns
    (tmp_path / "mended").touch()
    parts = map_partitions(fail_on_three, [1, 2, 3, 4], work=tmp_path, runtime=runtime, label="second try")
    assert [result["value"] for _, result in parts] == [2, 4, 6, 8]
    assert (tmp_path / "part-00000" / "number.txt").stat().st_mtime_ns == before


def test_a_killed_worker_is_told_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="worker process was killed"):
        map_partitions(kill_worker, [1, 2], work=tmp_path, runtime=Runtime(processes=2), label="killing")


def test_the_digest_follows_params_and_inputs(tmp_path):
    (tmp_path / "in.txt").write_text("one")
    first = run_digest("clean", P(), {"raw": tmp_path / "in.txt"})
    assert first == run_digest("clean", P(), {"raw": tmp_path / "in.txt"})
    assert first != run_digest("clean", P(size=2), {"raw": tmp_path / "in.txt"})
    assert first != run_digest("shard", P(), {"raw": tmp_path / "in.txt"})
    (tmp_path / "in.txt").write_text("two")
    assert first != run_digest("clean", P(), {"raw": tmp_path / "in.txt"})


def test_publish_replaces_the_out(tmp_path):
    work = stage_work(Runtime(work=tmp_path / "work"), "clean", P(), {})
    (work / "out").mkdir()
    (work / "out" / "new").touch()
    (tmp_path / "data" / "clean").mkdir(parents=True)
    (tmp_path / "data" / "clean" / "old").touch()
    publish(work / "out", tmp_path / "data" / "clean")
    assert [path.name for path in (tmp_path / "data" / "clean").iterdir()] == ["new"]


def test_a_kill_while_work_is_removed_leaves_none_that_looks_whole(tmp_path, monkeypatch):
    class Params(BaseModel):
        number: int = 1

    def write(item, folder):
        (folder / "records").write_text(str(item))
        return {}

    def killed(path, *_, **__):
        next(path.rglob("records")).unlink(missing_ok=True)
        raise KeyboardInterrupt

    runtime = Runtime(work=tmp_path / "work", processes=1)
    work = stage_work(runtime, "stage", Params(), {})
    map_partitions(write, [1, 2], work=work, runtime=runtime, label="x")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("components.io.work.shutil.rmtree", lambda path, **k: None if k else killed(path))
        discard(work)
    again = stage_work(runtime, "stage", Params(), {})
    assert again == work
    assert [path.name for path in work.parent.iterdir()] == [work.name]
    for folder, _ in map_partitions(write, [1, 2], work=work, runtime=runtime, label="x"):
        assert (folder / "records").is_file()


def test_a_part_without_its_end_is_made_anew(tmp_path):
    def write(_, folder):
        (folder / "records").write_text("whole")
        return {}

    runtime = Runtime(work=tmp_path / "work", processes=1)
    [(folder, _)] = map_partitions(write, [1], work=tmp_path, runtime=runtime, label="x")
    (folder / "done.json").unlink()
    (folder / "other").write_text("left")
    [(folder, _)] = map_partitions(write, [1], work=tmp_path, runtime=runtime, label="x")
    assert sorted(path.name for path in folder.iterdir()) == ["done.json", "records"]
