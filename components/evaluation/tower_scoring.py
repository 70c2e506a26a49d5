"""Scores of every picture against every caption by a head over two towers, in blocks of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from components.evaluation.retrieval import Ranks, recall_metrics, retrieval_ranks

ENSEMBLE = "ensemble"
PICTURES, CAPTIONS = 128, 256  # of a block; the cross attention cuts further by its own byte budget


class Source(Protocol):
    """Outputs of two towers by picture and caption."""

    lengths: NDArray[np.int64]  # (C,) words of each caption
    picture_of: NDArray[np.int64]  # (C,)

    def __len__(self) -> int: ...

    def regions(self, pictures: Sequence[int]) -> list[Tensor]:
        """Regions (P, k, width) of each level."""

    def words(self, captions: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Words (C, n, width) of each level, and their mask (C, n)."""


def _silent(items: int = 1) -> None:
    return None


@torch.inference_mode()
def score_all(
    head: nn.Module,
    source: Source,
    *,
    pictures: int | None = None,
    device: str | torch.device = "cpu",
    picture_block: int = PICTURES,
    caption_block: int = CAPTIONS,
    advance: Callable[[int], None] = _silent,
) -> dict[str, Tensor]:
    """Scores (P, C) float32 by name, of the first `pictures` pictures (all by default) with their captions.

    Captions go in order of length, so that little is computed for padding. Where the head has both directions of HAT,
    their mean stands beside them as `ensemble`. `advance` hears of pictures.
    """
    count = len(source) if pictures is None else min(pictures, len(source))
    captions = np.flatnonzero(source.picture_of < count)
    order = captions[np.argsort(source.lengths[captions], kind="stable")]
    scores: dict[str, Tensor] = {}
    head.eval()
    for start in range(0, count, picture_block):
        chosen = range(start, min(start + picture_block, count))
        regions = [level.to(device) for level in source.regions(chosen)]
        for at in range(0, len(order), caption_block):
            columns = order[at : at + caption_block]
            words, mask = source.words(columns.tolist())
            found = head(regions, [level.to(device) for level in words], mask.to(device))
            for name, block in found.items():
                whole = scores.setdefault(name, torch.zeros(count, len(captions)))
                whole[start : start + len(chosen), torch.from_numpy(np.searchsorted(captions, columns))] = (
                    block.float().cpu()
                )
        advance(len(chosen))
    if {"i2t", "t2i"} <= scores.keys():
        scores[ENSEMBLE] = (scores["i2t"] + scores["t2i"]) / 2
    return scores


def main_score(names: Sequence[str]) -> str:
    """The score that a model of several is judged by: the ensemble, VITR's, or the only one."""
    return next((name for name in (ENSEMBLE, "vitr") if name in names), next(iter(names)))


def ranks_of(scores: Tensor, picture_of: NDArray[np.int64]) -> Ranks:
    """Ranks in both directions from scores (P, C); `picture_of` of these captions alone."""
    matrix = scores.numpy()
    return retrieval_ranks(matrix, matrix.T, picture_of)


def recalls(scores: dict[str, Tensor], picture_of: NDArray[np.int64]) -> dict[str, dict[str, float]]:
    """`recall_metrics` of each score, and ``r_sum``: the sum of the six recalls, in percent."""
    found = {}
    for name, matrix in scores.items():
        metrics = recall_metrics(ranks_of(matrix, picture_of))
        found[name] = metrics | {"r_sum": 6 * metrics["r_mean"]}
    return found
