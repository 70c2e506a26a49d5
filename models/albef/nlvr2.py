"""ALBEF fine-tuned for NLVR2: whether the sentence is true of two pictures (§5)."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from models.albef.checkpoints import load_parts
from models.albef.config import Nlvr2Config
from models.albef.pairs import PairReader, Shown
from models.albef.reading import Taught, check_batch, class_head, distilled_classes
from models.albef.starting import encoders_of, with_doubled_blocks

CLASSES = 2  # false, true


class Nlvr2Reader(PairReader):
    """Both encoders and the class head `cls_head`."""

    def __init__(self, config: Nlvr2Config) -> None:
        super().__init__(config, config.sharing)
        self.cls_head = class_head(config.text_width, CLASSES)

    def classify(self, images: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (B, 2), false and true, of sentences (B, L) and pictures (2B, 3, S, S): B first ones, B second."""
        first, second = self.visual_encoder(images).chunk(2)  # (B, 1 + N, Dv) each
        hidden = self.read_pair(Shown(first), Shown(second), input_ids, attention_mask)
        logits: Tensor = self.cls_head(hidden[:, 0])
        return logits


class AlbefNlvr2(Nlvr2Reader, Taught):
    """The student and its teacher."""

    def __init__(self, config: Nlvr2Config) -> None:
        super().__init__(config)
        self.config: Nlvr2Config = config
        self.hire(Nlvr2Reader(config))

    @classmethod
    def from_pretraining(
        cls, state_dict: Mapping[str, Tensor], config: Nlvr2Config, training: Mapping[str, Tensor] | None = None
    ) -> Self:
        """Start from the weights of pre-training or of text assignment, with a new head; the teacher starts equal.

        `training` is not read: the text assignment before it has no teacher.

        Pre-trained fusion layers are used twice. Raises ValueError where the weights do not fit the config.
        """
        model = cls(config)
        load_parts(model, with_doubled_blocks(encoders_of(state_dict), config), new=("cls_head.",))
        model.reset_teacher()
        return model

    def forward(
        self, images: Tensor, input_ids: Tensor, attention_mask: Tensor, targets: Tensor, alpha: float
    ) -> Tensor:
        """The loss (scalar) on B sentences (B, L) int64 with pictures (2B, 3, S, S) float; targets (B,) are 0 or 1.

        `alpha` in [0, 1] weighs the teacher's answer; the teacher moves at every call. Raises ValueError for shapes
        that disagree.
        """
        check_batch(alpha, targets.shape[0], input_ids=input_ids)
        check_batch(alpha, 2 * targets.shape[0], images=images)
        logits = self.classify(images, input_ids, attention_mask)
        teacher_logits = None
        with torch.no_grad():
            self.move_teacher()
            if alpha > 0:
                assert isinstance(self.teacher, Nlvr2Reader)
                teacher_logits = self.teacher.classify(images, input_ids, attention_mask)
        return distilled_classes(logits, targets, teacher_logits, alpha)
