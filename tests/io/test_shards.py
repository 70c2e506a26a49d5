"""Reading shards by position, and finding the one that is missing, cut or altered."""

import json
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest

from components.io.errors import UserError
from components.io.records import RecordWriter, row_name, sha256_file, write_manifest
from components.io.shards import ShardReader, require_whole, verify


def record(index: int, captions: int) -> dict:
    return {
        "id": row_name("demo", index),
        "source": "demo",
        "url": f"http://x.test/{index}.jpg",
        "image": bytes([index % 256]) * (index + 1),
        "sha256": f"{index:064x}",
        "width": 100 + index,
        "height": 50,
        "captions": [f"caption {place} of {index}" for place in range(captions)],
        "row_ids": [row_name("demo", 1000 * index + place) for place in range(captions)],
        "coco_id": None,
    }


RECORDS = [record(index, captions) for index, captions in enumerate([1, 3, 0, 2, 5, 1, 1])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    entries = []
    for number, rows in enumerate((RECORDS[:3], RECORDS[3:6], RECORDS[6:])):
        with RecordWriter(tmp_path / f"shard-{number:05d}.arrow") as writer:
            writer.write(rows[:2])
            writer.write(rows[2:])
        entries.append(writer.entry())
    (tmp_path / "tokenizer.json").write_text("{}\n")
    digest = sha256_file(tmp_path / "tokenizer.json")
    write_manifest(tmp_path, "shards", entries, tokenizer={"file": "tokenizer.json", "sha256": digest})
    return tmp_path


def test_records_by_position(folder: Path) -> None:
    reader = ShardReader(folder)
    assert len(reader) == 7
    assert [reader[index] for index in range(7)] == RECORDS
    assert [reader[index] for index in (-1, -7)] == [RECORDS[6], RECORDS[0]]
    assert [reader.image(index) for index in (0, 6, -1)] == [RECORDS[index]["image"] for index in (0, 6, 6)]
    for beyond in (7, -8):
        with pytest.raises(IndexError):
            reader[beyond]


def test_caption_index_names_every_caption_once(folder: Path) -> None:
    reader = ShardReader(folder)
    index = reader.caption_index()
    assert index.dtype == np.int64
    assert [reader.captions[picture][place] for picture, place in index.tolist()] == [
        caption for row in RECORDS for caption in row["captions"]
    ]


def _read_elsewhere(reader: ShardReader, index: int) -> dict:
    return reader[index]


def test_reader_crosses_into_workers(folder: Path) -> None:
    """After this process has opened a shard: a fork inherits the map, a spawned process opens its own."""
    reader = ShardReader(folder)
    assert reader[0] == RECORDS[0]
    assert pickle.loads(pickle.dumps(reader))[4] == RECORDS[4]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.starmap(_read_elsewhere, [(reader, 0), (reader, 6)]) == [RECORDS[0], RECORDS[6]]


def test_a_folder_without_records(tmp_path: Path) -> None:
    write_manifest(tmp_path, "shards", [])
    reader = ShardReader(tmp_path)
    assert len(reader) == 0
    assert reader.captions == []
    assert reader.caption_index().shape == (0, 2)


def test_whole_folder_has_no_problem(folder: Path) -> None:
    assert verify(folder) == []
    require_whole(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    (folder / "shard-00001.arrow").unlink()
    assert verify(folder) == ["shard-00001.arrow is missing"]
    with pytest.raises(UserError, match=r"shard-00001\.arrow is named in its manifest but missing"):
        ShardReader(folder)[3]


def test_truncated_shard_is_named(folder: Path) -> None:
    path = folder / "shard-00002.arrow"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    assert verify(folder) == [f"shard-00002.arrow is truncated: {size // 2} bytes where the manifest says {size}"]
    with pytest.raises(UserError, match=r"shard-00002\.arrow is damaged"):
        ShardReader(folder)[6]


def test_one_altered_bit_is_found(folder: Path) -> None:
    path = folder / "shard-00000.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert verify(folder) == ["shard-00000.arrow was altered: its sha256 is not the manifest's"]
    with pytest.raises(UserError, match=r"is not whole: shard-00000\.arrow was altered.*run the stage"):
        require_whole(folder)


def test_exchanged_shards_of_another_length_are_noticed_when_read(folder: Path) -> None:
    (folder / "shard-00000.arrow").write_bytes((folder / "shard-00002.arrow").read_bytes())
    with pytest.raises(UserError, match="holds 1 records where its manifest says 3"):
        ShardReader(folder)[0]


def test_stray_shard_altered_tokenizer_and_missing_manifest(folder: Path) -> None:
    (folder / "shard-00009.arrow").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{ }\n")
    assert verify(folder) == [
        "shard-00009.arrow is not in the manifest",
        "tokenizer.json was altered: its sha256 is not the manifest's",
    ]
    (folder / "manifest.json").unlink()
    assert len(verify(folder)) == 1
    assert "has not finished" in verify(folder)[0]


def test_a_manifest_cannot_point_outside_its_folder(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    content["files"][0]["name"] = "../other.arrow"
    (folder / "manifest.json").write_text(json.dumps(content))
    assert "../other.arrow is missing" in verify(folder)
