"""Shards in a bucket: read as local ones, within the cache's limit, checked, shared by processes."""

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from components.io.errors import UserError
from components.io.order import ReadPlan
from components.io.records import read_manifest
from components.io.shards import ShardReader
from components.io.storage import open_storage
from tests.data.making import record, record_folder

pytest_plugins = ["tests.buckets"]


@pytest.fixture
def folder(tmp_path):
    records = [record("demo", 2 * n, bytes([n]) * 4000, [f"a {n}", f"b {n}"], width=10, height=n) for n in range(23)]
    record_folder(tmp_path / "shards", records, per_file=4, kind="shards")
    return tmp_path / "shards"


@pytest.fixture(params=["folder", "s3"])
def place(request, folder, tmp_path):
    name = f"s3://{request.getfixturevalue('bucket')}/shards" if request.param == "s3" else str(tmp_path / "far")
    storage = open_storage(name)
    for path in folder.iterdir():
        storage.upload(path, path.name)
    return name


def held(cache):
    return sum(path.stat().st_size for path in cache.rglob("*.arrow"))


def test_reads_as_local_shards_do_within_its_limit(folder, place, tmp_path):
    limit = 2 * max(file.bytes for file in read_manifest(folder).files)
    local, far = ShardReader(folder), ShardReader(place, cache=tmp_path / "cache", cache_bytes=limit)
    assert len(far) == 23
    assert far.rows_per_shard == [4, 4, 4, 4, 4, 3]
    assert far.captions == local.captions
    assert far.column("height").to_pylist() == list(range(23))
    for _, rows in zip(range(9), ReadPlan(tuple(far.rows_per_shard), 5, 1, window=2).batches(), strict=False):
        assert [far[row] for row in rows[1].tolist()] == [local[row] for row in rows[1].tolist()]
        assert held(tmp_path / "cache") <= limit
        assert sum(far.manifest.files[shard].bytes for shard in far._tables) <= limit
    assert pickle.loads(pickle.dumps(far))[22] == local[22]


def test_a_shard_is_fetched_once_while_there_is_room(folder, tmp_path, monkeypatch):
    far = ShardReader(folder, cache=tmp_path / "cache")
    fetched = []
    download = far._cache.storage.download
    monkeypatch.setattr(far._cache.storage, "download", lambda name, path: (fetched.append(name), download(name, path)))
    assert [far[row]["height"] for row in (0, 9, 1, 22, 3, 8)] == [0, 9, 1, 22, 3, 8]
    assert fetched == ["records-00000.arrow", "records-00002.arrow", "records-00005.arrow"]
    again = ShardReader(folder, cache=tmp_path / "cache")
    monkeypatch.setattr(again._cache.storage, "download", lambda *_: pytest.fail("fetched again"))
    assert again[22]["height"] == 22


def test_damage_at_the_place_is_named(place, tmp_path):
    storage = open_storage(place)
    whole = storage.read("records-00001.arrow")
    for damaged in (whole[:-1], whole.replace(b"a 5", b"a 6")):
        assert damaged != whole
        storage.write("records-00001.arrow", damaged)
        with pytest.raises(UserError, match=r"records-00001\.arrow at .* is truncated or altered"):
            ShardReader(place, cache=tmp_path / "cache")[5]
    storage.delete("records-00001.arrow")
    with pytest.raises(UserError, match=r"records-00001\.arrow is missing at"):
        ShardReader(place, cache=tmp_path / "cache")[5]
    assert not [path for path in (tmp_path / "cache").rglob("*") if "00001" in path.name and "lock" not in path.name]
    storage.delete("manifest.json")
    with pytest.raises(UserError, match=r"holds no manifest\.json"):
        ShardReader(place, cache=tmp_path / "cache")


def test_a_manifest_cannot_lead_elsewhere(folder, tmp_path):
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace("records-00000.arrow", "../outside.arrow"))
    with pytest.raises(UserError, match="no file beside it"):
        ShardReader(folder, cache=tmp_path / "cache")[0]


def _read(job):
    place, cache, limit, start = job
    reader = ShardReader(place, cache=cache, cache_bytes=limit)
    return [reader[(start + 7 * step) % len(reader)]["height"] for step in range(60)]


def test_processes_share_a_small_cache(folder, tmp_path):
    limit = 2 * max(file.bytes for file in read_manifest(folder).files)
    jobs = [(str(folder), tmp_path / "cache", limit, start) for start in range(4)]
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as pool:
        for start, heights in enumerate(pool.map(_read, jobs)):
            assert heights == [(start + 7 * step) % 23 for step in range(60)]
