"""The built-in corpus: what its captions say is so, and its boxes are where the things are."""

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from components.data import synthesize as stage
from components.data.corpus.params import WebParams
from components.data.corpus.render import PALETTE, box_of, mask, trace
from components.data.corpus.scenes import CONVERSE, Fact, Kind, Scene, choose_facts, facts, say
from components.data.synthesize import SynthesizeParams, synthesize
from components.io.errors import UserError
from components.io.runtime import Runtime

NO_ILLS = WebParams(**dict.fromkeys(WebParams.model_fields, 0))
PARAMS = SynthesizeParams(train=24, val=16, test=16, seed=7, web=NO_ILLS)
CAPTION = re.compile(
    r"a (large|small) (\w+) (rubber|metal) (cube|sphere|cylinder) is (left of|right of|in front of|behind) "
    r"a (large|small) (\w+) (rubber|metal) (cube|sphere|cylinder)"
)


def build(folder: Path, params: SynthesizeParams = PARAMS, processes: int = 1) -> Path:
    synthesize(params, corpus=folder / "corpus", runtime=Runtime(work=folder / "work", processes=processes))
    return folder / "corpus"


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def scenes(corpus) -> list[dict]:
    return json.loads((corpus / "scenes.json").read_text())


def find(scene: dict, words: tuple[str, ...]) -> dict | None:
    """The thing that these four words name; read from scenes.json with none of the stage's own code."""
    named = [
        item
        for item in scene["objects"]
        if (item["size"], item["colour"], item["material"], item["shape"]) == tuple(words)
    ]
    assert len(named) <= 1
    return named[0] if named else None


def margin(scene: dict, caption: str) -> float | None:
    """By how much the caption holds on the ground (negative: it does not); None when a thing it names is not there."""
    words = CAPTION.fullmatch(caption)
    assert words is not None, caption
    first, relation, second = find(scene, words.groups()[:4]), words[5], find(scene, words.groups()[5:])
    if first is None or second is None:
        return None
    (x1, y1), (x2, y2) = first["position"], second["position"]
    return {"left of": x2 - x1, "right of": x1 - x2, "in front of": y2 - y1, "behind": y1 - y2}[relation]


def test_every_scene_has_three_different_true_captions(scenes):
    for scene in scenes:
        assert len(set(scene["captions"])) == 3
        for caption in scene["captions"]:
            assert margin(scene, caption) >= 0.7, (scene["name"], caption)


def test_left_and_right_hold_in_the_picture_too(scenes):
    seen = 0
    for scene, caption in [(one, caption) for one in scenes for caption in one["captions"]]:
        words = CAPTION.fullmatch(caption)
        if words[5] in ("left of", "right of"):
            first, second = find(scene, words.groups()[:4]), find(scene, words.groups()[5:])
            apart = (second["box"][0] + second["box"][2] / 2) - (first["box"][0] + first["box"][2] / 2)
            assert (apart > 0) == (words[5] == "left of"), (scene["name"], caption)
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluation_captions_are_true_of_no_other_scene_of_the_split(scenes, split):
    of_split = [scene for scene in scenes if scene["split"] == split]
    assert len(of_split) == 16
    for scene, other in itertools.permutations(of_split, 2):
        for caption in scene["captions"]:
            held = margin(other, caption)
            assert held is None or held <= 0, (scene["name"], caption, other["name"])


def test_a_split_whose_scenes_look_alike_is_drawn_again_until_its_captions_tell_them_apart(tmp_path, monkeypatch):
    drawn = []

    def same_scene_first(params, split, index, attempt=0, draw=stage.draw_scene):
        drawn.append((index, attempt))
        scene, picture = draw(params, split, 0 if attempt == 0 else index, attempt)
        return stage.replace(scene, name=f"{split}-{index:05d}"), picture

    monkeypatch.setattr(stage, "draw_scene", same_scene_first)
    images = tmp_path / "images"
    images.mkdir()
    scenes = [same_scene_first(PARAMS, "val", index)[0] for index in range(3)]
    told = stage.caption_split(PARAMS, scenes, images)
    assert any(attempt > 0 for _, attempt in drawn)
    for scene, other in itertools.permutations([scene.to_json() for scene in told], 2):
        assert all((margin(other, caption) or 0) <= 0 for caption in scene["captions"])


def test_captions_that_cannot_be_told_apart_are_one_clear_error(tmp_path, monkeypatch):
    draw = stage.draw_scene

    def always_the_same(params, split, index, attempt=0):
        scene, picture = draw(params, split, 0)
        return stage.replace(scene, name=f"{split}-{index:05d}"), picture

    monkeypatch.setattr(stage, "draw_scene", always_the_same)
    monkeypatch.setattr(stage, "REDRAWS", 3)
    scenes = [always_the_same(PARAMS, "val", index)[0] for index in range(2)]
    with pytest.raises(UserError, match=r"lower `synthesize\.val`"):
        stage.caption_split(PARAMS, scenes, tmp_path)


def test_boxes_hold_exactly_the_visible_pixels(scenes):
    for content in scenes[:20]:
        scene = Scene.from_json(content)
        hits, alone, _, _ = trace(scene, PARAMS.image_size)
        for number, thing in enumerate(scene.things):
            visible = mask(hits, number)
            left, top, width, height = thing.box
            inside = visible[top : top + height, left : left + width]
            assert inside.sum() == visible.sum() == thing.pixels > 0
            assert all(edge.any() for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))
            assert thing.pixels >= 0.5 * alone[number]


def test_box_of_a_mask():
    visible = np.zeros((10, 12), dtype=bool)
    visible[2, 3] = visible[7, 5] = True
    assert box_of(visible) == (3, 2, 3, 6)


def test_things_stand_where_a_pinhole_camera_sees_them(scenes):
    """Against the projection of the thing's middle, worked out from the camera's place alone."""
    for scene in scenes:
        view = scene["view"]
        for item in scene["objects"]:
            height = 0.88 if item["size"] == "large" else 0.5
            height *= {"sphere": 1.0, "cube": 0.73, "cylinder": 0.8}[item["shape"]]
            back, up = math.cos(view["elevation"]), math.sin(view["elevation"])
            x, y = item["position"][0] - view["target"][0], item["position"][1] - view["target"][1]
            depth = view["distance"] + back * y - up * height
            across = (0.5 + view["zoom"] * x / depth) * PARAMS.image_size
            down = (0.5 - view["zoom"] * (up * y + back * height) / depth) * PARAMS.image_size
            left, top, wide, high = item["box"]
            assert left - 0.3 * wide <= across <= left + 1.3 * wide
            assert top - 0.3 * high <= down <= top + 1.3 * high


def test_rubber_shows_its_colour(corpus, scenes):
    checked: Counter[str] = Counter()
    for content in scenes:
        scene = Scene.from_json(content)
        hits, *_ = trace(scene, PARAMS.image_size)
        pixels = np.asarray(Image.open(corpus / "images" / scene.file), dtype=np.float64)
        assert pixels.shape == (112, 112, 3)
        for number, thing in enumerate(scene.things):
            if thing.kind.material == "rubber":
                shown = pixels[mask(hits, number)].mean(axis=0)
                shares = {
                    colour: np.dot(shown, value) / np.linalg.norm(shown) / np.linalg.norm(value)
                    for colour, value in PALETTE.items()
                }
                assert max(shares, key=shares.__getitem__) == thing.kind.colour, (scene.name, str(thing.kind), shares)
                checked[thing.kind.colour] += 1
    assert set(checked) == set(PALETTE)


def test_objects_counts_and_kinds(scenes):
    assert {len(scene["objects"]) for scene in scenes} == {2, 3, 4, 5, 6}
    for scene in scenes:
        kinds = [(item["size"], item["colour"], item["material"], item["shape"]) for item in scene["objects"]]
        assert len(set(kinds)) == len(kinds)


def test_karpathy_layout(corpus, scenes):
    content = json.loads((corpus / "retrieval.json").read_text())
    assert [image["filename"] for image in content["images"]] == [scene["file"] for scene in scenes]
    assert Counter(image["split"] for image in content["images"]) == {"train": 24, "val": 16, "test": 16}
    sentences = [sentence for image in content["images"] for sentence in image["sentences"]]
    assert [sentence["sentid"] for sentence in sentences] == list(range(3 * 56))
    for image, scene in zip(content["images"], scenes, strict=True):
        assert (corpus / "images" / image["filename"]).is_file()
        assert [sentence["raw"] for sentence in image["sentences"]] == scene["captions"]
        assert image["sentids"] == [sentence["sentid"] for sentence in image["sentences"]]


def test_same_bytes_from_one_process_two_or_after_a_stop(corpus, tmp_path, monkeypatch):
    expected = digests(corpus)
    assert len(expected) > 56
    monkeypatch.setattr(stage, "SCENES_PER_PART", 10)
    assert digests(build(tmp_path / "two", processes=2)) == expected

    def stop(params, item, folder, run=stage.draw_part):
        if item[0] == "val" and item[1] > 0:
            raise KeyboardInterrupt
        return run(params, item, folder)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stage, "draw_part", stop)
        build(tmp_path / "stopped")
    finished = list((tmp_path / "stopped" / "work").rglob("part-*/done.json"))
    assert len(finished) == 4  # three of train, one of val
    assert digests(build(tmp_path / "stopped")) == expected
    assert not list((tmp_path / "stopped" / "work").rglob("*.jpg"))


def test_another_seed_draws_other_scenes(corpus, tmp_path):
    params = PARAMS.model_copy(update={"seed": 8, "train": 2, "val": 1, "test": 1})
    other = build(tmp_path, params)
    assert (other / "images" / "train-00000.jpg").read_bytes() != (corpus / "images" / "train-00000.jpg").read_bytes()


def test_disabled_costs_nothing(tmp_path):
    corpus = build(tmp_path, SynthesizeParams(enabled=False))
    assert [path.name for path in corpus.iterdir()] == ["ills.json"]
    assert json.loads((corpus / "ills.json").read_text()) == {"enabled": False}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"min_objects": 5, "max_objects": 4}, "min_objects"),
        ({"train": 10}, "train"),
        ({"val": 5, "test": 5}, "test"),
        ({"colour": 1}, "colour"),
        ({"web": {"dead_hosts": -1}}, "dead_hosts"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(settings, named):
    with pytest.raises(ValidationError, match=named):
        SynthesizeParams(**settings)


def test_choice_of_facts_names_as_many_things_as_it_can():
    a, b, c, d = (Kind("large", colour, "metal", "cube") for colour in ("red", "blue", "green", "gray"))
    said = [
        Fact(a, "left of", b),
        Fact(b, "right of", a),
        Fact(a, "behind", b),
        Fact(c, "behind", d),
        Fact(a, "behind", c),
    ]
    assert choose_facts(said, 2) == [said[0], said[3]]
    assert choose_facts(said, 3) == [said[0], said[3], said[4]]
    assert choose_facts(said, 4)[3] == said[2]  # the converse of the first comes last
    assert choose_facts(said, 9)[4] == said[1]


def test_a_scene_comes_back_from_its_json(scenes):
    for content in scenes:
        scene = Scene.from_json(content)
        assert json.loads(json.dumps(scene.to_json())) == content
        clear, possible = facts(scene, clear=True), facts(scene, clear=False)
        assert set(clear) <= set(possible)
        assert not any(Fact(fact.object, fact.relation, fact.subject) in possible for fact in clear)
        assert all(Fact(fact.object, CONVERSE[fact.relation], fact.subject) in clear for fact in clear)


def test_a_caption_may_state_two_relations_of_its_subject(tmp_path):
    corpus = build(tmp_path, PARAMS.model_copy(update={"relations": 2}))
    scenes = json.loads((corpus / "scenes.json").read_text())
    longer = 0
    for scene in scenes:
        assert len(set(scene["captions"])) == 3
        for caption in scene["captions"]:
            first, _, more = caption.partition(" and ")
            assert margin(scene, first) >= 0.7
            if more:
                longer += 1
                subject = first.partition(" is ")[0]
                assert margin(scene, f"{subject} is {more}") >= 0.7
                assert first.split()[-4:] != more.split()[-4:], "of two things"
            else:
                held = facts(Scene.from_json(scene), clear=True)
                assert len({fact.object for fact in held if f"a {fact.subject} is " in caption}) == 1
    assert longer > 60


def test_say():
    a, b, c = (Kind("small", colour, "metal", "cube") for colour in ("red", "blue", "green"))
    said = [Fact(a, "left of", b), Fact(a, "behind", b), Fact(b, "behind", c), Fact(a, "behind", c)]
    assert say(said[0], said, 1) == "a small red metal cube is left of a small blue metal cube"
    both = "a small red metal cube is left of a small blue metal cube and behind a small green metal cube"
    assert say(said[0], said, 2) == both
    assert say(said[2], said, 2) == str(said[2])
