"""The last features of the momentum teacher, as extra pairs for the contrastive loss (ALBEF §3.2)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NO_IMAGE = -100  # the image id of a row that no picture has filled; real ids are never negative


class FeatureQueue(nn.Module):
    """Ring buffers of the newest `size` image and text features, columns of (E, K), and their image ids (K,).

    They start as random unit vectors, as published. A batch may wrap around the end, and may be larger than the ring;
    a ring of size 0 keeps nothing, for trainings so short that old features would only tell new ones apart from old.
    """

    images: Tensor
    texts: Tensor
    ids: Tensor
    pointer: Tensor

    def __init__(self, embed_dim: int, size: int) -> None:
        super().__init__()
        self.register_buffer("images", F.normalize(torch.randn(embed_dim, size), dim=0))
        self.register_buffer("texts", F.normalize(torch.randn(embed_dim, size), dim=0))
        self.register_buffer("ids", torch.full((size,), NO_IMAGE))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def push(self, images: Tensor, texts: Tensor, ids: Tensor | None = None) -> None:
        """Overwrite the oldest columns with features (B, E), and with image ids (B,) where the caller has them."""
        rows, size = images.shape[0], self.ids.shape[0]
        if size == 0:
            return
        slots = ((self.pointer + torch.arange(rows, device=self.pointer.device)) % size)[-size:]
        self.images[:, slots] = images[-size:].T.to(self.images.dtype)
        self.texts[:, slots] = texts[-size:].T.to(self.texts.dtype)
        if ids is not None:
            self.ids[slots] = ids[-size:]
        self.pointer.copy_((self.pointer + rows) % size)
