"""Runs of `finetune` over two pre-trained towers: HAT, VITR and their baselines. Light to import: no torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from components.training.settings import AugmentParams, ScheduleParams, TrainingParams
from models.dual.config import DualConfig
from models.embedding.config import VseConfig, VsrnConfig
from models.hat.config import HatHeadConfig
from models.vitr.head_config import VitrHeadConfig

KINDS = ("linear", "hat", "vitr", "vse", "vsrn")


class TowerRun(TrainingParams, frozen=True, extra="forbid"):
    """What these runs share."""

    task: Path = Field(description="folder of the task: data/tasks/TASK, with the splits train and val")
    pretrained: Path = Field(description="the towers and their cached outputs: data/features/NAME")
    optimizer: Literal["adamw", "adam"] = Field(default="adam", description="both papers use Adam")
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="not for biases and one-dimensional weights")
    freeze_epochs: int = Field(
        default=100_000,
        ge=0,
        le=100_000,
        description="epochs that read cached features; later ones run the towers, which then learn too",
    )
    learn: tuple[Literal["image", "text"], ...] = Field(
        default=("image", "text"),
        min_length=1,
        description="the towers that learn after freeze_epochs; of the other, cached features are read throughout",
    )
    learn_above: int = Field(
        default=0,
        ge=0,
        le=100,
        description="of the text tower only the layers above this level learn, from its cached words, in a part of the "
        "time; 0: all of it",
    )
    tower_rate: float = Field(
        default=1.0, gt=0, le=1, description="the towers' learning rate, as a share of the schedule's"
    )
    augment: AugmentParams = Field(
        default=AugmentParams(crop_scale=(0.5, 1.0), randaugment_operations=0),
        description="augmentation of training pictures, once the image tower learns; before, no more than flips, where "
        "the features were kept mirrored too",
    )
    keep_weights: Literal["best", "last"] = Field(
        default="best", description="the weights of the epoch that is best on val, or the last epoch's"
    )
    validate_epochs: bool = Field(default=True, description="look at val after each epoch")
    validate_pictures: int | None = Field(
        default=None, ge=2, description="pictures of val that are looked at, with their captions; null: all"
    )

    @model_validator(mode="after")
    def _run_agrees(self) -> Self:
        if self.keep_weights == "best" and not self.validate_epochs:
            raise ValueError("keep_weights is best, which needs validate_epochs: set keep_weights to last")
        return self


class LinearRun(TowerRun, frozen=True, extra="forbid"):
    """A dual encoder with a contrastive loss: two projections of pooled features, the floor; or, fine-tuned, a CLIP."""

    kind: Literal["linear"] = Field(default="linear", description="what is learned")
    epochs: int = Field(default=4, ge=1, le=100_000, description="passes over all captions")
    batch_size: int = Field(default=500, ge=2, le=1_000_000, description="pairs a step, over all workers together")
    schedule: ScheduleParams = Field(
        default=ScheduleParams(kind="cosine_by_iteration", lr=1e-3, min_lr=1e-5, warmup_lr=1e-4, warmup_iterations=50),
        description="learning rate",
    )
    head: DualConfig = Field(default=DualConfig(), description="what stands on the towers")


class HatRun(TowerRun, frozen=True, extra="forbid"):
    """HAT; the defaults are the paper's (section 4.1), where its code differs as the code has it."""

    kind: Literal["hat"] = Field(default="hat", description="what is learned")
    epochs: int = Field(default=20, ge=1, le=100_000, description="passes over all captions")
    batch_size: int = Field(default=58, ge=2, le=1_000_000, description="pairs a step, over all workers together")
    schedule: ScheduleParams = Field(
        default=ScheduleParams(kind="step", lr=1e-4, warmup_lr=1e-4, warmup_iterations=0),
        description="learning rate: 1e-4 in the code, 1e-5 in the paper; a tenth every 10 epochs in both",
    )
    freeze_epochs: int = Field(
        default=10,
        ge=0,
        le=100_000,
        description="epochs that read cached features; later ones run the towers, which then learn too",
    )
    head: HatHeadConfig = Field(default=HatHeadConfig(), description="what stands on the towers")
    loss: Literal["triplet", "contrastive"] = Field(
        default="triplet", description="of each direction's scores; the paper's is the triplet loss"
    )
    margin: float = Field(default=0.2, ge=0, le=100, description="of the triplet loss with hardest negatives")
    temperature: float = Field(
        default=0.04, gt=0, le=10, description="of the contrastive loss, for a direction's mean score over levels"
    )
    pooled_weight: float = Field(
        default=1.0, ge=0, le=1000, description="weight of the contrastive loss of head.pooled, a mean over the batch"
    )
    pooled_temperature: float = Field(default=0.05, gt=0, le=10, description="of that loss")


class VitrRun(TowerRun, frozen=True, extra="forbid"):
    """VITR on frozen towers; the defaults are the paper's (section 4.2)."""

    kind: Literal["vitr"] = Field(default="vitr", description="what is learned")
    epochs: int = Field(default=20, ge=1, le=100_000, description="passes over all captions")
    batch_size: int = Field(default=128, ge=2, le=1_000_000, description="pairs a step, over all workers together")
    schedule: ScheduleParams = Field(
        default=ScheduleParams(kind="late_decay", lr=4e-4, warmup_lr=4e-4, warmup_iterations=0, decay_epochs=5),
        description="learning rate",
    )
    head: VitrHeadConfig = Field(default=VitrHeadConfig(), description="what stands on the towers")
    margin: float = Field(default=0.185, ge=0, le=100, description="alpha of eq. 20 and 21")
    temperature: float = Field(default=0.025, ge=0, le=100, description="lambda of eq. 20 and 21")
    negative_pool: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="more pairs of train, drawn anew each step, among which the hardest negatives are looked for; 0: "
        "the batch's own",
    )
    contrast_weight: float = Field(
        default=1.0, ge=0, le=1000, description="weight of the dual encoder's own loss, which the paper trains before"
    )

    @model_validator(mode="after")
    def _pool_is_cached(self) -> Self:
        if self.negative_pool and self.epochs > self.freeze_epochs:
            raise ValueError(
                "negative_pool reads cached features, which the towers leave behind once they learn: set it to 0, or "
                "freeze_epochs to epochs"
            )
        return self


class VseRun(TowerRun, frozen=True, extra="forbid"):
    """VSE∞ on frozen towers, a baseline of VITR; the defaults are its own for region features."""

    kind: Literal["vse"] = Field(default="vse", description="what is learned")
    epochs: int = Field(default=25, ge=1, le=100_000, description="passes over all captions")
    batch_size: int = Field(default=128, ge=2, le=1_000_000, description="pairs a step, over all workers together")
    schedule: ScheduleParams = Field(
        default=ScheduleParams(kind="late_decay", lr=5e-4, warmup_lr=5e-4, warmup_iterations=0, decay_epochs=15),
        description="learning rate",
    )
    head: VseConfig = Field(default=VseConfig(), description="what stands on the towers")
    margin: float = Field(default=0.2, ge=0, le=100, description="of the triplet loss with hardest negatives")


class VsrnRun(TowerRun, frozen=True, extra="forbid"):
    """VSRN++ on frozen towers, a baseline of VITR, without its caption generator; the defaults are its own."""

    kind: Literal["vsrn"] = Field(default="vsrn", description="what is learned")
    epochs: int = Field(default=30, ge=1, le=100_000, description="passes over all captions")
    batch_size: int = Field(default=128, ge=2, le=1_000_000, description="pairs a step, over all workers together")
    schedule: ScheduleParams = Field(
        default=ScheduleParams(kind="late_decay", lr=2e-4, warmup_lr=2e-4, warmup_iterations=0, decay_epochs=15),
        description="learning rate",
    )
    head: VsrnConfig = Field(default=VsrnConfig(), description="what stands on the towers")
    margin: float = Field(default=0.2, ge=0, le=100, description="of the triplet loss with hardest negatives")
