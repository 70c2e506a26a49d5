"""Search by single queries: candidates from an index of global vectors, scored by the head (VITR's turbo, section 3.6).

Of the collection only global vectors are at hand; words of captions and regions of pictures are asked for where they
are candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.evaluation.tower_scoring import Source, main_score, mean_of_directions
from components.evaluation.vector_index import EXACT, IndexSettings, VectorIndex

CANDIDATES = 200  # N of table 5, with which table 6 loses nothing
CAPTIONS, PICTURES = 1024, 64  # scored at once with one picture, with one caption


class Ranked(NamedTuple):
    """What one query found, best first by score, equal scores by cosine."""

    places: NDArray[np.int64]  # (N,) positions in the collection
    scores: NDArray[np.float32]  # (N,) the model's main score (`main_score`)
    cosines: NDArray[np.float32]  # (N,) of global vectors


class TowerSearch:
    """Pictures for a caption and captions for a picture, in the collection that `source` reads.

    Args:
        head: of a HAT, VITR or baseline, in evaluation mode.
        source: the collection's outputs of the towers; read for candidates alone.
        images: (P, D) global vectors of its pictures, as `embed_all` gives them.
        texts: (C, D) of its captions.
        index: how candidates are found.
        device: where the head is.

    Raises ValueError when there are not as many vectors as pictures and captions, or one is not finite.
    """

    def __init__(
        self,
        head: Any,
        source: Source,
        images: Tensor,
        texts: Tensor,
        *,
        index: IndexSettings = EXACT,
        device: str | torch.device = "cpu",
    ) -> None:
        if (len(images), len(texts)) != (len(source), len(source.picture_of)):
            sizes = f"{len(source)} pictures with {len(source.picture_of)} captions"
            raise ValueError(f"{len(images)} and {len(texts)} vectors for {sizes}")
        self.head, self.source, self.device = head, source, device
        self._images, self._texts, self._settings = images, texts, index

    @cached_property
    def picture_index(self) -> VectorIndex:
        """The index of all pictures."""
        return VectorIndex(self._images, self._settings)

    @cached_property
    def caption_index(self) -> VectorIndex:
        """The index of all captions."""
        return VectorIndex(self._texts, self._settings)

    @torch.inference_mode()
    def captions_for(self, regions: Sequence[Tensor], candidates: int | None = CANDIDATES) -> list[Ranked]:
        """The captions of each picture, from its regions (Q, k, width) of each level.

        As many are scored as `candidates` says, all where it is None or more than there are.
        """
        levels = [level.to(self.device) for level in regions]
        vectors = self.head.embed_images(levels).float().cpu()
        return [
            self._rank(places, vectors[query], self._texts, self._score_captions([one[query, None] for one in levels]))
            for query, places in enumerate(self._candidates(vectors, lambda: self.caption_index, candidates))
        ]

    @torch.inference_mode()
    def pictures_for(self, words: Sequence[Tensor], mask: Tensor, candidates: int | None = CANDIDATES) -> list[Ranked]:
        """The pictures of each caption, from its words (Q, n, width) of each level and their mask (Q, n)."""
        levels, mask = [level.to(self.device) for level in words], mask.to(self.device)
        vectors = self.head.embed_texts(levels, mask).float().cpu()
        return [
            self._rank(
                places,
                vectors[query],
                self._images,
                self._score_pictures([one[query, None] for one in levels], mask[query, None]),
            )
            for query, places in enumerate(self._candidates(vectors, lambda: self.picture_index, candidates))
        ]

    @staticmethod
    def _candidates(
        vectors: Tensor, index: Callable[[], VectorIndex], count: int | None
    ) -> Sequence[NDArray[np.int64] | None]:
        """Each query's candidates; None where all are to be scored, for which no index is needed."""
        return [None] * len(vectors) if count is None else list(index().search(vectors, count))

    def _rank(
        self,
        places: NDArray[np.int64] | None,
        vector: Tensor,
        collection: Tensor,
        score: Callable[[NDArray[np.int64]], Tensor],
    ) -> Ranked:
        if places is None:
            cosines = collection @ vector
            places = cosines.argsort(descending=True, stable=True).numpy()
        else:
            cosines = torch.zeros(len(collection))
            cosines[places] = collection[places] @ vector
        scores = score(places)
        order = scores.argsort(descending=True, stable=True).numpy()  # candidates come by cosine, so ties keep it
        chosen = places[order]
        return Ranked(chosen, scores.numpy()[order], cosines.numpy()[chosen])

    def _score_captions(self, regions: list[Tensor]) -> Callable[[NDArray[np.int64]], Tensor]:
        """The scores (N,) float32 of one picture with captions by their positions."""

        def score(places: NDArray[np.int64]) -> Tensor:
            scores = torch.zeros(len(places))
            order = np.argsort(self.source.lengths[places], kind="stable")  # little padding in a block
            for at in range(0, len(order), CAPTIONS):
                chosen = order[at : at + CAPTIONS]
                words, mask = self.source.words(places[chosen].tolist())
                found = self._main(regions, [level.to(self.device) for level in words], mask.to(self.device))
                scores[torch.from_numpy(chosen)] = found[0]
            return scores

        return score

    def _score_pictures(self, words: list[Tensor], mask: Tensor) -> Callable[[NDArray[np.int64]], Tensor]:
        """The scores (N,) float32 of one caption with pictures by their positions."""

        def score(places: NDArray[np.int64]) -> Tensor:
            blocks = [
                self._main(
                    [level.to(self.device) for level in self.source.regions(places[at : at + PICTURES].tolist())],
                    words,
                    mask,
                )[:, 0]
                for at in range(0, len(places), PICTURES)
            ]
            return torch.cat(blocks)

        return score

    def _main(self, regions: list[Tensor], words: list[Tensor], mask: Tensor) -> Tensor:
        scores = mean_of_directions(self.head(regions, words, mask))
        return scores[main_score(list(scores))].float().cpu()
