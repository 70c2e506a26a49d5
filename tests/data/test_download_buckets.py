"""Sources in an S3 bucket give what the same source gives in a folder."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.data.download import DownloadParams, SourceParams, download
from components.io.errors import UserError
from components.io.outcomes import count_reasons
from components.io.records import read_manifest
from components.io.runtime import Runtime
from components.io.storage import open_storage
from tests.data.making import folder_bytes

pytest_plugins = ["tests.buckets"]

PNG = b"\x89PNG\r\n\x1a\n" + bytes(32)


def run(folder, input, *, out, place=None, **changed):
    params = DownloadParams(sources={"src": SourceParams(path=input, **(place or {}))}, records_per_file=7, **changed)
    work = folder / f"work-{out}"
    download(params, source="src", input=params.sources["src"].path, raw=folder / out, runtime=Runtime(work=work))
    return folder / out


def pictures(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(PNG + name.encode())


def local_json(folder):
    pictures(folder / "images", [f"{number}.png" for number in range(40)])
    (folder / "images/empty.png").write_bytes(b"")
    (folder / "images/page.png").write_bytes(b"<html>")
    (folder / "images/big.png").write_bytes(PNG + bytes(5000))
    names = [*(f"{number}.png" for number in range(40)), "gone.png", "empty.png", "page.png", "big.png", "../x.png"]
    (folder / "list.json").write_text(json.dumps([{"image": name, "caption": [name, "x"]} for name in names]))
    return {"images": "images"}


def flat_folder(folder):
    pictures(folder, ["a.png", "b.jpg", "c.png"])
    (folder / "a.txt").write_text("one\ntwo\n")
    (folder / "b.txt").write_bytes(b"\xff")
    return {"format": "folder"}


def web_parquet(folder):
    folder.mkdir()
    for part in range(2):
        urls = [f"http://a.com/{part}", "ftp://b", None]
        pq.write_table(pa.table({"url": urls, "text": ["a", "b", "c"]}), folder / f"{part}.parquet")
    return {}


@pytest.mark.parametrize("make", [local_json, flat_folder, web_parquet])
def test_as_from_a_folder(tmp_path, bucket, make):
    place = make(tmp_path / "src")
    fetch = make is not web_parquet
    storage = open_storage(f"s3://{bucket}/sources/{make.__name__}")
    for entry in open_storage(tmp_path / "src").list():
        storage.upload(tmp_path / "src" / entry.name, entry.name)
    near = run(tmp_path, tmp_path / "src", out="near", place=place, fetch=fetch, max_bytes=1000)
    far = run(tmp_path, storage.place, out="far", place=place, fetch=fetch, max_bytes=1000)
    assert folder_bytes(near) == folder_bytes(far)
    assert read_manifest(far).rows == {"local_json": 40, "flat_folder": 1, "web_parquet": 0}[make.__name__]


def test_a_single_list(tmp_path, bucket):
    (tmp_path / "pairs.tsv").write_text("a\thttp://a.com/1\nb\tftp://x\n")
    storage = open_storage(f"s3://{bucket}/lists")
    storage.upload(tmp_path / "pairs.tsv", "pairs.tsv")
    storage.write("other.tsv", b"not asked for")
    far = run(tmp_path, f"s3://{bucket}/lists/pairs.tsv", out="far", fetch=False)
    assert folder_bytes(far) == folder_bytes(run(tmp_path, tmp_path / "pairs.tsv", out="near", fetch=False))


def test_only_the_named_list_is_copied(tmp_path, bucket):
    storage = open_storage(f"s3://{bucket}")
    storage.write("lists/a.tsv", b"a\thttp://a.com/1\n")
    storage.write("lists/b.tsv", b"b\thttp://b.com/1\n")
    far = run(tmp_path, f"s3://{bucket}", out="far", fetch=False, place={"list": "lists/b.tsv"})
    assert count_reasons(far) == {("rejected", "not_fetched"): 1}


def test_another_version_is_another_source(tmp_path, bucket):
    storage = open_storage(f"s3://{bucket}/src")
    storage.write("list.json", json.dumps([{"image": "a.png", "caption": "x"}]).encode())
    storage.write("a.png", PNG)
    assert read_manifest(run(tmp_path, storage.place, out="out")).rows == 1
    storage.write("a.png", b"<html>")
    assert read_manifest(run(tmp_path, storage.place, out="out")).rows == 0


def test_what_the_user_can_mend_is_said(tmp_path, bucket):
    with pytest.raises(UserError, match="holds no object"):
        run(tmp_path, f"s3://{bucket}/nothing", out="out")
    with pytest.raises(UserError, match=r"`download\.sources\.src\.serve`"):
        run(tmp_path, f"s3://{bucket}/nothing", out="out", place={"serve": "web"})
    open_storage(f"s3://{bucket}/src").write("a.tsv", b"")
    with pytest.raises(UserError, match="set the source's `list`"):
        run(tmp_path, f"s3://{bucket}/src", out="out", place={"list": "b.tsv"})
