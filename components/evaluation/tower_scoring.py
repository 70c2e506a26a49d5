"""Scores of every picture against every caption by a head over two towers, in blocks of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from components.evaluation.retrieval import recall_metrics, retrieval_ranks
from components.evaluation.scoring import Candidates, only, with_tail
from components.evaluation.vector_index import EXACT, IndexSettings, VectorIndex
from components.io.progress import silent

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


@torch.inference_mode()
def score_all(
    head: nn.Module,
    source: Source,
    *,
    pictures: int | None = None,
    device: str | torch.device = "cpu",
    picture_block: int = PICTURES,
    caption_block: int = CAPTIONS,
    advance: Callable[[int], None] = silent,
) -> dict[str, Tensor]:
    """Scores (P, C) float32 by name, of the first `pictures` pictures (all by default) with their captions.

    Where the head has both directions of HAT, their mean stands beside them as `ensemble`. `advance` hears of pictures.
    """
    count = len(source) if pictures is None else min(pictures, len(source))
    captions = np.flatnonzero(source.picture_of < count)
    scores: dict[str, list[Tensor]] = {}
    for start in range(0, count, picture_block):
        part = range(start, min(start + picture_block, count))
        for name, rows in score_rows(head, source, part, captions, device=device, caption_block=caption_block).items():
            scores.setdefault(name, []).append(rows)
        advance(len(part))
    return mean_of_directions({name: torch.cat(rows) for name, rows in scores.items()})


@torch.inference_mode()
def score_rows(
    head: nn.Module,
    source: Source,
    part: range,
    captions: NDArray[np.int64],
    *,
    device: str | torch.device = "cpu",
    caption_block: int = CAPTIONS,
) -> dict[str, Tensor]:
    """Scores (len(part), C) float32 by name of the pictures of `part` with `captions` (C,), rising.

    Captions go in order of length, so that little is computed for padding.
    """
    order = captions[np.argsort(source.lengths[captions], kind="stable")]
    scores: dict[str, Tensor] = {}
    head.eval()
    regions = [level.to(device) for level in source.regions(part)]
    for at in range(0, len(order), caption_block):
        columns = order[at : at + caption_block]
        words, mask = source.words(columns.tolist())
        found = head(regions, [level.to(device) for level in words], mask.to(device))
        for name, block in found.items():
            whole = scores.setdefault(name, torch.zeros(len(part), len(captions)))
            whole[:, torch.from_numpy(np.searchsorted(captions, columns))] = block.float().cpu()
    return scores


def mean_of_directions(scores: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, with `ensemble` beside both directions of HAT where there are both: HAT*."""
    return scores | {ENSEMBLE: (scores["i2t"] + scores["t2i"]) / 2} if {"i2t", "t2i"} <= scores.keys() else scores


class TwoStage(NamedTuple):
    """Scores of candidates alone, by name; what is no candidate of a query is minus infinity in its row."""

    first: Tensor  # (P, C) cosines that chose the candidates
    image_to_text: dict[str, Tensor]  # (P, C) each
    text_to_image: dict[str, Tensor]  # (C, P) each
    images: Tensor  # (P, D) the global vectors
    texts: Tensor  # (C, D)


def embed_all(
    head: Any, source: Source, *, device: str | torch.device = "cpu", caption_block: int = CAPTIONS
) -> tuple[Tensor, Tensor]:
    """The head's global vectors of all pictures (P, D) and captions (C, D), float32 on the CPU."""
    order = np.argsort(source.lengths, kind="stable")
    found = embed_captions(head, source, order, device=device, caption_block=caption_block)
    texts = torch.empty_like(found)
    texts[torch.from_numpy(order)] = found
    return embed_pictures(head, source, range(len(source)), device=device), texts


@torch.inference_mode()
def embed_pictures(head: Any, source: Source, part: range, *, device: str | torch.device = "cpu") -> Tensor:
    """The head's global vectors (len(part), D) of pictures, float32 on the CPU."""
    head.eval()
    found = [head.embed_images([level.to(device) for level in source.regions([one])]) for one in part]
    return torch.cat(found).float().cpu()


@torch.inference_mode()
def embed_captions(
    head: Any,
    source: Source,
    order: NDArray[np.int64],
    *,
    device: str | torch.device = "cpu",
    caption_block: int = CAPTIONS,
) -> Tensor:
    """The head's global vectors (c, D) of the captions `order` (c,), best by length, float32 on the CPU."""
    head.eval()
    found = []
    for at in range(0, len(order), caption_block):
        words, mask = source.words(order[at : at + caption_block].tolist())
        found.append(head.embed_texts([level.to(device) for level in words], mask.to(device)))
    return torch.cat(found).float().cpu()


def score_candidates(
    head: Any,
    source: Source,
    top: int,
    *,
    index: IndexSettings = EXACT,
    device: str | torch.device = "cpu",
    caption_block: int = CAPTIONS,
    advance: Callable[[int], None] = silent,
) -> TwoStage:
    """Each query's `top` candidates by the cosine of global vectors, scored by the head (VITR's turbo, section 3.6).

    An `index` that is approximate may miss some of the nearest; those it finds are scored like any.
    A pair that both of its sides ask for is scored once. With `top` at the number of captions all is as `score_all`.
    `advance` hears of pictures.
    """
    images, texts = embed_all(head, source, device=device, caption_block=caption_block)
    candidates = nearest(images, texts, top, index)
    pairs = candidates.pairs(range(len(source)))
    scores = score_pairs(head, source, pairs, device=device, caption_block=caption_block, advance=advance)
    return two_stage(images, texts, candidates, pairs, scores)


def nearest(images: Tensor, texts: Tensor, top: int, index: IndexSettings = EXACT) -> Candidates:
    """The `top` candidates of each picture and of each caption, by global vectors (P, D) and (C, D)."""
    sides = (VectorIndex(theirs, index).search(mine, top) for mine, theirs in ((images, texts), (texts, images)))
    return Candidates(*map(torch.from_numpy, sides))


@torch.inference_mode()
def score_pairs(
    head: Any,
    source: Source,
    pairs: tuple[Tensor, Tensor],
    *,
    device: str | torch.device = "cpu",
    caption_block: int = CAPTIONS,
    advance: Callable[[int], None] = silent,
) -> dict[str, Tensor]:
    """Scores (pairs,) float32 by name of `pairs`: picture indices, rising, and caption indices.

    `advance` hears of pictures.
    """
    scores: dict[str, Tensor] = {}
    picture, text = pairs
    for one in torch.unique(picture).tolist():
        low, high = torch.searchsorted(picture, torch.tensor([one, one + 1])).tolist()
        wanted = text[low:high].numpy()
        order = np.argsort(source.lengths[wanted], kind="stable")
        regions = [level.to(device) for level in source.regions([one])]
        for at in range(0, len(order), caption_block):
            places = order[at : at + caption_block]
            words, mask = source.words(wanted[places].tolist())
            found = head(regions, [level.to(device) for level in words], mask.to(device))
            for name, block in found.items():
                whole = scores.setdefault(name, torch.zeros(len(picture)))
                whole[torch.from_numpy(low + places)] = block[0].float().cpu()
        advance(1)
    return scores


def two_stage(
    images: Tensor,
    texts: Tensor,
    candidates: Candidates,
    pairs: tuple[Tensor, Tensor],
    scores: Mapping[str, Tensor],
) -> TwoStage:
    """Scores of pairs (pairs,) by name, as the matrices of both directions."""
    found = {name: candidates.scores(*pairs, values) for name, values in scores.items()}
    return TwoStage(
        images @ texts.T,
        mean_of_directions({name: one.image_to_text for name, one in found.items()}),
        mean_of_directions({name: one.text_to_image for name, one in found.items()}),
        images,
        texts,
    )


def as_if_candidates(scores: Tensor, first: Tensor, candidates: NDArray[np.int64]) -> Tensor:
    """Scores (Q, M) float64 as they rank when only the `candidates` (Q, N) were scored: all else follows by cosine.

    `first` (Q, M) holds the cosines. A right answer that is no candidate thus stands after all N of them.
    """
    return with_tail(only(scores, torch.from_numpy(candidates)), first)


def main_score(names: Sequence[str]) -> str:
    """The score that a model of several is judged by: the ensemble, VITR's, or the only one."""
    return next((name for name in (ENSEMBLE, "vitr") if name in names), next(iter(names)))


def recalls(
    scores: Mapping[str, Tensor | tuple[NDArray[Any], NDArray[Any]]], picture_of: NDArray[np.int64]
) -> dict[str, dict[str, float]]:
    """`recall_metrics` of each score, and ``r_sum``: the sum of the six recalls, in percent.

    A score is (P, C), or one matrix each way: (P, C) and (C, P). `picture_of` is of these captions alone.
    """
    found = {}
    for name, given in scores.items():
        both = (given.numpy(), given.numpy().T) if isinstance(given, Tensor) else given
        metrics = recall_metrics(retrieval_ranks(*both, picture_of))
        found[name] = metrics | {"r_sum": 6 * metrics["r_mean"]}
    return found
