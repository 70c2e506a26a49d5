"""Stage `shard`: equal shards of the same bytes every time, every row accounted for, and resumption after a kill."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from components.data.shard import ShardParams, TokenizerParams, plan_shards, shard
from components.data.tokenizer import load_tokenizer
from components.io.errors import UserError
from components.io.outcomes import check_conservation, count_reasons
from components.io.records import RecordWriter, read_manifest, row_name, write_manifest
from components.io.runtime import Runtime
from components.io.shards import ShardReader, verify

ROOT = Path(__file__).resolve().parents[2]


def record(index: int) -> dict:
    captions = [f"a {colour} cube number {index}" for colour in ("red", "blue", "green")[: 1 + index % 3]]
    return {
        "id": row_name("demo", 10 * index),
        "source": "demo",
        "url": None if index % 4 else f"http://x.test/{index}.jpg",
        "image": hashlib.sha256(str(index).encode()).digest() * 40,
        "sha256": f"{index:064x}",
        "width": 64,
        "height": 48,
        "captions": captions,
        "row_ids": [row_name("demo", 10 * index + place) for place in range(len(captions))],
        "coco_id": None,
    }


def write_unique(folder: Path, sizes: list[int]) -> list[dict]:
    folder.mkdir(parents=True)
    records, entries = [record(index) for index in range(sum(sizes))], []
    start = 0
    for number, size in enumerate(sizes):
        with RecordWriter(folder / f"part-{number:05d}.arrow") as writer:
            writer.write(records[start : start + size])
        entries.append(writer.entry())
        start += size
    write_manifest(folder, "unique", entries)
    return records


def params(**changes) -> ShardParams:
    tokenizer = TokenizerParams(vocab_size=100, min_frequency=1)
    return ShardParams(**{"pictures_per_shard": 8, "tokenizer": tokenizer, **changes})


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 7))
def test_plan_cuts_every_row_once_into_equal_shards(sizes: list[int], per_shard: int) -> None:
    files = [(f"f{index}", size) for index, size in enumerate(sizes)]
    plan = plan_shards(files, per_shard)
    taken = [(name, start + row) for pieces in plan for name, start, count in pieces for row in range(count)]
    assert taken == [(name, row) for name, size in files for row in range(size)]
    counts = [sum(count for _, _, count in pieces) for pieces in plan]
    assert all(count == per_shard for count in counts[:-1])
    assert all(0 < count <= per_shard for count in counts[-1:])


def test_shards_hold_the_records_in_order(tmp_path: Path) -> None:
    records = write_unique(tmp_path / "unique", [5, 0, 13, 3])
    shard(
        params(),
        unique=tmp_path / "unique",
        shards=tmp_path / "shards",
        runtime=Runtime(work=tmp_path / "work", processes=1),
    )
    manifest = read_manifest(tmp_path / "shards")
    assert [(file.name, file.rows) for file in manifest.files] == [
        ("shard-00000.arrow", 8),
        ("shard-00001.arrow", 8),
        ("shard-00002.arrow", 5),
    ]
    reader = ShardReader(tmp_path / "shards")
    assert [reader[index] for index in range(len(reader))] == records
    assert verify(tmp_path / "shards") == []
    assert manifest.captions == sum(len(row["captions"]) for row in records)
    tokenizer = load_tokenizer(tmp_path / "shards")
    assert manifest.extra["tokenizer"]["vocab_size"] == tokenizer.vocab_size <= 100
    assert tokenizer.unk_id not in tokenizer.encode_batch(["a red cube"], 16)[0]


def test_every_row_is_kept_once(tmp_path: Path) -> None:
    records = write_unique(tmp_path / "unique", [7, 4])
    shard(
        params(),
        unique=tmp_path / "unique",
        shards=tmp_path / "shards",
        runtime=Runtime(work=tmp_path / "work", processes=1),
    )
    rows = [name for row in records for name in row["row_ids"]]
    check_conservation(tmp_path / "shards", rows)
    assert count_reasons(tmp_path / "shards") == {("kept", "ok"): len(rows)}


def test_same_bytes_however_many_processes_and_however_the_input_is_cut(tmp_path: Path) -> None:
    write_unique(tmp_path / "one" / "unique", [21])
    write_unique(tmp_path / "many" / "unique", [4, 9, 8])
    for name, processes in (("one", 1), ("many", 2)):
        runtime = Runtime(work=tmp_path / name / "work", processes=processes)
        shard(params(), unique=tmp_path / name / "unique", shards=tmp_path / name / "shards", runtime=runtime)
    one, many = bytes_of(tmp_path / "one" / "shards"), bytes_of(tmp_path / "many" / "shards")
    assert {key: one[key] for key in one if key != "manifest.json"} == {
        key: many[key] for key in many if key != "manifest.json"
    }
    shard(
        params(),
        unique=tmp_path / "one" / "unique",
        shards=tmp_path / "one" / "shards",
        runtime=Runtime(work=tmp_path / "one" / "work", processes=2),
    )
    assert bytes_of(tmp_path / "one" / "shards") == one
    assert not list((tmp_path / "one" / "work" / "shard").iterdir()), "finished work is cleared away"


KILLED = """
import os, sys, signal
from pathlib import Path
import components.data.shard as stage
import components.io.work
from components.io.runtime import Runtime
components.io.work.code_digest = lambda *_: "same"
write, count = stage.write_shard, 0
def write_shard(item, folder):
    global count
    if count == 2:
        (folder / item[1]).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    return write(item, folder)
stage.write_shard = write_shard
root = Path(sys.argv[1])
stage.shard(
    stage.ShardParams.model_validate_json(sys.argv[2]),
    unique=root / "unique", shards=root / "shards", runtime=Runtime(work=root / "work", processes=1),
)
"""


def test_resumes_after_a_kill_with_the_same_bytes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("components.io.work.code_digest", lambda *_: "same")  # someone may edit the code meanwhile
    write_unique(tmp_path / "unique", [21])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), params(pictures_per_shard=4).model_dump_json()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "shards").exists()
    finished = sorted((tmp_path / "work" / "shard").rglob("shard-0000[01].arrow"))
    assert len(finished) == 2
    stamps = [path.stat().st_mtime_ns for path in finished]
    wait_a_tick()
    shard(
        params(pictures_per_shard=4),
        unique=tmp_path / "unique",
        shards=tmp_path / "shards",
        runtime=Runtime(work=tmp_path / "work", processes=1),
    )
    resumed = [(tmp_path / "shards" / path.name).stat().st_mtime_ns for path in finished]
    assert resumed == stamps, "finished shards are not written again"
    shard(
        params(pictures_per_shard=4),
        unique=tmp_path / "unique",
        shards=tmp_path / "whole",
        runtime=Runtime(work=tmp_path / "other", processes=1),
    )
    assert bytes_of(tmp_path / "shards") == bytes_of(tmp_path / "whole")


def wait_a_tick() -> None:
    """Until the clock has moved on, so that a rewritten file would have another time."""
    start = time.time_ns()
    while time.time_ns() == start:
        pass


def test_tokenizer_from_a_file(tmp_path: Path) -> None:
    write_unique(tmp_path / "unique", [3])
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "cube"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab))
    tokenizer = TokenizerParams(kind="file", path=tmp_path / "vocab.txt")
    runtime = Runtime(work=tmp_path / "work", processes=1)
    shard(params(tokenizer=tokenizer), unique=tmp_path / "unique", shards=tmp_path / "shards", runtime=runtime)
    assert load_tokenizer(tmp_path / "shards").vocab_size == 7
    with pytest.raises(UserError, match=r"shard\.tokenizer\.path is .*absent\.txt, where no file is"):
        shard(
            params(tokenizer=TokenizerParams(kind="file", path=tmp_path / "absent.txt")),
            unique=tmp_path / "unique",
            shards=tmp_path / "shards",
            runtime=runtime,
        )


def test_named_tokenizer_that_cannot_be_had_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    write_unique(tmp_path / "unique", [3])
    with pytest.raises(
        UserError, match=r"the tokenizer 'no-one/no-model' of shard\.tokenizer\.name cannot be had"
    ) as error:
        shard(
            params(tokenizer=TokenizerParams(kind="name", name="no-one/no-model")),
            unique=tmp_path / "unique",
            shards=tmp_path / "shards",
            runtime=Runtime(work=tmp_path / "work", processes=1),
        )
    assert "\n" not in str(error.value)


def test_nothing_left_to_shard(tmp_path: Path) -> None:
    write_unique(tmp_path / "unique", [])
    with pytest.raises(UserError, match="holds no record"):
        shard(
            params(),
            unique=tmp_path / "unique",
            shards=tmp_path / "shards",
            runtime=Runtime(work=tmp_path / "work", processes=1),
        )


@pytest.mark.parametrize(
    "content",
    [
        {"kind": "file"},
        {"kind": "name"},
        {"kind": "train", "path": "vocab.txt"},
        {"kind": "file", "path": "vocab.txt", "name": "bert-base-uncased"},
        {"kind": "file", "path": "vocab.txt", "words": ["how"]},
    ],
)
def test_contradicting_tokenizer_settings_are_refused(content: dict) -> None:
    with pytest.raises(ValidationError, match=r"is needed|has no effect"):
        TokenizerParams(**content)


@pytest.mark.parametrize("word", ["two words", "How", "", "a-b"])
def test_a_word_that_the_tokenizer_never_meets_is_refused(word: str) -> None:
    with pytest.raises(ValidationError, match="one lower-case word of letters and digits each"):
        TokenizerParams(words=(word,))
