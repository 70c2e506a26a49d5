"""The momentum teacher: an exponential moving average of the student's towers (ALBEF §3.3)."""

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from models.albef.config import AlbefConfig
from models.albef.model import Towers


def make_teacher(student: Towers, config: AlbefConfig) -> Towers:
    """Towers equal to the student's that no gradient reaches."""
    teacher = Towers(config, mlm_head=student.text_encoder.cls is not None)
    teacher.requires_grad_(False)
    copy_student(teacher, student)
    return teacher


@torch.no_grad()
def copy_student(teacher: nn.Module, student: nn.Module) -> None:
    """Set the teacher to the student."""
    update_teacher(teacher, student, momentum=0.0)


@torch.no_grad()
def update_teacher(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """One step of the average, in place: teacher = momentum * teacher + (1 - momentum) * student.

    The teacher's parameters are the student's of the same names, or some of them.
    """
    weights = dict(student.named_parameters())
    names, averages = zip(*teacher.named_parameters(), strict=True)
    average = get_ema_multi_avg_fn(momentum)  # type: ignore[no-untyped-call]
    average(list(averages), [weights[name] for name in names], None)
