"""RefCOCOg's references and CLEVR's scenes as pairs: small lists in the layouts that are published."""

import json
import pickle
from collections import Counter

import pytest
from PIL import Image

from components.data.prepare_tasks import PrepareTasksParams, prepare_tasks
from components.data.sources.lists import read_source
from components.io.errors import UserError
from components.io.outcomes import Reason
from components.io.runtime import Runtime
from components.io.shards import ShardReader

CUBE = {"shape": "cube", "color": "blue", "material": "metal", "size": "large"}
SPHERE = {"shape": "sphere", "color": "blue", "material": "rubber", "size": "large"}
CYLINDER = {"shape": "cylinder", "color": "red", "material": "rubber", "size": "small"}
WHERE = {"rotation": 10.0, "3d_coords": [0.1, 0.2, 0.7], "pixel_coords": [200, 100, 9.5]}
OPPOSITE = {"left": "right", "behind": "front"}


def scene(number, kinds, left, behind, split="train"):
    """A scene as published; left[i] and behind[i] are the objects left of and behind object i."""
    relations = {"left": left, "behind": behind}
    for name, other in OPPOSITE.items():
        relations[other] = [[j for j, found in enumerate(relations[name]) if i in found] for i in range(len(kinds))]
    return {
        "image_index": number,
        "image_filename": f"CLEVR_{split}_{number:06d}.png",
        "split": split,
        "objects": [kind | WHERE for kind in kinds],
        "relationships": relations,
        "directions": {"left": [-0.6, -0.7, 0.0], "right": [0.6, 0.7, 0.0]},
    }


# the sphere is left of and behind the cube; the cylinder is left of both, and in front of both
THREE = ([CUBE, SPHERE, CYLINDER], [[1, 2], [2], []], [[1], [], [0, 1]])
TRUE = {
    "a large blue rubber sphere is left of a large blue metal cube",
    "a small red rubber cylinder is left of a large blue metal cube",
    "a small red rubber cylinder is left of a large blue rubber sphere",
    "a large blue metal cube is right of a large blue rubber sphere",
    "a large blue metal cube is right of a small red rubber cylinder",
    "a large blue rubber sphere is right of a small red rubber cylinder",
    "a large blue rubber sphere is behind a large blue metal cube",
    "a large blue metal cube is behind a small red rubber cylinder",
    "a large blue rubber sphere is behind a small red rubber cylinder",
    "a large blue metal cube is in front of a large blue rubber sphere",
    "a small red rubber cylinder is in front of a large blue metal cube",
    "a small red rubber cylinder is in front of a large blue rubber sphere",
}


def write_clevr(folder, scenes):
    folder.mkdir(parents=True, exist_ok=True)
    content = {"info": {"split": "train", "version": "1.0"}, "scenes": scenes}
    (folder / "scenes.json").write_text(json.dumps(content))
    for one in scenes:
        if isinstance(one, dict) and "split" in one:
            place = folder / "images" / one["split"] / one["image_filename"]
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (48, 32), (10 * one["image_index"] % 255, 90, 60)).save(place)
    return folder


def clevr(folder, **options):
    return list(read_source(folder, format="clevr", list="scenes.json", images="images", **options))


def test_three_captions_of_a_scene_say_what_is_true_of_it(tmp_path):
    rows = clevr(write_clevr(tmp_path / "clevr", [scene(number, *THREE) for number in range(40)]))
    assert [row.row for row in rows] == list(range(120))
    assert all(row.error is None and row.split == "train" for row in rows)
    captions = [row.caption for row in rows]
    assert set(captions) == TRUE, "each true relation, and no other, is said of one of forty scenes"
    of_scene = [captions[start : start + 3] for start in range(0, 120, 3)]
    for said in of_scene:
        assert len(set(said)) == 3
        assert {thing for caption in said for thing in ("cube", "sphere", "cylinder") if thing in caption} == {
            "cube",
            "sphere",
            "cylinder",
        }
    assert rows[0].name == "train/CLEVR_train_000000.png"
    assert rows[0].path.is_file()


def test_what_is_said_follows_from_the_picture_s_number_alone(tmp_path):
    first = clevr(write_clevr(tmp_path / "a", [scene(number, *THREE) for number in (5, 6)]))
    second = clevr(write_clevr(tmp_path / "b", [scene(6, *THREE)]))
    assert [row.caption for row in first[3:]] == [row.caption for row in second]


def test_things_of_one_kind_are_not_told_apart(tmp_path):
    twins = scene(0, [CUBE, CUBE, SPHERE], [[1], [], []], [[], [0, 2], [0]])
    rows = clevr(write_clevr(tmp_path / "clevr", [twins]))
    assert len(rows) == 3
    assert not any("metal cube is left of a large blue metal cube" in row.caption for row in rows)
    only = clevr(write_clevr(tmp_path / "only", [scene(0, [CUBE, CUBE], [[1], []], [[], [0]])]))
    assert [row.error for row in only] == [Reason.MISSING_CAPTION]


def test_a_scene_that_says_less_has_fewer_captions(tmp_path):
    rows = clevr(write_clevr(tmp_path / "clevr", [scene(3, [CUBE, SPHERE], [[1], []], [[], []])]))
    assert {row.caption for row in rows} == {
        "a large blue rubber sphere is left of a large blue metal cube",
        "a large blue metal cube is right of a large blue rubber sphere",
    }


def test_odd_scenes_of_val_are_the_test_split(tmp_path):
    scenes = [scene(number, *THREE, split="val") for number in range(4)]
    folder = write_clevr(tmp_path / "clevr", scenes)
    assert Counter(row.split for row in clevr(folder)) == {"val": 6, "test": 6}
    chosen = clevr(folder, splits=("test",))
    assert [row.row for row in chosen] == [3, 4, 5, 9, 10, 11]
    assert chosen[0].name == "val/CLEVR_val_000001.png"


BROKEN = scene(1, *THREE)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (7, "no scene of CLEVR"),
        ({}, "it lacks 'image_index'"),
        (BROKEN | {"image_index": "1"}, "image_index, split or image_filename is none"),
        (BROKEN | {"objects": [CUBE, SPHERE]}, "3 objects have the relation left, there are 2"),
        (BROKEN | {"objects": [CUBE | {"shape": "cone"}, SPHERE, CUBE]}, "no thing of CLEVR is 'cone'"),
        (BROKEN | {"objects": [CUBE | {"size": ["large"]}, SPHERE, CUBE]}, "no thing of CLEVR is"),
        (BROKEN | {"relationships": {"left": [[3], [], []]}}, "no object 3"),
        (BROKEN | {"relationships": {"left": [[-1], [], []]}}, "no object -1"),
        (BROKEN | {"relationships": {"left": [[], [], []]}}, "it lacks 'right'"),
        (BROKEN | {"relationships": {"left": [None, [], []]}}, "no scene of CLEVR"),
    ],
)
def test_a_scene_that_is_none_is_one_row_with_its_reason(wrong, said, tmp_path):
    folder = tmp_path / "clevr"
    folder.mkdir()
    (folder / "scenes.json").write_text(json.dumps({"scenes": [wrong, scene(2, *THREE)]}))
    rows = clevr(folder)
    assert len(rows) == 4
    assert rows[0].error is Reason.MALFORMED_ROW
    assert said in rows[0].note
    assert all(row.error is None for row in rows[1:])


def test_names_that_lead_out_of_the_images_folder_are_refused(tmp_path):
    folder = write_clevr(tmp_path / "clevr", [])
    (folder / "scenes.json").write_text(json.dumps({"scenes": [scene(1, *THREE) | {"split": "../.."}]}))
    assert {row.error for row in clevr(folder)} == {Reason.MALFORMED_ROW}
    (folder / "scenes.json").write_text(json.dumps({"questions": []}))
    with pytest.raises(UserError, match="holds no list under scenes"):
        clevr(folder)


# -- RefCOCOg

NAMES = {7: "COCO_train2014_000000000007.jpg", 9: "COCO_train2014_000000000009.jpg"}


def write_refcocog(folder, refs):
    (folder / "train2014").mkdir(parents=True)
    for number, name in NAMES.items():
        Image.new("RGB", (48, 32), (number * 20, 90, 60)).save(folder / "train2014" / name)
    instances = {
        "info": {},
        "images": [{"id": number, "file_name": name, "height": 32, "width": 48} for number, name in NAMES.items()],
        "annotations": [{"id": 50, "image_id": 7, "bbox": [1.0, 2.0, 10.0, 11.0]}],
    }
    (folder / "instances.json").write_text(json.dumps(instances))
    (folder / "refs(umd).p").write_bytes(pickle.dumps(refs, protocol=2))
    return folder


def ref(number, picture, split, *texts):
    sentences = [{"raw": text, "sent": text.lower(), "tokens": text.split(), "sent_id": 1} for text in texts]
    return {"ref_id": number, "ann_id": 50, "image_id": picture, "split": split, "sentences": sentences}


REFS = [
    ref(1, 7, "train", "A woman holding a frisbee.", "the woman with a frisbee"),
    ref(2, 9, "test", "A white car in front of a bus"),
    ref(3, 7, "train", "the man beside her"),
    ref(4, 9, "test", "The bus behind the car", "a bus"),
]


def refcocog(folder, **options):
    return list(read_source(folder, format="refcoco", list="refs(umd).p", images="train2014", **options))


def test_expressions_are_captions_of_their_whole_picture(tmp_path):
    rows = refcocog(write_refcocog(tmp_path / "refcocog", REFS))
    assert [(row.split, row.name, row.caption) for row in rows] == [
        ("train", NAMES[7], "A woman holding a frisbee."),
        ("train", NAMES[7], "the woman with a frisbee"),
        ("test", NAMES[9], "A white car in front of a bus"),
        ("train", NAMES[7], "the man beside her"),
        ("test", NAMES[9], "The bus behind the car"),
        ("test", NAMES[9], "a bus"),
    ]
    assert {row.coco_id for row in rows} == {7, 9}
    assert [row.row for row in refcocog(tmp_path / "refcocog", splits=("test",))] == [2, 4, 5]


def test_references_that_say_nothing_are_rows_with_reasons(tmp_path):
    odd = [{"split": "train"}, "x", ref(5, 8, "train", "a dog"), ref(6, [7], "train", "a cat")]
    odd += [ref(7, 7, "train") | {"sentences": [{"sent": "a hat"}, {"tokens": []}, 3]}]
    rows = refcocog(write_refcocog(tmp_path / "refcocog", odd))
    assert [row.error for row in rows] == [Reason.MALFORMED_ROW] * 4 + [None] + [Reason.MISSING_CAPTION] * 2
    assert rows[4].caption == "a hat"
    assert "not in instances.json" in rows[2].note


def test_files_that_cannot_be_references_are_said(tmp_path):
    folder = write_refcocog(tmp_path / "refcocog", {"a": 1})
    with pytest.raises(UserError, match="holds no list of references"):
        refcocog(folder)
    (folder / "refs(umd).p").write_bytes(b"cos\nsystem\n(S'touch harm'\ntR.")
    with pytest.raises(UserError, match="is not plain data and is not read"):
        refcocog(folder)
    (folder / "instances.json").unlink()
    (folder / "refs(umd).p").write_bytes(pickle.dumps(REFS))
    with pytest.raises(UserError, match=r"instances.json does not exist, which names the pictures of refs\(umd\).p"):
        refcocog(folder)


# -- as tasks


def prepare(tmp_path, name, folder, **options):
    params = PrepareTasksParams.model_validate_json(
        json.dumps({"tasks": {name: {"kind": "retrieval", "path": str(folder)} | options}})
    )
    prepare_tasks(params, task=name, input=folder, tasks=tmp_path / name, runtime=Runtime(work=tmp_path / "work"))
    return {split: ShardReader(tmp_path / name / split) for split in ("train", "val", "test")}


def test_refcocog_is_a_retrieval_task(tmp_path):
    folder = write_refcocog(tmp_path / "refcocog", REFS)
    splits = prepare(tmp_path, "refcocog", folder, annotations="refs(umd).p", images="train2014", format="refcoco")
    assert {name: len(split) for name, split in splits.items()} == {"train": 1, "val": 0, "test": 1}
    assert splits["test"].captions == [["a white car in front of a bus", "the bus behind the car", "a bus"]]


def test_clevr_is_a_retrieval_task(tmp_path):
    scenes = [scene(number, *THREE, split=split) for split in ("train", "val") for number in range(4)]
    folder = write_clevr(tmp_path / "clevr", scenes)
    splits = prepare(tmp_path, "clevr", folder, annotations="scenes.json", images="images", format="clevr")
    assert {name: len(split) for name, split in splits.items()} == {"train": 4, "val": 2, "test": 2}
    assert all(len(captions) == 3 and set(captions) <= TRUE for captions in splits["test"].captions)
