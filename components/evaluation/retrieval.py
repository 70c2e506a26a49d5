"""Recall in image-text retrieval: pure functions of score matrices, for any number of captions per picture.

A query's *rank* is the position, from 1, of its best right answer when all candidates are sorted by score. **Ties count
against the model**: a wrong candidate with the same score as the best right answer stands before it, so a model that
gives every pair one score gets the worst ranks, not the best. `txt_*` is text retrieval (query a picture, find its
captions), `img_*` image retrieval (query a caption, find its picture), as in the published code's result files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

CUTOFFS = (1, 5, 10)  # the K of the papers' recall tables
CHUNK_SCORES = 1 << 24  # scores compared at once: 25,000 captions x 5,000 pictures would not fit as booleans

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Ranks:
    """Ranks from 1, one per query: `text` (N,) int64 for N pictures, `image` (M,) int64 for M captions."""

    text: IntArray
    image: IntArray


def retrieval_ranks(image_to_text: ArrayLike, text_to_image: ArrayLike, picture_of: ArrayLike) -> Ranks:
    """Ranks in both directions.

    `image_to_text` is (N, M) scores of N pictures against M captions, `text_to_image` (M, N) the other way (after
    re-ranking the two are not each other's transpose), `picture_of` (M,) the picture's index of each caption.
    Raises ValueError on shapes that do not fit, on NaN and on a picture without captions.
    """
    rows = np.asarray(image_to_text)
    if rows.ndim != 2 or np.shape(text_to_image) != rows.shape[::-1]:
        raise ValueError(f"score matrices must be (N, M) and (M, N), not {rows.shape} and {np.shape(text_to_image)}")
    pictures = np.arange(rows.shape[0])
    return Ranks(
        text=best_ranks(rows, pictures, picture_of),
        image=best_ranks(text_to_image, picture_of, pictures),
    )


def best_ranks(scores: ArrayLike, query_group: ArrayLike, candidate_group: ArrayLike) -> IntArray:
    """The rank of each query's best right answer, where right means of the query's group: (Q,) int64, from 1.

    `scores` (Q, C), `query_group` (Q,) and `candidate_group` (C,) integers. Minus infinity is a score like any other.
    Raises ValueError on shapes that do not fit, on NaN and on a query without a right answer.
    """
    matrix, queries, candidates = np.asarray(scores), np.asarray(query_group), np.asarray(candidate_group)
    if matrix.shape != (len(queries), len(candidates)):
        raise ValueError(f"scores are {matrix.shape} for {len(queries)} queries and {len(candidates)} candidates")
    ranks = np.empty(len(queries), dtype=np.int64)
    step = max(1, CHUNK_SCORES // max(1, len(candidates)))
    for start in range(0, len(queries), step):
        block = matrix[start : start + step]  # (q, C)
        right = queries[start : start + step, None] == candidates[None, :]  # (q, C)
        if np.isnan(block).any():
            raise ValueError(f"a score of query {start + int(np.isnan(block).any(axis=1).argmax())} is not a number")
        if not right.any(axis=1).all():
            raise ValueError(f"query {start + int(right.any(axis=1).argmin())} has no right answer")
        best = np.where(right, block, -np.inf).max(axis=1)  # (q,)
        ranks[start : start + step] = 1 + ((block >= best[:, None]) & ~right).sum(axis=1)
    return ranks


def recall_at(ranks: IntArray, k: int) -> float:
    """Percentage of queries whose best right answer is among the first `k`.

    `k` above the number of candidates counts all of them, since no rank is higher.
    """
    if len(ranks) == 0:
        raise ValueError("no ranks: recall over no query is not defined")
    return 100.0 * float(np.count_nonzero(ranks <= k)) / len(ranks)


def recall_metrics(ranks: Ranks) -> dict[str, float]:
    """The published result keys, in percent: ``txt_r1 … txt_r_mean``, ``img_r1 … img_r_mean``, ``r_mean``."""
    return _with_means(
        {
            f"{direction}_r{k}": recall_at(values, k)
            for direction, values in (("txt", ranks.text), ("img", ranks.image))
            for k in CUTOFFS
        }
    )


def chance_metrics(picture_of: Sequence[int] | IntArray, pictures: int) -> dict[str, float]:
    """What a random order would get on average, in percent, under the same keys as `recall_metrics`.

    A query with c right answers of m candidates is hit within k draws with probability 1 - C(m-c, k) / C(m, k).
    """
    counts = np.bincount(np.asarray(picture_of, dtype=np.int64), minlength=pictures)  # (N,) captions per picture
    captions = int(counts.sum())
    one_each = np.ones(captions, dtype=np.int64)
    return _with_means(
        {f"txt_r{k}": chance_recall(counts, captions, k) for k in CUTOFFS}
        | {f"img_r{k}": chance_recall(one_each, pictures, k) for k in CUTOFFS}
    )


def chance_recall(right: IntArray, candidates: int, k: int) -> float:
    """The expected recall at `k` of random orders, in percent; `right` (Q,) counts each query's right answers."""
    sizes, times = np.unique(right, return_counts=True)
    hit = [1.0 - _miss(candidates, int(size), k) for size in sizes]
    return 100.0 * float(np.dot(hit, times)) / len(right)


def _miss(candidates: int, right: int, k: int) -> float:
    """The probability that `k` draws of `candidates` without replacement miss all `right` ones."""
    k = min(k, candidates)
    factors = [max(0, candidates - right - draw) / (candidates - draw) for draw in range(k)]
    return float(np.prod(factors))


def _with_means(recalls: dict[str, float]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for direction in ("txt", "img"):
        values = {f"{direction}_r{k}": recalls[f"{direction}_r{k}"] for k in CUTOFFS}
        metrics |= {**values, f"{direction}_r_mean": sum(values.values()) / len(CUTOFFS)}
    metrics["r_mean"] = (metrics["txt_r_mean"] + metrics["img_r_mean"]) / 2
    return metrics


def top_indices(scores: ArrayLike, k: int) -> IntArray:
    """The `k` best candidates of each query, best first; equal scores in the order of their index. (Q, min(k, C))."""
    matrix = np.asarray(scores)
    return np.argsort(-matrix, axis=1, kind="stable")[:, :k].astype(np.int64)
