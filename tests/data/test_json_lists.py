"""JSON source lists: COCO's and Visual Genome's layouts, and reading element by element."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data.sources import json_stream
from components.data.sources.json_stream import iter_array, iter_members
from components.data.sources.lists import read_source
from components.io.errors import UserError
from components.io.outcomes import Reason

COCO = {
    "info": {"year": 2017},
    "images": [
        {"id": 9, "file_name": "000000000009.jpg", "coco_url": "http://images.cocodataset.org/train2017/9.jpg"},
        {"id": 25, "file_name": "COCO_val2014_000000000025.jpg", "flickr_url": "http://farm.staticflickr.com/25.jpg"},
        {"id": 30, "file_name": "000000000030.jpg"},
        {"id": "x", "file_name": "y.jpg"},
    ],
    "annotations": [
        {"image_id": 25, "id": 1, "caption": "one"},
        {"image_id": 9, "id": 2, "caption": "two"},
        {"image_id": 25, "id": 3, "caption": None},
        {"image_id": 77, "id": 4, "caption": "nowhere"},
        "no object",
        {"image_id": True, "caption": "a number it is not"},
        {"image_id": 9, "id": 5, "caption": 7},
    ],
}
GENOME = [
    {"id": 1, "regions": [{"region_id": 1, "phrase": "the clock"}, {"phrase": "a tree"}, 3]},
    {"id": 2, "regions": [{"phrase": "no known picture"}]},
    {"id": 3, "regions": []},
    {"regions": [{"phrase": "no id"}]},
]
IMAGE_DATA = [
    {"image_id": 1, "url": "https://cs.stanford.edu/people/rak248/VG_100K_2/1.jpg", "coco_id": 42},
    {"image_id": 3, "url": "https://cs.stanford.edu/people/rak248/VG_100K/3.jpg", "coco_id": None},
]


def rows_of(path, **options):
    rows = list(read_source(path, **options))
    assert [row.row for row in rows] == list(range(len(rows)))
    return rows


def test_coco_captions(tmp_path):
    (tmp_path / "captions.json").write_text(json.dumps(COCO))
    rows = rows_of(tmp_path)
    assert [(row.url, row.caption, row.coco_id) for row in rows[:2]] == [
        ("http://farm.staticflickr.com/25.jpg", "one", 25),
        ("http://images.cocodataset.org/train2017/9.jpg", "two", 9),
    ]
    malformed, missing = Reason.MALFORMED_ROW, Reason.MISSING_CAPTION
    assert [row.error for row in rows[2:]] == [missing, malformed, malformed, malformed, malformed, missing]
    assert rows[3].location == "captions.json:annotations[3]"
    assert json.loads(rows[3].content)["image_id"] == 77
    assert rows[-1].location == "captions.json:images, id 30"

    local = rows_of(tmp_path / "captions.json", format="coco", images="val2014")
    assert [row.name for row in local[:2]] == ["COCO_val2014_000000000025.jpg", "000000000009.jpg"]
    assert local[0].path == tmp_path / "val2014/COCO_val2014_000000000025.jpg"


def test_coco_pictures_without_captions(tmp_path):
    (tmp_path / "image_info.json").write_text(json.dumps({"images": COCO["images"]}))
    assert [row.error for row in rows_of(tmp_path)] == [Reason.MISSING_CAPTION] * 3
    (tmp_path / "image_info.json").write_text(json.dumps({"images": [], "annotations": ["only this"]}))
    assert [row.error for row in rows_of(tmp_path, format="coco")] == [Reason.MALFORMED_ROW]


def test_visual_genome(tmp_path):
    (tmp_path / "region_descriptions.json").write_text(json.dumps(GENOME))
    (tmp_path / "image_data.json").write_text(json.dumps(IMAGE_DATA))
    rows = rows_of(tmp_path)
    assert [(row.url, row.name, row.caption, row.coco_id) for row in rows if row.error is None] == [
        (IMAGE_DATA[0]["url"], None, "the clock", 42),
        (IMAGE_DATA[0]["url"], None, "a tree", 42),
        (None, "2.jpg", "no known picture", None),
    ]
    malformed, missing = Reason.MALFORMED_ROW, Reason.MISSING_CAPTION
    assert [row.error for row in rows] == [None, None, malformed, None, missing, malformed]

    (tmp_path / "images").mkdir()
    assert rows_of(tmp_path, images="images")[0].name == "VG_100K_2/1.jpg"
    (tmp_path / "images/1.jpg").write_bytes(b"")
    assert rows_of(tmp_path, images="images")[0].name == "1.jpg"


def test_karpathys_coco_ids(tmp_path):
    image = {"filename": "a.jpg", "split": "train", "cocoid": 57870, "sentences": [{"raw": "x"}]}
    (tmp_path / "dataset.json").write_text(json.dumps({"images": [image]}))
    assert rows_of(tmp_path)[0].coco_id == 57870


def test_an_expected_hash_in_albefs_layout(tmp_path):
    digest = "AB" * 32
    items = [{"image": "a.jpg", "caption": "x", "sha256": hash_} for hash_ in (digest, "ab", 7, None)]
    (tmp_path / "list.json").write_text(json.dumps(items))
    rows = rows_of(tmp_path)
    assert [row.sha256 for row in rows] == [digest.lower(), None, None, None]
    malformed = Reason.MALFORMED_ROW
    assert [row.error for row in rows] == [None, malformed, malformed, None]


json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(json_values, max_size=6), st.integers(1, 40), st.sampled_from([None, 1]), st.booleans())
def test_elements_are_those_of_the_whole(tmp_path_factory, elements, piece, indent, escaped):
    path = tmp_path_factory.mktemp("json") / "list.json"
    text = json.dumps(elements, indent=indent, ensure_ascii=escaped)
    path.write_bytes(text.encode("utf-8-sig", "surrogatepass"))
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, written raw, is not UTF-8
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "READ_BYTES", piece)
        assert list(iter_array(path)) == elements
        path.write_text(json.dumps({"a": 1, "b": elements, "c": [elements], "b2": {}}, indent=indent))
        assert [item for _, item in iter_members(path, ("b",))] == elements


@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value)[:-1].encode()), st.integers(1, 9))
def test_any_bytes_are_read_as_by_the_standard_library(tmp_path_factory, data, piece):
    path = tmp_path_factory.mktemp("json") / "any.json"
    path.write_bytes(data)
    try:
        whole = json.loads(data.decode("utf-8-sig"))
    except (UnicodeDecodeError, ValueError):
        whole = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "READ_BYTES", piece)
        if isinstance(whole, list):
            assert list(iter_array(path)) == whole
        else:
            with pytest.raises(UserError):
                list(iter_array(path))


@pytest.mark.parametrize(
    "text", ['[{"a": 1}, {"b": }]' + " " * 99, "[1, 2", "[1] 2", "[" * 100_000, '["a', "[1,]", "[nope]"]
)
def test_damage_is_one_sentence(tmp_path, text):
    (tmp_path / "l.json").write_text(text)
    with pytest.raises(UserError, match=r"l\.json is not JSON"):
        list(iter_array(tmp_path / "l.json"))


def test_a_lost_quotation_mark_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "ELEMENT_CHARACTERS", 1 << 16)
    monkeypatch.setattr(json_stream, "READ_BYTES", 1 << 12)
    (tmp_path / "l.json").write_text('[{"caption": "' + "x" * (1 << 24))
    tracemalloc.start()
    with pytest.raises(UserError, match="an element of more than 65536 characters"):
        list(iter_array(tmp_path / "l.json"))
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


def test_the_real_coco_captions(shared):
    rows = rows_of(shared / "data/coco_mini", list="annotations/captions_val2017.json", images="val2017")
    captioned = [row for row in rows if row.error is None]
    assert all(row.path.is_file() and int(row.path.stem) == row.coco_id for row in captioned)
    whole = json.loads((shared / "data/coco_mini/annotations/captions_val2017.json").read_text(encoding="utf-8"))
    assert [row.caption for row in captioned] == [one["caption"] for one in whole["annotations"]]
