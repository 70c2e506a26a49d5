"""The stage `finetune`: a pre-trained ALBEF on a task. One run, retrieval so far (ALBEF section 5, appendix A)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, StringConstraints, model_validator

from components.io.errors import UserError
from components.io.runtime import Runtime
from components.training.settings import AugmentParams, ScheduleParams, TrainingParams

RunName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_-]+$")]


class RetrievalRun(TrainingParams, frozen=True, extra="forbid"):
    """Fine-tuning for image-text retrieval; the defaults are the published code's for Flickr30K."""

    kind: Literal["retrieval"] = Field(default="retrieval", description="what is learned")
    task: Path = Field(description="folder of the task: data/tasks/TASK, with the splits train and val")
    epochs: int = Field(
        default=10, ge=1, le=100_000, description="passes over all captions; COCO: 10 in the paper, 5 in code"
    )
    batch_size: int = Field(default=256, ge=2, le=1_000_000, description="pairs a step, over all workers together")
    schedule: ScheduleParams = Field(
        default=ScheduleParams(lr=1e-5, min_lr=1e-6, warmup_lr=1e-5, warmup_iterations=100),
        description="learning rate",
    )
    augment: AugmentParams = Field(
        default=AugmentParams(crop_scale=(0.5, 1.0)), description="augmentation of training pictures"
    )
    image_size: int | None = Field(
        default=None, ge=1, le=4096, description="side of the picture (384 in the paper); null: as pre-trained"
    )
    queue_size: int = Field(
        default=65536, ge=0, description="teacher features kept per modality; 0: the batch's own only"
    )
    momentum: float = Field(default=0.995, ge=0, le=1, description="weight of the old teacher in its moving average")
    negative_pool: Literal["local", "global"] = Field(
        default="local", description="hard negatives from this worker's batch (published) or from all workers'"
    )
    text_dropout: float = Field(default=0.1, ge=0, lt=1, description="dropout of BERT")
    max_tokens: int = Field(default=30, ge=3, le=512, description="tokens of a caption, [CLS] and [SEP] included")
    keep_weights: Literal["best", "last"] = Field(
        default="best", description="the weights of the epoch with the best r_mean by ITC on val, or the last epoch's"
    )
    validate_epochs: bool = Field(default=True, description="recalls by ITC on val after each epoch")

    @model_validator(mode="after")
    def _run_agrees(self) -> Self:
        if self.keep_weights == "best" and not self.validate_epochs:
            raise ValueError("keep_weights is best, which needs validate_epochs: set keep_weights to last")
        return self


class FinetuneParams(BaseModel, frozen=True, extra="forbid"):
    """The fine-tuning runs by name; each gives data/models/RUN."""

    runs: dict[RunName, RetrievalRun] = Field(description="runs by name")

    @model_validator(mode="after")
    def _names(self) -> Self:
        if "pretrain" in self.runs:
            raise ValueError("a run cannot be called pretrain: data/models/pretrain holds the pre-trained weights")
        return self


def finetune(
    params: FinetuneParams,
    *,
    run: str,
    task: Path,
    pretrained: Path,
    weights: Path,
    curves: Path,
    runtime: Runtime = Runtime(),
) -> None:
    """Fine-tune `pretrained` on ``task/train`` as `params.runs[run]` says; outs as those of `pretrain`.

    Every caption of the task is a sample; captions of one picture are all its positives. After each epoch ITC alone
    ranks ``task/val``. Raises UserError for an unknown run, a missing split or weights, and as `pretrain`.
    """
    from components.training.albef_tasks import read_weights, train_retrieval
    from components.training.stage import train_stage

    if run not in params.runs:
        raise UserError(f"finetune.runs has no run {run!r}: it has {', '.join(sorted(params.runs)) or 'none'}")
    chosen = params.runs[run]
    train, val = task / "train", task / "val" if chosen.validate_epochs else None
    for split in (train, val):
        if split is not None and not split.is_dir():
            raise UserError(
                f"{split} does not exist: run prepare_tasks"
                + (", or set keep_weights to last and validate_epochs to false" if split is val else "")
            )
    read_weights(pretrained)  # say now what is missing, not from within a worker
    inputs = {"train": train, "pretrained": pretrained} | ({} if val is None else {"val": val})
    train_at, val_at, weights_at = train.resolve(), val and val.resolve(), pretrained.resolve()
    train_stage(
        f"finetune-{run}",
        chosen,
        inputs,
        lambda storage: partial(train_retrieval, chosen, run, train_at, val_at, weights_at, storage),
        weights=weights,
        curves=curves,
        runtime=runtime,
    )
