"""Time and recall by the number of candidates: VITR's tables 5 and 6 for a run of one's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from components.evaluation.search import open_run
from components.evaluation.tower_models import EncodedSplit
from components.evaluation.tower_scoring import as_if_candidates, embed_all, main_score, recalls, score_all
from components.evaluation.tower_search import Ranked, TowerSearch
from components.evaluation.vector_index import EXACT, IndexSettings, VectorIndex
from components.io.documents import write_json
from components.io.progress import progress, silent

TO_TEXT, TO_IMAGE = "image to text", "text to image"
ALL = "none"  # the row without turbo, as the papers name it
COLUMNS = ("txt_r1", "txt_r5", "txt_r10", "img_r1", "img_r5", "img_r10", "r_sum")
HEADINGS = ("candidates", "text R@1", "R@5", "R@10", "image R@1", "R@5", "R@10", "sum", "ms to text", "ms to image")


class TurboTables(NamedTuple):
    """Recalls in percent by number of candidates, and median milliseconds a query; None is without turbo."""

    recalls: dict[int | None, dict[str, float]]
    milliseconds: dict[int | None, dict[str, float]]

    def rows(self) -> list[tuple[str, ...]]:
        """Rows of text under `HEADINGS`; times with how many times faster than without turbo."""
        rows = []
        for count, found in self.recalls.items():
            times = []
            for direction in (TO_TEXT, TO_IMAGE):
                spent, whole = self.milliseconds[count][direction], self.milliseconds[None][direction]
                times.append(f"{spent:,.1f}" + ("" if count is None else f" ({whole / spent:.1f}x)"))
            name = ALL if count is None else f"{count:,}"
            rows.append((name, *(f"{found[column]:.1f}" for column in COLUMNS), *times))
        return rows


def query_times(
    search: TowerSearch,
    *,
    queries: int,
    candidates: Sequence[int],
    advance: Callable[[int], None] = silent,
) -> dict[int | None, dict[str, float]]:
    """The median milliseconds of a query each way, without turbo (None) and with so many `candidates`.

    Queries are spread over the collection; one after the other is asked in all the ways. Indices are built, and one
    query is asked, before the clock runs. The encoders' work is not in it: `search.source` has their outputs.
    """
    source = search.source
    pictures, captions = (
        np.unique(np.linspace(0, length - 1, queries).astype(np.int64)).tolist()
        for length in (len(source), len(source.picture_of))
    )

    def to_text(picture: int, count: int | None) -> list[Ranked]:
        return search.captions_for(source.regions([picture]), count)

    def to_image(caption: int, count: int | None) -> list[Ranked]:
        return search.pictures_for(*source.words([caption]), count)

    ways: tuple[int | None, ...] = (None, *candidates)
    found: dict[int | None, dict[str, float]] = {count: {} for count in ways}
    for name, ask, asked in ((TO_TEXT, to_text, pictures), (TO_IMAGE, to_image, captions)):
        ask(asked[-1], 1)
        spent: dict[int | None, list[float]] = {count: [] for count in ways}
        for query in asked:
            for count in ways:
                started = time.perf_counter()
                ask(query, count)
                spent[count].append(1000 * (time.perf_counter() - started))
            advance(1)
        for count in ways:
            found[count][name] = median(spent[count])
    return found


def turbo_tables(
    run: str,
    *,
    weights: Path,
    task: Path,
    evaluation: Path,
    out: Path,
    timings: Path,
    candidates: Sequence[int],
    queries: int,
    index: IndexSettings = EXACT,
) -> TurboTables:
    """Recalls and times of an evaluated run on its split, by the number of `candidates`, and without turbo.

    Every pair is scored once; with N candidates a query's right answers that are none of them stand after all N.
    Recalls go to the file `out`, whose bytes are the same for the same run, times to `timings`: no two runs agree in
    them.

    Args:
        run: the run's name, for messages.
        weights: its weights folder.
        task: its task's folder.
        evaluation: what `evaluate` left of it, for the name of the split.
        out: a JSON file to write.
        timings: another.
        candidates: how many; more than there are count as all.
        queries: that are timed, each way.
        index: how candidates are found.

    Raises UserError when the run is not evaluated, its files are missing or damaged, or it is no HAT, VITR or baseline.
    """
    model, sizes, split_name = open_run(run, weights=weights, evaluation=evaluation)
    device = next(model.parameters()).device
    split = EncodedSplit.read(task / split_name, model, sizes, weights, device)
    images, texts = embed_all(model.head, split, device=device)
    with progress(f"turbo {run}: score", len(split)) as advance:
        scored = score_all(model.head, split, device=device, advance=advance)
    scores = scored[main_score(list(scored))]
    cosines = images @ texts.T
    by_picture, by_caption = VectorIndex(texts, index), VectorIndex(images, index)
    both = {ALL: (scores.numpy(), scores.T.numpy())}
    for count in candidates:
        both[str(count)] = (
            as_if_candidates(scores, cosines, by_picture.search(images, count)).numpy(),
            as_if_candidates(scores.T, cosines.T, by_caption.search(texts, count)).numpy(),
        )
    found = recalls(both, split.picture_of)
    search = TowerSearch(model.head, split, images, texts, index=index, device=device)
    with progress(f"turbo {run}: time", 2 * queries, "queries") as advance:
        times = query_times(search, queries=queries, candidates=candidates, advance=advance)
    sized = {"pictures": len(split), "captions": len(split.captions)}
    about = {"run": run, "task": task.name, "split": split_name, "model": sizes["kind"], **sized}
    for path in (out, timings):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {**about, "index": index._asdict(), "recalls": found})
    machine = {"device": device.type, "threads": torch.get_num_threads(), "queries": queries}
    write_json(
        timings,
        {**about, **machine, "milliseconds": {ALL if count is None else str(count): ms for count, ms in times.items()}},
    )
    named: dict[int | None, dict[str, float]] = {None: found[ALL]}
    return TurboTables(named | {count: found[str(count)] for count in candidates}, times)
