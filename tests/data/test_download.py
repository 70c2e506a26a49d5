"""Stage `download` as a whole: conservation, determinism, resume after a kill."""

import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from components.data.download import DownloadParams, SourceParams, download
from components.data.fetching.http import Fetched, Fetcher
from components.data.fetching.journal import Journal
from components.io.errors import UserError
from components.io.outcomes import Reason, check_conservation, count_reasons, kept_row_ids, read_outcomes
from components.io.records import MANIFEST_FILE, RECORD_SCHEMA, iter_batches, read_manifest, row_name
from components.io.runtime import Runtime

PNG = b"\x89PNG\r\n\x1a\n" + bytes(32)
QUICK = {"retries": 0, "backoff_seconds": 0.0, "connect_seconds": 5.0, "total_seconds": 10.0}


def run(tmp_path: Path, input: Path, *, out="raw", quick=True, place=None, **changed) -> Path:
    place = SourceParams(path=input, **(place or {}))
    params = DownloadParams(sources={"src": place}, **{**(QUICK if quick else {}), **changed})
    download(params, source="src", input=input, raw=tmp_path / out, runtime=Runtime(work=tmp_path / "work"))
    return tmp_path / out


def reasons(raw: Path) -> Counter[str]:
    assert all((status == "kept") == (reason == "ok") for status, reason in count_reasons(raw))
    return Counter({reason: rows for (_, reason), rows in count_reasons(raw).items()})


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A list and its web: 60 pictures with two captions far apart, and some ills."""
    folder = tmp_path_factory.mktemp("site")
    web = folder / "web"
    web.mkdir()
    lines = []
    for number in range(60):
        (web / f"{number}.png").write_bytes(PNG + str(number).encode() * (number + 1))
        lines.append(f"picture {number}\thttp://corpus.test/{number}.png")
    (web / "page.png").write_bytes(b"<html>")
    lines += [
        "page\thttp://corpus.test/page.png",
        "gone\thttp://corpus.test/gone.png",
        "moved\thttp://corpus.test/moved",
    ]
    lines += [
        "dead\thttp://dead.test/x.png",
        "no tab",
        "trap\thttp://127.0.0.1/x",
        "picture 3\thttp://corpus.test/3.png#top",
    ]
    lines += [f"again {number}\thttp://CORPUS.test:80/{number}.png" for number in range(60)]
    (web / "responses.json").write_text(json.dumps({"/moved": {"status": 302, "location": "/0.png"}}))
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n")
    return folder


SERVED = {"serve": "web"}
TARGETS = 64  # distinct URLs of the site that may be asked


def test_every_row_has_one_outcome_and_every_picture_one_record(tmp_path, site):
    raw = run(tmp_path, site, place=SERVED, records_per_file=25)
    names = [row_name("src", row) for row in range(127)]
    assert read_outcomes(raw)["row_id"].to_pylist() == names
    check_conservation(raw, names)
    assert reasons(raw) == {
        "ok": 121, "not_an_image": 1, "http_not_found": 1, "dns_failure": 1, "malformed_row": 1,
        "url_forbidden_host": 1, "duplicate_row": 1,
    }  # fmt: skip
    manifest = read_manifest(raw)
    assert (manifest.kind, manifest.rows, manifest.captions) == ("raw", 61, 121)
    assert [(file.name, file.rows) for file in manifest.files] == [
        ("records-00000.arrow", 25), ("records-00001.arrow", 25), ("records-00002.arrow", 11),
    ]  # fmt: skip
    records = [record for batch in iter_batches(raw) for record in batch.to_pylist()]
    assert next(iter_batches(raw)).schema.equals(RECORD_SCHEMA)
    assert sorted(name for record in records for name in record["row_ids"]) == sorted(kept_row_ids(raw).to_pylist())
    third = records[3]
    assert third["id"] == names[3]
    assert third["url"] == "http://corpus.test/3.png"
    assert third["image"] == PNG + b"3333"
    assert third["captions"] == ["picture 3", "again 3"]
    assert third["row_ids"] == [names[3], names[70]]
    outcomes = {row["row_id"]: row for row in read_outcomes(raw).to_pylist()}
    assert outcomes[names[64]]["detail"] == "pairs.tsv:65: 1 field, not 2"
    assert outcomes[names[66]]["detail"] == "pairs.tsv:67: same as row 3"
    assert outcomes[names[61]]["http_status"] == 404
    moved = outcomes[names[62]]
    assert (moved["url"], moved["final_url"]) == ("http://corpus.test/moved", "http://corpus.test/0.png")
    assert moved["sha256"] == records[0]["sha256"]
    assert moved["bytes"] == len(records[0]["image"])
    assert list((tmp_path / "work/download-src").iterdir()) == []


def test_the_same_bytes_whatever_comes_first(tmp_path, site):
    wide = run(tmp_path, site, out="wide", place=SERVED, records_per_file=7)
    narrow = run(tmp_path, site, out="narrow", place=SERVED, records_per_file=7, concurrency=1, per_host=1)
    assert content(wide) == content(narrow)


KILLED_RUN = """
import importlib, os, signal, sys
from pathlib import Path
from components.data.download import DownloadParams, SourceParams, download
from components.io import work
from components.io.runtime import Runtime

module, name, times, site, folder, settings = sys.argv[1:]
owner = importlib.import_module(module)
original, calls = getattr(owner, name), 0

def deadly(*args, **kwargs):
    global calls
    calls += 1
    if calls == int(times):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

setattr(owner, name, deadly)
work.code_digest = lambda *_: "fixed"
params = DownloadParams.model_validate_json(settings)
download(params, source="src", input=Path(site), raw=Path(folder) / "raw", runtime=Runtime(work=Path(folder) / "work"))
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, site) -> dict[str, bytes]:
    return content(run(tmp_path_factory.mktemp("whole"), site, place=SERVED, records_per_file=10))


@pytest.mark.parametrize(
    ("module", "name", "times"),
    [
        ("components.data.fetching.plan", "_judge", 50),
        ("components.data.fetching.journal", "write_line", 1),
        ("components.data.fetching.journal", "write_line", 40),
        ("components.data.fetching.chunks", "_write_chunk", 3),
        ("components.data.fetching.chunks", "captions_of", 10),
        ("components.io.outcomes", "write_outcomes", 1),
        ("components.io.records", "write_manifest", 1),
        ("components.io.work", "publish", 1),
        ("shutil", "rmtree", 2),
    ],
)
def test_killed_and_called_again(tmp_path, site, uninterrupted, monkeypatch, module, name, times):
    params = DownloadParams(sources={"src": SourceParams(path=site, **SERVED)}, records_per_file=10, **QUICK)
    arguments = [module, name, str(times), str(site), str(tmp_path), params.model_dump_json()]
    killed = subprocess.run([sys.executable, "-c", KILLED_RUN, *arguments], check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "raw").exists() or name == "rmtree"

    monkeypatch.setattr("components.io.work.code_digest", lambda *_: "fixed")  # someone may be editing code meanwhile
    asked = Counter()
    fetch = Fetcher.fetch

    async def counted(self, url, body):
        asked[str(url)] += 1
        return await fetch(self, url, body)

    monkeypatch.setattr(Fetcher, "fetch", counted)
    resumed = run(tmp_path, site, place=SERVED, records_per_file=10)
    assert content(resumed) == uninterrupted
    if name == "write_line":
        assert asked.total() == TARGETS - (times - 1)  # what the journal holds is not fetched again
    if module.startswith("components.io"):
        assert asked.total() == 0


def test_a_torn_journal_and_a_torn_picture_are_fetched_again(tmp_path):
    good = {"offset": 0, "reason": "ok", "bytes": 4, "sha256": hashlib.sha256(b"pass").hexdigest()}
    lines = [{"target": 0}, {"target": 1, "offset": 4}, {"target": 2, "offset": 99}, {"target": 3, "offset": 0}]
    (tmp_path / "journal.jsonl").write_text("\n".join(json.dumps({**good, **line}) for line in lines)[:-5])
    (tmp_path / "bodies.bin").write_bytes(b"passpas")  # the second is cut, the third is missing
    with Journal(tmp_path) as journal:
        assert set(journal.results) == {0}  # the line of the fourth has no end
        offset = journal.keep(io.BytesIO(b"pass"))
        journal.note(1, Fetched(Reason.OK, bytes=4, sha256=good["sha256"]), offset)
        assert journal.image(1) == journal.image(0) == b"pass"
        journal.note(2, Fetched(Reason.TIMEOUT, passing=True))
    with Journal(tmp_path) as journal:
        assert {target: result.reason for target, result in journal.results.items()} == {
            0: Reason.OK, 1: Reason.OK, 2: Reason.TIMEOUT,
        }  # fmt: skip
        assert journal.results[2].passing


def test_without_fetching_nothing_is_touched(tmp_path, site, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    raw = run(tmp_path, site, fetch=False)
    assert reasons(raw) == {"not_fetched": 124, "malformed_row": 1, "url_forbidden_host": 1, "duplicate_row": 1}
    assert read_manifest(raw).rows == 0
    assert sorted(content(raw)) == [MANIFEST_FILE, "outcomes.parquet", "quarantine.parquet"]


def test_local_pictures(tmp_path):
    folder = tmp_path / "src"
    (folder / "images").mkdir(parents=True)
    (folder / "secret.png").write_bytes(PNG)
    for name, data in {"a.png": PNG, "empty.png": b"", "page.png": b"<html>", "big.png": PNG + bytes(2000)}.items():
        (folder / "images" / name).write_bytes(data)
    (folder / "images/directory.png").mkdir()
    (folder / "images/link.png").symlink_to(folder / "secret.png")
    names = ["a.png", "gone.png", "empty.png", "page.png", "big.png", "directory.png", "link.png", "../secret.png"]
    items = [{"image": name, "caption": ["one", "two"]} for name in names]
    (folder / "list.json").write_text(json.dumps(items))
    raw = run(tmp_path, folder, place={"images": "images"}, max_bytes=1000)
    assert reasons(raw) == {
        "ok": 2, "file_missing": 6, "empty_body": 2, "not_an_image": 2, "too_large": 2, "malformed_row": 2,
    }  # fmt: skip
    [record] = [record for batch in iter_batches(raw) for record in batch.to_pylist()]
    assert (record["url"], record["captions"], record["image"]) == ("a.png", ["one", "two"], PNG)
    assert str(tmp_path).encode() not in b"".join(content(raw).values())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(st.binary(max_size=40), st.text(max_size=20).map(lambda x: f"a\thttp://{x}".encode())), max_size=9
    )
)
def test_any_list_conserves_its_rows(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("any")
    text = b"\n".join(lines) + b"\n"
    (folder / "pairs.tsv").write_bytes(text)
    raw = run(folder, folder / "pairs.tsv", fetch=False)
    check_conservation(raw, [row_name("src", row) for row in range(text.count(b"\n"))])


def test_the_built_in_corpus_gives_what_its_ills_promise(tmp_path):
    from components.data.corpus.params import WebParams
    from components.data.synthesize import SynthesizeParams, synthesize

    few = dict.fromkeys(WebParams.model_fields, 2)
    sizes = SynthesizeParams(train=40, val=4, test=4, image_size=80, web=WebParams(**few))
    synthesize(sizes, corpus=tmp_path / "corpus", runtime=Runtime(processes=1, work=tmp_path / "work"))
    ills = json.loads((tmp_path / "corpus/ills.json").read_text())
    raw = run(tmp_path, tmp_path / "corpus", place={"list": "pairs.tsv", "serve": "web"})
    assert reasons(raw) == ills["download"]["counts"]
    table = read_outcomes(raw)
    assert table.num_rows == ills["rows_in"]
    found = {reason: [] for reason in ills["download"]["rows"]}
    for row, reason in enumerate(table["reason"].to_pylist()):
        if reason != "ok":
            found[reason].append(row)
    assert found == ills["download"]["rows"]


def test_the_real_lists(tmp_path, shared):
    cc3m = run(tmp_path, shared / "data/web/cc3m_validation.tsv", out="cc3m", fetch=False)
    assert reasons(cc3m) == {"not_fetched": 15_833}
    mess = run(tmp_path, shared / "data/web/url_text_10000.parquet", out="mess", fetch=False)
    assert reasons(mess) == {"not_fetched": 9_998, "url_too_long": 1, "url_invalid": 1}


def test_an_empty_list_is_an_empty_set(tmp_path):
    (tmp_path / "pairs.tsv").write_bytes(b"")
    raw = run(tmp_path, tmp_path / "pairs.tsv")
    assert read_outcomes(raw).num_rows == read_manifest(raw).rows == 0


def test_what_the_user_can_mend_is_said(tmp_path, site):
    with pytest.raises(UserError, match=r"download\.sources\.src\.serve"):
        run(tmp_path, site, place={"serve": "nowhere"})
    with pytest.raises(UserError, match=r"download\.sources\.src\.path"):
        run(tmp_path, tmp_path / "gone")
    with pytest.raises(UserError, match="there is no source 'x'"):
        download(DownloadParams(), source="x", input=site, raw=tmp_path / "raw", runtime=Runtime(work=tmp_path / "w"))
    with pytest.raises(ValidationError, match="connect_seconds"):
        DownloadParams(connect_seconds=5, total_seconds=1)
    with pytest.raises(ValidationError):
        SourceParams(path=Path(), host="localhost")
    with pytest.raises(ValidationError):
        DownloadParams(sources={"../x": {"path": "x"}})


def test_parameters_are_light_to_import():
    heavy = ["pyarrow", "aiohttp", "yarl", "torch", "numpy", "PIL", "ray"]
    code = f"import sys, components.data.download; print([m for m in {heavy} if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert found.stdout.strip() == "[]"


def test_the_plan_brings_no_reason_that_is_not_in_the_enumeration(tmp_path, site):
    raw = run(tmp_path, site, place=SERVED)
    assert set(reasons(raw)) <= {str(reason) for reason in Reason}
    assert get_args(SourceParams.model_fields["format"].annotation)
