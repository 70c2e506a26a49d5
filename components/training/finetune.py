"""The stage `finetune`: a pre-trained ALBEF on a task (ALBEF section 5, appendix A)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Discriminator, Field, StringConstraints, Tag, model_validator

from components.io.errors import UserError
from components.io.runtime import Runtime
from components.training.settings import AugmentParams, ScheduleParams, TrainingParams
from components.training.tower_runs import HatRun, LinearRun, TowerRun, VitrRun, VseRun, VsrnRun

RunName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_-]+$")]


class FinetuneRun(TrainingParams, frozen=True, extra="forbid"):
    """What every fine-tuning run has."""

    task: Path = Field(description="folder of the task: data/tasks/TASK, with the splits train and val")
    pretrained: Path = Field(
        default=Path("data/models/pretrain"), description="weights to start from; dvc.yaml reads it, so write it out"
    )
    batch_size: int = Field(default=256, ge=2, le=1_000_000, description="samples a step, over all workers together")
    augment: AugmentParams = Field(
        default=AugmentParams(crop_scale=(0.5, 1.0)), description="augmentation of training pictures"
    )
    image_size: int | None = Field(
        default=None, ge=1, le=4096, description="side of the picture (384 in the paper); null: as pre-trained"
    )
    momentum: float = Field(default=0.995, ge=0, le=1, description="weight of the old teacher in its moving average")
    text_dropout: float = Field(default=0.1, ge=0, lt=1, description="dropout of BERT")
    max_tokens: int = Field(default=30, ge=3, le=512, description="tokens of a text, [CLS] and [SEP] included")
    keep_weights: Literal["best", "last"] = Field(
        default="best", description="the weights of the epoch that is best on val, or the last epoch's"
    )
    validate_epochs: bool = Field(default=True, description="look at val after each epoch")

    @model_validator(mode="after")
    def _run_agrees(self) -> Self:
        if self.keep_weights == "best" and not self.validate_epochs:
            raise ValueError("keep_weights is best, which needs validate_epochs: set keep_weights to last")
        return self


class RetrievalRun(FinetuneRun, frozen=True, extra="forbid"):
    """Fine-tuning for image-text retrieval; the defaults are the published code's for Flickr30K."""

    kind: Literal["retrieval"] = Field(default="retrieval", description="what is learned")
    epochs: int = Field(
        default=10, ge=1, le=100_000, description="passes over all captions; COCO: 10 in the paper, 5 in code"
    )
    schedule: ScheduleParams = Field(
        default=ScheduleParams(lr=1e-5, min_lr=1e-6, warmup_lr=1e-5, warmup_iterations=100),
        description="learning rate",
    )
    queue_size: int = Field(
        default=65536, ge=0, description="teacher features kept per modality; 0: the batch's own only"
    )
    negative_pool: Literal["local", "global"] = Field(
        default="local", description="hard negatives from this worker's batch (published) or from all workers'"
    )
    negative_hardness: float = Field(
        default=1.0, ge=0, le=10, description="of ITM's negatives: 1 as published, 0 draws them evenly"
    )


class GroundingRun(RetrievalRun, frozen=True, extra="forbid"):
    """Fine-tuning on expressions that point at things, without their boxes; defaults as published for RefCOCO+."""

    kind: Literal["grounding"] = Field(default="grounding", description="what is learned")  # type: ignore[assignment]
    epochs: int = Field(default=5, ge=1, le=100_000, description="passes over all expressions")
    augment: AugmentParams = Field(
        default=AugmentParams(crop_scale=(1.0, 1.0)), description="augmentation; no crop, as published"
    )


FINE = ScheduleParams(lr=2e-5, min_lr=1e-6, warmup_lr=1e-5, warmup_iterations=100)


class EntailmentRun(FinetuneRun, frozen=True, extra="forbid"):
    """Fine-tuning for visual entailment; the defaults are the published code's."""

    kind: Literal["entailment"] = Field(default="entailment", description="what is learned")
    epochs: int = Field(default=5, ge=1, le=100_000, description="passes over all sentences")
    schedule: ScheduleParams = Field(default=FINE, description="learning rate")
    alpha_ramp: bool = Field(default=False, description="alpha rises from 0 over the first epoch; off in the code")


class Nlvr2Run(FinetuneRun, frozen=True, extra="forbid"):
    """Fine-tuning for statements over two pictures; the defaults are the published code's."""

    kind: Literal["nlvr2"] = Field(default="nlvr2", description="what is learned")
    epochs: int = Field(default=10, ge=1, le=100_000, description="passes over all sentences")
    batch_size: int = Field(default=128, ge=2, le=1_000_000, description="sentences a step, over all workers together")
    schedule: ScheduleParams = Field(default=FINE, description="learning rate")
    sharing: Literal["all", "cross_attention", "key_value", "none"] = Field(
        default="key_value",
        description="what the two blocks of a fusion layer share (table 7): all, the cross-attention layers (the "
        "paper's words), their keys and values (its code), nothing",
    )
    start: Literal["pretrain", "assign_text"] = Field(
        default="pretrain", description="start from pre-training, or from the text assignment after it (table 7)"
    )


class VqaRun(FinetuneRun, frozen=True, extra="forbid"):
    """Fine-tuning for visual question answering; the defaults are the published code's."""

    kind: Literal["vqa"] = Field(default="vqa", description="what is learned")
    epochs: int = Field(default=8, ge=1, le=100_000, description="passes over all questions")
    schedule: ScheduleParams = Field(
        default=ScheduleParams(lr=2e-5, min_lr=1e-6, warmup_lr=1e-5, warmup_iterations=400),
        description="learning rate",
    )
    max_tokens: int = Field(default=25, ge=3, le=512, description="tokens of a question, [CLS] and [SEP] included")
    max_answer_tokens: int = Field(default=12, ge=3, le=512, description="tokens of an answer, likewise")
    decoder_layers: int = Field(default=6, ge=1, le=100, description="layers of the answer decoder")
    answer_top_k: int = Field(
        default=128, ge=1, le=1_000_000, description="candidates scored whole when val is looked at"
    )
    keep_weights: Literal["best", "last"] = Field(
        default="last", description="the weights of the epoch that is best on val, or the last epoch's (published)"
    )
    validate_epochs: bool = Field(default=False, description="answer val after each epoch; off in the code")


def _kind_of(value: Any) -> str:
    return str(value.get("kind", "retrieval") if isinstance(value, dict) else getattr(value, "kind", "retrieval"))


Run = Annotated[
    Annotated[RetrievalRun, Tag("retrieval")]
    | Annotated[GroundingRun, Tag("grounding")]
    | Annotated[EntailmentRun, Tag("entailment")]
    | Annotated[Nlvr2Run, Tag("nlvr2")]
    | Annotated[VqaRun, Tag("vqa")]
    | Annotated[LinearRun, Tag("linear")]
    | Annotated[HatRun, Tag("hat")]
    | Annotated[VitrRun, Tag("vitr")]
    | Annotated[VseRun, Tag("vse")]
    | Annotated[VsrnRun, Tag("vsrn")],
    Discriminator(_kind_of),
]


class FinetuneParams(BaseModel, frozen=True, extra="forbid"):
    """The fine-tuning runs by name; each gives data/models/RUN."""

    runs: dict[RunName, Run] = Field(description="runs by name")

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

    The run's `kind` says what is learned. For retrieval and grounding every caption is a sample, and captions of one
    picture are all its positives; else every item is a sample. After each epoch ``task/val`` is looked at: retrieval by
    ITC alone. Raises UserError for an unknown run, a missing split or weights, and as `pretrain`.
    """
    from components.training.albef_tasks import read_weights
    from components.training.stage import train_stage
    from components.training.task_training import ASSIGNED, train_run

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
    if isinstance(chosen, TowerRun):
        from components.training.tower_training import check_features, train_tower_run

        check_features(pretrained, [split.name for split in (train, val) if split is not None])
        train_stage(
            f"finetune-{run}",
            chosen,
            {"train": train, "pretrained": pretrained} | ({} if val is None else {"val": val}),
            partial(
                partial, train_tower_run, chosen, run, train.resolve(), val and val.resolve(), pretrained.resolve()
            ),
            weights=weights,
            curves=curves,
            runtime=runtime,
        )
        return
    if isinstance(chosen, Nlvr2Run) and chosen.start == "assign_text":
        pretrained = pretrained / ASSIGNED
        if not pretrained.is_dir():
            raise UserError(
                f"{pretrained} does not exist: set pretrain.assign_text, or finetune.runs.{run}.start to pretrain"
            )
    read_weights(pretrained)  # say now what is missing, not from within a worker
    inputs = {"train": train, "pretrained": pretrained} | ({} if val is None else {"val": val})
    train_at, val_at, weights_at = train.resolve(), val and val.resolve(), pretrained.resolve()
    train_stage(
        f"finetune-{run}",
        chosen,
        inputs,
        lambda storage: partial(train_run, chosen, run, train_at, val_at, weights_at, storage),
        weights=weights,
        curves=curves,
        runtime=runtime,
    )
