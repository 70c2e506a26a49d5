"""ALBEF's losses and its choice of hard negatives, on plain tensors (§3.2, §3.3)."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.albef.distributed import own_rows, process_count

TINY = 1e-6  # below any mean count of rows that is not zero


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (B, C) against target distributions (B, C), a scalar (Eq. 2)."""
    return -(targets * logits.log_softmax(dim=1)).sum(dim=1).mean()


def distilled_targets(hard: Tensor, teacher_logits: Tensor, alpha: float) -> Tensor:
    """Targets (B, C): `alpha` of the teacher's softmax, the rest of `hard` (Eq. 6, up to the teacher's entropy)."""
    return alpha * teacher_logits.softmax(dim=1) + (1 - alpha) * hard


def contrastive_loss(
    similarity: tuple[Tensor, Tensor], teacher_similarity: tuple[Tensor, Tensor], hard: Tensor, alpha: float
) -> Tensor:
    """ITC: both directions' similarities over temperature (B, B + K), averaged; `hard` rows sum to one (Eq. 2, 6)."""
    losses = [
        soft_cross_entropy(student, distilled_targets(hard, teacher, alpha))
        for student, teacher in zip(similarity, teacher_similarity, strict=True)
    ]
    return torch.stack(losses).mean()


def masked_language_loss(
    logits: Tensor, labels: Tensor, teacher_logits: Tensor | None, alpha: float, count: Tensor | None = None
) -> Tensor:
    """MLM over the M masked positions: logits (M, V), labels (M,); zero when M = 0 (Eq. 3, 7).

    `teacher_logits` (M, V) weigh `alpha`; None means that nothing is distilled. The sum is divided by `count`
    instead of M where that is given: the mean M of all processes makes the mean of their losses that of all positions.
    """
    divisor = max(labels.shape[0], 1) if count is None else count.clamp(min=TINY)
    loss = F.cross_entropy(logits, labels, reduction="sum") / divisor
    if teacher_logits is None:
        return loss
    distilled = -(teacher_logits.softmax(dim=1) * logits.log_softmax(dim=1)).sum() / divisor
    return (1 - alpha) * loss + alpha * distilled


class Negatives(NamedTuple):
    """ITM's hard negatives, as rows of the pool they were drawn from; all three (B,).

    `possible` is false where the pool holds no negative for the pair: then its indices mean nothing and ITM leaves the
    pair out. None means that all are possible.
    """

    image_per_text: Tensor
    text_per_image: Tensor
    possible: Tensor | None = None


def sampling_weights(similarity: Tensor, same_image: Tensor) -> Tensor:
    """Probabilities (B, P) of drawing each negative: the softmax of similarities (B, P) over other pictures' rows.

    `same_image` (B, P) is true where a pool row shows the same picture. A row without negatives is all zero. Masking
    before the softmax draws from the published distribution, and cannot underflow to an empty one.
    """
    weights = similarity.masked_fill(same_image, -torch.inf).softmax(dim=1)
    return weights.masked_fill(same_image, 0.0)  # a row of -inf alone is nan after the softmax


@torch.no_grad()
def sample_negatives(
    similarity_i2t: Tensor,
    similarity_t2i: Tensor,
    same_image: Tensor,
    generator: torch.Generator | None = None,
    *,
    hardness: float = 1.0,
    everyone: bool = False,
) -> Negatives:
    """One hard negative picture per text and one hard negative text per picture (§3.2).

    All tensors are (B, P), similarities over temperature; `generator` must live on their device. Similarities are
    multiplied by `hardness` first: 1 is the published draw, 0 an even one. With `everyone`, whose pool is all
    processes' rows and whose `generator` is in the same state in all, each process draws for its rows what one process
    with all rows would.
    """
    possible = ~same_image.all(dim=1)

    def draw(similarity: Tensor) -> Tensor:
        weights = sampling_weights(similarity * hardness, same_image).masked_fill(~possible[:, None], 1.0)
        if not everyone:
            return torch.multinomial(weights, 1, generator=generator).squeeze(1)
        noise = weights.new_empty(process_count() * weights.shape[0], weights.shape[1])
        # the exponential race, which is how torch.multinomial draws one of each row
        return (weights / own_rows(noise.exponential_(generator=generator))).argmax(dim=1)

    images = draw(similarity_t2i)
    return Negatives(images, draw(similarity_i2t), possible)


def matching_loss(logits: Tensor, possible: Tensor, count: Tensor | None = None) -> Tensor:
    """ITM over logits (3B, 2): B matching pairs, then 2B negatives of them (Eq. 4).

    Pairs that aren't `possible` (B,) are left out with their negatives. Zero when none is possible; the graph stays
    whole, so that every process has the same gradients to reduce. `count`, of the pairs that are divided by, as in
    `masked_language_loss`.
    """
    pairs = possible.shape[0]
    labels = (torch.arange(3 * pairs, device=logits.device) < pairs).long()
    counted = possible.repeat(3).to(logits.dtype)
    losses = F.cross_entropy(logits, labels, reduction="none")
    divisor = counted.sum().clamp(min=1) if count is None else (3 * count).clamp(min=TINY)
    return (losses * counted).sum() / divisor
