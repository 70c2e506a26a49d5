"""Stage `prepare_tasks` for questions, entailment, statements over two pictures, and expressions; real layouts too."""

import io
import json
import pickle
from pathlib import Path

import pytest
from PIL import Image

from components.data.corpus.params import WebParams
from components.data.prepare_tasks import PrepareTasksParams, TaskParams, prepare_tasks
from components.data.synthesize import SynthesizeParams, synthesize
from components.data.tasks.annotations import Annotations, read_answers
from components.data.tasks.items import load_plain_pickle
from components.io.errors import UserError
from components.io.outcomes import count_reasons, read_outcomes
from components.io.records import read_manifest
from components.io.runtime import Runtime
from components.io.shards import ShardReader, verify


def write_picture(path: Path, size: tuple[int, int] = (40, 30), shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 80, 120)).save(path)


def run(folder: Path, tmp_path: Path, kind: str, out: str = "tasks", **changes) -> Path:
    params = PrepareTasksParams(tasks={"demo": TaskParams(**{"path": folder, "kind": kind, **changes})})
    runtime = Runtime(work=tmp_path / "work", processes=1)
    prepare_tasks(params, task="demo", input=folder, tasks=tmp_path / out, runtime=runtime)
    return tmp_path / out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("synthesized")
    no_ills = WebParams(**dict.fromkeys(WebParams.model_fields, 0))
    params = SynthesizeParams(train=8, val=3, test=3, image_size=80, web=no_ills)
    synthesize(params, corpus=folder / "corpus", runtime=Runtime(work=folder / "work", processes=1))
    return folder / "corpus"


PICTURES = {"vqa": 1, "entailment": 1, "nlvr2": 2, "grounding": 1}


@pytest.mark.parametrize("kind", PICTURES)
def test_the_built_in_corpus(corpus: Path, tmp_path: Path, kind: str) -> None:
    tasks = run(corpus, tmp_path, kind, annotations=f"{kind}.json", images="images")
    content = json.loads((corpus / f"{kind}.json").read_text())
    for split in ("train", "val", "test"):
        items, reader = Annotations(tasks / split, kind), ShardReader(tasks / split)
        assert len(items) == len(content[split]) == read_manifest(tasks / split).extra["items"]
        for item, given in zip((items[index] for index in range(len(items))), content[split], strict=True):
            records = [reader[place] for place in item["pictures"]]
            names = given["images"] if kind == "nlvr2" else [given["image"]]
            assert [record["url"] for record in records] == names
            assert all(row in record["row_ids"] for row, record in zip(item["row_ids"], records, strict=True))
        assert verify(tasks / split) == []
    outcomes = read_outcomes(tasks)
    rows = PICTURES[kind] * sum(len(content[split]) for split in ("train", "val", "test"))
    assert len(set(outcomes["row_id"].to_pylist())) == outcomes.num_rows == rows
    first, given = Annotations(tasks / "test", kind)[0], content["test"][0]
    if kind == "vqa":
        assert first["answers"] == [given["answer"]]
        assert first["weights"] == [1.0]
        assert set(read_answers(tasks)) >= {"yes", "no", "1"}
    elif kind == "grounding":
        assert first["box"] == given["box"]
        assert first["candidates"] == given["candidates"]
    else:
        names = ["False", "True"] if kind == "nlvr2" else ["contradiction", "neutral", "entailment"]
        assert names[first["label"]] == given["label"]


def test_the_same_input_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    one, two = (
        run(corpus, tmp_path, "vqa", out=out, annotations="vqa.json", images="images", pictures_per_file=5)
        for out in ("one", "two")
    )
    files = [path.relative_to(one) for path in sorted(one.rglob("*")) if path.is_file()]
    assert any(path.name == "answers.json" for path in files)
    assert all((one / path).read_bytes() == (two / path).read_bytes() for path in files)


def test_vqa_v2_and_visual_genome(tmp_path: Path) -> None:
    folder = tmp_path / "vqa"
    write_picture(folder / "images/train2014/COCO_train2014_000000000009.jpg")
    write_picture(folder / "images/VG_100K_2/7.jpg")
    questions = [
        {"image_id": 9, "question_id": 90, "question": "What is on the bus?"},
        {"image_id": 9, "question_id": 91, "question": "Unanswered?"},
        {"image_id": 10, "question_id": 100, "question": "No picture?"},
        {"question": "no id"},
    ]
    people = ["two dogs", "Two dogs", "a cat", "2 dogs", "2 dogs", "2 dogs", "cat", "cats", "2 dogs", "2 dogs"]
    answers = [
        {
            "question_id": 90,
            "image_id": 9,
            "answer_type": "other",
            "answers": [{"answer": answer, "answer_id": index} for index, answer in enumerate(people)],
        },
        {"question_id": 100, "answers": [{"answer": "x"}]},
    ]
    (folder / "questions.json").write_text(json.dumps({"data_subtype": "train2014", "questions": questions}))
    (folder / "answers.json").write_text(json.dumps({"annotations": answers}))
    genome = [{"id": 7, "qas": [{"qa_id": 5, "question": "Where?", "answer": "On the left."}, 3]}, {"id": 8}]
    (folder / "qa.json").write_text(json.dumps(genome))
    tasks = run(
        folder,
        tmp_path,
        "vqa",
        annotations=["questions.json", "qa.json"],
        answers=["answers.json"],
        images="images",
        splits={"train": ["questions.json", "qa.json"]},
        answer_count=2,
    )
    items = Annotations(tasks / "train", "vqa")
    assert [item["question_id"] for item in (items[index] for index in range(3))] == ["90", "91", "5"]
    assert items[0]["answers"] == people
    assert items[0]["targets"] == ["2 dogs", "cat", "cats"]
    assert items[0]["weights"] == pytest.approx([0.7, 0.2, 0.1])
    assert items[0]["type"] == "other"
    assert items[1]["answers"] == []
    assert (items[2]["targets"], items[2]["weights"]) == (["on left"], [0.5])
    assert read_answers(tasks) == ["2 dogs", "cat"]
    assert {reason: count for (_, reason), count in count_reasons(tasks).items()} == {
        "ok": 3,
        "malformed_row": 3,
        "file_missing": 1,
    }
    (folder / "list.json").write_text(json.dumps(["Yes!", "no", "yes"]))
    listed = run(
        folder,
        tmp_path,
        "vqa",
        out="listed",
        annotations="qa.json",
        images="images",
        splits={"train": ["qa.json"]},
        answer_list="list.json",
    )
    assert read_answers(listed) == ["yes", "no"]


def test_snli_ve_in_its_own_layout(tmp_path: Path) -> None:
    folder = tmp_path / "ve"
    write_picture(folder / "images/12.jpg")
    lines = [
        {"Flickr30K_ID": "12", "gold_label": "neutral", "sentence1": "SECRET", "sentence2": "A man eats."},
        {"Flickr30K_ID": "12", "gold_label": "-", "sentence2": "Nobody agrees."},
        {"Flickr30K_ID": "12", "gold_label": "maybe", "sentence2": "Odd."},
        {"image": "../../secret.jpg", "label": "neutral", "sentence": "Outside."},
    ]
    (folder / "dev.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\nno json\n")
    tasks = run(folder, tmp_path, "entailment", annotations="dev.jsonl", images="images", splits={"val": ["dev.jsonl"]})
    items = Annotations(tasks / "val", "entailment")
    assert [(item["text"], item["label"]) for item in (items[index] for index in range(len(items)))] == [
        ("a man eats", 1)
    ]
    assert {reason: count for (_, reason), count in count_reasons(tasks).items()} == {
        "ok": 1,
        "unlabelled": 1,
        "malformed_row": 3,
    }
    assert all(b"SECRET" not in path.read_bytes() for path in tasks.rglob("*") if path.is_file())


def test_nlvr2_with_a_missing_picture(tmp_path: Path) -> None:
    folder = tmp_path / "nlvr2"
    write_picture(folder / "dev/dev-1-0-img0.png")
    write_picture(folder / "dev/dev-1-0-img1.png", shade=9)
    write_picture(folder / "dev/dev-2-0-img0.png", shade=99)
    lines = [
        {"identifier": "dev-1-0-0", "sentence": "Both are blue.", "label": "True"},
        {"identifier": "dev-1-0-1", "sentence": "One is red.", "label": False},
        {"identifier": "dev-2-0-0", "sentence": "One is lost.", "label": "False"},
        {"identifier": "dev-2-0-1", "sentence": "Unknown.", "label": "perhaps"},
    ]
    (folder / "dev.json").write_text("\n".join(json.dumps(line) for line in lines))
    tasks = run(folder, tmp_path, "nlvr2", annotations="dev.json", splits={"val": ["dev.json"]})
    items = Annotations(tasks / "val", "nlvr2")
    assert [(items[index]["label"], items[index]["pictures"]) for index in range(len(items))] == [
        (1, [0, 1]),
        (0, [0, 1]),
    ]
    assert read_manifest(tasks / "val").extra["items_without_picture_or_text"] == 1
    assert sum(count_reasons(tasks).values()) == 8
    assert count_reasons(tasks)["rejected", "file_missing"] == 1


REFS = [
    {
        "ref_id": 5,
        "ann_id": 50,
        "image_id": 1,
        "split": split,
        "category_id": 3,
        "sentences": [{"raw": "Red cup!", "sent": "red cup", "tokens": ["red", "cup"], "sent_id": 1}, {"sent": "cup"}],
    }
    for split in ("train", "testA", "testB")
]


def refcoco(tmp_path: Path) -> Path:
    folder = tmp_path / "refcoco"
    write_picture(folder / "images/train2014/COCO_train2014_000000000001.jpg")
    (folder / "refs(unc).p").write_bytes(pickle.dumps(REFS, protocol=0))
    instances = {
        "images": [{"id": 1, "file_name": "COCO_train2014_000000000001.jpg", "height": 30, "width": 40}],
        "annotations": [
            {"id": 50, "image_id": 1, "bbox": [1.0, 2.0, 10.0, 11.0]},
            {"id": 51, "image_id": 1, "bbox": [20.0, 2.0, 10.0, 11.0]},
        ],
    }
    (folder / "instances.json").write_text(json.dumps(instances))
    (folder / "dets.json").write_text(json.dumps({"1": [[0, 0, 5, 5, 0.9], [1, 2, 9, 9, 0.8]]}))
    return folder


GROUNDING = {
    "annotations": "refs(unc).p",
    "instances": "instances.json",
    "images": "images",
    "splits": {"train": ["train"], "test": ["testA", "testB"]},
}


def test_refcoco_from_its_pickle(tmp_path: Path) -> None:
    folder = refcoco(tmp_path)
    tasks = run(folder, tmp_path, "grounding", proposals="dets.json", **GROUNDING)
    items = Annotations(tasks / "test", "grounding")
    assert items.column("subset") == ["testA", "testA", "testB", "testB"]
    assert items[0] == {
        "pictures": [0],
        "row_ids": ["demo/000000002"],
        "text": "red cup",
        "ref_id": "5",
        "subset": "testA",
        "box": [1.0, 2.0, 10.0, 11.0],
        "candidates": [[0.0, 0.0, 5.0, 5.0], [1.0, 2.0, 9.0, 9.0]],
    }
    without = run(folder, tmp_path, "grounding", out="true", **GROUNDING)
    assert Annotations(without / "train", "grounding")[0]["candidates"] == [
        [1.0, 2.0, 10.0, 11.0],
        [20.0, 2.0, 10.0, 11.0],
    ]


class Harm:
    def __reduce__(self):
        return (Path.touch, (Path("harm"),))


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("a.p", pickle.dumps([Harm()])), ("b.p", b"cos\nsystem\n(S'touch harm'\ntR.")):
        Path(name).write_bytes(content)
        with pytest.raises(UserError, match="is not plain data and is not read"):
            load_plain_pickle(Path(name))
    Path("c.p").write_bytes(pickle.dumps(REFS)[:-20])
    with pytest.raises(UserError, match=r"damaged|not plain"):
        load_plain_pickle(Path("c.p"))
    assert not Path("harm").exists()
    sink = io.BytesIO()
    pickle.Pickler(sink, protocol=2).dump({"a": [1, 2.5, "ü", None, True, (1,)]})
    Path("d.p").write_bytes(sink.getvalue())
    assert load_plain_pickle(Path("d.p")) == {"a": [1, 2.5, "ü", None, True, (1,)]}


def test_what_is_said_of_wrong_parameters(tmp_path: Path) -> None:
    folder = refcoco(tmp_path)
    with pytest.raises(UserError, match=r"set the task's `instances`"):
        run(folder, tmp_path, "grounding", annotations="refs(unc).p", images="images")
    with pytest.raises(UserError, match=r"is of split 'testA', which prepare_tasks.tasks.demo.splits names nowhere"):
        run(folder, tmp_path, "grounding", **GROUNDING | {"splits": {"train": ["train"]}})
    with pytest.raises(UserError, match=r"set the task's `annotations`"):
        run(folder, tmp_path, "vqa")
    with pytest.raises(ValueError, match="proposals is a key of tasks of kind grounding"):
        TaskParams(path=folder, kind="vqa", proposals="dets.json")
    with pytest.raises(ValueError, match="max_side would scale pictures"):
        TaskParams(path=folder, kind="grounding", picture={"max_side": 100})


def test_the_real_entailment_pairs(shared: Path, tmp_path: Path) -> None:
    small = tmp_path / "snli"
    (small / "images").mkdir(parents=True)
    for split in ("dev", "test"):
        lines = (shared / "data/snli_ve" / f"{split}.jsonl").read_text().splitlines()
        (small / f"{split}.jsonl").write_text("\n".join(lines[:40]))
        for line in lines[:40]:
            name = json.loads(line)["image"]
            source = shared / "data/flickr8k/images" / name
            if source.is_file() and not (small / "images" / name).exists():  # some are not in Flickr8k
                (small / "images" / name).symlink_to(source)
    tasks = run(
        small,
        tmp_path,
        "entailment",
        annotations=["dev.jsonl", "test.jsonl"],
        images="images",
        splits={"val": ["dev.jsonl"], "test": ["test.jsonl"]},
    )
    items = Annotations(tasks / "val", "entailment")
    reasons = count_reasons(tasks)
    assert sum(reasons.values()) == 80
    assert reasons["kept", "ok"] + reasons["kept", "caption_truncated"] > 70
    assert len(items) > 30
    assert set(items.column("label")) == {0, 1, 2}
    premise = json.loads((small / "dev.jsonl").read_text().splitlines()[0])["premise"].lower().rstrip(" .")
    assert not any(premise in text for text in items.column("text"))


def test_the_real_nlvr2_sentences(shared: Path, tmp_path: Path) -> None:
    """All lines pass the reader; there are no pictures, which each row says."""
    tasks = run(shared / "data/nlvr2", tmp_path, "nlvr2", annotations="dev.json", splits={"val": ["dev.json"]})
    assert count_reasons(tasks) == {("rejected", "file_missing"): 2 * 6982}


def test_single_things_of_real_pictures(shared: Path, tmp_path: Path) -> None:
    tasks = run(
        shared / "data/coco_mini",
        tmp_path,
        "grounding",
        annotations=["annotations/instances_val2017.json"],
        images="val2017",
        splits={"val": ["annotations/instances_val2017.json"]},
    )
    items, reader = Annotations(tasks / "val", "grounding"), ShardReader(tasks / "val")
    assert len(items) > 50
    assert count_reasons(tasks).keys() == {("kept", "ok")}
    for index in range(len(items)):
        item = items[index]
        left, top, width, height = item["box"]
        record = reader[item["pictures"][0]]
        assert 0 <= left < left + width <= record["width"] + 1
        assert 0 <= top < top + height <= record["height"] + 1
        assert item["box"] in item["candidates"]
