"""The further tasks: each item's truth, worked out again from scenes.json."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from components.data.corpus.language import Words, pointing_words
from components.data.corpus.params import WebParams
from components.data.corpus.scenes import Scene
from components.data.corpus.tasks import TASKS, UNSEEN
from components.data.synthesize import SynthesizeParams, synthesize
from components.io.runtime import Runtime

NO_ILLS = WebParams(**dict.fromkeys(WebParams.model_fields, 0))
COUNTS = {"train": 30, "val": 8, "test": 2}
PARAMS = SynthesizeParams(**COUNTS, seed=5, web=NO_ILLS)
WORDS = {
    "size": ("large", "small"),
    "colour": ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow"),
    "material": ("rubber", "metal"),
    "shape": ("cube", "sphere", "cylinder"),
}
RELATIONS = r"(left of|right of|in front of|behind)"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    synthesize(PARAMS, corpus=folder / "corpus", runtime=Runtime(work=folder / "work", processes=1))
    return folder / "corpus"


@pytest.fixture(scope="module")
def scenes(corpus) -> dict[str, dict]:
    return {scene["file"]: scene for scene in json.loads((corpus / "scenes.json").read_text())}


def items(corpus: Path, task: str) -> list[dict]:
    content = json.loads((corpus / f"{task}.json").read_text())
    return [item for split in COUNTS for item in content[split]]


def parse(noun: str) -> dict[str, str]:
    """The attributes that an English noun phrase names."""
    found = {}
    for word in noun.split():
        word = word.removesuffix("s") if word != "things" else "thing"
        named = [attribute for attribute, values in WORDS.items() if word in values]
        assert word == "thing" or len(named) == 1, noun
        if named:
            found[named[0]] = word
    return found


def among(scene: dict, noun: str) -> list[dict]:
    said = parse(noun)
    return [item for item in scene["objects"] if all(item[name] == value for name, value in said.items())]


def lead(first: dict, relation: str, second: dict) -> float:
    (x1, y1), (x2, y2) = first["position"], second["position"]
    return {"left of": x2 - x1, "right of": x1 - x2, "in front of": y2 - y1, "behind": y1 - y2}[relation]


def holds(scene: dict, first: str, relation: str, second: str) -> bool:
    """Whether the relation is clear; fails when it is neither clearly so nor clearly not so."""
    one, other = among(scene, first), among(scene, second)
    assert len(one) == len(other) == 1
    margin = lead(one[0], relation, other[0])
    assert abs(margin) >= 0.7
    return margin > 0


def test_every_split_has_items_of_its_own_pictures(corpus, scenes):
    assert set(TASKS) == {"vqa", "nlvr2", "entailment", "grounding"}
    for task in TASKS:
        content = json.loads((corpus / f"{task}.json").read_text())
        assert set(content) == {"dataset", "train", "val", "test"}
        for split, count in COUNTS.items():
            pictures = {name for item in content[split] for name in item.get("images", [item.get("image")])}
            assert {scenes[name]["split"] for name in pictures} == {split}
            assert len(pictures) == count
            assert len({item["id"] for item in content[split]}) == len(content[split])


def test_answers(corpus, scenes):
    kinds: Counter[str] = Counter()
    answers: dict[str, set[str]] = {}
    for item in items(corpus, "vqa"):
        scene, question, answer = scenes[item["image"]], item["question"], item["answer"]
        if found := re.fullmatch(r"how many (.+) are there\?", question):
            expected = str(len(among(scene, found[1])))
        elif found := re.fullmatch(r"is there a (.+)\?", question):
            expected = "yes" if among(scene, found[1]) else "no"
        elif found := re.fullmatch(rf"is the (.+) {RELATIONS} the (.+)\?", question):
            expected = "yes" if holds(scene, *found.groups()) else "no"
        else:
            found = re.fullmatch(r"what (size|color|shape) is the (.+)\?", question)
            material = re.fullmatch(r"what is the (.+) made of\?", question)
            name, noun = ("material", material[1]) if material else (found[1].replace("color", "colour"), found[2])
            assert name not in parse(noun)
            (thing,) = among(scene, noun)
            expected = thing[name]
        assert answer == expected, (item, scene["objects"])
        kinds[item["type"]] += 1
        answers.setdefault(item["type"], set()).add(answer)
    assert set(kinds) == {"count", "exists", "size", "colour", "material", "shape", "relation"}
    assert answers["exists"] == answers["relation"] == {"yes", "no"}
    assert answers["colour"] == set(WORDS["colour"])
    assert len(answers["count"]) >= 4


def test_statements(corpus, scenes):
    forms: Counter[tuple[str, str]] = Counter()
    for item in items(corpus, "nlvr2"):
        left, right = (scenes[name] for name in item["images"])
        assert left is not right
        sentence, sides = item["sentence"], {"left": left, "right": right}
        if found := re.fullmatch(r"there (?:is|are) (\d+) (.+) in the two pictures together", sentence):
            truth = len(among(left, found[2])) + len(among(right, found[2])) == int(found[1])
        elif found := re.fullmatch(
            r"(neither picture|exactly one of the pictures|both pictures) shows? a (.+)", sentence
        ):
            having = sum(bool(among(scene, found[2])) for scene in (left, right))
            truth = having == ("neither picture", "exactly one of the pictures", "both pictures").index(found[1])
        elif found := re.fullmatch(r"the (\w+) picture shows more (.+) than the (\w+) picture", sentence):
            assert {found[1], found[3]} == {"left", "right"}
            truth = len(among(sides[found[1]], found[2])) > len(among(sides[found[3]], found[2]))
        else:
            found = re.fullmatch(rf"in the (\w+) picture a (.+) is {RELATIONS} a (.+)", sentence)
            truth = holds(sides[found[1]], *found.groups()[1:])
        assert item["label"] == str(truth), (item, left["objects"], right["objects"])
        forms[item["about"]["form"], item["label"]] += 1
    assert len(forms) == 8  # four forms, true and false
    labels = Counter(item["label"] for item in items(corpus, "nlvr2"))
    assert labels["True"] == labels["False"] == sum(COUNTS.values())


def test_hypotheses(corpus, scenes):
    of_unseen: Counter[str] = Counter()
    found_labels: Counter[str] = Counter()
    for item in items(corpus, "entailment"):
        scene, sentence = scenes[item["image"]], item["sentence"]
        unseen = next((words for words in UNSEEN if sentence.endswith(f" {words}")), None)
        if unseen is not None:
            there = len(among(scene, sentence.removeprefix("the ").removesuffix(f" {unseen}")))
            label = "neutral" if there == 1 else "contradiction"
            assert there <= 1
            of_unseen[label] += 1
        elif found := re.fullmatch(r"there is a (.+)", sentence):
            label = "entailment" if among(scene, found[1]) else "contradiction"
        else:
            found = re.fullmatch(rf"a (.+) is {RELATIONS} a (.+)", sentence)
            label = "entailment" if holds(scene, *found.groups()) else "contradiction"
        assert item["label"] == label, (item, scene["objects"])
        found_labels[label] += 1
    assert set(found_labels.values()) == {sum(COUNTS.values())}
    assert of_unseen["contradiction"] > 0  # the words alone do not give the label away


def test_expressions_point_at_one_box(corpus, scenes):
    by_place = 0
    for item in items(corpus, "grounding"):
        scene = scenes[item["image"]]
        assert item["candidates"] == [thing["box"] for thing in scene["objects"]]
        assert item["box"] == item["candidates"][item["target"]]
        target = scene["objects"][item["target"]]
        found = re.fullmatch(rf"the (.+) {RELATIONS} the (.+)", item["text"])
        if found is None:
            assert among(scene, item["text"].removeprefix("the ")) == [target]
            continue
        (anchor,) = among(scene, found[3])
        fitting = [thing for thing in among(scene, found[1]) if thing is not anchor]
        assert len(fitting) > 1  # it takes the relation to tell them apart
        assert [thing for thing in fitting if lead(thing, found[2], anchor) > 0] == [target]
        by_place += 1
    assert by_place > 20


def test_fewest_words_that_point(scenes):
    rng = np.random.default_rng(0)
    for content in scenes.values():
        scene = Scene.from_json(content)
        for thing in scene.things:
            words = pointing_words(rng, scene, thing)
            assert words.among(scene) == [thing]
            assert len(words.to_json()) == 1 or all(
                Words(**{name: getattr(thing.kind, name)}).count(scene) > 1 for name in WORDS
            )
            silent = pointing_words(rng, scene, thing, silent="colour")
            assert silent is None or silent.colour is None
