"""How sure a recall is: bootstrap intervals over pictures, and recalls over folds of the pictures (COCO's 1K)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.evaluation.retrieval import CUTOFFS, IntArray, Ranks, recall_metrics, retrieval_ranks

LEVEL = 95.0  # percent of the resamples that an interval holds
RESAMPLES = 1000
SEED = 0
CHUNK = 1 << 22  # counts drawn at once

Scores = tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]  # image to text (N, M), text to image (M, N)


@dataclass(frozen=True)
class Hits:
    """Right answers by picture: `text` (N, 3) its own query's hits at 1, 5, 10, `image` (N, 3) its captions' hits."""

    text: NDArray[np.float64]
    image: NDArray[np.float64]
    captions: NDArray[np.float64]  # (N,)


def recall_intervals(
    ranks: Ranks, picture_of: IntArray, *, resamples: int = RESAMPLES, seed: int = SEED
) -> dict[str, list[float]]:
    """Percentile intervals ``[low, high]`` in percent of each of `recall_metrics`' numbers, by resampling pictures.

    A picture is drawn with all its captions, since its captions' ranks hang together; the gallery stays whole, so ranks
    stay as they are. `picture_of` (M,) is the picture of each caption. The same ranks and `seed` give the same numbers,
    in whatever batches or processes the ranks were made.
    """
    hits = _hits(ranks, picture_of)
    pictures = len(hits.captions)
    random = np.random.default_rng(seed)
    step = max(1, CHUNK // pictures)
    found: list[NDArray[np.float64]] = []
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        drawn = random.multinomial(pictures, np.full(pictures, 1 / pictures), size=size).astype(np.float64)  # (b, N)
        text = 100 * drawn @ hits.text / pictures  # (b, 3)
        image = 100 * drawn @ hits.image / (drawn @ hits.captions)[:, None]
        found.append(_columns(text, image))
    values = np.concatenate(found)
    edges = np.percentile(values, [(100 - LEVEL) / 2, (100 + LEVEL) / 2], axis=0)  # (2, 9)
    names = list(recall_metrics(ranks))
    return {name: [float(low), float(high)] for name, low, high in zip(names, *edges, strict=True)}


def _hits(ranks: Ranks, picture_of: IntArray) -> Hits:
    cutoffs = np.array(CUTOFFS)
    text = (ranks.text[:, None] <= cutoffs).astype(np.float64)
    image = np.zeros_like(text)
    np.add.at(image, picture_of, (ranks.image[:, None] <= cutoffs).astype(np.float64))
    return Hits(text, image, np.bincount(picture_of, minlength=len(text)).astype(np.float64))


def _columns(text: NDArray[np.float64], image: NDArray[np.float64]) -> NDArray[np.float64]:
    """In the order of `recall_metrics`: three recalls and their mean, twice, and the mean of all: (b, 9)."""
    means = [part.mean(axis=1, keepdims=True) for part in (text, image)]
    return np.concatenate([text, means[0], image, means[1], (means[0] + means[1]) / 2], axis=1)


def fold_recalls(scores: Scores, picture_of: IntArray, folds: int) -> dict[str, float]:
    """Recalls averaged over `folds` consecutive parts of the pictures, each searched by itself (COCO's "1K five-fold").

    Within a part only its own pictures and captions are candidates. Of a re-ranked matrix, candidates outside a query's
    top k keep their place behind those in it. Raises ValueError when the pictures do not divide into so many
    equal parts.
    """
    pictures = scores[0].shape[0]
    if folds < 1 or pictures % folds:
        raise ValueError(f"{pictures} pictures do not divide into {folds} equal folds")
    size = pictures // folds
    found = []
    for start in range(0, pictures, size):
        captions = np.flatnonzero((picture_of >= start) & (picture_of < start + size))
        rows = slice(start, start + size)
        ranks = retrieval_ranks(scores[0][rows][:, captions], scores[1][captions, rows], picture_of[captions] - start)
        found.append(recall_metrics(ranks))
    return {name: float(np.mean([metrics[name] for metrics in found])) for name in found[0]}
