"""ALBEF while it learns: student, momentum teacher and feature queue, and the steps that all its training shares."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.albef.config import AlbefConfig
from models.albef.distributed import (
    gather_rows,
    gather_rows_with_grad,
    mean_over_processes,
    pad_to_longest,
    process_rank,
)
from models.albef.finite import raise_not_finite
from models.albef.losses import Negatives, contrastive_loss, matching_loss, sample_negatives
from models.albef.model import Albef, Encoding
from models.albef.momentum import copy_student, make_teacher, update_teacher
from models.albef.queues import FeatureQueue

FEATURES = ("image features", "text features", "the teacher's image features", "the teacher's text features")


class Alignment(NamedTuple):
    """One contrastive step: its loss, what the encoders said, and the grid that negatives are drawn from.

    The grid is (B, P), P being the rows of the negative pool: student features against teacher features over
    temperature, and where a pool row shows the same picture.
    """

    loss: Tensor
    image: Encoding
    text: Encoding
    teacher_image: Encoding
    similarity_i2t: Tensor
    similarity_t2i: Tensor
    same_image: Tensor


class Matching(NamedTuple):
    """What ITM reads: B pairs, each text with its negative picture, each picture with its negative text.

    `text_tokens` (3B, L, Dt) and `mask` (3B, L); text t sees picture `image_rows[t]` of `image_tokens` (C, 1 + N, Dv),
    whose first B are the batch's own. `negatives` says what was drawn.
    """

    image_tokens: Tensor
    text_tokens: Tensor
    mask: Tensor
    image_rows: Tensor
    negatives: Negatives


class DistilledAlbef(Albef):
    """Student, `teacher` and `queue`. A forward pass moves the teacher and the queue, also in evaluation mode."""

    def __init__(self, config: AlbefConfig, *, mlm_head: bool) -> None:
        super().__init__(config, mlm_head=mlm_head)
        self.teacher = make_teacher(self, config)
        self.queue = FeatureQueue(config.embed_dim, config.queue_size)

    def reset_teacher(self) -> None:
        """Set the teacher to the student, as before the first step."""
        copy_student(self.teacher, self)

    def align(
        self, images: Tensor, input_ids: Tensor, attention_mask: Tensor, alpha: float, image_ids: Tensor | None = None
    ) -> Alignment:
        """ITC with momentum distillation (§3.2, §3.3); then the teacher's features enter the queue.

        `image_ids` (B,) int64, not negative, tell which rows show the same picture; without them all rows differ.
        Raises ValueError for shapes that disagree and FloatingPointError for similarities that are not finite.
        """
        rows = images.shape[0]
        if input_ids.shape[0] != rows or (image_ids is not None and image_ids.shape != (rows,)):
            given = "no" if image_ids is None else tuple(image_ids.shape)
            raise ValueError(f"{rows} images, {input_ids.shape[0]} texts and {given} image ids do not pair up")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha} must lie in [0, 1]")
        # Without image ids the row numbers over all processes serve: each row is its own picture.
        row_numbers = process_rank() * rows + torch.arange(rows, device=images.device)
        ids = row_numbers if image_ids is None else image_ids

        self.clamp_temperature()
        image, text = self.encode_image(images), self.encode_text(input_ids, attention_mask)
        with torch.no_grad():  # the teacher moves first, then speaks, as published
            update_teacher(self.teacher, self, self.config.momentum)
            teacher_image = self.teacher.encode_image(images)
            teacher_text = self.teacher.encode_text(input_ids, attention_mask)
        features = (image.feature, text.feature)
        teacher_features = (teacher_image.feature, teacher_text.feature)

        with torch.autocast(images.device.type, enabled=False):
            everyone = (gather_rows(teacher_image.feature), gather_rows(teacher_text.feature))  # (world * B, E) each
            all_ids = gather_rows(ids)
            pool, pool_ids = (everyone, all_ids) if self.config.negative_pool == "global" else (teacher_features, ids)
            queues = (self.queue.images.T, self.queue.texts.T)
            keys = [torch.cat([fresh, old]) for fresh, old in zip(pool, queues, strict=True)]  # (P + K, E)
            similarity = self._compare(features, keys)  # twice (B, P + K)
            with torch.no_grad():
                teacher_similarity = self._compare(teacher_features, keys)
            if not torch.stack([s.sum() for s in (*similarity, *teacher_similarity)]).isfinite().all():
                raise_not_finite(self, images, dict(zip(FEATURES, features + teacher_features, strict=True)))
            positives = (ids[:, None] == torch.cat([pool_ids, self.queue.ids])).to(keys[0].dtype)  # (B, P + K)
            hard = positives / positives.sum(dim=1, keepdim=True)
            loss = contrastive_loss(similarity, teacher_similarity, hard, alpha)
            grid_i2t, grid_t2i = (compared[:, : len(pool_ids)].detach() for compared in similarity)
        self.queue.push(*everyone, ids=None if image_ids is None else all_ids)
        return Alignment(loss, image, text, teacher_image, grid_i2t, grid_t2i, ids[:, None] == pool_ids)

    def _compare(self, features: Sequence[Tensor], keys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Image-to-text and text-to-image similarities over temperature, (B, C), of (image, text) features and keys."""
        (image, text), (images, texts) = features, keys
        return image @ texts.T / self.temp, text @ images.T / self.temp

    def with_hard_negatives(
        self,
        aligned: Alignment,
        attention_mask: Tensor,
        negatives: Negatives | None = None,
        generator: torch.Generator | None = None,
    ) -> Matching:
        """Each pair and two hard negatives of it, to be fused in one pass (§3.2). `negatives` replaces the draw."""
        image, text = aligned.image, aligned.text
        pairs = image.tokens.shape[0]
        everyone = self.config.negative_pool == "global"
        if negatives is None:
            negatives = sample_negatives(
                aligned.similarity_i2t,
                aligned.similarity_t2i,
                aligned.same_image,
                generator,
                hardness=self.config.negative_hardness,
                everyone=everyone,
            )
        own = torch.arange(pairs, device=image.tokens.device)
        if everyone:
            text_tokens, mask = pad_to_longest(text.tokens), pad_to_longest(attention_mask)
            text_pool, mask_pool = gather_rows_with_grad(text_tokens), gather_rows(mask)  # (P, L', ...)
            other_images = gather_rows_with_grad(image.tokens)[negatives.image_per_text]
            image_tokens = torch.cat([image.tokens, other_images])  # the rest of the pool is not worth projecting
            image_rows = torch.cat([own, pairs + own, own])
        else:
            text_tokens = text_pool = text.tokens
            mask = mask_pool = attention_mask
            image_tokens = image.tokens
            image_rows = torch.cat([own, negatives.image_per_text, own])
        return Matching(
            image_tokens,
            torch.cat([text_tokens, text_tokens, text_pool[negatives.text_per_image]]),  # (3B, L, Dt)
            torch.cat([mask, mask, mask_pool[negatives.text_per_image]]),
            image_rows,
            negatives,
        )

    def matching_loss(self, fused: Tensor, negatives: Negatives) -> Tensor:
        """ITM on the fused tokens (3B, L, Dt) of a `Matching`; a pair that has no negative is left out (Eq. 4)."""
        logits = self.itm_head(fused[:, 0])  # (3B, 2)
        possible = negatives.possible
        if possible is None:
            possible = torch.ones(len(logits) // 3, dtype=torch.bool, device=logits.device)
        everyone = self.config.negative_pool == "global"
        return matching_loss(logits, possible, mean_over_processes(possible.sum()) if everyone else None)
