"""Scenes: a few things on a ground plane, seen from one side, and what is true of them.

Ground coordinates are the viewer's: x to the right, y away from the viewer, z up; the plane is z = 0. So "left of" and
"behind" are comparisons of x and of y.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

SIZES = ("large", "small")
COLOURS = ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow")
MATERIALS = ("rubber", "metal")
SHAPES = ("cube", "sphere", "cylinder")
RELATIONS = ("left of", "right of", "in front of", "behind")
CONVERSE = {"left of": "right of", "right of": "left of", "in front of": "behind", "behind": "in front of"}

RADIUS = {"large": 0.88, "small": 0.5}  # of the circle on the ground that a thing may take up; ground units
FIELD = (2.35, 2.2)  # greatest |x| and |y| of a thing's middle
GAP = 0.22  # least distance between two such circles
CLEAR = 0.75  # least difference along the ground for a relation that a caption may state
CLEAR_VIEW = 0.05  # and across the picture, as a part of its width, for left and right
LAYOUT_TRIES = 40


@dataclass(frozen=True)
class Kind:
    """What a thing is, as a caption names it."""

    size: str
    colour: str
    material: str
    shape: str

    def __str__(self) -> str:
        return f"{self.size} {self.colour} {self.material} {self.shape}"


@dataclass(frozen=True)
class Thing:
    """One thing of a scene. `box` and `pixels` are those of its visible part, known once the scene is drawn."""

    kind: Kind
    x: float  # ground units, of its middle
    y: float
    angle: float  # radians about the vertical
    box: tuple[int, int, int, int] = (0, 0, 0, 0)  # left, top, width, height; pixels
    pixels: int = 0

    @property
    def radius(self) -> float:
        """Of the circle that it may take up on the ground; the half height is as much, or less."""
        return RADIUS[self.kind.size]


@dataclass(frozen=True)
class View:
    """Where the scene is seen from and how it is lit. The camera looks at a point near the middle of the ground."""

    distance: float  # of the camera from the point that it looks at; ground units
    elevation: float  # radians above the ground
    target: tuple[float, float]  # the point, on the ground
    zoom: float  # focal length over picture width
    light_azimuth: float  # radians; 0 is from the viewer, positive from the right
    light_elevation: float
    ground: tuple[float, float, float]  # linear red, green, blue of the plane
    pool: tuple[float, float]  # where on the ground the light is brightest
    spread: float  # of that pool; ground units

    @property
    def camera(self) -> tuple[float, float, float]:
        """The camera's place."""
        back, up = math.cos(self.elevation) * self.distance, math.sin(self.elevation) * self.distance
        return self.target[0], self.target[1] - back, up

    def across(self, x: float, y: float) -> float:
        """How far right in the picture a point of the ground lies; 0 is the left edge, 1 the right one."""
        depth = math.cos(self.elevation) * (y - self.target[1]) + self.distance
        return 0.5 + self.zoom * (x - self.target[0]) / depth


@dataclass(frozen=True)
class Fact:
    """A relation between two kinds of thing: what one caption says."""

    subject: Kind
    relation: str
    object: Kind

    def __str__(self) -> str:
        return f"a {self.subject} is {self.relation} a {self.object}"


@dataclass(frozen=True)
class Scene:
    """Things, all of different kinds, and the view of them."""

    name: str
    split: str
    things: tuple[Thing, ...]
    view: View
    captions: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The picture's file name."""
        return f"{self.name}.jpg"

    def to_json(self) -> dict[str, Any]:
        """Plain values, as in ``scenes.json``."""
        things = [
            {**asdict(thing.kind), "position": [thing.x, thing.y], "angle": thing.angle, "box": list(thing.box)}
            | {"pixels": thing.pixels}
            for thing in self.things
        ]
        return {
            "name": self.name,
            "split": self.split,
            "file": self.file,
            "objects": things,
            "view": asdict(self.view),
            "captions": list(self.captions),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """The scene that `to_json` wrote."""
        things = tuple(
            Thing(
                Kind(item["size"], item["colour"], item["material"], item["shape"]),
                x=item["position"][0],
                y=item["position"][1],
                angle=item["angle"],
                box=tuple(item["box"]),
                pixels=item["pixels"],
            )
            for item in content["objects"]
        )
        view: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in content["view"].items()
        }
        return cls(content["name"], content["split"], things, View(**view), tuple(content["captions"]))


def lead(view: View, subject: Thing, relation: str, object_: Thing) -> tuple[float, float]:
    """By how much `subject` stands in `relation` to `object_`: along the ground, and across the picture.

    Positive: it does. The second is in picture widths and counts for left and right alone; else it equals the first.
    """
    if relation in ("left of", "right of"):
        sign = 1.0 if relation == "right of" else -1.0
        seen = view.across(subject.x, subject.y) - view.across(object_.x, object_.y)
        return sign * (subject.x - object_.x), sign * seen
    ground = (subject.y - object_.y) * (1.0 if relation == "behind" else -1.0)
    return ground, ground


def facts(scene: Scene, *, clear: bool) -> list[Fact]:
    """The relations that hold in a scene.

    With `clear`, those that nobody would dispute: by a wide margin along the ground and, for left and right, in the
    picture too. Without, every relation that anybody might grant: it holds on the ground or in the picture.
    """
    found = []
    for subject in scene.things:
        for other in scene.things:
            if other is subject:
                continue
            for relation in RELATIONS:
                ground, seen = lead(scene.view, subject, relation, other)
                holds = ground >= CLEAR and seen >= CLEAR_VIEW if clear else ground > 0 or seen > 0
                if holds:
                    found.append(Fact(subject.kind, relation, other.kind))
    return found


def choose_facts(candidates: list[Fact], count: int) -> list[Fact]:
    """`count` different facts of one scene (fewer if there are no more), naming as many of its things as they can.

    Goes by the order of `candidates` where there is a choice. A fact and its converse say the same and count as one
    as long as there is another.
    """
    chosen: list[Fact] = []
    named: set[Kind] = set()
    said: set[frozenset[Kind]] = set()

    def gain(fact: Fact) -> tuple[int, int]:
        pair = frozenset((fact.subject, fact.object))
        converse = Fact(fact.object, CONVERSE[fact.relation], fact.subject)
        return len(pair - named), 2 * (pair not in said) + (converse not in chosen)

    rest = list(candidates)
    while rest and len(chosen) < count:
        best = max(rest, key=gain)  # the first of equals
        rest.remove(best)
        chosen.append(best)
        named |= {best.subject, best.object}
        said.add(frozenset((best.subject, best.object)))
    return chosen


def say(fact: Fact, candidates: list[Fact], relations: int) -> str:
    """A caption: the fact, and up to ``relations - 1`` more of `candidates` about its subject and yet other things.

    "a small red metal cube is behind a large gray rubber sphere and left of a small blue metal cylinder". True where
    all of them are, and of no scene that the fact alone does not fit.
    """
    said = [fact]
    for other in candidates:
        if len(said) < relations and other.subject == fact.subject and other.object not in [one.object for one in said]:
            said.append(other)
    return " and ".join([str(fact), *(f"{other.relation} a {other.object}" for other in said[1:])])


def draw_view(rng: np.random.Generator) -> View:
    """A view: always from the same side, never quite the same."""
    brightness = rng.uniform(0.26, 0.6)
    tint = rng.uniform(-0.06, 0.06, size=2)
    ground = (brightness * (1 + tint[0]), brightness * (1 + tint[1]), brightness * (1 - tint.sum()))
    return View(
        distance=_rounded(rng.uniform(10.0, 11.5)),
        elevation=_rounded(math.radians(rng.uniform(30, 42))),
        target=(_rounded(rng.uniform(-0.2, 0.2)), _rounded(rng.uniform(-0.1, 0.3))),
        zoom=_rounded(rng.uniform(1.5, 1.62)),
        light_azimuth=_rounded(math.radians(rng.uniform(-75, 75))),
        light_elevation=_rounded(math.radians(rng.uniform(42, 65))),
        ground=(_rounded(ground[0]), _rounded(ground[1]), _rounded(ground[2])),
        pool=(_rounded(rng.uniform(-3, 3)), _rounded(rng.uniform(-2, 3))),
        spread=_rounded(rng.uniform(4.5, 8.0)),
    )


def draw_things(rng: np.random.Generator, count: int) -> tuple[Thing, ...] | None:
    """`count` things of different kinds with room between them; None when they found no room."""
    kinds: list[Kind] = []
    while len(kinds) < count:
        kind = Kind(*(values[int(rng.integers(len(values)))] for values in (SIZES, COLOURS, MATERIALS, SHAPES)))
        if kind not in kinds:
            kinds.append(kind)
    things: list[Thing] = []
    for kind in sorted(kinds, key=lambda kind: SIZES.index(kind.size)):  # the large ones first, while there is room
        for _ in range(LAYOUT_TRIES):
            x, y = (_rounded(limit * (2 * rng.random() - 1)) for limit in FIELD)
            thing = Thing(kind, x, y, _rounded(rng.uniform(0, math.pi / 2)))
            if all(math.dist((x, y), (old.x, old.y)) > thing.radius + old.radius + GAP for old in things):
                things.append(thing)
                break
        else:
            return None
    order = rng.permutation(count)
    return tuple(things[index] for index in order)


def with_boxes(scene: Scene, boxes: list[tuple[int, int, int, int]], pixels: list[int]) -> Scene:
    """The scene with what drawing it has shown, in the order of its things."""
    things = [
        replace(thing, box=box, pixels=count) for thing, box, count in zip(scene.things, boxes, pixels, strict=True)
    ]
    return replace(scene, things=tuple(things))


def _rounded(value: float) -> float:
    """Four decimals: what scenes.json says is exactly what was drawn."""
    return round(float(value), 4)
