"""Describing things in part: "red cubes", "the small metal thing", and which things such words fit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Self

import numpy as np

from components.data.corpus.scenes import COLOURS, MATERIALS, SHAPES, SIZES, Kind, Scene, Thing

VALUES = {"size": SIZES, "colour": COLOURS, "material": MATERIALS, "shape": SHAPES}  # in the order of English
ATTRIBUTES = tuple(VALUES)
SUBSETS = [list(combinations(ATTRIBUTES, said)) for said in range(len(ATTRIBUTES) + 1)]  # by how many they are


@dataclass(frozen=True)
class Words:
    """A partial description; None where nothing is said."""

    size: str | None = None
    colour: str | None = None
    material: str | None = None
    shape: str | None = None

    @classmethod
    def of(cls, kind: Kind, attributes: tuple[str, ...] = ATTRIBUTES) -> Self:
        """What `attributes` of a kind are."""
        return cls(**{name: getattr(kind, name) for name in attributes})

    def fit(self, thing: Thing) -> bool:
        """Whether they are true of a thing."""
        kind = thing.kind
        return (
            (self.size is None or self.size == kind.size)
            and (self.colour is None or self.colour == kind.colour)
            and (self.material is None or self.material == kind.material)
            and (self.shape is None or self.shape == kind.shape)
        )

    def among(self, scene: Scene) -> list[Thing]:
        """The things of a scene that they fit."""
        return [thing for thing in scene.things if self.fit(thing)]

    def count(self, scene: Scene) -> int:
        """How many things of a scene they fit."""
        return len(self.among(scene))

    def to_json(self) -> dict[str, str]:
        """What is said, by attribute."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def one(self) -> str:
        """As a noun: "small metal thing"."""
        said = [value for value in (self.size, self.colour, self.material) if value is not None]
        return " ".join([*said, self.shape or "thing"])

    @property
    def many(self) -> str:
        """As a plural: "small metal things"."""
        return f"{self.one}s"


def pick(rng: np.random.Generator, values: tuple[str, ...]) -> str:
    """One of the values."""
    return values[int(rng.integers(len(values)))]


def random_words(rng: np.random.Generator, said: int, kind: Kind | None = None) -> Words:
    """Words about `said` attributes at random: those of `kind`, or any values."""
    sets = SUBSETS[said]
    names = sets[int(rng.integers(len(sets)))]
    if kind is not None:
        return Words.of(kind, names)
    return Words(**{name: pick(rng, VALUES[name]) for name in names})


def pointing_words(rng: np.random.Generator, scene: Scene, thing: Thing, *, silent: str | None = None) -> Words | None:
    """The fewest words that fit `thing` alone, at random among equals; None when there are none.

    Says nothing about the attribute `silent`.
    """
    for sets in SUBSETS[1:]:
        first = int(rng.integers(len(sets)))
        for names in sets[first:] + sets[:first]:
            if silent not in names:
                words = Words.of(thing.kind, names)
                if words.count(scene) == 1:
                    return words
    return None


def changed(rng: np.random.Generator, words: Words) -> Words:
    """The same words with one of them replaced by another of its kind."""
    name = pick(rng, tuple(words.to_json()))
    others = tuple(value for value in VALUES[name] if value != getattr(words, name))
    return Words(**{**words.to_json(), name: pick(rng, others)})
