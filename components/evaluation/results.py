"""What an evaluation leaves behind: metrics, a rank per query, and the queries worth looking at."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from torch import Tensor

from components.evaluation.embedding import EMBEDDING_FILE
from components.evaluation.global_vectors import write_vectors
from components.evaluation.retrieval import (
    Ranks,
    chance_metrics,
    recall_metrics,
    retrieval_ranks,
    top_indices,
)
from components.evaluation.summary import METRICS_FILE
from components.evaluation.uncertainty import LEVEL, RESAMPLES, SEED, fold_recalls, recall_intervals
from components.io.documents import write_json

RANKS_FILE = "ranks.parquet"
EXAMPLES_FILE = "examples.json"
EXTRA = "extra"  # folder of what runs of some kinds have: a map of the vectors, a submission
TEXT, IMAGE = "txt", "img"  # the published names of the two directions
DIGITS = 4  # of scores in examples.json
FOLDED, FOLDS = 5000, 5  # COCO's test set, which is also reported in five folds of a thousand pictures

Scores = tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]  # image to text (N, M), text to image (M, N)

RANKS_SCHEMA = pa.schema(
    [
        ("direction", pa.string()),  # txt: the query is a picture; img: the query is a caption
        ("query", pa.string()),  # record id of the picture, row id of the caption
        ("picture", pa.string()),  # record id of the picture that the query is or belongs to
        ("rank_itc", pa.int32()),  # from 1; ties count against the model
        ("rank_itm", pa.int32()),
        ("top_itm", pa.string()),  # the first candidate: row id of a caption, record id of a picture
    ]
)


class Split(Protocol):
    """Names and texts of the pictures and captions that were scored."""

    picture_ids: list[str]
    caption_ids: list[str]
    captions: list[str]
    picture_of: NDArray[np.int64]


def write_results(
    folder: Path,
    split: Split,
    *,
    itc: Scores,
    itm: Scores,
    examples: int,
    example_candidates: int,
    about: dict[str, Any],
    folds: int | None = None,
    resamples: int = RESAMPLES,
    seed: int = SEED,
    placed: dict[str, list[list[float]]] | None = None,
    vectors: tuple[Tensor, Tensor, str] | None = None,
) -> None:
    """Write ``metrics.json``, ``ranks.parquet`` and ``examples.json`` into `folder`; `about` heads the metrics.

    Beside the recalls stand their bootstrap intervals (`resamples` draws of pictures from `seed`; none for 0), and
    means over `folds` parts of the pictures: five where there are COCO's 5,000 (None), none for 0 or 1. `placed` is
    what `embedding_map` gave, for ``extra/embedding.json``; `vectors` are what `write_vectors` keeps in ``extra``.
    The metrics come last, so a folder that has them is complete. Raises ValueError as `retrieval_ranks` does, and when
    the pictures do not divide into so many folds.
    """
    ranks_itc = retrieval_ranks(*itc, split.picture_of)
    ranks_itm = retrieval_ranks(*itm, split.picture_of)
    metrics = {
        **about,
        "pictures": len(split.picture_ids),
        "captions": len(split.caption_ids),
        "itc": recall_metrics(ranks_itc),
        "itm": recall_metrics(ranks_itm),
        "chance": chance_metrics(split.picture_of, len(split.picture_ids)),
    }
    if resamples:
        metrics["intervals"] = {
            "level": LEVEL,
            "resamples": resamples,
            "seed": seed,
            **{
                name: recall_intervals(ranks, split.picture_of, resamples=resamples, seed=seed)
                for name, ranks in (("itc", ranks_itc), ("itm", ranks_itm))
            },
        }
    parts = (FOLDS if len(split.picture_ids) == FOLDED else 0) if folds is None else folds
    if parts > 1:
        metrics["folds"] = {
            "folds": parts,
            "pictures": len(split.picture_ids) // parts,
            **{name: fold_recalls(scores, split.picture_of, parts) for name, scores in (("itc", itc), ("itm", itm))},
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS_FILE).unlink(missing_ok=True)
    pq.write_table(_rank_table(split, ranks_itc, ranks_itm, itm), folder / RANKS_FILE, compression="zstd")
    found = {
        TEXT: _examples(split, TEXT, itc[0], itm[0], (ranks_itc.text, ranks_itm.text), examples, example_candidates),
        IMAGE: _examples(
            split, IMAGE, itc[1], itm[1], (ranks_itc.image, ranks_itm.image), examples, example_candidates
        ),
    }
    write_json(folder / EXAMPLES_FILE, found)
    extra = empty_extra(folder)
    if placed is not None:
        write_json(extra / EMBEDDING_FILE, placed)
    if vectors is not None:
        write_vectors(extra, *vectors)
    write_json(folder / METRICS_FILE, metrics)


def empty_extra(folder: Path) -> Path:
    """``extra`` in the folder of an evaluation, emptied; it is there for all kinds, since DVC tracks it for all."""
    shutil.rmtree(folder / EXTRA, ignore_errors=True)
    (folder / EXTRA).mkdir(parents=True)
    return folder / EXTRA


def _rank_table(split: Split, itc: Ranks, itm: Ranks, scores: Scores) -> pa.Table:
    texts, images = (top_indices(one, 1)[:, 0] for one in scores)
    owners = [split.picture_ids[index] for index in split.picture_of]
    columns = [
        [TEXT] * len(itc.text) + [IMAGE] * len(itc.image),
        split.picture_ids + split.caption_ids,
        split.picture_ids + owners,
        np.concatenate([itc.text, itc.image]),
        np.concatenate([itm.text, itm.image]),
        [split.caption_ids[index] for index in texts] + [split.picture_ids[index] for index in images],
    ]
    return pa.table(
        [pa.array(column, type=field.type) for column, field in zip(columns, RANKS_SCHEMA, strict=True)],
        schema=RANKS_SCHEMA,
    )


def _examples(
    split: Split,
    direction: str,
    similarity: NDArray[np.floating[Any]],
    scores: NDArray[np.floating[Any]],
    ranks: tuple[NDArray[np.int64], NDArray[np.int64]],
    count: int,
    candidates: int,
) -> dict[str, list[dict[str, Any]]]:
    """The `count` best queries (first by the widest margin) and the `count` worst (last, then by the margin)."""
    pictures = np.arange(len(split.picture_ids))
    of_query, of_candidate = (pictures, split.picture_of) if direction == TEXT else (split.picture_of, pictures)
    margin = np.array(
        [_margin(row, of_candidate == group) for row, group in zip(scores, of_query, strict=True)]
    )  # (Q,) score of the best right answer over the best wrong one
    rank_itc, rank_itm = ranks
    order = np.lexsort((-margin, rank_itm))  # best first
    top = top_indices(scores, candidates)  # (Q, k)

    def candidate_of(query: int, candidate: int) -> dict[str, Any]:
        return {
            **_name(split, IMAGE if direction == TEXT else TEXT, candidate, of_candidate[candidate]),
            "right": bool(of_candidate[candidate] == of_query[query]),
            "score": round(float(scores[query, candidate]), DIGITS),
            "similarity": round(float(similarity[query, candidate]), DIGITS),
        }

    def describe(query: int) -> dict[str, Any]:
        right = np.flatnonzero(of_candidate == of_query[query])
        return {
            **_name(split, direction, query, of_query[query]),
            "rank_itc": int(rank_itc[query]),
            "rank_itm": int(rank_itm[query]),
            "answer": candidate_of(query, int(right[scores[query, right].argmax()])),
            "top": [candidate_of(query, int(candidate)) for candidate in top[query]],
        }

    best = [describe(query) for query in order[: min(count, (len(order) + 1) // 2)]]
    worst = [describe(query) for query in order[::-1][: min(count, len(order) // 2)]]
    return {"best": best, "worst": worst}


def _margin(scores: NDArray[np.floating[Any]], right: NDArray[np.bool_]) -> float:
    wrong = scores[~right]
    return float(scores[right].max() - wrong.max()) if wrong.size else 0.0


def _name(split: Split, direction: str, index: int, picture: int) -> dict[str, str]:
    """A picture by its record's id; a caption by its row's, with its text and its picture's id."""
    if direction == TEXT:
        return {"picture": split.picture_ids[index]}
    return {
        "picture": split.picture_ids[picture],
        "caption_id": split.caption_ids[index],
        "caption": split.captions[index],
    }
