"""Evaluated runs: recalls, and example queries with their first candidates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.evaluation.embedding import EMBEDDING_FILE
from components.evaluation.page.samples import record_folders
from components.evaluation.page.thumbnails import Thumbnail, thumbnail
from components.evaluation.results import EXAMPLES_FILE, EXTRA, IMAGE, RANKS_FILE, TEXT
from components.evaluation.summary import read_metrics, retrieval_runs
from components.io.records import iter_batches

HARDLY = 0.05  # of the way from chance to all right


@dataclass(frozen=True)
class Run:
    """One evaluation: metrics.json, and by direction ranks and queries.

    `ranks` by (direction, scores), such as (``txt``, ``itm``): (Q,) int64; `captions` (N,) int64: of each
    picture.
    """

    name: str
    metrics: Mapping[str, Any]
    ranks: Mapping[tuple[str, str], NDArray[np.int64]]
    captions: NDArray[np.int64]
    queries: Mapping[str, tuple[Query, ...]]
    pictures: Mapping[str, Thumbnail]
    embedding: Mapping[str, list[list[float]]] | None = None

    @property
    def labels(self) -> tuple[str, str]:
        """What the main score and the one beside it are called."""
        labels = self.metrics.get("labels", {})
        return labels.get("itm", "Re-ranked"), labels.get("itc", "Similarity alone")


@dataclass(frozen=True)
class Query:
    """One example: `content` as in examples.json, `kind` best or worst."""

    kind: str
    content: Mapping[str, Any]


def read_runs(evaluation: Path, tasks: Path, queries: int) -> list[Run]:
    """All evaluated retrieval runs by name, each with at most `queries` best and worst queries per direction, each."""
    return [_read_run(folder, tasks, queries) for folder in retrieval_runs(evaluation)]


def _read_run(folder: Path, tasks: Path, queries: int) -> Run:
    metrics = read_metrics(folder)
    table = pq.read_table(folder / RANKS_FILE, columns=["direction", "picture", "rank_itc", "rank_itm"])
    captions = pc.value_counts(table.filter(pc.equal(table["direction"], IMAGE))["picture"]).field("counts").to_numpy()
    ranks: dict[tuple[str, str], NDArray[np.int64]] = {}
    for direction in (TEXT, IMAGE):
        part = table.filter(pc.equal(table["direction"], direction))
        for scores in ("itc", "itm"):
            ranks[direction, scores] = part[f"rank_{scores}"].to_numpy().astype(np.int64)
    examples = json.loads((folder / EXAMPLES_FILE).read_text(encoding="utf-8"))
    chosen = {
        direction: tuple(
            Query(kind, content) for kind in ("best", "worst") for content in examples[direction][kind][:queries]
        )
        for direction in (TEXT, IMAGE)
    }
    names = {query.content["picture"] for found in chosen.values() for query in found}
    names |= {hit["picture"] for query in chosen[IMAGE] for hit in (*query.content["top"], query.content["answer"])}
    split = tasks / str(metrics.get("task", "")) / str(metrics.get("split", ""))
    path = folder / EXTRA / EMBEDDING_FILE
    embedding = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return Run(folder.name, metrics, ranks, captions, chosen, thumbnails(names, record_folders(split)), embedding)


def thumbnails(names: set[str], folders: Iterable[Path]) -> dict[str, Thumbnail]:
    """Small pictures of the named records, where they can be found and decoded."""
    found: dict[str, Thumbnail] = {}
    for folder in folders:
        for batch in iter_batches(folder, ["id", "image"], rows=4096):
            for index, name in enumerate(batch.column("id").to_pylist()):
                if name in names and name not in found:
                    picture = thumbnail(batch.column("image")[index].as_py())
                    if picture is not None:
                        found[name] = picture
    return found


def run_warnings(run: Run) -> list[str]:
    """Sentences on results that should make a reader pause."""
    itc, itm, chance = (run.metrics[name]["r_mean"] for name in ("itc", "itm", "chance"))
    warnings = []
    if itc - chance < HARDLY * (100 - chance):
        warnings.append(
            f"{run.name}: the mean recall before re-ranking, {itc:.1f}, is hardly above chance, {chance:.1f}."
        )
    if itm < itc:
        own, beside = run.labels
        said = f"{own} is behind {beside}: mean recall {itm:.1f}, {itc:.1f}"
        if "labels" not in run.metrics:
            said = f"re-ranking lowers the mean recall from {itc:.1f} to {itm:.1f}"
        warnings.append(f"{run.name}: {said}.")
    return warnings
