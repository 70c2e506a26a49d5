"""ALBEF pre-training: ITC + ITM + MLM with momentum distillation (§3.2, §3.3, Eq. 5)."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.albef.config import AlbefConfig
from models.albef.distilled import DistilledAlbef
from models.albef.distributed import mean_over_processes
from models.albef.losses import Negatives, masked_language_loss
from models.albef.masking import NO_LABEL, mask_tokens


class PretrainingOutput(NamedTuple):
    """The three losses (scalars), and what they were computed on: similarities over temperature are (B, pool)."""

    loss_itc: Tensor
    loss_itm: Tensor
    loss_mlm: Tensor
    negatives: Negatives
    similarity_i2t: Tensor
    similarity_t2i: Tensor

    @property
    def loss(self) -> Tensor:
        """Their sum (Eq. 5)."""
        return self.loss_itc + self.loss_itm + self.loss_mlm


class AlbefPretraining(DistilledAlbef):
    """The student with its MLM head, the teacher and the queue."""

    def __init__(self, config: AlbefConfig) -> None:
        super().__init__(config, mlm_head=True)

    def forward(
        self,
        images: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        alpha: float,
        generator: torch.Generator | None = None,
        *,
        mlm_alpha: float | None = None,
        masked_ids: Tensor | None = None,
        mlm_labels: Tensor | None = None,
        negatives: Negatives | None = None,
    ) -> PretrainingOutput:
        """One step on B different pictures (B, 3, S, S) float and one caption of each (B, L) int64.

        `alpha` in [0, 1] is the weight of the teacher's targets, `mlm_alpha` that of MLM where it is another (table 1).
        `generator`, on the images' device, draws masks and negatives; `masked_ids` with `mlm_labels` (both (B, L),
        label -100 where nothing is predicted) and `negatives` replace the draws. The teacher moves before it is asked,
        and the queue afterwards. Raises ValueError for shapes that disagree and FloatingPointError where similarities
        are not finite.
        """
        if (masked_ids is None) != (mlm_labels is None):
            raise ValueError("give masked_ids and mlm_labels together or neither")
        if masked_ids is None or mlm_labels is None:
            masked_ids, mlm_labels = mask_tokens(input_ids, self.config, generator)
        if not masked_ids.shape == mlm_labels.shape == input_ids.shape:
            raise ValueError("masked_ids and mlm_labels must have the shape of input_ids")

        aligned = self.align(images, input_ids, attention_mask, alpha)
        matching = self.with_hard_negatives(aligned, attention_mask, negatives, generator)
        masked_tokens = self.text_encoder.bert.encode(masked_ids, attention_mask)  # (B, L, Dt)
        # ITM's 3B texts and MLM's B in one pass: each picture's keys and values are computed once a step.
        pairs, length = input_ids.shape
        padding = matching.mask.shape[1] - length  # with the global pool, ITM's are as long as any process's
        fused = self.fuse(
            matching.image_tokens,
            torch.cat([matching.text_tokens, F.pad(masked_tokens, (0, 0, 0, padding))]),
            torch.cat([matching.mask, F.pad(attention_mask, (0, padding))]),
            torch.cat([matching.image_rows, matching.image_rows[:pairs]]),
        )  # (4B, L', Dt)
        loss_itm = self.matching_loss(fused[: 3 * pairs], matching.negatives)

        # Vocabulary logits at the chosen positions only: the vocabulary is by far the widest layer.
        chosen = mlm_labels != NO_LABEL  # (B, L), M of them
        logits = self.text_encoder.predict_tokens(fused[3 * pairs :, :length][chosen])  # (M, V)
        teacher_logits = None
        weight = alpha if mlm_alpha is None else mlm_alpha
        if weight > 0:
            with torch.no_grad():
                teacher = self.teacher
                teacher_tokens = teacher.text_encoder.bert.encode(masked_ids, attention_mask)
                teacher_fused = teacher.fuse(aligned.teacher_image.tokens, teacher_tokens, attention_mask)
                teacher_logits = teacher.text_encoder.predict_tokens(teacher_fused[chosen])
        count = mean_over_processes(chosen.sum()) if self.config.negative_pool == "global" else None
        loss_mlm = masked_language_loss(logits, mlm_labels[chosen], teacher_logits, weight, count)
        return PretrainingOutput(
            aligned.loss, loss_itm, loss_mlm, matching.negatives, aligned.similarity_i2t, aligned.similarity_t2i
        )
