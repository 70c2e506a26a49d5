"""The stage `clean`: what becomes of each row, sameness of bytes, and resuming after a kill."""

import signal
import subprocess
import sys

import pytest

from components.data.clean import CleanParams, clean
from components.io.errors import UserError
from components.io.outcomes import check_conservation, count_reasons, kept_row_ids, read_outcomes
from components.io.records import iter_batches, read_manifest
from components.io.runtime import Runtime
from tests.data.making import encoded, folder_bytes, photo, record, record_folder

PARAMS = CleanParams(picture={"min_side": 32}, caption={"max_words": 5})


def raw_records():
    good = [encoded(photo(i)) for i in range(6)]
    return {
        "web": [
            record("web", 0, good[0], ["A cat.", "", "The <b>cat</b>, again"]),
            record("web", 3, good[1][:500], ["truncated", "also"]),
            record("web", 5, encoded(photo(9, (20, 20))), ["tiny"]),
            record("web", 6, encoded(photo(2), "PNG"), ["one two three four five six seven"]),
            record("web", 7, good[3], ["...", "!"]),
            record("web", 9, b"<html>", ["page"]),
            record("web", 10, good[4], ["x" * 5000, "None"]),
        ],
        "album": [record("album", i, good[i], [f"Picture {i}"]) for i in range(6)],
    }


def all_records(folder):
    return [row for batch in iter_batches(folder) for row in batch.to_pylist()]


@pytest.fixture
def raw(tmp_path):
    for source, records in raw_records().items():
        record_folder(tmp_path / "raw" / source, records, per_file=3)
    return tmp_path / "raw"


def test_what_becomes_of_each_row(raw, tmp_path):
    out = tmp_path / "clean"
    clean(PARAMS, raw=raw, clean=out, runtime=Runtime(processes=1, work=tmp_path / "work"))

    records = raw_records()
    check_conservation(out, [row for source in records.values() for one in source for row in one["row_ids"]])
    assert count_reasons(out) == {
        ("kept", "ok"): 9,
        ("kept", "caption_truncated"): 1,
        ("rejected", "caption_empty"): 3,
        ("rejected", "caption_too_long"): 1,
        ("rejected", "truncated_image"): 2,
        ("rejected", "image_too_small"): 1,
        ("rejected", "undecodable"): 1,
    }
    got = all_records(out)
    assert [one["id"] for one in got] == [
        *(one["id"] for one in records["album"]),
        *("web/000000000", "web/000000006", "web/000000010"),
    ]
    by_id = {one["id"]: one for one in got}
    first = by_id["web/000000000"]
    assert first == {
        **records["web"][0],
        "width": 96,
        "height": 72,
        "captions": ["a cat", "the cat again"],
        "row_ids": ["web/000000000", "web/000000002"],
    }
    encoded_anew = by_id["web/000000006"]
    assert encoded_anew["image"][:2] == b"\xff\xd8"
    assert encoded_anew["sha256"] == records["web"][3]["sha256"]  # still that of the download
    assert encoded_anew["captions"] == ["one two three four five"]
    assert by_id["web/000000010"]["captions"] == ["none"]
    assert sorted(kept_row_ids(out).to_pylist()) == sorted(row for one in got for row in one["row_ids"])

    manifest = read_manifest(out)
    assert manifest.captions == 10
    assert manifest.extra["sources"] == ["album", "web"]
    assert manifest.extra["changes"]["picture_png"] == 1
    assert manifest.extra["changes"]["caption_truncated"] == 1
    detail = {row["row_id"]: row["detail"] for row in read_outcomes(out).to_pylist()}
    assert detail["web/000000006"] == "picture: png; caption: 2 words cut"
    assert detail["web/000000010"] == "5000 characters"
    assert detail["web/000000005"] == "20 x 20 pixels"
    assert detail["web/000000009"] == "a web page"
    assert manifest.extra["rejects"] == {
        "caption_empty": 3, "caption_too_long": 1, "image_too_small": 1, "truncated_image": 2, "undecodable": 1,
    }  # fmt: skip
    assert manifest.extra["changes"] == {
        "caption_changed": 10, "caption_lower_case": 9, "caption_punctuation": 4, "caption_spaces": 1,
        "caption_tags": 1, "caption_truncated": 1, "caption_words": 1, "picture_png": 1,
    }  # fmt: skip
    assert not (tmp_path / "work" / "clean").exists() or not list((tmp_path / "work" / "clean").iterdir())


def test_a_token_cap_by_a_tokenizer(raw, tmp_path):
    from components.data.tokenizer import bert_tokenizer

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "pic", "##ture", *(f"{i}" for i in range(6))]
    bert_tokenizer({name: index for index, name in enumerate(names)}).save(tmp_path / "tokenizer.json")
    params = CleanParams(picture={"min_side": 32}, caption={"max_tokens": 4, "tokenizer": tmp_path / "tokenizer.json"})
    clean(params, raw=raw, clean=tmp_path / "out", runtime=Runtime(processes=1, work=tmp_path / "work"))
    got = {one["id"]: one["captions"] for one in all_records(tmp_path / "out")}
    assert got["album/000000003"] == ["picture"]  # [CLS] pic ##ture [SEP]; the number would be the fifth
    assert got["web/000000000"] == ["a cat", "the cat"]
    changes = read_manifest(tmp_path / "out").extra["changes"]
    assert changes["caption_tokens"] == changes["caption_truncated"] == 8
    missing = params.model_copy(update={"caption": params.caption.model_copy(update={"tokenizer": tmp_path / "no"})})
    with pytest.raises(UserError, match="no"):
        clean(missing, raw=raw, clean=tmp_path / "out", runtime=Runtime(processes=1, work=tmp_path / "work"))


def test_same_bytes_on_one_process_and_two(raw, tmp_path):
    outs = []
    for processes in (1, 2):
        out = tmp_path / f"clean{processes}"
        clean(PARAMS, raw=raw, clean=out, runtime=Runtime(processes=processes, work=tmp_path / "work"))
        outs.append(folder_bytes(out))
    assert outs[0] == outs[1]


def test_nothing_kept(tmp_path):
    record_folder(tmp_path / "raw" / "web", [record("web", 0, b"no", ["one", "two"])])
    clean(PARAMS, raw=tmp_path / "raw", clean=tmp_path / "out", runtime=Runtime(processes=1, work=tmp_path / "work"))
    assert read_manifest(tmp_path / "out").files == ()
    assert count_reasons(tmp_path / "out") == {("rejected", "undecodable"): 2}


def test_no_records_at_all(tmp_path):
    record_folder(tmp_path / "raw" / "web", [])
    clean(PARAMS, raw=tmp_path / "raw", clean=tmp_path / "out", runtime=Runtime(processes=1, work=tmp_path / "work"))
    assert read_outcomes(tmp_path / "out").num_rows == 0


def test_no_source(tmp_path):
    (tmp_path / "raw").mkdir()
    with pytest.raises(UserError, match="holds no source"):
        clean(PARAMS, raw=tmp_path / "raw", clean=tmp_path / "out", runtime=Runtime(work=tmp_path / "work"))


def test_unfinished_source(raw, tmp_path):
    (raw / "web" / "manifest.json").unlink()
    with pytest.raises(UserError, match="has not finished"):
        clean(PARAMS, raw=raw, clean=tmp_path / "out", runtime=Runtime(work=tmp_path / "work"))


KILLED = """
import os, signal, sys
from pathlib import Path
from components.data import clean as stage
from components.io import work
from components.io.runtime import Runtime

work.code_digest = lambda *_: "this code"
whole = stage.clean_record
def until(record, *rest):
    if record["id"] == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(record, *rest)
stage.clean_record = until
folder = Path(sys.argv[1])
params = stage.CleanParams(picture={"min_side": 32}, caption={"max_words": 5})
stage.clean(params, raw=folder / "raw", clean=folder / "resumed", runtime=Runtime(processes=1, work=folder / "work"))
"""


@pytest.mark.parametrize("at", ["album/000000000", "album/000000004", "web/000000010"])
def test_killed_and_resumed(raw, tmp_path, at, monkeypatch):
    monkeypatch.setattr("components.io.work.code_digest", lambda *_: "this code")  # though it be edited meanwhile
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), at], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "resumed").exists()
    finished = [path.stat().st_ino for path in sorted((tmp_path / "work").rglob("part-[0-9]*[0-9]/records.arrow"))]
    assert len(finished) == ["album/000000000", "album/000000004", None, None, "web/000000010"].index(at)

    clean(PARAMS, raw=raw, clean=tmp_path / "resumed", runtime=Runtime(processes=1, work=tmp_path / "work"))
    clean(PARAMS, raw=raw, clean=tmp_path / "whole", runtime=Runtime(processes=1, work=tmp_path / "other"))
    assert folder_bytes(tmp_path / "resumed") == folder_bytes(tmp_path / "whole")
    again = [path.stat().st_ino for path in sorted((tmp_path / "resumed").glob("*.arrow"))]
    assert again[: len(finished)] == finished  # these very files: nothing was done twice
