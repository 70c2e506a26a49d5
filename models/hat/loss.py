"""The triplet ranking loss with hardest negatives (HAT section 3.4; margin 0.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def hardest_triplet_loss(scores: Tensor, image_ids: Tensor, margin: float = 0.2) -> Tensor:
    """Sum over the batch of the hardest caption's and the hardest picture's violation of the margin; a scalar.

    Args:
        scores: (B, B), row p the scores of picture p with every caption; pairs stand on the diagonal.
        image_ids: (B,) pairs with the same id are no negatives of each other.
        margin: how much a pair must score above its hardest negative.

    Raises:
        ValueError: when the batch holds one picture only, since then there is no negative.

    """
    related = image_ids[:, None] == image_ids[None]
    if bool(related.all()):
        raise ValueError("the batch holds one picture only, so no pair has a negative: use a larger batch")
    positive = scores.diagonal()
    captions = (margin + scores - positive[:, None]).relu().masked_fill(related, 0).amax(dim=1)
    pictures = (margin + scores - positive[None]).relu().masked_fill(related, 0).amax(dim=0)
    return torch.sum(captions) + torch.sum(pictures)
