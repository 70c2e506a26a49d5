"""HAT: regions and words of several depths, aligned level by level (HAT sections 3.2 and 3.3).

Each image level has a LayerNorm and a projection, each text level a projection (BERT's layers end with a LayerNorm of
their own). The head reads the towers' outputs, so that it learns from cached ones as from fresh ones.

Shapes: P pictures, C captions, k regions and n words (padded) of a level, d the common width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.dual.model import mean_words
from models.hat.config import HatHeadConfig
from models.hat.cross_attention import Direction, cross_attention_scores

Levels = Sequence[Tensor]
Item = TypeVar("Item")


class HatDirection(nn.Module):
    """One direction of cross attention with projections of its own: HAT(i-t) or HAT(t-i)."""

    def __init__(
        self, config: HatHeadConfig, direction: Direction, image_widths: Sequence[int], text_widths: Sequence[int]
    ) -> None:
        super().__init__()
        self.config, self.direction = config, direction
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in image_widths)
        self.image = nn.ModuleList(nn.Linear(width, config.width) for width in image_widths)
        self.text = nn.ModuleList(nn.Linear(width, config.width) for width in text_widths)
        self.dropout = nn.Dropout(config.dropout)
        for projection in (*self.image, *self.text):
            nn.init.normal_(projection.weight, std=0.02)
            nn.init.zeros_(projection.bias)

    def project_images(self, regions: Levels) -> list[Tensor]:
        """(P, k, width) of each level to (P, k, d)."""
        parts = zip(self.image, self.norms, regions, strict=True)
        return [project(self.dropout(norm(level))) for project, norm, level in parts]

    def project_texts(self, words: Levels) -> list[Tensor]:
        """(C, n, width) of each level to (C, n, d)."""
        return [project(self.dropout(level)) for project, level in zip(self.text, words, strict=True)]

    def align(self, regions: Levels, words: Levels, mask: Tensor) -> Tensor:
        """Scores (P, C): the levels' sum, from projected regions (P, k, d) and words (C, n, d) with mask (C, n)."""
        scores = [
            cross_attention_scores(
                image,
                text,
                mask,
                self.direction,
                smoothing=self.config.smoothing,
                clip=self.config.clip,
            )
            for image, text in zip(regions, words, strict=True)
        ]
        return torch.stack(scores).sum(dim=0)


class HatHead(nn.Module):
    """One or both directions over chosen levels of two towers.

    Raises ValueError when the towers have fewer levels than `config.levels` names, or unequally many.
    """

    def __init__(self, config: HatHeadConfig, image_widths: Sequence[int], text_widths: Sequence[int]) -> None:
        super().__init__()
        if len(image_widths) != len(text_widths):
            raise ValueError(f"{len(image_widths)} stages and {len(text_widths)} layers make no pairs of levels")
        if max(config.levels) > len(image_widths):
            raise ValueError(f"levels names {max(config.levels)}, the towers give {len(image_widths)} levels")
        self.config = config
        chosen: tuple[Direction, ...] = ("i2t", "t2i") if config.direction == "both" else (config.direction,)
        self.directions = nn.ModuleDict(
            {
                name: HatDirection(config, name, self.pick(image_widths), self.pick(text_widths))  # type: ignore[type-var]
                for name in chosen
            }
        )

    def pick(self, levels: Sequence[Item]) -> list[Item]:
        """Those of the towers' levels that are aligned."""
        return [levels[level - 1] for level in self.config.levels]

    def forward(self, regions: Levels, words: Levels, mask: Tensor) -> dict[str, Tensor]:
        """Scores (P, C) of each direction, by name; and `similarity`, of mean regions and words, where it is pooled.

        Args:
            regions: the image tower's levels, (P, k, width) each.
            words: the text tower's levels, (C, n, width) each.
            mask: (C, n), true or 1 where a word stands; at least one word a caption.

        """
        image, text = self.pick(regions), self.pick(words)
        scores, images, texts = {}, [], []
        for name, direction in self.directions.items():
            assert isinstance(direction, HatDirection)
            seen, read = direction.project_images(image), direction.project_texts(text)
            scores[name] = direction.align(seen, read, mask)
            if self.config.pooled:
                images += _mean_regions(seen)
                texts += _mean_words(read, mask)
        if self.config.pooled:
            scores["similarity"] = torch.cat(images, dim=1) @ torch.cat(texts, dim=1).T / len(images)
        return scores

    def embed_images(self, regions: Levels) -> Tensor:
        """(P, D): the mean projected region of each level and direction, side by side; for choosing candidates."""
        chosen = self.pick(regions)
        directions = self.directions.values()
        means = [mean for one in directions for mean in _mean_regions(one.project_images(chosen))]  # type: ignore[operator]
        return torch.cat(means, dim=1)

    def embed_texts(self, words: Levels, mask: Tensor) -> Tensor:
        """(C, D): the mean projected word of each level and direction, as `embed_images`."""
        chosen = self.pick(words)
        directions = self.directions.values()
        means = [mean for one in directions for mean in _mean_words(one.project_texts(chosen), mask)]  # type: ignore[operator]
        return torch.cat(means, dim=1)


def _mean_regions(levels: Levels) -> list[Tensor]:
    """(P, k, d) of each level to the mean (P, d), of length 1."""
    return [F.normalize(level.mean(dim=1), dim=1) for level in levels]


def _mean_words(levels: Levels, mask: Tensor) -> list[Tensor]:
    """(C, n, d) of each level to the mean (C, d), of length 1."""
    return [F.normalize(mean_words(level, mask), dim=1) for level in levels]


def ensemble(scores: Sequence[Tensor]) -> Tensor:
    """HAT*: the mean of the directions' similarities, (P, C)."""
    return torch.stack(list(scores)).mean(dim=0)
