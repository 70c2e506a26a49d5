"""CLEVR's scenes as pictures with relational captions (VITR section 4.1), worded as the built-in corpus is.

``{"scenes": [{"image_index", "image_filename", "split", "objects": [{"shape", "color", "material", "size", …}],
"relationships": {"left": [[2, 3], …], …}}]}``: ``relationships[r][i]`` are the objects that stand in relation r to i.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from components.data.corpus.scenes import COLOURS, MATERIALS, SHAPES, SIZES, Fact, Kind, choose_facts
from components.data.sources.json_stream import iter_members
from components.data.sources.local import inside_of, local_row
from components.data.sources.rows import SourceRow, malformed_row

CAPTIONS = 3  # of a picture: what the paper has on average
RELATIONS = {"left": "left of", "right": "right of", "front": "in front of", "behind": "behind"}  # CLEVR's, and said
TEST = "test"  # of CLEVR no scenes of this split are published


def read_clevr(file: Path, root: Path, splits: tuple[str, ...] | None) -> Iterator[SourceRow]:
    """Rows of a ``CLEVR_…_scenes.json``, `CAPTIONS` a picture, of `splits` if given; pictures lie in ``root/SPLIT``.

    Which relations are said follows from the picture's number alone. A scene that states fewer makes fewer rows, one
    that states none a single row without caption. The scenes of CLEVR's ``val`` with an odd number are its ``test``.
    """
    inside = inside_of(root)
    row = 0
    for index, (_, item) in enumerate(iter_members(file, ("scenes",))):
        location = f"{file.name}:scenes[{index}]"
        try:
            number, folder, name, facts = _read(item)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            yield malformed_row(row, location, f"no scene of CLEVR ({_words(error)})", content=item)
            row += 1
            continue
        split = TEST if folder == "val" and number % 2 else folder
        order = np.random.default_rng(number).permutation(len(facts))
        said: list[Fact | None] = [*choose_facts([facts[place] for place in order], CAPTIONS)]
        for place, fact in enumerate(said or [None]):
            if splits is None or split in splits:
                caption = None if fact is None else str(fact)
                yield local_row(row, f"{location}, relation {place}", f"{folder}/{name}", caption, split, inside)
            row += 1


def _read(scene: Any) -> tuple[int, str, str, list[Fact]]:
    """Number, split, picture's name, and what is true of a scene, each kind of fact once. Raises as indexing does."""
    number, split, name = scene["image_index"], scene["split"], scene["image_filename"]
    if type(number) is not int or number < 0 or not isinstance(split, str) or not isinstance(name, str):
        raise ValueError("image_index, split or image_filename is none")
    kinds = [_kind(thing) for thing in scene["objects"]]
    facts: dict[Fact, None] = {}
    for relation, words in RELATIONS.items():
        related = scene["relationships"][relation]
        if len(related) != len(kinds):
            raise ValueError(f"{len(related)} objects have the relation {relation}, there are {len(kinds)}")
        for thing, others in zip(kinds, related, strict=True):
            for other in others:
                if type(other) is not int or not 0 <= other < len(kinds):
                    raise ValueError(f"no object {other!r}")
                if kinds[other] != thing:  # two things of one kind have no names that tell them apart
                    facts[Fact(kinds[other], words, thing)] = None
    return number, split, name, list(facts)


def _kind(thing: Any) -> Kind:
    kind = Kind(thing["size"], thing["color"], thing["material"], thing["shape"])
    for value, known in ((kind.size, SIZES), (kind.colour, COLOURS), (kind.material, MATERIALS), (kind.shape, SHAPES)):
        if value not in known:
            raise ValueError(f"no thing of CLEVR is {value!r}")
    return kind


def _words(error: Exception) -> str:
    return f"it lacks {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
