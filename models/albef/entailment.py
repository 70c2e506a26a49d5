"""ALBEF fine-tuned for visual entailment: whether the picture entails the sentence (§5)."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from models.albef.checkpoints import load_parts
from models.albef.config import EntailmentConfig
from models.albef.reading import Reader, Taught, check_batch, class_head, distilled_classes
from models.albef.starting import encoders_of, start_teacher


class EntailmentReader(Reader):
    """Both encoders and the class head `cls_head`."""

    def __init__(self, config: EntailmentConfig) -> None:
        super().__init__(config)
        self.cls_head = class_head(config.text_width, config.classes)

    def classify(self, images: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Class logits (B, C) of pictures (B, 3, S, S) and sentences (B, L)."""
        logits: Tensor = self.cls_head(self.read(images, input_ids, attention_mask)[:, 0])
        return logits


class AlbefEntailment(EntailmentReader, Taught):
    """The student and its teacher."""

    def __init__(self, config: EntailmentConfig) -> None:
        super().__init__(config)
        self.config: EntailmentConfig = config
        self.hire(EntailmentReader(config))

    @classmethod
    def from_pretraining(
        cls,
        state_dict: Mapping[str, Tensor],
        config: EntailmentConfig,
        training: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Start from `student_state_dict` of a pre-trained model, with a new head.

        The teacher goes on from that in `training` (see `start_teacher`), or else starts equal.

        Raises ValueError where the weights do not fit the config.
        """
        model = cls(config)
        load_parts(model, encoders_of(state_dict), new=("cls_head.",))
        model.reset_teacher()
        start_teacher(model, training, encoders_of, new=("cls_head.",))
        return model

    def forward(
        self, images: Tensor, input_ids: Tensor, attention_mask: Tensor, targets: Tensor, alpha: float
    ) -> Tensor:
        """The loss (scalar) on B pictures (B, 3, S, S) float, sentences (B, L) int64 and classes (B,) int64.

        `alpha` in [0, 1] weighs the teacher's answer; the teacher moves at every call. Raises ValueError for shapes
        that disagree.
        """
        check_batch(alpha, images.shape[0], input_ids=input_ids, targets=targets)
        logits = self.classify(images, input_ids, attention_mask)
        teacher_logits = None
        with torch.no_grad():
            self.move_teacher()
            if alpha > 0:
                assert isinstance(self.teacher, EntailmentReader)
                teacher_logits = self.teacher.classify(images, input_ids, attention_mask)
        return distilled_classes(logits, targets, teacher_logits, alpha)
