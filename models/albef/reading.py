"""What the models of pictures with texts share: both encoders, a class head, and a teacher of the same parts (§3.3)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.albef.config import AlbefConfig
from models.albef.momentum import copy_student, update_teacher
from models.albef.text import TextEncoder
from models.albef.vision import ImageEncoder


class Reader(nn.Module):
    """Image encoder and fusing text encoder, without the projections that only ITC needs."""

    def __init__(self, config: AlbefConfig) -> None:
        super().__init__()
        self.visual_encoder = ImageEncoder(config)
        self.text_encoder = TextEncoder(config)

    def read(self, images: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Multimodal tokens (B, L, Dt) of pictures (B, 3, S, S) and token ids (B, L)."""
        bert = self.text_encoder.bert
        return bert.fuse(bert.encode(input_ids, attention_mask), attention_mask, self.visual_encoder(images))


class Taught(nn.Module):
    """Mixin for a model with a momentum teacher; ``__init__`` ends with `hire`."""

    config: AlbefConfig
    teacher: nn.Module

    def hire(self, teacher: nn.Module) -> None:
        """Take `teacher`, a module with this model's parameters (or some of them) by the same names; set it equal."""
        teacher.requires_grad_(False)
        self.teacher = teacher
        self.reset_teacher()

    def reset_teacher(self) -> None:
        """Set the teacher to the student, as before the first step."""
        copy_student(self.teacher, self)

    def move_teacher(self) -> None:
        """One step of the moving average; the teacher moves before it speaks, as published."""
        update_teacher(self.teacher, self, self.config.momentum)


def class_head(width: int, classes: int) -> nn.Sequential:
    """The published head on [CLS]: two linear layers with a ReLU between them."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


def distilled_classes(logits: Tensor, targets: Tensor, teacher_logits: Tensor | None, alpha: float) -> Tensor:
    """Cross-entropy of logits (B, C) with classes (B,) int64, `alpha` of it with the teacher's softmax instead.

    `teacher_logits` (B, C) may be None where `alpha` is 0. A scalar, the mean over the batch.
    """
    loss = F.cross_entropy(logits, targets)
    if teacher_logits is None:
        return loss
    soft = -(teacher_logits.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1).mean()
    return (1 - alpha) * loss + alpha * soft


def check_batch(alpha: float, rows: int, **tensors: Tensor) -> None:
    """Raise ValueError for an `alpha` that is no share, or a tensor whose first dimension isn't `rows`."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} must lie in [0, 1]")
    wrong = [f"{name} {tuple(value.shape)}" for name, value in tensors.items() if value.shape[:1] != torch.Size([rows])]
    if wrong:
        raise ValueError(f"a batch of {rows} does not go with {', '.join(wrong)}")
