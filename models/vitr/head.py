"""VITR over two towers: a dual encoder's global vectors, reasoned regions and words, fused into one score.

The paper's dual encoder is CLIP, pre-trained: the towers' first level (`VitrHeadConfig.projection` false). Where there
is none, two linear projections of the towers' pooled outputs take its place and learn beside the rest, from a
contrastive loss of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.dual.config import DualConfig
from models.dual.model import DualHead
from models.vitr.config import VitrConfig
from models.vitr.head_config import VitrHeadConfig
from models.vitr.model import Vitr


class VitrHead(nn.Module):
    """The score of eq. 19 as `vitr`, and the dual encoder's cosine as `similarity`."""

    def __init__(self, config: VitrHeadConfig, image_widths: Sequence[int], text_widths: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        width = text_widths[-1]  # d1: words and global vectors are of one width
        if not config.projection and text_widths[0] != width:
            raise ValueError(f"words are {width} wide and global vectors {text_widths[0]}, where VITR has one d1")
        dual = DualConfig(
            projection=config.projection,
            width=width,
            temperature=config.temperature,
            levels=config.dual_levels,
            dropout=config.dropout if config.projection else 0,
        )
        self.dual = DualHead(dual, image_widths, text_widths)
        self.dropout = nn.Dropout(config.dropout)
        shared = config.model_dump(exclude={"use_global", "projection", "temperature", "dual_levels", "dropout"})
        self.vitr = Vitr(VitrConfig(global_width=width, region_width=image_widths[-1], **shared))

    def forward(self, regions: Sequence[Tensor], words: Sequence[Tensor], mask: Tensor) -> dict[str, Tensor]:
        """Scores (P, C) of pictures (P, k, d2) with captions (C, n, d1) of the last levels."""
        images, texts = self.dual.embed_images(regions), self.dual.embed_texts(words, mask)
        similarity = images @ texts.T
        if not self.config.use_global:
            images, texts = torch.zeros_like(images), torch.zeros_like(texts)
        scores = self.vitr(self.dropout(regions[-1]), images, self.dropout(words[-1]), mask, texts)
        return {"vitr": scores, "similarity": similarity}

    def embed_images(self, regions: Sequence[Tensor]) -> Tensor:
        """The dual encoder's vectors (P, d1), of length 1: what the turbo module compares (section 3.6)."""
        return self.dual.embed_images(regions)

    def embed_texts(self, words: Sequence[Tensor], mask: Tensor) -> Tensor:
        """Likewise (C, d1)."""
        return self.dual.embed_texts(words, mask)
