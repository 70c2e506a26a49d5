"""Further tasks over the same scenes: questions, statements over two pictures, entailment, referring expressions.

Each item carries, beside its text, what the text says in terms of ``scenes.json``, so that its truth can be checked
without reading English. Relations are used only where they are clear (see `scenes.facts`), and denied only where
nobody would grant them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from components.data.corpus.language import ATTRIBUTES, Words, changed, pick, pointing_words, random_words
from components.data.corpus.scenes import CLEAR, CLEAR_VIEW, CONVERSE, RELATIONS, Fact, Kind, Scene, Thing, facts, lead

Item = dict[str, Any]
TASKS = ("vqa", "nlvr2", "entailment", "grounding")
UNSEEN = (  # what no picture shows
    "is hollow",
    "is heavier than it looks",
    "is warm to the touch",
    "belongs to a child",
    "was bought yesterday",
    "will be moved tomorrow",
    "is brand new",
    "smells of paint",
)
TRIES = 40


def write_tasks(scenes: Sequence[Scene], seed: int) -> dict[str, dict[str, Any]]:
    """The content of each task's file: ``{"dataset": "corpus", "train": [...], "val": [...], "test": [...]}``.

    An item's random numbers depend on `seed`, its split and its scene's place in the split alone.
    """
    content: dict[str, dict[str, Any]] = {task: {"dataset": "corpus"} for task in TASKS}
    for number, split in enumerate(("train", "val", "test")):
        of_split = [scene for scene in scenes if scene.split == split]
        partners = np.random.default_rng([seed, 5, number]).permutation(len(of_split))
        items: dict[str, list[Item]] = {task: [] for task in TASKS}
        for index, scene in enumerate(of_split):
            rng = np.random.default_rng([seed, 4, number, index])
            items["vqa"] += questions(rng, scene)
            if len(of_split) > 1:
                partner = partners[index] if partners[index] != index else (index + 1) % len(of_split)
                items["nlvr2"] += statements(rng, scene, of_split[partner])
            items["entailment"] += hypotheses(rng, scene)
            items["grounding"] += expressions(rng, scene)
        for task in TASKS:
            content[task][split] = [{"id": f"{split}-{place:06d}", **item} for place, item in enumerate(items[task])]
    return content


# -- questions


def questions(rng: np.random.Generator, scene: Scene) -> list[Item]:
    """Up to eight questions about a scene, each with its one answer."""
    items = [_count_question(rng, scene)]
    items += [_exists_question(rng, scene, wanted) for wanted in (True, False)]
    things = [scene.things[place] for place in rng.permutation(len(scene.things))]
    for number, name in enumerate(ATTRIBUTES):
        for thing in things[number % len(things) :] + things[: number % len(things)]:
            words = pointing_words(rng, scene, thing, silent=name)
            if words is not None:
                items.append(_attribute_question(scene, thing, name, words))
                break
    relation = _relation_question(rng, scene)
    return items if relation is None else [*items, relation]


def _question(scene: Scene, kind: str, text: str, answer: str, **about: Any) -> Item:
    return {"image": scene.file, "type": kind, "question": text, "answer": answer, "about": about}


def _count_question(rng: np.random.Generator, scene: Scene) -> Item:
    words = _words_about(rng, scene, int(rng.integers(1, 3)))
    text = f"how many {words.many} are there?"
    return _question(scene, "count", text, str(words.count(scene)), words=words.to_json())


def _exists_question(rng: np.random.Generator, scene: Scene, wanted: bool) -> Item:
    kind = _any_thing(rng, scene).kind
    words = random_words(rng, int(rng.integers(2, 5)), kind)
    if not wanted:
        words = _absent(rng, scene, words, kind)
    text = f"is there a {words.one}?"
    return _question(scene, "exists", text, "yes" if wanted else "no", words=words.to_json())


def _attribute_question(scene: Scene, thing: Thing, name: str, words: Words) -> Item:
    texts = {
        "size": f"what size is the {words.one}?",
        "colour": f"what color is the {words.one}?",
        "material": f"what is the {words.one} made of?",
        "shape": f"what shape is the {words.one}?",
    }
    answer = getattr(thing.kind, name)
    return _question(scene, name, texts[name], answer, words=words.to_json(), attribute=name)


def _relation_question(rng: np.random.Generator, scene: Scene) -> Item | None:
    fact = _any_fact(rng, scene)
    if fact is None:
        return None
    subject, object_ = (_pointing(rng, scene, kind) for kind in (fact.subject, fact.object))
    true = bool(rng.integers(2))
    relation = fact.relation if true else CONVERSE[fact.relation]
    text = f"is the {subject.one} {relation} the {object_.one}?"
    about = {"subject": subject.to_json(), "relation": relation, "object": object_.to_json()}
    return _question(scene, "relation", text, "yes" if true else "no", **about)


# -- statements over two pictures


def statements(rng: np.random.Generator, left: Scene, right: Scene) -> list[Item]:
    """A true and a false statement over two pictures, of different forms."""
    forms = [_FORMS[place] for place in rng.permutation(len(_FORMS))]
    items: list[Item] = []
    for wanted in (True, False):
        for form in forms:
            found = next((item for item in (form(rng, left, right) for _ in range(TRIES)) if item[1] is wanted), None)
            if found is not None:
                forms.remove(form)
                sentence, label, about = found
                images = [left.file, right.file]
                items.append({"images": images, "sentence": sentence, "label": str(label), "about": about})
                break
    return items


Statement = tuple[str, bool, dict[str, Any]]


def _total(rng: np.random.Generator, left: Scene, right: Scene) -> Statement:
    words = _words_about(rng, left if rng.integers(2) else right, int(rng.integers(1, 3)))
    truth = words.count(left) + words.count(right)
    number = max(0, truth + int(rng.integers(-1, 2)))
    noun = words.one if number == 1 else words.many
    text = f"there {'is' if number == 1 else 'are'} {number} {noun} in the two pictures together"
    return text, number == truth, {"form": "total", "words": words.to_json(), "number": number}


def _pictures(rng: np.random.Generator, left: Scene, right: Scene) -> Statement:
    words = _words_about(rng, left if rng.integers(2) else right, int(rng.integers(1, 4)))
    having = (words.count(left) > 0) + (words.count(right) > 0)
    number = int(rng.integers(3))
    subject = ("neither picture shows", "exactly one of the pictures shows", "both pictures show")[number]
    return (
        f"{subject} a {words.one}",
        having == number,
        {"form": "pictures", "words": words.to_json(), "number": number},
    )


def _more(rng: np.random.Generator, left: Scene, right: Scene) -> Statement:
    words = Words() if rng.integers(4) == 0 else _words_about(rng, left if rng.integers(2) else right, 1)
    sides = ("left", "right") if rng.integers(2) else ("right", "left")
    counts = {"left": words.count(left), "right": words.count(right)}
    text = f"the {sides[0]} picture shows more {words.many} than the {sides[1]} picture"
    about = {"form": "more", "words": words.to_json(), "more": sides[0]}
    return text, counts[sides[0]] > counts[sides[1]], about


def _one_fact(rng: np.random.Generator, left: Scene, right: Scene) -> Statement:
    side, scene = ("left", left) if rng.integers(2) else ("right", right)
    fact = _any_fact(rng, scene)
    assert fact is not None  # scenes are drawn with some
    true = bool(rng.integers(2))
    if not true:
        fact = Fact(fact.subject, CONVERSE[fact.relation], fact.object)
    about = {"form": "fact", "side": side, "fact": _fact_json(fact)}
    return f"in the {side} picture {fact}", true, about


_FORMS: tuple[Callable[[np.random.Generator, Scene, Scene], Statement], ...] = (_total, _pictures, _more, _one_fact)


# -- entailment


def hypotheses(rng: np.random.Generator, scene: Scene) -> list[Item]:
    """One hypothesis for each label. Words about unseen properties are in neutral and contradicting ones alike.

    From one word to four say what there is or is not; both say as much, so that the form gives nothing away.
    """
    fact = _any_fact(rng, scene)
    thing = _any_thing(rng, scene)
    absent = _absent(rng, scene, random_words(rng, int(rng.integers(1, 5)), thing.kind), thing.kind)
    there = Words.of(_any_thing(rng, scene).kind, tuple(absent.to_json()))
    true: list[tuple[str, Item]] = [(f"there is a {there.one}", {"words": there.to_json()})]
    false = [
        (f"there is a {absent.one}", {"words": absent.to_json()}),
        (f"the {absent.one} {pick(rng, UNSEEN)}", {"words": absent.to_json()}),
    ]
    if fact is not None:
        denied = Fact(fact.subject, CONVERSE[fact.relation], fact.object)
        true.append((str(fact), {"fact": _fact_json(fact)}))
        false.append((str(denied), {"fact": _fact_json(denied)}))
    seen = _pointing(rng, scene, thing.kind) if rng.integers(2) else Words.of(thing.kind)
    unseen = pick(rng, UNSEEN)
    neutral = [(f"the {seen.one} {unseen}", {"words": seen.to_json(), "unseen": unseen})]
    return [
        {"image": scene.file, "sentence": text, "label": label, "about": about}
        for label, choices in (("entailment", true), ("neutral", neutral), ("contradiction", false))
        for text, about in [choices[int(rng.integers(len(choices)))]]
    ]


# -- referring expressions


def expressions(rng: np.random.Generator, scene: Scene) -> list[Item]:
    """Up to two expressions that each point at one thing: by what it is, and by where it is.

    `box` and `candidates` (all things of the scene; `target` is the place among them) are left, top, width, height in
    pixels, of what is visible.
    """
    boxes = [list(thing.box) for thing in scene.things]
    found: list[tuple[str, Thing, dict[str, Any]]] = []
    thing = _any_thing(rng, scene)
    words = _pointing(rng, scene, thing.kind)
    found.append((f"the {words.one}", thing, {"words": words.to_json()}))
    by_place = _by_place(rng, scene)
    if by_place is not None:
        found.append(by_place)
    return [
        {
            "image": scene.file,
            "text": text,
            "box": list(target.box),
            "target": scene.things.index(target),
            "candidates": boxes,
            "about": about,
        }
        for text, target, about in found
    ]


def _by_place(rng: np.random.Generator, scene: Scene) -> tuple[str, Thing, dict[str, Any]] | None:
    """An expression that needs its relation: the words about the target fit other things too."""
    for _ in range(TRIES if len(scene.things) > 2 else 0):
        target, anchor = _two_things(rng, scene)
        relation = pick(rng, RELATIONS)
        if not _clear(scene, target, relation, anchor):
            continue
        words = random_words(rng, int(rng.integers(0, 3)), target.kind)
        others = [thing for thing in words.among(scene) if thing not in (target, anchor)]
        if others and all(max(lead(scene.view, other, relation, anchor)) <= 0 for other in others):
            where = _pointing(rng, scene, anchor.kind)
            about = {"words": words.to_json(), "relation": relation, "object": where.to_json()}
            return f"the {words.one} {relation} the {where.one}", target, about
    return None


# -- common


def _clear(scene: Scene, subject: Thing, relation: str, object_: Thing) -> bool:
    ground, seen = lead(scene.view, subject, relation, object_)
    return ground >= CLEAR and seen >= CLEAR_VIEW


def _any_thing(rng: np.random.Generator, scene: Scene) -> Thing:
    return scene.things[int(rng.integers(len(scene.things)))]


def _absent(rng: np.random.Generator, scene: Scene, words: Words, kind: Kind) -> Words:
    """Words like these that fit nothing in the scene; all about a thing like `kind` where few words fit everywhere."""
    for _ in range(TRIES):
        words = changed(rng, words)
        if not words.count(scene):
            return words
    words = Words.of(kind)
    while words.count(scene):  # there are many more kinds than things in a scene
        words = changed(rng, words)
    return words


def _any_fact(rng: np.random.Generator, scene: Scene) -> Fact | None:
    for _ in range(TRIES):
        subject, object_ = _two_things(rng, scene)
        relation = pick(rng, RELATIONS)
        if _clear(scene, subject, relation, object_):
            return Fact(subject.kind, relation, object_.kind)
    clear = facts(scene, clear=True)
    return clear[int(rng.integers(len(clear)))] if clear else None


def _two_things(rng: np.random.Generator, scene: Scene) -> tuple[Thing, Thing]:
    first, second = int(rng.integers(len(scene.things))), int(rng.integers(len(scene.things) - 1))
    return scene.things[first], scene.things[second + (second >= first)]


def _fact_json(fact: Fact) -> Item:
    subject, object_ = Words.of(fact.subject).to_json(), Words.of(fact.object).to_json()
    return {"subject": subject, "relation": fact.relation, "object": object_}


def _words_about(rng: np.random.Generator, scene: Scene, said: int) -> Words:
    """Words that mostly fit something of the scene."""
    return random_words(rng, said, _any_thing(rng, scene).kind if rng.random() < 0.75 else None)


def _pointing(rng: np.random.Generator, scene: Scene, kind: Kind) -> Words:
    """The fewest words for the thing of this kind; all things of a scene differ, so there are some."""
    thing = next(thing for thing in scene.things if thing.kind == kind)
    words = pointing_words(rng, scene, thing)
    assert words is not None
    return words
