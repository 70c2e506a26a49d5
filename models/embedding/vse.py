"""VSE∞: sorted features, pooled by weights that are learned for each rank (Chen et al., CVPR 2021, section 3).

"Learning the Best Pooling Strategy for Visual Semantic Embedding". Mean and maximum are two settings of the weights.

Shapes: P pictures, C captions, k regions, n words (padded), E the common width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.embedding.config import VseConfig


class GeneralisedPooling(nn.Module):
    """A weighted sum of each feature's values in falling order; weights depend on rank and number alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.score = nn.Linear(width, 1, bias=False)

    def weights(self, counts: Tensor) -> Tensor:
        """Of each rank, for sets of so many members: counts (B,) at least 1, to (B, max count); past a count 0."""
        sizes, place = counts.unique(return_inverse=True)  # few, since what else the weights depend on is learned
        longest = int(sizes.max())
        code = _positions(longest, self.width).to(self.score.weight)
        packed = nn.utils.rnn.pack_padded_sequence(
            code.expand(len(sizes), -1, -1), sizes.cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=longest)
        forward, backward = states.chunk(2, dim=2)
        logits = self.score((forward + backward) / 2)[:, :, 0]
        outside = torch.arange(longest, device=counts.device) >= sizes[:, None]
        return logits.masked_fill(outside, float("-inf")).softmax(dim=1)[place]

    def forward(self, members: Tensor, mask: Tensor) -> Tensor:
        """Members (B, n, E) with mask (B, n), true where there is one, at least one a row; to (B, E)."""
        ordered = members.masked_fill(~mask[:, :, None], float("-inf")).sort(dim=1, descending=True).values
        weights = self.weights(mask.sum(dim=1))
        ordered = ordered[:, : weights.shape[1]]
        ordered = ordered.masked_fill(ordered.isinf(), 0)  # a weight of 0 does not undo an infinity
        return (weights[:, :, None] * ordered).sum(dim=1)


def _positions(count: int, width: int) -> Tensor:
    """The Transformer's position code (count, width)."""
    steps = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    angles = torch.arange(count)[:, None] * steps
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


class VseHead(nn.Module):
    """Cosine of the pooled regions and words of the towers' last levels, as `similarity`."""

    def __init__(self, config: VseConfig, image_widths: Sequence[int], text_widths: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.image = nn.Linear(image_widths[-1], config.width)
        self.image_mlp = nn.Sequential(
            nn.Linear(image_widths[-1], config.width // 2 or 1),
            nn.ReLU(),
            nn.Linear(config.width // 2 or 1, config.width),
        )
        self.text = nn.Linear(text_widths[-1], config.width)
        self.image_pool = GeneralisedPooling(config.position_width)
        self.text_pool = GeneralisedPooling(config.position_width)

    def embed_images(self, regions: Sequence[Tensor]) -> Tensor:
        """(P, E), of length 1, from each level's (P, k, d), of which the last is used."""
        last = regions[-1]
        members = self.image(last) + self.image_mlp(last)
        return F.normalize(self.image_pool(members, self._some(last.new_ones(last.shape[:2], dtype=torch.bool))), dim=1)

    def embed_texts(self, words: Sequence[Tensor], mask: Tensor) -> Tensor:
        """(C, E), of length 1, from each level's (C, n, d) with mask (C, n), of which the last is used."""
        return F.normalize(self.text_pool(self.text(words[-1]), self._some(mask.bool())), dim=1)

    def _some(self, mask: Tensor) -> Tensor:
        """The mask without the members that this training step leaves out; one a row stays."""
        if not self.training or self.config.drop == 0:
            return mask
        draws = torch.rand(mask.shape, device=mask.device).masked_fill(~mask, -1)
        first = F.one_hot(draws.argmax(dim=1), mask.shape[1]).bool()
        return mask & ((draws >= self.config.drop) | first)

    def forward(self, regions: Sequence[Tensor], words: Sequence[Tensor], mask: Tensor) -> dict[str, Tensor]:
        """Cosines (P, C) as `similarity`."""
        return {"similarity": self.embed_images(regions) @ self.embed_texts(words, mask).T}
