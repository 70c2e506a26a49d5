"""Scores of every picture against every caption by a head over two towers, in blocks of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from components.evaluation.retrieval import recall_metrics, retrieval_ranks
from components.evaluation.scoring import OUTSIDE
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
    return mean_of_directions(scores)


def mean_of_directions(scores: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, with `ensemble` beside both directions of HAT where there are both: HAT*."""
    return scores | {ENSEMBLE: (scores["i2t"] + scores["t2i"]) / 2} if {"i2t", "t2i"} <= scores.keys() else scores


class TwoStage(NamedTuple):
    """Scores of candidates alone, by name; what is no candidate of a query is `OUTSIDE` in its row."""

    first: Tensor  # (P, C) cosines that chose the candidates
    image_to_text: dict[str, Tensor]  # (P, C) each
    text_to_image: dict[str, Tensor]  # (C, P) each
    images: Tensor  # (P, D) the global vectors
    texts: Tensor  # (C, D)


@torch.inference_mode()
def embed_all(
    head: Any, source: Source, *, device: str | torch.device = "cpu", caption_block: int = CAPTIONS
) -> tuple[Tensor, Tensor]:
    """The head's global vectors of all pictures (P, D) and captions (C, D), float32 on the CPU."""
    head.eval()
    images = [head.embed_images([level.to(device) for level in source.regions([one])]) for one in range(len(source))]
    order = np.argsort(source.lengths, kind="stable")
    texts: Tensor | None = None
    for at in range(0, len(order), caption_block):
        columns = order[at : at + caption_block]
        words, mask = source.words(columns.tolist())
        found = head.embed_texts([level.to(device) for level in words], mask.to(device))
        texts = found.new_zeros(len(order), found.shape[1]) if texts is None else texts
        texts[torch.from_numpy(columns)] = found
    assert texts is not None  # a split has captions
    return torch.cat(images).float().cpu(), texts.float().cpu()


@torch.inference_mode()
def score_candidates(
    head: Any,
    source: Source,
    top: int,
    *,
    device: str | torch.device = "cpu",
    caption_block: int = CAPTIONS,
    advance: Callable[[int], None] = silent,
) -> TwoStage:
    """Each query's `top` candidates by the cosine of global vectors, scored by the head (VITR's turbo, section 3.6).

    A pair that both of its sides ask for is scored once. With `top` at the number of captions all is as `score_all`.
    `advance` hears of pictures.
    """
    count, captions = len(source), len(source.picture_of)
    images, texts = embed_all(head, source, device=device, caption_block=caption_block)
    first = images @ texts.T  # (P, C)
    asked = torch.zeros_like(first, dtype=torch.bool).scatter_(1, first.topk(min(top, captions), dim=1).indices, True)
    asking = torch.zeros_like(first.T, dtype=torch.bool).scatter_(
        1, first.T.topk(min(top, count), dim=1).indices, True
    )  # (C, P)
    result = TwoStage(first, {}, {}, images, texts)
    for picture in range(count):
        regions = [level.to(device) for level in source.regions([picture])]
        wanted = torch.nonzero(asked[picture] | asking[:, picture])[:, 0].numpy()
        wanted = wanted[np.argsort(source.lengths[wanted], kind="stable")]
        for at in range(0, len(wanted), caption_block):
            columns = wanted[at : at + caption_block]
            words, mask = source.words(columns.tolist())
            found_scores = head(regions, [level.to(device) for level in words], mask.to(device))
            for name, block in found_scores.items():
                for whole, shape in ((result.image_to_text, first.shape), (result.text_to_image, first.T.shape)):
                    whole.setdefault(name, torch.full(shape, OUTSIDE))
                row, places = block[0].float().cpu(), torch.from_numpy(columns)
                mine, theirs = asked[picture, places], asking[places, picture]
                result.image_to_text[name][picture, places[mine]] = row[mine]
                result.text_to_image[name][places[theirs], picture] = row[theirs]
        advance(1)
    return result._replace(
        image_to_text=mean_of_directions(result.image_to_text), text_to_image=mean_of_directions(result.text_to_image)
    )


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
