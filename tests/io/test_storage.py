"""One interface over folders and S3; the bucket is moto's, on loopback."""

import pickle
from pathlib import Path

import pytest

from components.io.errors import UserError
from components.io.storage import Entry, S3Storage, is_s3, open_storage

pytest_plugins = ["tests.buckets"]


@pytest.fixture(params=["folder", "s3"])
def storage(request, tmp_path):
    if request.param == "folder":
        return open_storage(tmp_path / "store")
    bucket = request.getfixturevalue("bucket")
    return open_storage(f"s3://{bucket}/some/prefix")


def test_what_is_written_is_read(storage, tmp_path):
    assert list(storage.list()) == []
    storage.write("b/two.bin", b"22")
    storage.write("a.bin", b"")
    (tmp_path / "local.bin").write_bytes(b"333")
    storage.upload(tmp_path / "local.bin", "b/a/three.bin")
    assert [entry[:2] for entry in storage.list()] == [("a.bin", 0), ("b/a/three.bin", 3), ("b/two.bin", 2)]
    assert storage.read("b/two.bin") == b"22"
    assert storage.read("b/a/three.bin", 2) == b"33"
    assert storage.read("a.bin", 5) == b""
    storage.download("b/a/three.bin", tmp_path / "new/copy.bin")
    assert (tmp_path / "new/copy.bin").read_bytes() == b"333"
    before = {entry.name: entry.version for entry in storage.list()}
    storage.write("b/two.bin", b"other")
    after = {entry.name: entry.version for entry in storage.list()}
    assert {name for name in before if before[name] != after[name]} == {"b/two.bin"}
    assert pickle.loads(pickle.dumps(storage)).read("b/two.bin") == b"other"
    storage.delete("a.bin")
    storage.delete("a.bin")
    assert [entry.name for entry in storage.list()] == ["b/a/three.bin", "b/two.bin"]
    assert not list(tmp_path.rglob("*.partial"))


def test_what_is_not_there(storage, tmp_path):
    with pytest.raises(FileNotFoundError):
        storage.read("gone")
    with pytest.raises(FileNotFoundError):
        storage.download("gone", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("name", ["../x", "/x", "", "a/../../x", "a\0"])
def test_names_stay_below_the_place(storage, name):
    for call in (storage.read, storage.delete, lambda name: storage.write(name, b"")):
        with pytest.raises(ValueError, match="does not stay below"):
            call(name)


def test_places():
    assert isinstance(open_storage("s3://bucket-1/a/b/"), S3Storage)
    assert open_storage("s3://bucket-1/a/b/").place == "s3://bucket-1/a/b"
    assert open_storage(Path("s3://bucket-1/a")).place == "s3://bucket-1/a"  # pathlib folds the slashes
    assert open_storage("s3://bucket-1").place == "s3://bucket-1"
    assert is_s3(Path("s3://bucket-1/a"))
    assert not is_s3("data/s3")
    for wrong in ("s3://", "s3://Bucket/x", "s3:/a/b", "s3://key:secret@bucket/x"):
        with pytest.raises(UserError, match="write s3://BUCKET/PREFIX") as found:
            open_storage(wrong)
        assert "secret" not in str(found.value)


def test_what_s3_refuses_is_one_sentence(bucket, monkeypatch):
    with pytest.raises(UserError, match=r"s3://no-such-bucket cannot be used \(NoSuchBucket\)"):
        list(open_storage("s3://no-such-bucket").list())
    with pytest.raises(UserError, match="NoSuchBucket"):
        open_storage("s3://no-such-bucket").write("x", b"")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(UserError, match="cannot be reached"):
        open_storage(f"s3://{bucket}/x").read("y")


def test_more_than_a_page(bucket, monkeypatch):
    monkeypatch.setattr("components.io.storage.PAGE_KEYS", 3)
    storage = open_storage(f"s3://{bucket}/many")
    for number in range(10):
        storage.write(f"{number:04d}", b"x")
    assert [entry.name for entry in storage.list()] == [f"{number:04d}" for number in range(10)]
    assert isinstance(next(iter(storage.list())), Entry)
