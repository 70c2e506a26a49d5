"""A model beside its baseline on the same queries: where only one of them is right at rank 1 (VITR figures 5 and 6).

Both ways round: also where the baseline wins. Shown are those that the loser ranked worst; the counts are of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from components.evaluation.page.queries import Run, thumbnails
from components.evaluation.page.samples import record_folders
from components.evaluation.page.thumbnails import Thumbnail
from components.evaluation.results import IMAGE, RANKS_FILE, TEXT
from components.io.records import iter_batches

MODELS = ("vitr", "hat")  # that are set beside a baseline
BASELINES = (("linear",), ("vse", "vsrn"))  # kinds of run, the first that has one
COLUMNS = ["direction", "query", "picture", "rank_itm", "top_itm"]


@dataclass(frozen=True)
class First:
    """A run's first candidate for a query: its picture's id, and its text where the candidate is a caption."""

    picture: str
    caption: str
    right: bool
    rank: int  # of the right answer, from 1


@dataclass(frozen=True)
class Case:
    """One query, by its picture's id and (text, ""), with the model's and the baseline's first candidates."""

    picture: str
    caption: str
    model: First
    baseline: First


@dataclass(frozen=True)
class Side:
    """A direction: how many queries each way, of all, and some where the model wins and where the baseline does."""

    direction: str
    both: int
    model_alone: int
    baseline_alone: int
    neither: int
    won: tuple[Case, ...]
    lost: tuple[Case, ...]


@dataclass(frozen=True)
class Versus:
    """Two runs over one split; `pictures` by id."""

    model: str
    baseline: str
    sides: tuple[Side, ...]
    pictures: Mapping[str, Thumbnail]


def read_versus(runs: Sequence[Run], evaluation: Path, tasks: Path, limit: int) -> list[Versus]:
    """Each split's best VITR and HAT beside the best of their baselines there, with `limit` cases each way round.

    Runs whose queries differ, or that were evaluated before first candidates were kept, are left out.
    """
    found = []
    for model, baseline in _pairs(runs) if limit else ():
        own, other = _first(evaluation / model.name), _first(evaluation / baseline.name)
        if not own or own.keys() != other.keys():
            continue
        split = tasks / str(model.metrics.get("task", "")) / str(model.metrics.get("split", ""))
        captions = _captions(split)
        sides = tuple(_side(direction, own, other, captions, limit) for direction in (TEXT, IMAGE))
        cases = [case for side in sides for case in (*side.won, *side.lost)]
        names = {case.picture for case in cases}
        names |= {first.picture for case in cases for first in (case.model, case.baseline)}
        found.append(Versus(model.name, baseline.name, sides, thumbnails(names, record_folders(split))))
    return found


def _pairs(runs: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    splits = dict.fromkeys((run.metrics.get("task"), run.metrics.get("split")) for run in runs)
    for place in splits:
        here = [run for run in runs if (run.metrics.get("task"), run.metrics.get("split")) == place]
        baseline = next((best for kinds in BASELINES if (best := _best(here, kinds)) is not None), None)
        for kind in MODELS:
            model = _best(here, (kind,))
            if model is not None and baseline is not None:
                yield model, baseline


def _best(runs: Sequence[Run], kinds: Sequence[str]) -> Run | None:
    """The run of these kinds with the best mean recall, the first of equals."""
    fitting = [run for run in runs if run.metrics.get("model") in kinds]
    return max(fitting, key=lambda run: float(run.metrics["itm"]["r_mean"]), default=None)


Ranks = Mapping[tuple[str, str], tuple[str, int, str]]


def _first(folder: Path) -> Ranks:
    """By direction and query: the query's picture, the right answer's rank and the first candidate's name."""
    path = folder / RANKS_FILE
    if "top_itm" not in pq.read_schema(path).names:
        return {}
    rows = pq.read_table(path, columns=COLUMNS).to_pylist()
    return {(row["direction"], row["query"]): (row["picture"], int(row["rank_itm"]), row["top_itm"]) for row in rows}


def _captions(split: Path) -> dict[str, tuple[str, str]]:
    """Text and picture of each caption by its name."""
    found = {}
    for folder in record_folders(split):
        for batch in iter_batches(folder, ["id", "captions", "row_ids"], rows=4096):
            for record in batch.to_pylist():
                for name, text in zip(record["row_ids"], record["captions"], strict=True):
                    found[name] = (text, record["id"])
    return found


def _side(direction: str, model: Ranks, baseline: Ranks, captions: Mapping[str, tuple[str, str]], limit: int) -> Side:
    queries = [key for key in model if key[0] == direction]
    groups: dict[tuple[bool, bool], list[tuple[str, str]]] = {}
    for key in queries:
        groups.setdefault((model[key][1] == 1, baseline[key][1] == 1), []).append(key)

    def first(own: tuple[str, int, str]) -> First:
        picture, rank, name = own
        text, of_picture = captions.get(name, ("", "")) if direction == TEXT else ("", name)
        return First(of_picture, text, of_picture == picture, rank)

    def cases(won: tuple[bool, bool], loser: Ranks) -> tuple[Case, ...]:
        worst = sorted(groups.get(won, ()), key=lambda key: (-loser[key][1], key))[:limit]
        return tuple(
            Case(
                model[key][0],
                captions.get(key[1], ("", ""))[0] if direction == IMAGE else "",
                first(model[key]),
                first(baseline[key]),
            )
            for key in worst
        )

    return Side(
        direction,
        both=len(groups.get((True, True), ())),
        model_alone=len(groups.get((True, False), ())),
        baseline_alone=len(groups.get((False, True), ())),
        neither=len(groups.get((False, False), ())),
        won=cases((True, False), baseline),
        lost=cases((False, True), model),
    )
