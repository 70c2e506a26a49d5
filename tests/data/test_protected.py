"""Protected lists: names in every layout, synonyms, and pictures that leak by name, through others, or as crops."""

import json
import pickle

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from pydantic import ValidationError

from components.data.deduplicate import DeduplicateParams, ProtectedList, deduplicate
from components.data.duplicates.hashing import cropped_hashes, distances, hash_words, perceptual_hash
from components.data.duplicates.names import entry_names, names_of
from components.data.duplicates.protected import find_files, listed_names, read_entries, with_synonyms
from components.io.errors import UserError
from components.io.outcomes import check_conservation, count_reasons, read_outcomes
from components.io.records import iter_batches
from components.io.runtime import Runtime
from tests.data.making import encoded, folder_bytes, photo, record, record_folder


@pytest.mark.parametrize(
    ("text", "hint", "names"),
    [
        ("COCO_train2014_000000123456.jpg", "", {"coco:123456"}),
        ("train2014/COCO_train2014_000000581857_16.jpg", "", {"coco:581857"}),  # RefCOCO: the object's number behind
        ("coco_val2014_000000000042.JPG", "", {"coco:42"}),
        ("000000123456.jpg", "", {"coco:123456"}),
        ("train2017/000000123456.jpg", "", {"coco:123456"}),
        ("images/val2017/123456.png", "", {"coco:123456"}),
        ("COCO_test2015_000000262144", "", {"coco:262144"}),
        (
            "http://images.cocodataset.org/train2017/000000123456.jpg",
            "",
            {"coco:123456", "url:images.cocodataset.org/train2017/000000123456.jpg"},
        ),
        ("VG_100K_2/2317.jpg", "", {"visual_genome:2317"}),
        ("2317.jpg", "visual_genome", {"visual_genome:2317"}),
        (
            "https://cs.stanford.edu/people/rak248/VG_100K/2317.jpg",
            "",
            {"visual_genome:2317", "url:cs.stanford.edu/people/rak248/VG_100K/2317.jpg"},
        ),
        ("1000268201_693b08cb0e.jpg", "", {"flickr:1000268201"}),
        (
            "http://farm4.staticflickr.com/3153/2970773875_164f0c0b83_z.jpg",
            "",
            {"flickr:2970773875", "url:farm4.staticflickr.com/3153/2970773875_164f0c0b83_z.jpg"},
        ),
        ("flickr30k-images/36979.jpg", "", {"flickr:36979"}),
        ("36979.jpg", "flickr30k", {"flickr:36979"}),
        ("1000092795.jpg", "", {"flickr:1000092795"}),
        ("00000017.jpg", "web", set()),  # somebody's running numbers
        ("http://shop.test/12345678.jpg", "", {"url:shop.test/12345678.jpg"}),
        ("http://shop.test/2970773875_164f0c0b83.jpg", "", {"url:shop.test/2970773875_164f0c0b83.jpg"}),
        ("dev-850-0-img0.png", "", {"nlvr2:dev-850-0-img0"}),
        ("http://[::1", "", set()),
        ("holiday.jpg", "", set()),
        ("", "", set()),
    ],
)
def test_names_of_files_and_urls(text, hint, names):
    assert names_of(text, hint) == names


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        (123456, {"coco:123456"}),
        ("123456", {"coco:123456"}),
        ("000000123456.jpg", {"coco:123456"}),
        # RefCOCO's refs, Karpathy, COCO, VQA, MDETR
        ({"ref_id": 1, "image_id": 581857, "file_name": "COCO_train2014_000000581857_16.jpg"}, {"coco:581857"}),
        ({"filepath": "val2014", "filename": "COCO_val2014_000000000042.jpg", "imgid": 0, "cocoid": 42}, {"coco:42"}),
        ({"image": "1000268201_693b08cb0e.jpg", "id": 17}, {"flickr:1000268201"}),
        ({"id": 9, "file_name": "000000000009.jpg"}, {"coco:9"}),
        ({"image_id": 262144, "question": "?", "question_id": 1}, {"coco:262144"}),
        ({"id": 3, "original_id": 77, "caption": "x"}, {"coco:77"}),
        ({"image": "train2014/COCO_train2014_000000299552.jpg", "text": "x"}, {"coco:299552"}),
        # Visual Genome's image_data.json
        ({"image_id": 2317, "coco_id": 77, "flickr_id": 88}, {"visual_genome:2317", "coco:77", "flickr:88"}),
        ({"image_id": 2318, "coco_id": None, "flickr_id": None}, {"visual_genome:2318"}),
        ({"identifier": "dev-850-0-1", "left_url": "http://a.test/1.jpg"},
         {"nlvr2:dev-850-0-img0", "nlvr2:dev-850-0-img1", "url:a.test/1.jpg"}),
        ({"images": ["dev/dev-1-2-img0.png", "dev/dev-1-2-img1.png"]}, {"nlvr2:dev-1-2-img0", "nlvr2:dev-1-2-img1"}),
        (None, set()),
        (True, set()),
        ([1], set()),
        ({"caption": "x"}, set()),
    ],
)  # fmt: skip
def test_names_of_entries(entry, names):
    assert entry_names(entry, "coco") == names


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["image", "images", "url", "id", "image_id", "filename", "filepath", "x"]), inner
        )
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(JSON, st.text(max_size=40))
def test_anything_has_names_or_none(entry, text):
    for name in entry_names(entry, "coco") | names_of(text) | names_of(f"http://{text}"):
        assert name.partition(":")[0] in ("coco", "flickr", "visual_genome", "nlvr2", "url")


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


KARPATHY = {
    "dataset": "coco",
    "images": [
        {"filename": "COCO_val2014_000000000011.jpg", "cocoid": 11, "split": "test"},
        {"filename": "COCO_val2014_000000000012.jpg", "cocoid": 12, "split": "train"},
    ],
}


@pytest.mark.parametrize(
    ("content", "splits", "names"),
    [
        (KARPATHY, ("test",), {"coco:11"}),
        (KARPATHY, (), {"coco:11", "coco:12"}),
        ({"val": [1, 2], "testA": [3], "train": [4]}, ("val", "testA"), {"coco:1", "coco:2", "coco:3"}),
        ('{"image_id": 5}\n{"image_id": 6}\n', (), {"coco:5", "coco:6"}),
        ("7\n\n000000000008.jpg,val\n9\ttestA\n", (), {"coco:7", "coco:8", "coco:9"}),
        ("[1, 2]", (), {"coco:1", "coco:2"}),
        ({"questions": [{"image_id": 5}], "info": {}}, (), {"coco:5"}),
    ],
)
def test_layouts(tmp_path, content, splits, names):
    assert set(listed_names("list", write(tmp_path / "list.json", content), splits, "coco")) == names


def test_refcoco_pickle(tmp_path):
    refs = [{"ref_id": 1, "image_id": 5, "split": "testA"}, {"ref_id": 2, "image_id": 6, "split": "train"}]
    (tmp_path / "refs(unc).p").write_bytes(pickle.dumps(refs, protocol=2))
    assert listed_names("refs", tmp_path / "refs(unc).p", ("testA",), "coco") == {"coco:5": ("refs", "testA", "coco:5")}


def test_where_a_name_comes_from(tmp_path):
    entry = {"split": "testA", "image_id": 5, "flickr_url": "http://flickr.com/photos/x/66666/"}
    found = listed_names("refs", write(tmp_path / "a.json", [entry]), ("testA",), "coco")
    assert found["coco:5"] == found["flickr:66666"] == ("refs", "testA", "coco:5")
    pair = {"left_url": "http://a.test/1.jpg", "right_url": "http://a.test/2.jpg"}
    found = listed_names("nlvr2", write(tmp_path / "b.json", [pair]), (), "coco")
    assert {name: origin.picture for name, origin in found.items()} == {
        "url:a.test/1.jpg": "url:a.test/1.jpg",
        "url:a.test/2.jpg": "url:a.test/2.jpg",
    }


@pytest.mark.parametrize(
    ("name", "content", "splits", "message"),
    [
        ("refs(unc).p", "cos\nsystem\n(S'true'\ntR.", (), "not plain data"),
        ("a.json", "{nonsense", (), "is not JSON"),
        ("a.json", "{}", (), "holds no list of pictures"),
        ("a.json", "[" * 100_000, (), "a.json is"),
        ("a.json", "[]", (), "holds no picture"),
        ("a.json", KARPATHY, ("val",), r"no picture of split 'val' \(its splits: test, train\)"),
        ("a.json", [{"caption": "x"}], (), "entry 1 names no picture"),
    ],
)
def test_lists_that_protect_nothing_are_refused(tmp_path, name, content, splits, message):
    path = write(tmp_path / name, content)
    with pytest.raises(UserError, match=message):
        listed_names("list", path, splits, "coco")


def test_more_messages(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        list(read_entries(tmp_path / "none.json"))
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="no readable UTF-8"):
        list(read_entries(tmp_path / "bytes.json"))
    with pytest.raises(ValidationError, match="no plain word"):
        DeduplicateParams(protected={"a/b": {"path": "x"}})
    path = write(tmp_path / "list.json", ["../secret.jpg", "a.jpg"])
    (tmp_path / "images").mkdir()
    (tmp_path / "secret.jpg").write_bytes(b"x")
    with pytest.raises(UserError, match="none of the pictures"):
        find_files(tmp_path / "images", path, ())
    (tmp_path / "images" / "a.jpg").write_bytes(b"x")
    assert [name for name, _, _ in find_files(tmp_path / "images", path, ())] == ["a.jpg"]


def test_synonyms_reach_through_several_files(tmp_path):
    names = listed_names("refs", write(tmp_path / "refs.json", [77]), (), "coco")
    genome = [{"image_id": 2317, "coco_id": 77, "flickr_id": None}, {"image_id": 1, "coco_id": None, "flickr_id": 5}]
    genome += [{"image_id": 2, "coco_id": 78, "flickr_id": 99999}]
    url = "http://farm1.staticflickr.com/1/55555_0123456789_z.jpg"
    coco = {"images": [{"id": 77, "file_name": "000000000077.jpg", "flickr_url": url}]}
    other = [{"cocoid": 77, "flickr_id": 55555, "vg_id": 4000}]
    files = [write(tmp_path / f"{n}.json", content) for n, content in enumerate([other, genome, coco])]
    found = with_synonyms(names, files)
    assert {name for name in found if not name.startswith("url:")} == {
        *("coco:77", "visual_genome:2317", "visual_genome:4000", "flickr:55555"),
    }
    assert set(found.values()) == {("refs", None, "coco:77")}


def test_crops_are_hashed_as_if_cut_out():
    cuts = (0.0, 0.05)
    image = photo(1, (400, 300))
    packed = cropped_hashes(image, 16, cuts)
    assert packed is not None
    found = np.frombuffer(packed, np.uint64).reshape(-1, 4)
    assert len(found) == 2 * 2**4
    place = 0
    for mirrored in (False, True):
        for top in cuts:
            for bottom in cuts:
                for left in cuts:
                    for right in cuts:
                        box = (400 * left, 300 * top, 400 - 400 * right, 300 - 300 * bottom)
                        crop = image.crop(tuple(map(round, box)))
                        hashed = perceptual_hash(ImageOps.mirror(crop) if mirrored else crop, 16)
                        assert distances(found[place : place + 1], hash_words([hashed], 16))[0] <= 6
                        place += 1
    assert cropped_hashes(Image.new("RGB", (90, 90), "white"), 16, cuts) is None
    assert cropped_hashes(photo(1, (3, 500)), 8, cuts, mirror=False) is not None  # narrower than a cut


def picture(row, image, url, source="web", **options):
    return record(
        source, row, encoded(image, **options), ["a caption"], url=url, width=image.width, height=image.height
    )


def big(seed):
    return photo(seed, (256, 192))


def corner(image, share):
    return image.crop((round(image.width * share), round(image.height * share), image.width, image.height))


def inputs(folder):
    records = [
        picture(0, big(0), "train2017/000000000077.jpg", "coco"),
        picture(1, big(0), "http://blog.test/pic.jpg", quality=50),  # the same picture from elsewhere
        picture(2, corner(ImageOps.mirror(big(0)), 0.05), "http://blog.test/cut.jpg"),
        picture(3, big(1), "VG_100K/2317.jpg", "visual_genome"),
        picture(4, big(2), "http://farm4.staticflickr.com/3153/55555_164f0c0b83_z.jpg", "sbu"),
        picture(5, corner(big(20), 0.05), "http://blog.test/task.jpg"),
        picture(6, big(3), "http://blog.test/fine.jpg"),
        picture(7, big(4), "http://blog.test/listed.jpg", quality=60),
        picture(8, big(5), "train2017/000000000078.jpg", "coco"),
        picture(9, Image.new("RGB", (96, 96), "white"), "val2017/000000000079.jpg", "coco"),
        {**picture(11, big(6), "http://cs.test/genome/5.jpg", "vg"), "coco_id": 88},  # as a source's list states it
        picture(10, Image.new("RGB", (96, 96), "white"), "http://blog.test/white.jpg"),
    ]
    record_folder(folder / "clean", records, kind="clean")
    test = [picture(0, big(20), "images/20.jpg", "retrieval"), picture(1, big(21), "55555_164f0c0b83.jpg", "retrieval")]
    record_folder(folder / "tasks" / "retrieval" / "test", test, kind="task")
    write(folder / "refs.json", {"val": [77], "testA": [{"image_id": 88}], "testB": [79], "train": [78]})
    write(folder / "genome.json", [{"image_id": 2317, "coco_id": 88, "flickr_id": None}])
    (folder / "images").mkdir()
    (folder / "images" / "four.jpg").write_bytes(encoded(big(4)))
    (folder / "images" / "broken.jpg").write_bytes(b"no picture")
    write(folder / "named.txt", "four.jpg\nbroken.jpg\nabsent.jpg\n")
    protected = {
        "refcoco_plus": ProtectedList(path=folder / "refs.json", splits=("val", "testA", "testB")),
        "named": ProtectedList(path=folder / "named.txt", images=folder / "images"),
    }
    return records, DeduplicateParams(protected=protected, synonyms=(folder / "genome.json",))


def run(folder, params, out="unique", **runtime):
    where = Runtime(work=folder / "work", **{"processes": 1, **runtime})
    deduplicate(params, clean=folder / "clean", tasks=folder / "tasks", unique=folder / out, runtime=where)
    kept = [row["url"] for batch in iter_batches(folder / out) for row in batch.to_pylist()]
    evidence = {row["id"]: row for row in pq.read_table(folder / out / "evidence.parquet").to_pylist()}
    return kept, evidence


def test_every_way_to_a_protected_picture(tmp_path):
    records, params = inputs(tmp_path)
    kept, evidence = run(tmp_path, params)
    check_conservation(tmp_path / "unique", [row for one in records for row in one["row_ids"]])
    assert kept == ["http://blog.test/fine.jpg", "train2017/000000000078.jpg"]

    def found(source, row):
        line = evidence[f"{source}/{row:09d}"]
        return tuple(
            line[key] for key in ("reason", "rule", "matched_task", "matched_split", "matched_id", "name", "via")
        )

    coco = ("refcoco_plus", "val", "coco:77", "coco:77")
    assert found("coco", 0) == ("leak_named", "coco", *coco, None)
    # pictures that are known by name stand in for those that are not here
    assert found("web", 1) == ("leak_near", "hash", *coco, "coco/000000000")
    assert found("web", 2) == ("leak_near", "cropped_hash", *coco, "coco/000000000")
    assert found("visual_genome", 3) == (
        *("leak_named", "visual_genome", "refcoco_plus", "testA", "coco:88", "visual_genome:2317", None),
    )
    assert found("sbu", 4) == (
        *("leak_named", "flickr", "retrieval", "test", "retrieval/000000001", "flickr:55555", None),
    )
    assert found("web", 5)[1:] == ("cropped_hash", "retrieval", "test", "retrieval/000000000", None, None)
    assert found("web", 7)[1:] == ("hash", "named", None, "four.jpg", None, None)
    assert found("coco", 9)[:3] == ("leak_named", "coco", "refcoco_plus")
    assert found("web", 10) == (  # without a hash, by bytes
        *("leak_exact", "sha256", "refcoco_plus", "testB", "coco:79", "coco:79", "coco/000000009"),
    )
    assert found("vg", 11) == ("leak_named", "coco", "refcoco_plus", "testA", "coco:88", "coco:88", None)
    assert count_reasons(tmp_path / "unique") == {
        **{("kept", "ok"): 2, ("rejected", "leak_named"): 5, ("rejected", "leak_exact"): 1},
        ("rejected", "leak_near"): 4,
    }
    names = pq.read_table(tmp_path / "unique" / "protected.parquet").to_pylist()
    assert {row["name"] for row in names if row["task"] == "refcoco_plus"} >= {"coco:77", "visual_genome:2317"}
    assert [row["name"] for row in names] == sorted(row["name"] for row in names)


def test_lists_need_no_task_and_rules_can_be_left_out(tmp_path):
    _, params = inputs(tmp_path)
    (tmp_path / "tasks").rename(tmp_path / "no")
    (tmp_path / "tasks").mkdir()
    kept, _ = run(tmp_path, params.model_copy(update={"near": False}), "bytes")
    assert "http://blog.test/pic.jpg" in kept
    assert "http://blog.test/white.jpg" not in kept
    kept, _ = run(tmp_path, params.model_copy(update={"leak_crop": 0.0}), "whole")
    assert "http://blog.test/cut.jpg" in kept
    kept, _ = run(tmp_path, params.model_copy(update={"mirror": False}), "unmirrored")
    assert "http://blog.test/cut.jpg" in kept
    kept, _ = run(tmp_path, params.model_copy(update={"synonyms": ()}), "alone")
    assert "VG_100K/2317.jpg" in kept
    with pytest.raises(UserError, match=r"protected\.gone\.path is .*, where no file is"):
        run(tmp_path, DeduplicateParams(protected={"gone": ProtectedList(path=tmp_path / "gone.json")}))


def test_same_bytes_on_one_process_and_two_and_after_a_second_pass(tmp_path):
    _, params = inputs(tmp_path)
    run(tmp_path, params, "one")
    run(tmp_path, params, "two", processes=2)
    assert folder_bytes(tmp_path / "one") == folder_bytes(tmp_path / "two")
    (tmp_path / "clean").rename(tmp_path / "before")
    (tmp_path / "one").rename(tmp_path / "clean")
    run(tmp_path, params, "again")
    assert set(read_outcomes(tmp_path / "again")["reason"].to_pylist()) == {"ok"}
