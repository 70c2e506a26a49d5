"""VSRN++: regions reason over their affinities, then a GRU sums each side up (Li et al., TPAMI 2022, section 3).

The published network also learns to write the caption from the picture; that part is left out here: VITR's paper takes
it for its reasoning over regions.

Shapes: P pictures, C captions, k regions, n words (padded), E the common width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from models.embedding.config import VsrnConfig


class RegionGraph(nn.Module):
    """One graph convolution with a residual: V* = W_r (R V W_g) + V, R the regions' affinities over their number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)  # as published: at first the regions pass as they are
        nn.init.zeros_(self.out.bias)

    def forward(self, regions: Tensor) -> Tensor:
        """(P, k, E) to (P, k, E)."""
        affinities = self.query(regions) @ self.key(regions).transpose(1, 2) / regions.shape[1]  # (P, k, k)
        reasoned: Tensor = self.out(affinities @ self.value(regions)) + regions
        return reasoned


class VsrnHead(nn.Module):
    """Cosine of what two GRUs make of reasoned regions and of words of the towers' last levels, as `similarity`."""

    def __init__(self, config: VsrnConfig, image_widths: Sequence[int], text_widths: Sequence[int]) -> None:
        super().__init__()
        self.image = nn.Linear(image_widths[-1], config.width)
        self.reasoning = nn.Sequential(*(RegionGraph(config.width) for _ in range(config.reasoning_steps)))
        self.image_gru = nn.GRU(config.width, config.width, batch_first=True)
        self.text_gru = nn.GRU(text_widths[-1], config.width, batch_first=True)

    def embed_images(self, regions: Sequence[Tensor]) -> Tensor:
        """(P, E), of length 1, from each level's (P, k, d), of which the last is used."""
        reasoned = F.normalize(self.reasoning(self.image(regions[-1])), dim=2)
        return F.normalize(self.image_gru(reasoned)[1][0], dim=1)

    def embed_texts(self, words: Sequence[Tensor], mask: Tensor) -> Tensor:
        """(C, E), of length 1, from each level's (C, n, d) with mask (C, n), of which the last is used."""
        packed = pack_padded_sequence(words[-1], mask.sum(dim=1).cpu(), batch_first=True, enforce_sorted=False)
        return F.normalize(self.text_gru(packed)[1][0], dim=1)

    def forward(self, regions: Sequence[Tensor], words: Sequence[Tensor], mask: Tensor) -> dict[str, Tensor]:
        """Cosines (P, C) as `similarity`."""
        return {"similarity": self.embed_images(regions) @ self.embed_texts(words, mask).T}
