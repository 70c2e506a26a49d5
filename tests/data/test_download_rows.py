"""What `download` says of single rows, and what a second run does about failures that can pass."""

import hashlib
import json
import shutil
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.data.download import DownloadParams, SourceParams, download
from components.data.fetching import journal
from components.data.fetching.urls import mask_credentials
from components.io.outcomes import check_conservation, count_reasons, read_outcomes
from components.io.records import iter_batches, read_manifest, row_name
from components.io.runtime import Runtime
from tests.data.making import folder_bytes
from tests.data.web import Handler, serving

PNG = b"\x89PNG\r\n\x1a\n" + bytes(32)
QUICK = {"retries": 0, "backoff_seconds": 0.0, "connect_seconds": 2.0, "total_seconds": 2.0, "records_per_file": 7}


@pytest.fixture(autouse=True)
def same_code(monkeypatch):
    monkeypatch.setattr("components.io.work.code_digest", lambda *_: "fixed")  # someone may be editing code meanwhile


def run(folder: Path, input: Path, *, out: str = "raw", work: str = "work", place=None, **changed) -> Path:
    params = DownloadParams(sources={"src": SourceParams(path=input, **(place or {}))}, **{**QUICK, **changed})
    download(params, source="src", input=input, raw=folder / out, runtime=Runtime(work=folder / work))
    return folder / out


def outcomes(raw: Path) -> dict[str, dict]:
    return {row["row_id"]: row for row in read_outcomes(raw).to_pylist()}


def records(raw: Path) -> list[dict]:
    return [record for batch in iter_batches(raw) for record in batch.to_pylist()]


@pytest.fixture
def moody(tmp_path, monkeypatch):
    """A server of pictures /0, /1 ... in the place of the corpus's own; `troubles` says what else a path answers."""
    state = SimpleNamespace(asked=Counter(), troubles={})

    class Moody(Handler):
        def answer(self):
            state.asked[self.path] += 1
            trouble = state.troubles.get(self.path)
            if trouble == "hang":
                self.release.wait()
            if trouble in ("hang", "drop"):
                self.close_connection = True
                return
            self.send(trouble or 200, b"" if trouble else PNG + self.path.encode())

    @contextmanager
    def serve(_):
        with serving(Moody) as server:
            yield server.server_port

    monkeypatch.setattr("components.data.corpus.server.serve", serve)
    (tmp_path / "site/web").mkdir(parents=True)
    lines = [f"picture {number}\thttp://corpus.test/{number}" for number in range(40)]
    (tmp_path / "site/pairs.tsv").write_text("\n".join([*lines, "again\thttp://corpus.test/3", "no tab"]) + "\n")
    state.site = tmp_path / "site"
    return state


SERVED = {"serve": "web"}


def test_a_second_run_asks_for_what_can_pass_and_nothing_else(tmp_path, moody):
    whole = folder_bytes(run(tmp_path, moody.site, place=SERVED, out="whole", work="other"))
    moody.asked.clear()
    for number, trouble in {3: 503, 8: 429, 9: 500, 20: "hang", 27: "drop", 39: 408}.items():
        moody.troubles[f"/{number}"] = trouble
    moody.troubles |= {"/5": 404, "/6": 403, "/7": 410}
    first = run(tmp_path, moody.site, place=SERVED)
    assert count_reasons(first)["kept", "ok"] == 31
    assert {path for path, times in moody.asked.items() if times > 1} == {
        "/27"
    }  # the library asks again when a connection closes without a word; others once

    passing = ["/20", "/27", "/3", "/39", "/8", "/9"]
    moody.asked.clear()
    del moody.troubles["/3"], moody.troubles["/20"]
    second = run(tmp_path, moody.site, place=SERVED)
    assert sorted(moody.asked) == passing
    assert count_reasons(second)["kept", "ok"] == 34

    moody.asked.clear()
    moody.troubles = {path: status for path, status in moody.troubles.items() if path in ("/5", "/6", "/7")}
    third = run(tmp_path, moody.site, place=SERVED)
    assert sorted(moody.asked) == ["/27", "/39", "/8", "/9"]
    assert not list((tmp_path / "work/download-src").iterdir())  # nothing is left that could pass

    moody.asked.clear()
    assert folder_bytes(run(tmp_path, moody.site, place=SERVED, work="fresh", out="new")) == folder_bytes(third)
    assert moody.asked.total() == 40
    kept = {one["id"]: one for one in records(third)}
    assert {one["id"]: one for one in records(tmp_path / "whole")} == kept | {
        one["id"]: one for one in records(tmp_path / "whole") if one["url"][-2:] in ("/5", "/6", "/7")
    }
    assert whole["quarantine.parquet"] == folder_bytes(third)["quarantine.parquet"]


def test_a_second_run_after_all_passed_equals_one_without_trouble(tmp_path, moody):
    whole = folder_bytes(run(tmp_path, moody.site, place=SERVED, out="whole", work="other"))
    moody.troubles = {f"/{number}": 500 + number % 4 for number in range(0, 40, 3)}
    run(tmp_path, moody.site, place=SERVED)
    moody.troubles = {}
    assert folder_bytes(run(tmp_path, moody.site, place=SERVED)) == whole


class Stopped(Exception):  # noqa: N818
    """In the place of a kill."""


@pytest.mark.parametrize("where", ["rename", "rmtree", "write_line"])
def test_stopped_while_chunks_are_opened_again(tmp_path, moody, monkeypatch, where):
    whole = folder_bytes(run(tmp_path, moody.site, place=SERVED, out="whole", work="other"))
    moody.troubles = {f"/{number}": 503 for number in range(0, 40, 5)}
    run(tmp_path, moody.site, place=SERVED)
    moody.troubles, calls = {}, Counter()
    owner, name = {
        "rename": (Path, "rename"),
        "rmtree": (shutil, "rmtree"),
        "write_line": (journal, "write_line"),
    }[where]
    original = getattr(owner, name)
    for stop in range(1, 16, 2):

        def stopping(*args, stop=stop, **kwargs):
            calls[stop] += 1
            if calls[stop] == stop:
                raise Stopped
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, stopping)
        try:
            run(tmp_path, moody.site, place=SERVED)
        except Stopped:
            continue
        finally:
            monkeypatch.setattr(owner, name, original)
        break
    assert folder_bytes(run(tmp_path, moody.site, place=SERVED)) == whole


def test_work_that_was_kept_goes_with_its_list(tmp_path, moody):
    moody.troubles = {"/1": 503}
    run(tmp_path, moody.site, place=SERVED)
    [kept] = (tmp_path / "work/download-src").iterdir()
    (moody.site / "pairs.tsv").write_text("one\thttp://corpus.test/0\n")
    run(tmp_path, moody.site, place=SERVED)
    assert not kept.exists()


def test_milliseconds_stand_beside_the_outs(tmp_path, moody):
    moody.troubles = {"/4": "hang"}
    raw = run(tmp_path, moody.site, place=SERVED)
    table = pq.read_table(tmp_path / "work/timings/download-src.parquet")
    assert table["row_id"].to_pylist() == read_outcomes(raw)["row_id"].to_pylist()
    times = table["milliseconds"].to_pylist()
    assert times[40] == times[3]  # one fetch, two rows
    assert times[41] is None
    assert 1990 <= times[4] < 30_000
    assert all(0 <= time < 30_000 for time in times[:40])
    assert "milliseconds" not in read_outcomes(raw).column_names


def test_a_picture_at_many_urls_is_a_placeholder(tmp_path):
    web = tmp_path / "site/web"
    web.mkdir(parents=True)
    for number in range(30):
        same = number % 3 == 0
        (web / f"{number}.png").write_bytes(PNG if same else PNG + str(number).encode())
    lines = [f"{number}\thttp://corpus.test/{number}.png" for number in range(30)]
    lines += [f"more {number}\thttp://corpus.test/1.png" for number in range(30)]  # one URL, however often, is one
    (tmp_path / "site/pairs.tsv").write_text("\n".join(lines) + "\n")
    raw = run(tmp_path, tmp_path / "site", place=SERVED, placeholder_urls=10)
    assert count_reasons(raw) == {("kept", "ok"): 50, ("rejected", "placeholder"): 10}
    found = outcomes(raw)
    assert found["src/000000000"]["detail"] == "the same picture at 10 URLs"
    check_conservation(raw, [row_name("src", row) for row in range(60)])
    assert read_manifest(raw).rows == 20
    assert not any(record["image"] == PNG for record in records(raw))
    for off in (11, 0):
        kept = run(tmp_path, tmp_path / "site", place=SERVED, placeholder_urls=off, out=f"raw{off}")
        assert count_reasons(kept) == {("kept", "ok"): 60}
    only = tmp_path / "only"
    (only / "web").mkdir(parents=True)
    (only / "web/a.png").write_bytes(PNG), (only / "web/b.png").write_bytes(PNG)
    (only / "pairs.tsv").write_text("a\thttp://corpus.test/a.png\nb\thttp://corpus.test/b.png\n")
    assert read_manifest(run(tmp_path, only, place=SERVED, placeholder_urls=2, out="none")).files == ()


def test_expected_hashes(tmp_path):
    web = tmp_path / "site/web"
    web.mkdir(parents=True)
    (web / "a.png").write_bytes(PNG), (web / "b.png").write_bytes(PNG + b"b")
    good, wrong = hashlib.sha256(PNG).hexdigest(), "0" * 64
    rows = [
        ("a", "right", good),
        ("a", "wrong", wrong),
        ("a", "none", None),
        ("a", "right", good),
        ("a", "right", None),
        ("b", "only wrong", wrong),
        ("b", "no hash", "abc"),
        ("a", "upper", f" {good.upper()} "),
    ]
    names, texts, hashes = zip(*rows, strict=True)
    table = {"url": [f"http://corpus.test/{name}.png" for name in names], "text": texts, "hash": hashes}
    pq.write_table(pa.table(table), tmp_path / "site/list.parquet")
    raw = run(tmp_path, tmp_path / "site", place={**SERVED, "sha256_column": "hash"})
    got = [row["reason"] for row in outcomes(raw).values()]
    assert got == ["ok", "sha256_mismatch", "ok", "duplicate_row", "ok", "sha256_mismatch", "malformed_row", "ok"]
    assert outcomes(raw)["src/000000001"]["detail"] == f"the list expects {wrong}"
    assert outcomes(raw)["src/000000001"]["sha256"] == good
    [record] = records(raw)
    assert record["captions"] == ["right", "none", "right", "upper"]


def test_malformed_rows_are_in_quarantine(tmp_path):
    lines = [b"fine\thttp://a.com/x", b"no tab", b"caf\xe9\thttp://a.com/y", b"see http://bob:secret@a.com/ there"]
    (tmp_path / "pairs.tsv").write_bytes(b"\n".join(lines))
    raw = run(tmp_path, tmp_path / "pairs.tsv", fetch=False)
    assert pq.read_table(raw / "quarantine.parquet").to_pylist() == [
        {"row_id": "src/000000001", "location": "pairs.tsv:2", "problem": "1 field, not 2", "content": "no tab"},
        {
            "row_id": "src/000000002",
            "location": "pairs.tsv:3",
            "problem": "not UTF-8 at byte 3",
            "content": "caf\\xe9\thttp://a.com/y",
        },
        {
            "row_id": "src/000000003",
            "location": "pairs.tsv:4",
            "problem": "1 field, not 2",
            "content": "see http://***@a.com/ there",
        },
    ]
    (tmp_path / "l.json").write_text(json.dumps([{"image": 3, "caption": "x"}, 7]))
    again = pq.read_table(run(tmp_path, tmp_path / "l.json", out="json") / "quarantine.parquet")
    assert again["location"].to_pylist() == ["l.json:[0]", "l.json:[1]"]
    assert again["content"].to_pylist() == ['{"picture": 3, "caption": "x", "sha256": null}', "7"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://bob:secret@a.com/x", "http://***@a.com/x"),
        ("HTTP://bob@a.com", "HTTP://***@a.com"),
        ("//bob:secret@a.com/x", "//***@a.com/x"),
        ("ftp://bob:se@cret@a.com:21/x", "ftp://***@a.com:21/x"),
        ("http:\\\\bob:secret@a.com/x", "***@a.com/x"),
        ("bob:secret@a.com/x", "***@a.com/x"),
        ("http://a.com/@bob/x?to=b@c", "http://a.com/@bob/x?to=b@c"),
        ("http://a.com?b@c", "http://a.com?b@c"),
        ("http://a.com/x", "http://a.com/x"),
    ],
)
def test_no_password_is_shown(tmp_path, text, shown):
    assert mask_credentials(text) == shown
    (tmp_path / "pairs.tsv").write_text(f"caption\t{text}\ncaption\t{text}" + "x" * 3000 + "\n")
    raw = run(tmp_path, tmp_path / "pairs.tsv", fetch=False)
    urls = read_outcomes(raw)["url"].to_pylist()
    assert urls[0] == shown
    if "secret" in text:
        assert not any(b"secret" in data or b"cret@" in data for data in folder_bytes(raw).values())
        assert "secret" not in " ".join(urls)


def test_coco_ids_reach_the_records(tmp_path):
    (tmp_path / "src").mkdir()
    for name in "ab":
        (tmp_path / f"src/{name}.png").write_bytes(PNG + name.encode())
    images = [{"id": 5, "file_name": "a.png"}, {"id": 6, "file_name": "b.png"}]
    annotations = [{"image_id": number, "caption": f"{number}"} for number in (6, 5, 6)]
    (tmp_path / "src/captions.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    raw = run(tmp_path, tmp_path / "src")
    assert [(one["url"], one["coco_id"]) for one in records(raw)] == [("b.png", 6), ("a.png", 5)]
