"""Readers of source lists: every row comes out once, in order, whatever is wrong with it."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data.sources.lists import LINE_BYTES, SourceRow, read_source
from components.io.errors import UserError
from components.io.outcomes import Reason


def rows_of(path: Path, **options) -> list[SourceRow]:
    rows = list(read_source(path, **options))
    assert [row.row for row in rows] == sorted({row.row for row in rows})
    return rows


def written(path: Path, content: bytes | str | object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes | str):
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_tsv_keeps_order_and_names_the_line_of_each_ill(tmp_path):
    lines = [
        b"\xef\xbb\xbfa dog\thttp://a.com/1.jpg\r\n",
        "ein Hund, größer\thttp://a.com/ü.jpg\n".encode(),
        b"no tab here\n",
        b"one\ttwo\tthree\n",
        b"caf\xe9\thttp://a.com/2.jpg\n",
        b"\n",
        b"no url\t\n",
        b"\thttp://a.com/3.jpg\n",
        b"x" * (2 * LINE_BYTES) + b"\thttp://a.com\n",
        b'"quoted"\thttp://a.com/4.jpg',
    ]
    rows = rows_of(written(tmp_path / "pairs.tsv", b"".join(lines)))
    malformed = Reason.MALFORMED_ROW
    assert [row.error for row in rows] == [
        None, None, malformed, malformed, malformed, malformed, Reason.MISSING_URL, None, malformed, None,
    ]  # fmt: skip
    assert rows[0].caption == "a dog"
    assert rows[0].url == "http://a.com/1.jpg"
    assert rows[1].caption == "ein Hund, größer"
    assert rows[4].location == "pairs.tsv:5"
    assert rows[4].note == "not UTF-8 at byte 3"
    assert rows[7].caption == ""  # empty is a caption, which a later stage judges
    assert rows[9].caption == '"quoted"'


def test_tsv_does_not_depend_on_the_locale(tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ascii")
    assert rows_of(written(tmp_path / "l.tsv", "猫\thttp://a.com\n"))[0].caption == "猫"


def test_utf16_is_refused_with_the_cure(tmp_path):
    with pytest.raises(UserError, match="save it as UTF-8"):
        rows_of(written(tmp_path / "l.tsv", "a\thttp://a.com\n".encode("utf-16")))


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line and line != b""), max_size=20))
def test_any_bytes_give_one_row_per_line(tmp_path_factory, lines):
    path = written(tmp_path_factory.mktemp("tsv") / "any.tsv", b" " + b"\n".join(lines))
    assert len(rows_of(path)) == max(len(lines), 1)


def test_parquet_finds_its_columns(tmp_path):
    table = pa.table({"TEXT": ["a", None, "c"], "URL": ["http://a.com", "http://b.com", None], "n": [1, 2, 3]})
    pq.write_table(table, tmp_path / "list.parquet")
    rows = rows_of(tmp_path)
    assert [row.error for row in rows] == [None, Reason.MISSING_CAPTION, Reason.MISSING_URL]
    assert rows[0].url == "http://a.com"
    assert rows[2].location == "list.parquet:3"
    named = rows_of(tmp_path / "list.parquet", url_column="TEXT", caption_column="url")
    assert named[0].url == "a"
    assert rows_of(tmp_path, caption_column="n")[0].error is Reason.MALFORMED_ROW  # numbers are no captions
    with pytest.raises(UserError, match=r"no column words: set `caption_column` to one of TEXT, URL, n"):
        rows_of(tmp_path, caption_column="words")


def test_parquet_parts_are_read_in_the_order_of_their_names(tmp_path):
    for part in (1, 0):
        pq.write_table(pa.table({"url": [f"http://a.com/{part}"], "caption": ["x"]}), tmp_path / f"{part}.parquet")
    assert [(row.row, row.url) for row in rows_of(tmp_path)] == [(0, "http://a.com/0"), (1, "http://a.com/1")]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_with_broken_utf8_spoils_one_row(tmp_path, kind):
    good = pa.array(["http://a.com", "http://b.com"]).cast(kind)
    pq.write_table(pa.table({"url": good, "text": pa.array([b"ok", b"\xff"], pa.binary())}), tmp_path / "l.parquet")
    assert [row.error for row in rows_of(tmp_path)] == [None, Reason.MALFORMED_ROW]


def test_a_damaged_parquet_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="not a whole parquet file"):
        rows_of(written(tmp_path / "l.parquet", b"PAR1 and no more"))


def test_albef_json(tmp_path):
    items = [
        {"image": "a.jpg", "caption": "one"},
        {"image": "sub/b.jpg", "caption": ["two", "three"]},
        {"image": "http://a.com/c.jpg", "caption": "four"},
        {"image": "a.jpg", "caption": []},
        {"image": "a.jpg"},
        {"caption": "five"},
        {"image": 3, "caption": "six"},
        {"image": "a.jpg", "caption": [None, 7]},
        "seven",
        {"image": "a.jpg", "caption": "\ud800"},
    ]
    rows = rows_of(written(tmp_path / "list.json", items), images="pictures")
    missing, malformed = Reason.MISSING_CAPTION, Reason.MALFORMED_ROW
    assert [row.error for row in rows] == [
        None, None, None, None, missing, missing, Reason.MISSING_URL, malformed, missing,
        malformed, malformed, malformed,
    ]  # fmt: skip
    assert rows[2].path == tmp_path / "pictures/sub/b.jpg"
    assert rows[2].name == "sub/b.jpg"
    assert rows[2].location == "list.json:[1].caption[1]"
    assert rows[3].url == "http://a.com/c.jpg"
    assert rows[3].path is None


def karpathy(tmp_path: Path) -> Path:
    def image(name, split, *captions, **more):
        return {"filename": name, "split": split, "sentences": [{"raw": one} for one in captions], **more}

    images = [image("a.jpg", "train", "1", "2"), image("b.jpg", "val", "3", filepath="val2014"), image("c.jpg", "test")]
    return written(tmp_path / "dataset.json", {"images": images, "dataset": "x"})


def test_karpathy_json(tmp_path):
    rows = rows_of(karpathy(tmp_path), images="images")
    assert [(row.caption, row.split) for row in rows] == [("1", "train"), ("2", "train"), ("3", "val"), (None, "test")]
    assert rows[2].path == tmp_path / "images/val2014/b.jpg"
    assert rows[3].error is Reason.MISSING_CAPTION


def test_a_row_keeps_its_number_whatever_splits_are_taken(tmp_path):
    assert [row.row for row in rows_of(karpathy(tmp_path), splits=("val", "test"))] == [2, 3]


def test_folder(tmp_path):
    for name in ("b.jpg", "a.png", "sub/c.webp", ".hidden.jpg", "notes.md"):
        written(tmp_path / name, b"x")
    written(tmp_path / "a.txt", "one\r\n\ntwo\n")
    written(tmp_path / "sub/c.txt", b"\xff")
    rows = rows_of(tmp_path)
    assert [(row.name, row.caption) for row in rows[:2]] == [("a.png", "one"), ("a.png", "two")]
    assert [row.error for row in rows[2:]] == [Reason.MISSING_CAPTION, Reason.MALFORMED_ROW]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("../secret.jpg", Reason.MALFORMED_ROW),
        ("sub/../../secret.jpg", Reason.MALFORMED_ROW),
        ("/etc/passwd", Reason.MALFORMED_ROW),
        ("..\\secret.jpg", Reason.MALFORMED_ROW),
        ("a\0.jpg", Reason.MALFORMED_ROW),
        (".", Reason.MALFORMED_ROW),
        ("link.jpg", Reason.FILE_MISSING),
        ("folder/secret.jpg", Reason.FILE_MISSING),
        ("loop/x.jpg", Reason.FILE_MISSING),
        ("x" * 5000, None),  # the operating system says no when it is opened
        ("inner.jpg", None),
        ("fine.jpg", None),
    ],
)
def test_names_cannot_leave_the_images_folder(tmp_path, name, error):
    images = tmp_path / "images"
    written(images / "fine.jpg", b"x")
    written(tmp_path / "outside/secret.jpg", b"x")
    (images / "link.jpg").symlink_to(tmp_path / "outside/secret.jpg")
    (images / "inner.jpg").symlink_to("fine.jpg")
    (images / "folder").symlink_to(tmp_path / "outside")
    (images / "loop").symlink_to("loop")
    row = rows_of(written(tmp_path / "l.json", [{"image": name, "caption": "x"}]), images="images")[0]
    assert row.error is error or (name == "x" * 5000 and row.error is Reason.FILE_MISSING)
    assert (row.path is None) == (row.error is not None)


def test_formats_are_told_by_content_where_the_name_is_silent(tmp_path):
    assert rows_of(written(tmp_path / "one", "cap\thttp://a.com\n"))[0].url == "http://a.com"
    assert rows_of(written(tmp_path / "two", ' [{"image": "a", "caption": "b"}]'))[0].name == "a"
    with pytest.raises(UserError, match="set the source's `format`"):
        rows_of(written(tmp_path / "three", "nothing known"))


@pytest.mark.parametrize("content", ["{", '{"images": 3}', '{"a": ' + "[" * 100_000, "[1, 2", b"{\xff}"])
def test_broken_json_is_one_sentence(tmp_path, content):
    with pytest.raises(UserError):
        rows_of(written(tmp_path / "l.json", content))


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_source(tmp_path / "gone.tsv")
    with pytest.raises(UserError, match="`list`"):
        read_source(tmp_path, list="gone.tsv")
    written(tmp_path / "a.tsv", ""), written(tmp_path / "b.json", "[]")
    with pytest.raises(UserError, match=r"a\.tsv, b\.json"):
        read_source(tmp_path)
    with pytest.raises(UserError, match="splits"):
        read_source(tmp_path, list="a.tsv", splits=("train",))


def test_the_real_lists(shared):
    flickr = rows_of(shared / "data/flickr8k", images="images")
    assert len(flickr) == 40_000
    assert all(row.error is None for row in flickr)
    assert len(rows_of(shared / "data/web/cc3m_validation.tsv")) == 15_833
    assert len(rows_of(shared / "data/web/url_text_10000.parquet")) == 10_000
