"""Two linear projections of the towers' pooled outputs, or a CLIP's own vectors among them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.dual.config import DualConfig

MAX_SCALE = 100.0


def mean_words(words: Tensor, mask: Tensor) -> Tensor:
    """(C, n, d) and mask (C, n) to the mean word (C, d); (C, 1, d), a caption's own vector, is that whatever n is."""
    if words.shape[1] == 1:
        return words[:, 0]
    weights = mask.to(words.dtype)[:, :, None]
    return (words * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


class DualHead(nn.Module):
    """Cosine of two projections, of the mean regions and the mean words of the towers' last or chosen levels.

    Without `config.projection`, of the first level's vectors as they are. Raises ValueError when `config.levels` names
    a level that a tower does not give, and when the first levels are not of one width, so that they cannot be compared.
    """

    def __init__(self, config: DualConfig, image_widths: Sequence[int], text_widths: Sequence[int]) -> None:
        super().__init__()
        scale = torch.tensor(-math.log(config.temperature))
        self.log_scale = nn.Parameter(scale, requires_grad=config.learn_temperature)
        self.projection = config.projection
        if not config.projection:
            if image_widths[0] != text_widths[0]:
                raise ValueError(
                    f"projection is false, but the first levels are {image_widths[0]} and {text_widths[0]} wide: that "
                    "takes towers with `clip`"
                )
            return
        fewest = min(len(image_widths), len(text_widths))
        if max(config.levels, default=1) > fewest:
            raise ValueError(f"levels names {max(config.levels)}, the towers give {fewest} levels")
        self.chosen = [level - 1 for level in config.levels] or [-1]
        self.image_norms, self.text_norms = (
            nn.ModuleList(nn.LayerNorm(widths[level - 1]) for level in config.levels)
            for widths in (image_widths, text_widths)
        )
        self.image = nn.Linear(sum(image_widths[level] for level in self.chosen), config.width)
        self.text = nn.Linear(sum(text_widths[level] for level in self.chosen), config.width)
        self.dropout = nn.Dropout(config.dropout)

    def _join(self, means: Sequence[Tensor], norms: nn.ModuleList) -> Tensor:
        """The means (B, d) of chosen levels, side by side."""
        if len(norms):
            means = [norm(mean) for norm, mean in zip(norms, means, strict=True)]
        joined: Tensor = self.dropout(torch.cat(list(means), dim=1))
        return joined

    def embed_images(self, regions: Sequence[Tensor]) -> Tensor:
        """(P, width), of length 1, from each level's (P, k, d)."""
        if not self.projection:
            return F.normalize(regions[0].mean(dim=1), dim=1)
        means = [regions[level].mean(dim=1) for level in self.chosen]
        return F.normalize(self.image(self._join(means, self.image_norms)), dim=1)

    def embed_texts(self, words: Sequence[Tensor], mask: Tensor) -> Tensor:
        """(C, width), of length 1, from each level's (C, n, d)."""
        if not self.projection:
            return F.normalize(mean_words(words[0], mask), dim=1)
        means = [mean_words(words[level], mask) for level in self.chosen]
        return F.normalize(self.text(self._join(means, self.text_norms)), dim=1)

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
