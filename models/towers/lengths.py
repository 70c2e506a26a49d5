"""Captions of like length together, so that scoring computes little for padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def caption_lengths(mask: Tensor) -> Tensor:
    """The place (C,) int64 after each caption's last word, from its mask (C, n).

    Raises ValueError when a caption has no word.
    """
    lengths = (mask.bool() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)
    if not bool(lengths.all()):
        raise ValueError("a caption has no word: leave it out before scoring")
    return lengths


def score_by_length(mask: Tensor, captions: int, score: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Scores (P, C) that `score` gives for blocks of captions, put back into the captions' order.

    Args:
        mask: (C, n), true or 1 where a word stands; at least one word a caption.
        captions: the most in a block.
        score: from the positions (c,) of some captions and the place after the last word of any, to (P, c).

    Raises:
        ValueError: when a caption has no word.

    """
    lengths = caption_lengths(mask)
    order = lengths.argsort(stable=True)
    blocks = order.split(captions)
    longest = lengths[torch.stack([block[-1] for block in blocks])].tolist()
    return torch.cat([score(*block) for block in zip(blocks, longest, strict=True)], dim=1)[:, order.argsort()]
