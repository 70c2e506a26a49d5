"""Two linear projections of the towers' pooled outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.dual.config import DualConfig

MAX_SCALE = 100.0


def mean_words(words: Tensor, mask: Tensor) -> Tensor:
    """(C, n, d) and mask (C, n) to the mean word (C, d)."""
    weights = mask.to(words.dtype)[:, :, None]
    return (words * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


class DualHead(nn.Module):
    """Cosine of two projections, of the mean region and the mean word of the towers' last levels."""

    def __init__(self, config: DualConfig, image_widths: Sequence[int], text_widths: Sequence[int]) -> None:
        super().__init__()
        self.image = nn.Linear(image_widths[-1], config.width)
        self.text = nn.Linear(text_widths[-1], config.width)
        scale = torch.tensor(-math.log(config.temperature))
        self.log_scale = nn.Parameter(scale, requires_grad=config.learn_temperature)

    def embed_images(self, regions: Sequence[Tensor]) -> Tensor:
        """(P, width), of length 1, from each level's (P, k, d), of which the last is used."""
        return F.normalize(self.image(regions[-1].mean(dim=1)), dim=1)

    def embed_texts(self, words: Sequence[Tensor], mask: Tensor) -> Tensor:
        """(C, width), of length 1, from each level's (C, n, d), of which the last is used."""
        return F.normalize(self.text(mean_words(words[-1], mask)), dim=1)

    def forward(self, regions: Sequence[Tensor], words: Sequence[Tensor], mask: Tensor) -> dict[str, Tensor]:
        """Cosines (P, C) as `similarity`."""
        return {"similarity": self.embed_images(regions) @ self.embed_texts(words, mask).T}

    @property
    def scale(self) -> Tensor:
        """The inverse temperature, at most 100."""
        return self.log_scale.exp().clamp(max=MAX_SCALE)


def info_nce(similarity: Tensor, image_ids: Tensor, scale: Tensor | float) -> Tensor:
    """The contrastive loss of both directions, a scalar; all captions of a picture are its positives, equally.

    Args:
        similarity: (B, B), row p the cosines of picture p with every caption; pairs stand on the diagonal.
        image_ids: (B,) equal for captions of one picture.
        scale: the inverse temperature.

    Raises:
        ValueError: when the batch holds one picture only, since then there is no negative.

    """
    related = image_ids[:, None] == image_ids[None]
    if bool(related.all()):
        raise ValueError("the batch holds one picture only, so no pair has a negative: use a larger batch")
    targets = related / related.sum(dim=1, keepdim=True)
    logits = similarity * scale
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
