"""Evaluations in parts: any number of workers, what is kept for the next evaluation, and what is not believed."""

import json
import os
import signal
from functools import partial

import numpy as np
import pytest
from PIL import Image

from components.evaluation import albef_parts, sharing
from components.evaluation.evaluate import EvaluateParams, evaluate
from components.io.errors import UserError
from components.io.runtime import Runtime
from components.io.work import DONE_FILE, keep_within, map_partitions
from tests.evaluation.tiny_albef import jpeg, save_weights, write_split

CAPTIONS = [
    [f"a {colour} cube", f"{colour} {'and so on ' * place}", colour]
    for place, colour in enumerate(["red", "blue", "green", "white", "black", "brown", "grey"])
]
FILES = ("metrics.json", "ranks.parquet", "examples.json", "extra/embedding.json")
SMALL = {"top_k": 3, "batch_size": 1, "pair_batch_size": 2, "pictures_per_part": 1, "bootstrap": 50}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Seven pictures, three captions each, and an untrained ALBEF."""
    folder = tmp_path_factory.mktemp("seven")
    save_weights(folder / "weights", CAPTIONS)
    pictures = [jpeg(Image.effect_noise((40, 30), 20 + 20 * number).convert("RGB")) for number in range(7)]
    write_split(folder / "task" / "test", pictures, CAPTIONS)
    return {"run": "r", "task": folder / "task", "weights": folder / "weights"}


@pytest.fixture(scope="module")
def alone(given, tmp_path_factory):
    """What one process finds."""
    out = tmp_path_factory.mktemp("alone")
    return results(given, out, Runtime(processes=1, work=out / "work"))


def results(given, out, runtime, **changes):
    evaluate(EvaluateParams(**SMALL | changes), **given, evaluation=out / "found", runtime=runtime)
    return {name: (out / "found" / name).read_bytes() for name in FILES}


def parts(work):
    """The finished parts below a work folder: names, and when they were made."""
    return {path.parent.name: path.stat().st_mtime_ns for path in work.glob(f"evaluate/*/*/{DONE_FILE}")}


def test_processes_are_started_where_the_rest_takes_longer_than_their_start(given, alone, tmp_path, monkeypatch):
    asked = []

    def recorded(run, items, **how):
        asked.append((how["runtime"].processes, len(items)))
        return map_partitions(run, items, **how | {"runtime": Runtime(processes=1)})

    monkeypatch.setattr(sharing, "map_partitions", recorded)
    assert results(given, tmp_path, Runtime(processes=2, work=tmp_path / "short")) == alone
    assert asked == [(1, 7 + 2), (1, 7)]  # pictures and captions, pairs
    monkeypatch.setattr(sharing, "WORTH_SECONDS", 0)
    assert results(given, tmp_path, Runtime(processes=2, work=tmp_path / "long")) == alone
    assert asked[2:] == [(2, 7 + 2), (2, 7)]
    assert len(parts(tmp_path / "long")) == 7 + 2 + 7  # none twice, none to fill up
    assert results(given, tmp_path, Runtime(processes=2, work=tmp_path / "long")) == alone
    assert asked[4:] == [(1, 7 + 2), (1, 7)]  # all are there


@pytest.mark.slow
@pytest.mark.ray
def test_seven_pictures_with_two_ray_workers_give_the_bytes_of_one(ray_cluster, given, alone, tmp_path):
    assert results(given, tmp_path, Runtime(ray_address="auto", work=tmp_path / "work")) == alone
    assert len(parts(tmp_path / "work")) == 7 + 2 + 7


def die_at_first(meeting, item, folder):
    """Write the item; two of them kill their worker the first time."""
    mark = meeting / f"died-{item}"
    if item in (1, 5) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "item.txt").write_text(str(item))
    return {}


def refuse(item, folder):
    raise UserError("said by a worker")


@pytest.mark.slow
@pytest.mark.ray
def test_a_killed_ray_worker_s_part_is_done_again(ray_cluster, tmp_path):
    shared = sharing.Shared(tmp_path / "work", Runtime(ray_address="auto"), "cpu", 1)
    folders = shared.map(partial(die_at_first, tmp_path), range(7), name="part", label="dying")
    assert [(folder / "item.txt").read_text() for folder in folders] == [str(item) for item in range(7)]
    assert (tmp_path / "died-1").exists()
    assert (tmp_path / "died-5").exists()
    with pytest.raises(UserError, match=r"^said by a worker$"):
        shared.map(refuse, [0], name="refused", label="refusing")


def test_another_evaluation_of_the_same_weights_encodes_and_ranks_nothing_again(given, tmp_path, monkeypatch):
    runtime = Runtime(processes=1, work=tmp_path / "work")
    first = results(given, tmp_path, runtime)
    before = parts(runtime.work)

    def no_model(job):
        raise AssertionError("the model was loaded")

    no_model.cache_clear = lambda: None
    with monkeypatch.context() as patched:
        patched.setattr(albef_parts, "_loaded", no_model)
        assert results(given, tmp_path, runtime) == first
        changed = results(given, tmp_path, runtime, seed=3, examples=1, folds=7)
    assert json.loads(changed["metrics.json"])["folds"]["folds"] == 7
    assert parts(runtime.work) == before

    results(given, tmp_path, runtime, top_k=5)  # other pairs, but the same features
    after = parts(runtime.work)
    assert {name: after[name] for name in before} == before
    assert {name.rpartition("-")[0] for name in after.keys() - before.keys()} == {"logits-5-2"}

    weights = tmp_path / "weights"
    save_weights(weights, CAPTIONS, seed=1)
    other = results(given | {"weights": weights}, tmp_path, runtime)
    assert other["ranks.parquet"] != first["ranks.parquet"]
    assert len(list((runtime.work / "evaluate").iterdir())) == 2


def test_a_damaged_part_is_made_again(given, alone, tmp_path):
    runtime = Runtime(processes=1, work=tmp_path / "work")
    results(given, tmp_path, runtime)
    (folder,) = (runtime.work / "evaluate").iterdir()
    tokens = folder / "encoded-00008" / "tokens.npy"
    right = tokens.read_bytes()
    tokens.write_bytes(right[:-4] + b"\0\0\x80?")  # one number is another, the file's shape is as it was
    (folder / "encoded-00003" / "features.npy").unlink()
    (folder / "logits-3-2-00002" / DONE_FILE).write_text('{"sha')
    (folder / "logits-3-2-00004" / "more").write_text("what nobody wrote")
    before = parts(runtime.work)
    assert results(given, tmp_path, runtime) == alone
    assert tokens.read_bytes() == right
    after = parts(runtime.work)
    made = {name for name in after if after[name] != before[name]}
    assert made == {"encoded-00003", "encoded-00008", "logits-3-2-00002", "logits-3-2-00004"}


def test_the_longest_unused_evaluations_are_given_up(given, tmp_path):
    runtime = Runtime(processes=1, work=tmp_path / "work", evaluation_cache_gb=0)
    results(given, tmp_path, runtime)
    assert list((tmp_path / "work" / "evaluate").iterdir()) == []

    for age, name in enumerate(["c", "a", "b"]):
        (tmp_path / "kept" / name).mkdir(parents=True)
        (tmp_path / "kept" / name / "x").write_bytes(bytes(100))
        os.utime(tmp_path / "kept" / name, (1_000_000_000 + age, 1_000_000_000 + age))
    keep_within(tmp_path / "kept", 250)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["a", "b"]
    keep_within(tmp_path / "nowhere", 0)


def test_parts_cover_everything_once_in_whole_batches():
    for length, size, multiple in ((7, 2, 1), (7, 2, 3), (1, 5, 4), (12, 4, 4), (0, 3, 2)):
        found = sharing.ranges(length, size, multiple)
        assert [index for part in found for index in part] == list(range(length))
        assert all(part.start % multiple == 0 and len(part) > 0 for part in found)
    assert sharing.ranges(7, 2, 3) == [range(0, 3), range(3, 6), range(6, 7)]


def test_mapped_tokens_are_those_that_were_encoded(tmp_path):
    import torch

    from components.evaluation.scoring import Texts, by_length

    lengths = torch.tensor([4, 2, 3, 2, 5])
    mask = (torch.arange(5)[None] < lengths[:, None]).long()
    states = torch.randn(5, 5, 6) * mask[..., None]
    order, folders = by_length(lengths), []
    for number, some in enumerate(order.split(2)):
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        np.save(folders[-1] / "tokens.npy", torch.cat([states[i, : lengths[i]] for i in some]).numpy())
    read = albef_parts.read_tokens(tuple(folders), Texts(mask, mask))
    wanted = torch.tensor([4, 0, 3, 3])
    assert torch.equal(read(wanted, 5), states[wanted])
    assert torch.equal(read(torch.tensor([1, 2]), 3), states[[1, 2], :3])
