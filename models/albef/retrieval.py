"""ALBEF fine-tuned for retrieval: ITC with several positives, and ITM (§5)."""

from collections.abc import Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor

from models.albef.checkpoints import load_student
from models.albef.config import AlbefConfig
from models.albef.distilled import DistilledAlbef
from models.albef.losses import Negatives
from models.albef.starting import start_teacher, without_head


class RetrievalOutput(NamedTuple):
    """The two losses (scalars), and what they were computed on: similarities over temperature are (B, pool)."""

    loss_itc: Tensor
    loss_itm: Tensor
    negatives: Negatives
    similarity_i2t: Tensor
    similarity_t2i: Tensor

    @property
    def loss(self) -> Tensor:
        """Their sum."""
        return self.loss_itc + self.loss_itm


class AlbefRetrieval(DistilledAlbef):
    """The student without MLM head, the teacher, and a queue that remembers image ids."""

    def __init__(self, config: AlbefConfig) -> None:
        super().__init__(config, mlm_head=False)

    @classmethod
    def from_pretraining(
        cls, state_dict: Mapping[str, Tensor], config: AlbefConfig, training: Mapping[str, Tensor] | None = None
    ) -> Self:
        """Start from `student_state_dict` of a pre-trained model.

        Teacher and queue go on from those in `training` (see `start_teacher`); else the teacher starts equal.

        Position embeddings are resized when `config` has another image size. Raises ValueError where the weights do not
        fit the config.
        """
        model = cls(config)
        load_student(model, state_dict)
        model.reset_teacher()
        start_teacher(model, training, without_head)
        return model

    def forward(
        self,
        images: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        image_ids: Tensor,
        alpha: float,
        generator: torch.Generator | None = None,
        *,
        negatives: Negatives | None = None,
    ) -> RetrievalOutput:
        """One step on B pictures (B, 3, S, S) float and a caption of each (B, L) int64.

        Rows and queued features with the same `image_ids` (B,) int64 are all positives and share the target, and are
        never drawn as negatives. `generator`, on the images' device, draws the negatives; `negatives` replaces the
        draw. Raises ValueError for shapes that disagree and FloatingPointError where similarities are not finite.
        """
        aligned = self.align(images, input_ids, attention_mask, alpha, image_ids)
        matching = self.with_hard_negatives(aligned, attention_mask, negatives, generator)
        fused = self.fuse(matching.image_tokens, matching.text_tokens, matching.mask, matching.image_rows)
        loss_itm = self.matching_loss(fused, matching.negatives)
        return RetrievalOutput(
            aligned.loss, loss_itm, matching.negatives, aligned.similarity_i2t, aligned.similarity_t2i
        )
