"""The stage `deduplicate`: leaks, duplicates, merged captions, evidence; sameness of bytes and resuming."""

import itertools
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from pydantic import ValidationError

from components.data.deduplicate import DeduplicateParams, deduplicate
from components.data.duplicates.decide import BY_HASH, BY_SHA256, DUPLICATE, HASH_SCHEMA, KEEP, LEAK, decide
from components.io.errors import UserError
from components.io.outcomes import check_conservation, kept_row_ids, read_outcomes
from components.io.records import iter_batches, read_manifest
from components.io.runtime import Runtime
from tests.data.making import encoded, folder_bytes, photo, record, record_folder

NUMBER = itertools.count()


def big(seed):
    return photo(seed, (256, 192))


def smaller(image):
    return image.resize((192, 144), Image.Resampling.BICUBIC)


def cleaned(source, row, image, captions, **options):
    sizes = {"width": image.width, "height": image.height}
    return record(source, row, encoded(image, **options), captions, url=f"http://{source}.test/{row}.jpg", **sizes)


def inputs(folder):
    """Clean records and two tasks: pictures 0-9 are the set's own, 20-23 belong to evaluation splits."""
    mirror = ImageOps.mirror(big(3))
    records = [
        cleaned("web", 0, big(0), ["a", "b"]),
        cleaned("web", 2, smaller(big(1)), ["small one", "shared", "small one"]),
        cleaned("web", 5, big(1), ["large one", "shared", "large one"]),
        cleaned("web", 8, big(0), ["a", "c"]),  # the bytes of web/0
        cleaned("web", 10, big(0), ["c", "c", "d"], quality=60),
        cleaned("web", 13, big(2), ["alone", "alone", "else"]),
        cleaned("web", 16, big(20), ["leak", "leak again"]),
        cleaned("web", 18, smaller(big(21)), ["leak, smaller"]),
        cleaned("web", 19, ImageOps.mirror(big(22)), ["leak, mirrored"]),
        cleaned("web", 20, big(23), ["in training: no leak"]),
        cleaned("web", 21, big(3), ["looks left"]),
        cleaned("web", 22, smaller(mirror), ["looks right"]),
        cleaned("web", 23, Image.new("RGB", (96, 96), "white"), ["blank"]),
        cleaned("web", 24, Image.new("RGB", (96, 96), "black"), ["blank"]),
    ]
    record_folder(folder / "clean", records, kind="clean")
    tasks = folder / "tasks"
    record_folder(tasks / "retrieval" / "val", [cleaned("retrieval", 0, big(20), ["x"])], kind="task")
    test = [cleaned("retrieval", 1, big(21), ["y"]), cleaned("retrieval", 2, big(20), ["x"])]
    record_folder(tasks / "retrieval" / "test", test, kind="task")
    record_folder(tasks / "retrieval" / "train", [cleaned("retrieval", 3, big(23), ["z"])], kind="task")
    record_folder(tasks / "vqa" / "test", [cleaned("vqa", 0, big(22), ["w"])], kind="task")
    return records


def run(folder, out="unique", *, processes=1, **params):
    where = Runtime(processes=processes, work=folder / f"work{next(NUMBER)}")
    chosen = DeduplicateParams(**params)
    deduplicate(chosen, clean=folder / "clean", tasks=folder / "tasks", unique=folder / out, runtime=where)
    records = {row["id"]: row for batch in iter_batches(folder / out) for row in batch.to_pylist()}
    reasons = {row["row_id"]: row["reason"] for row in read_outcomes(folder / out).to_pylist()}
    evidence = {row["row_id"]: row for row in pq.read_table(folder / out / "evidence.parquet").to_pylist()}
    return records, reasons, evidence


def web(row):
    return f"web/{row:09d}"


def test_what_becomes_of_each_row(tmp_path):
    given_records = inputs(tmp_path)
    records, reasons, evidence = run(tmp_path)
    out = tmp_path / "unique"

    check_conservation(out, [row for one in given_records for row in one["row_ids"]])
    kept = {row for one in records.values() for row in one["row_ids"]}
    assert kept == set(kept_row_ids(out).to_pylist())
    assert list(records) == [web(row) for row in (0, 5, 13, 20, 21, 23, 24)]

    # equal bytes, and the same picture compressed more: captions move to the first
    assert records[web(0)]["captions"] == ["a", "b", "c", "d"]
    assert records[web(0)]["row_ids"] == [web(0), web(1), web(9), web(12)]
    assert [reasons[web(row)] for row in range(8, 13)] == [
        *("duplicate_exact", "merged"),
        *("duplicate_near", "duplicate_near", "merged"),
    ]
    # more pixels win, though they come later
    assert records[web(5)]["captions"] == ["large one", "shared", "small one"]
    assert records[web(5)]["image"] == given_records[2]["image"]
    assert [reasons[web(row)] for row in range(2, 8)] == [
        *("merged", "duplicate_near", "duplicate_near"),
        *("ok", "ok", "duplicate_exact"),
    ]
    # within one record
    assert records[web(13)]["captions"] == ["alone", "else"]
    assert reasons[web(14)] == "duplicate_exact"
    # leaks
    assert [reasons[web(row)] for row in range(16, 21)] == [
        *("leak_exact", "leak_exact"),
        *("leak_near", "leak_near"),
        "ok",
    ]
    # mirrored
    assert records[web(21)]["captions"] == ["looks left", "looks right"]
    assert reasons[web(22)] == "merged"

    assert set(evidence) == {row for row, reason in reasons.items() if reason != "ok"}
    assert all(evidence[row]["reason"] == reasons[row] for row in evidence)
    leak = {"matched_task": "retrieval", "rule": "sha256", "distance": 0}
    # equal bytes stand in both splits: the first by name is named
    assert evidence[web(16)] == {
        **{"row_id": web(16), "id": web(16), "reason": "leak_exact", "matched_id": "retrieval/000000002"},
        **{**leak, "matched_split": "test", "name": None, "via": None},
    }
    smaller_leak, mirrored_leak = evidence[web(18)], evidence[web(19)]
    assert (smaller_leak["matched_id"], smaller_leak["rule"]) == ("retrieval/000000001", "hash")
    assert 0 <= smaller_leak["distance"] <= DeduplicateParams().leak_distance
    assert (mirrored_leak["matched_task"], mirrored_leak["rule"]) == ("vqa", "mirrored_hash")
    assert evidence[web(12)]["matched_id"] == web(0)
    assert evidence[web(12)]["matched_task"] is None
    assert evidence[web(14)]["rule"] == "caption"
    assert evidence[web(22)]["rule"] == "mirrored_hash"

    manifest = read_manifest(out)
    assert manifest.extra["pictures"] == {"kept": 7, "leaked": 3, "duplicates": 4}
    assert manifest.extra["evaluation"] == [
        {"task": "retrieval", "split": "test", "pictures": 2},
        {"task": "retrieval", "split": "val", "pictures": 1},
        {"task": "vqa", "split": "test", "pictures": 1},
    ]


def test_nothing_of_an_evaluation_split_is_left(tmp_path):
    """After the stage, a second pass over its own out finds neither leak nor duplicate."""
    inputs(tmp_path)
    run(tmp_path)
    (tmp_path / "clean").rename(tmp_path / "before")
    (tmp_path / "unique").rename(tmp_path / "clean")
    records, reasons, evidence = run(tmp_path)
    assert set(reasons.values()) == {"ok"}
    assert evidence == {}
    assert len(records) == 7


def test_rules_by_parameter(tmp_path):
    inputs(tmp_path)
    _, reasons, _ = run(tmp_path, "exact", near=False)
    assert reasons[web(8)] == "duplicate_exact"
    assert reasons[web(10)] == reasons[web(2)] == reasons[web(18)] == reasons[web(22)] == "ok"
    assert reasons[web(16)] == "leak_exact"

    _, reasons, _ = run(tmp_path, "none", near=False, exact=False)
    assert reasons[web(8)] == "ok"
    assert reasons[web(16)] == "leak_exact"

    _, reasons, _ = run(tmp_path, "unmirrored", mirror=False)
    assert reasons[web(22)] == reasons[web(19)] == "ok"
    assert reasons[web(18)] == "leak_near"

    _, reasons, _ = run(tmp_path, "train", evaluation_splits=("train",))
    assert reasons[web(20)] == "leak_exact"
    assert reasons[web(16)] == "ok"

    _, reasons, _ = run(tmp_path, "unprotected", evaluation_splits=())
    assert {reasons[web(row)] for row in (16, 18, 19)} == {"ok"}


@pytest.mark.parametrize("hash_size", [8, 16, 24])
def test_other_hash_sizes(tmp_path, hash_size):
    inputs(tmp_path)
    near = hash_size**2 // 20
    _, reasons, _ = run(tmp_path, hash_size=hash_size, max_distance=near, leak_distance=near, leak_crop_distance=near)
    assert reasons[web(10)] == "duplicate_near"
    assert reasons[web(18)] == "leak_near"


def test_same_bytes_on_one_process_and_two(tmp_path):
    inputs(tmp_path)
    run(tmp_path, "one")
    run(tmp_path, "two", processes=2)
    assert folder_bytes(tmp_path / "one") == folder_bytes(tmp_path / "two")


def test_messages(tmp_path):
    record_folder(tmp_path / "clean", [cleaned("web", 0, photo(0), ["a"])], kind="clean")
    (tmp_path / "tasks").mkdir()
    with pytest.raises(UserError, match="no task with a split named val or test"):
        run(tmp_path)
    assert len(run(tmp_path, evaluation_splits=())[0]) == 1
    (tmp_path / "tasks" / "retrieval" / "val").mkdir(parents=True)
    with pytest.raises(UserError, match=r"retrieval/val.* has not finished"):
        run(tmp_path)
    with pytest.raises(ValidationError, match="at most 16"):
        DeduplicateParams(hash_size=8, max_distance=17)


def test_no_records(tmp_path):
    record_folder(tmp_path / "clean", [], kind="clean")
    assert run(tmp_path, evaluation_splits=()) == ({}, {}, {})


KILLED = """
import os, signal, sys
from pathlib import Path
from components.data.duplicates import hash_parts, merging
from components.data.deduplicate import DeduplicateParams, deduplicate
from components.io import work
from components.io.runtime import Runtime

work.code_digest = lambda *_: "this code"
folder, name, calls = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
module = hash_parts if name == "_hashes" else merging
whole = getattr(module, name)
def until(*given, **named):
    global calls
    calls -= 1
    if calls < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*given, **named)
setattr(module, name, until)
deduplicate(DeduplicateParams(), clean=folder / "clean", tasks=folder / "tasks", unique=folder / "resumed",
            runtime=Runtime(processes=1, work=folder / "work"))
"""


@pytest.mark.parametrize(("at", "calls"), [("_hashes", 7), ("decide", 0), ("_keep", 5)])
def test_killed_and_resumed(tmp_path, at, calls, monkeypatch):
    monkeypatch.setattr("components.io.work.code_digest", lambda *_: "this code")  # though it be edited meanwhile
    inputs(tmp_path)
    arguments = [sys.executable, "-c", KILLED, str(tmp_path), at, str(calls)]
    killed = subprocess.run(arguments, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "resumed").exists()
    finished = list((tmp_path / "work").rglob("done.json"))
    assert finished
    paths = {"clean": tmp_path / "clean", "tasks": tmp_path / "tasks"}
    for out, work in (("resumed", "work"), ("whole", "other")):
        deduplicate(
            DeduplicateParams(),
            **paths,
            unique=tmp_path / out,
            runtime=Runtime(processes=1, work=tmp_path / work),
        )
    assert folder_bytes(tmp_path / "resumed") == folder_bytes(tmp_path / "whole")


# -- decisions on hashes alone


def table(rows):
    """Rows of (sha256, pixels, bytes, set bits of the hash or None)."""
    content = []
    for index, (sha256, pixels, size, bits) in enumerate(rows):
        packed = None
        if bits is not None:
            flags = np.zeros(64, np.uint8)
            flags[list(bits)] = 1
            packed = np.packbits(flags).tobytes()
        content.append({"id": f"s/{index:09d}", "sha256": sha256, "pixels": pixels, "bytes": size, "hash": packed})
    return pa.Table.from_pylist(content, schema=HASH_SCHEMA)


def judge(rows, evaluation=(), exact=True, max_distance=2, leak_distance=3):
    return decide(table(rows), table(evaluation), exact=exact, max_distance=max_distance, leak_distance=leak_distance)


def test_likeness_is_not_handed_on():
    """Each is two bits from the next: the ends are unlike, and only what is near the kept one gives way to it."""
    chain = [(f"{i}", 100 - i, 1, range(2 * i)) for i in range(6)]
    found = judge(chain)
    assert found.match.tolist() == [-1, 0, -1, 2, -1, 4]
    assert found.distance.tolist() == [-1, 2, -1, 2, -1, 2]


def test_more_pixels_then_more_bytes_then_the_lower_id():
    assert judge([("a", 5, 9, []), ("b", 6, 1, []), ("c", 6, 2, []), ("d", 6, 2, [0])]).match.tolist() == [2, 2, -1, 2]
    assert judge([("a", 5, 5, []), ("a", 5, 5, [])]).match.tolist() == [-1, 0]


def test_equal_bytes_follow_their_picture():
    found = judge([("a", 1, 1, [0]), ("a", 1, 1, [0]), ("b", 9, 9, [])])
    assert found.match.tolist() == [2, 2, -1]
    assert found.rule.tolist() == [BY_HASH, BY_HASH, -1]
    assert found.distance.tolist() == [1, 1, -1]


def test_without_a_hash_only_bytes_count():
    found = judge([("a", 1, 1, None), ("b", 1, 1, None), ("a", 1, 1, None)], [("b", 1, 1, None)])
    assert found.action.tolist() == [KEEP, LEAK, DUPLICATE]
    assert found.rule.tolist() == [-1, BY_SHA256, BY_SHA256]


def test_the_nearest_evaluation_picture_is_named():
    found = judge([("a", 1, 1, []), ("b", 1, 1, range(9))], [("x", 1, 1, [1, 2]), ("y", 1, 1, [3]), ("z", 1, 1, [4])])
    assert (found.action.tolist(), found.match.tolist(), found.distance.tolist()) == ([LEAK, KEEP], [1, -1], [1, -1])


def test_a_leak_takes_no_duplicate_along():
    """Duplicates are looked for among what is left: the copy 4 bits from the evaluation picture stays."""
    found = judge([("a", 1, 1, [0, 1]), ("b", 1, 1, range(4))], [("x", 1, 1, [])])
    assert found.action.tolist() == [LEAK, KEEP]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 3), st.integers(1, 3)), max_size=25),
    st.integers(0, 2**31),
    st.integers(0, 6),
)
def test_what_is_kept_is_unlike_and_what_is_not_is_near(rows, seed, max_distance):
    rng = np.random.default_rng(seed)
    of_sha = {sha: np.flatnonzero(rng.random(10) < 0.4).tolist() for sha in "abcdef"}  # equal bytes, equal hashes
    of_sha["f"] = None
    rows = [(sha, pixels, size, of_sha[sha]) for sha, pixels, size in rows]
    found = judge(rows, max_distance=max_distance)

    def apart(one, other):
        if rows[one][0] == rows[other][0]:
            return 0
        if rows[one][3] is None or rows[other][3] is None:
            return 999
        return len(set(rows[one][3]) ^ set(rows[other][3]))

    kept = [index for index in range(len(rows)) if found.action[index] == KEEP]
    assert all(apart(one, other) > max_distance for one in kept for other in kept if one != other)
    for index in set(range(len(rows))) - set(kept):
        match = found.match[index]
        assert match in kept
        assert apart(index, match) == found.distance[index] <= max_distance
