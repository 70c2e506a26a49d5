"""Stacked cross attention between regions and words, for every picture with every caption (HAT section 3.3).

The published functions loop over captions and build the attended vectors of width d. Here captions and pictures are
batched, and the attended vectors are never built: with S = regions x words (dot products), attention a over regions and
G = regions x regions, the cosine of word w with its attended vector is (a . S_w) / (|w| sqrt(a' G a)), which costs k
instead of d per weight. The same holds with regions and words exchanged.

Shapes: P pictures, C captions, k regions, n words (padded), d the common width of a level.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from models.towers.lengths import score_by_length

Direction = Literal["i2t", "t2i"]  # i2t: regions attend to words; t2i: words attend to regions
Clip = Literal["leaky", "relu"]  # the published code's LeakyReLU(0.1), or the paper's max(x, 0)

CACHED_BYTES = 8 * 2**20
EPS = 1e-8  # of the published norms and cosines
TINY = 1e-24  # under a square root, for a finite gradient at 0


def _clip(similarity: Tensor, clip: Clip) -> Tensor:
    return F.leaky_relu(similarity, 0.1) if clip == "leaky" else similarity.relu()


def _unit(x: Tensor, dim: int) -> Tensor:
    return x / (x.square().sum(dim=dim, keepdim=True).clamp(min=TINY).sqrt() + EPS)


def _norm(square: Tensor) -> Tensor:
    return square.clamp(min=TINY).sqrt()


def cross_attention_scores(
    regions: Tensor,
    words: Tensor,
    mask: Tensor,
    direction: Direction,
    *,
    smoothing: float = 9.0,
    clip: Clip = "leaky",
    block_bytes: int | None = None,
) -> Tensor:
    """Scores (P, C): mean cosine of each word (or region) with what it attends to in the other modality.

    Args:
        regions: (P, k, d).
        words: (C, n, d).
        mask: (C, n), true where a word stands; at least one word a caption.
        direction: which side asks: "t2i" words, "i2t" regions.
        smoothing: lambda, the inverse temperature of the attention.
        clip: what negative similarities become before they are normalised over the asking side.
        block_bytes: intermediate tensors of a block of pictures and captions; None: what a processor's cache holds
            (half the time of large blocks), or 256 MiB on a GPU.

    Raises:
        ValueError: when widths differ or a caption has no word.

    """
    if regions.shape[2] != words.shape[2]:
        raise ValueError(f"regions have width {regions.shape[2]}, words {words.shape[2]}: project both to one width")
    if block_bytes is None:
        block_bytes = CACHED_BYTES if regions.device.type == "cpu" else 256 * 2**20
    per_word = 4 * regions.shape[1] * regions.element_size()  # about four such tensors live at once
    side = max(1, int((block_bytes / (per_word * words.shape[1])) ** 0.5))
    score = _words_ask if direction == "t2i" else _regions_ask

    def block(chosen: Tensor, longest: int) -> Tensor:
        own, own_mask = words[chosen, :longest], mask[chosen, :longest]
        pictures = max(1, int(block_bytes / (per_word * longest * len(chosen))))
        return torch.cat([score(some, own, own_mask, smoothing, clip) for some in regions.split(pictures)])

    return score_by_length(mask, side, block)


def attention_weights(
    regions: Tensor, words: Tensor, mask: Tensor, direction: Direction, smoothing: float = 9.0, clip: Clip = "leaky"
) -> Tensor:
    """The attention (P, C, k, n) itself: over regions for "t2i", over words for "i2t". For drawing."""
    similarity = _similarity(regions, words, mask, clip)[1]
    if direction == "t2i":
        return (smoothing * _unit(similarity, dim=3)).softmax(dim=2)
    return _over_words(smoothing * _unit(similarity, dim=2), mask)


def _similarity(regions: Tensor, words: Tensor, mask: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Dot products (P, C, k, n) and the same clipped, with padded words at 0."""
    dots = torch.einsum("pkd,cnd->pckn", regions, words)
    return dots, _clip(dots, clip) * mask[None, :, None, :]


def _over_words(logits: Tensor, mask: Tensor) -> Tensor:
    return logits.masked_fill(~mask.bool()[None, :, None, :], float("-inf")).softmax(dim=3)


def _words_ask(regions: Tensor, words: Tensor, mask: Tensor, smoothing: float, clip: Clip) -> Tensor:
    dots, clipped = _similarity(regions, words, mask, clip)  # (P, C, k, n)
    attention = (smoothing * _unit(clipped, dim=3)).softmax(dim=2)
    gram = regions @ regions.transpose(1, 2)  # (P, k, k)
    attended = _norm((attention * torch.einsum("pkl,pcln->pckn", gram, attention)).sum(dim=2))  # (P, C, n)
    norm = words.norm(dim=2)[None]  # (1, C, n)
    cosine = (attention * dots).sum(dim=2) / (attended * norm).clamp(min=EPS)  # (P, C, n)
    return (cosine * mask[None]).sum(dim=2) / mask.sum(dim=1)


def _regions_ask(regions: Tensor, words: Tensor, mask: Tensor, smoothing: float, clip: Clip) -> Tensor:
    dots, clipped = _similarity(regions, words, mask, clip)  # (P, C, k, n)
    attention = _over_words(smoothing * _unit(clipped, dim=2), mask)
    gram = words @ words.transpose(1, 2)  # (C, n, n)
    attended = _norm((attention * torch.einsum("cnm,pckm->pckn", gram, attention)).sum(dim=3))  # (P, C, k)
    norm = regions.norm(dim=2)[:, None]  # (P, 1, k)
    cosine = (attention * dots).sum(dim=3) / (attended * norm).clamp(min=EPS)  # (P, C, k)
    return cosine.mean(dim=2)
