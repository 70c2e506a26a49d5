"""LSEH: hardest-negative loss with a margin that grows as two captions are alike (VITR section 3.5, eq. 20 to 22)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def semantic_vectors(captions: Sequence[str], values: int, seed: int = 0) -> Tensor:
    """The captions' reduced term vectors D' (eq. 22), (m, values) in float64.

    Terms are the lower-cased words between blanks, counted; the matrix is sparse and its truncated SVD exact (ARPACK).
    Raises ValueError unless there are more captions and more distinct terms than `values`.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import CountVectorizer

    counts = CountVectorizer(token_pattern=r"\S+", lowercase=True, dtype="float64").fit_transform(captions)
    if values >= min(counts.shape):
        raise ValueError(
            f"{values} singular values from {counts.shape[0]} captions with {counts.shape[1]} distinct terms: "
            f"choose at most {min(counts.shape) - 1}"
        )
    svd = TruncatedSVD(n_components=values, algorithm="arpack", random_state=seed)
    return torch.from_numpy(svd.fit(counts).transform(counts))


class Pool(NamedTuple):
    """Pairs from beyond the batch that are negatives alone."""

    to_captions: Tensor  # (B, N) scores of the batch's pictures with the pool's captions
    to_pictures: Tensor  # (B, N) scores of the batch's captions with the pool's pictures
    semantic: Tensor  # (N, d5) reduced term vectors of its captions
    image_ids: Tensor  # (N,)


def lseh_loss(
    scores: Tensor,
    semantic: Tensor,
    image_ids: Tensor,
    pool: Pool | None = None,
    *,
    margin: float = 0.185,
    temperature: float = 0.025,
) -> Tensor:
    """Loss per pair, (B,): hardest caption for each picture plus hardest picture for each caption (eq. 20, 21).

    Args:
        scores: (B, B), row p the scores of picture p with every caption of the batch.
        semantic: (B, d5) reduced term vectors of the captions.
        image_ids: (B,) pairs with the same id are no negatives of each other.
        pool: further negatives, among which the hardest is looked for as well; None: the batch's own.
        margin: alpha.
        temperature: lambda, the weight of the captions' cosine similarity.

    Raises:
        ValueError: when no pair has a negative (one picture only).

    """
    others = image_ids if pool is None else torch.cat([image_ids, pool.image_ids])
    related = image_ids[:, None] == others[None]  # (B, B + N)
    if bool(related.all()):
        raise ValueError("the batch holds one picture only, so no pair has a negative: use a larger batch")
    unit = F.normalize(semantic, dim=1)
    units, positive = unit, scores.diagonal()[:, None]  # (B, 1)
    captions, pictures = scores, scores.T
    if pool is not None:
        units = torch.cat([unit, F.normalize(pool.semantic, dim=1)])
        captions, pictures = torch.cat([scores, pool.to_captions], 1), torch.cat([scores.T, pool.to_pictures], 1)
    factor = margin + temperature * (unit @ units.T).to(scores.dtype)  # (B, B + N)
    to_captions = (factor + captions - positive).relu().masked_fill(related, 0)
    to_pictures = (factor + pictures - positive).relu().masked_fill(related, 0)
    return to_captions.amax(dim=1) + to_pictures.amax(dim=1)
