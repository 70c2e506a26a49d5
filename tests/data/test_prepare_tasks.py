"""Stage `prepare_tasks`: records by split, every row accounted for, no evaluation picture lost in silence."""

import hashlib
import io
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from pydantic import ValidationError

from components.data.prepare_tasks import PrepareTasksParams, TaskParams, prepare_tasks
from components.io.errors import UserError
from components.io.outcomes import check_conservation, read_outcomes
from components.io.records import read_manifest
from components.io.runtime import Runtime
from components.io.shards import ShardReader, verify


def picture(shade: int, size: tuple[int, int] = (40, 30), kind: str = "JPEG") -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", size, (shade, 80, 120)).save(sink, kind)
    return sink.getvalue()


def image(name: str, split: str, captions: list) -> dict:
    return {"filename": name, "split": split, "sentences": [{"raw": caption} for caption in captions]}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Seven pictures; rows 0-1, 2-3 train; 4-5, 6, 7 test (one file missing, one no picture); 8-10 val."""
    folder = tmp_path / "corpus"
    (folder / "images").mkdir(parents=True)
    for index, kind in enumerate(("JPEG", "JPEG", "PNG", "JPEG")):
        (folder / "images" / f"{index}.jpg").write_bytes(picture(index * 20, kind=kind))
    (folder / "images" / "page.jpg").write_bytes(b"<html>")
    (folder / "images" / "cut.jpg").write_bytes(picture(9, (200, 200))[:-60])
    images = [
        image("0.jpg", "train", ["A Dog.", "Two dogs!"]),
        image("1.jpg", "restval", ["A cat", "..."]),
        image("2.jpg", "test", ["A red cube", "a cube"]),
        image("absent.jpg", "test", ["lost"]),
        image("page.jpg", "test", ["a page"]),
        image("3.jpg", "val", ["a tree", None]),
        image("cut.jpg", "val", ["half a picture"]),
    ]
    (folder / "retrieval.json").write_text(json.dumps({"images": images, "dataset": "demo"}))
    return folder


def run(folder: Path, tmp_path: Path, *, processes: int = 1, out: str = "tasks", **changes) -> Path:
    task = TaskParams(**{"path": folder, "annotations": "retrieval.json", "images": "images", **changes})
    prepare_tasks(
        PrepareTasksParams(tasks={"demo": task}),
        task="demo",
        input=folder,
        tasks=tmp_path / out,
        runtime=Runtime(work=tmp_path / "work", processes=processes),
    )
    return tmp_path / out


def test_records_by_split(corpus: Path, tmp_path: Path) -> None:
    tasks = run(corpus, tmp_path)
    train, val, test = (ShardReader(tasks / split) for split in ("train", "val", "test"))
    assert [train[index]["id"] for index in range(len(train))] == ["demo/000000000", "demo/000000002"]
    assert train.captions == [["a dog", "two dogs"], ["a cat"]]
    assert val.captions == [["a tree"]]
    assert len(test) == 1
    record = test[0]
    original = (corpus / "images" / "2.jpg").read_bytes()
    assert record["sha256"] == hashlib.sha256(original).hexdigest()
    assert record["image"] != original, "a PNG is encoded anew"
    assert (record["width"], record["height"], record["url"], record["source"]) == (40, 30, "2.jpg", "demo")
    assert record["row_ids"] == ["demo/000000004", "demo/000000005"]
    assert all(verify(tasks / split) == [] for split in ("train", "val", "test"))


def test_every_row_has_one_outcome_with_its_split(corpus: Path, tmp_path: Path) -> None:
    tasks = run(corpus, tmp_path)
    check_conservation(tasks, [f"demo/{row:09d}" for row in range(11)])
    rejected = {
        row["row_id"][-2:]: (row["split"], row["reason"])
        for row in read_outcomes(tasks).to_pylist()
        if row["status"] == "rejected"
    }
    assert rejected == {
        "03": ("train", "caption_empty"),
        "06": ("test", "file_missing"),
        "07": ("test", "undecodable"),
        "09": ("val", "missing_caption"),
        "10": ("val", "truncated_image"),
    }


def test_small_and_narrow_evaluation_pictures_stay(corpus: Path, tmp_path: Path) -> None:
    (corpus / "images" / "2.jpg").write_bytes(picture(5, (3, 90)))
    assert len(ShardReader(run(corpus, tmp_path) / "test")) == 1
    assert len(ShardReader(run(corpus, tmp_path, picture={"max_side": 32}) / "test")) == 1


def test_same_bytes_again_and_with_more_processes(corpus: Path, tmp_path: Path) -> None:
    def content(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    one = content(run(corpus, tmp_path, out="one", pictures_per_file=1))
    assert content(run(corpus, tmp_path, out="two", pictures_per_file=1, processes=2)) == one
    assert "train/records-00001.arrow" in one


def test_several_annotation_files_by_name(corpus: Path, tmp_path: Path) -> None:
    """ALBEF's layout names no split: each file is one. Row numbers run on through the files."""
    for split, names in (("train", ["0.jpg", "1.jpg"]), ("test", ["2.jpg"])):
        entries = [{"image": name, "caption": ["one", "two"]} for name in names]
        (corpus / f"{split}.json").write_text(json.dumps(entries))
    splits = {"train": ["train.json"], "test": ["test.json"]}
    tasks = run(corpus, tmp_path, annotations=["train.json", "test.json"], splits=splits)
    assert ShardReader(tasks / "test")[0]["row_ids"] == ["demo/000000004", "demo/000000005"]
    assert read_manifest(tasks / "val").rows == 0
    check_conservation(tasks, [f"demo/{row:09d}" for row in range(6)])


def test_urls_are_rejected_rows_not_lost_ones(corpus: Path, tmp_path: Path) -> None:
    (corpus / "list.json").write_text(json.dumps([{"image": "http://x.test/a.jpg", "caption": "far"}]))
    tasks = run(corpus, tmp_path, annotations="list.json", splits={"test": ["list.json"]})
    (row,) = read_outcomes(tasks).to_pylist()
    assert (row["reason"], row["split"]) == ("not_fetched", "test")


def test_split_without_a_place_is_an_error_and_can_be_ignored(corpus: Path, tmp_path: Path) -> None:
    splits = {"train": ["train"], "val": ["val"], "test": ["test"]}
    with pytest.raises(
        UserError, match=r"images\[1\].* is of split 'restval', which prepare_tasks\.tasks\.demo\.splits"
    ):
        run(corpus, tmp_path, splits=splits)
    tasks = run(corpus, tmp_path, splits=splits, ignore_splits=["restval"])
    check_conservation(tasks, [f"demo/{row:09d}" for row in range(11) if row not in (2, 3)])


def test_errors_name_the_setting(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no task 'other'.*\(none\)"):
        prepare_tasks(PrepareTasksParams(), task="other", input=corpus, tasks=tmp_path / "tasks")
    with pytest.raises(UserError, match=r"absent does not exist: set prepare_tasks\.tasks\.demo\.path"):
        run(tmp_path / "absent", tmp_path)
    (corpus / "retrieval.json").write_text('{"images": []}')
    with pytest.raises(UserError, match="hold no row"):
        run(corpus, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"splits": {"train": ["a"], "test": ["a"]}},
        {"ignore_splits": ["val"]},
        {"splits": {"dev": ["val"]}},
        {"kind": "captioning"},
        {"pictures_per_file": 0},
    ],
)
def test_bad_settings_are_refused(changes: dict) -> None:
    with pytest.raises(ValidationError):
        TaskParams(path=Path("x"), **changes)


def test_task_names_are_folders() -> None:
    with pytest.raises(ValidationError, match="letters, digits"):
        PrepareTasksParams(tasks={"../up": TaskParams(path=Path("x"))})


def test_work_is_cleared_away(corpus: Path, tmp_path: Path) -> None:
    tasks = run(corpus, tmp_path)
    assert not list((tmp_path / "work").rglob("*.arrow"))
    shutil.rmtree(tasks)
    assert len(ShardReader(run(corpus, tmp_path) / "train")) == 2


def test_reference_free_flickr8k_subset(shared: Path, tmp_path: Path) -> None:
    """Real annotations: the first pictures of each official split."""
    source = shared / "data" / "flickr8k"
    images = json.loads((source / "dataset_flickr8k.json").read_text())["images"]
    chosen = [next(image for image in images if image["split"] == split) for split in ("train", "val", "test")]
    folder = tmp_path / "flickr8k"
    (folder / "images").mkdir(parents=True)
    for entry in chosen:
        shutil.copy(source / "images" / entry["filename"], folder / "images")
    (folder / "retrieval.json").write_text(json.dumps({"images": chosen, "dataset": "flickr8k"}))
    tasks = run(folder, tmp_path)
    for split in ("train", "val", "test"):
        reader = ShardReader(tasks / split)
        assert [len(captions) for captions in reader.captions] == [5]
