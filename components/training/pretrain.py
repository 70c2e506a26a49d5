"""The stage `pretrain`: ALBEF on shards of picture-caption pairs (ALBEF section 3)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from components.io.runtime import Runtime
from components.training.settings import ScheduleParams, TrainingParams
from models.albef.config import AlbefConfig

FROM_TOKENIZER = ("vocab_size", "pad_id", "cls_id", "sep_id", "mask_id")


class AssignTextParams(TrainingParams, frozen=True, extra="forbid"):
    """Text assignment after pre-training, which NLVR2 starts from; the defaults are the published code's."""

    epochs: int = Field(default=1, ge=1, le=100_000, description="passes over the pictures")
    schedule: ScheduleParams = Field(
        default=ScheduleParams(lr=2e-5, min_lr=1e-5, warmup_lr=1e-5, warmup_iterations=100),
        description="learning rate",
    )
    sharing: Literal["all", "cross_attention", "key_value", "none"] = Field(
        default="key_value", description="what the two blocks of a fusion layer share, as in NLVR2's run"
    )
    max_tokens: int = Field(default=25, ge=3, le=512, description="tokens of a caption, [CLS] and [SEP] included")


class PretrainParams(TrainingParams, frozen=True, extra="forbid"):
    """How to pre-train; the defaults are the paper's base model (3.5), where its code differs as the code has it."""

    model: AlbefConfig = Field(
        default=AlbefConfig(), description="sizes; vocabulary and special ids are the tokenizer's"
    )
    itc_weight: float = Field(
        default=1.0,
        ge=0,
        le=100,
        description="weight of ITC in the sum; 1 in the paper (eq. 5), 0 in table 1's first row",
    )
    distill: tuple[Literal["itc", "mlm"], ...] = Field(
        default=("itc", "mlm"),
        description="losses with the teacher's soft targets, of weight `alpha` (eq. 6, 7; apart in table 1)",
    )
    mlm_weight: float = Field(default=1.0, ge=0, le=100, description="weight of MLM in the sum; 1 in the paper (eq. 5)")
    max_tokens: int = Field(
        default=25, ge=3, le=512, description="tokens of a caption, [CLS] and [SEP] included; 25 in the published code"
    )

    start_vision: str | None = Field(
        default=None,
        min_length=1,
        description="weights of a ViT to start from (DeiT in the paper): timm:NAME, a file, or s3://BUCKET/KEY; null: "
        "random",
    )
    start_text: str | None = Field(
        default=None,
        min_length=1,
        description="weights of a BERT to start from: transformers:NAME, a file, or s3://BUCKET/KEY; null: random",
    )
    shards_at: str | None = Field(
        default=None,
        min_length=1,
        description="where training processes read the shards, if not where the stage finds them: s3://BUCKET/PREFIX "
        "or a folder with the same manifest; needs shuffle_shards",
    )
    shards_cache_mb: int = Field(
        default=16384, ge=1, description="MiB of shards from `shards_at` that each machine keeps in work/shards"
    )
    assign_text: AssignTextParams | None = Field(
        default=None, description="then learn to which of two pictures a text belongs, for NLVR2 (table 7); null: no"
    )

    @model_validator(mode="after")
    def _model_agrees(self) -> Self:
        given = [name for name in FROM_TOKENIZER if name in self.model.model_fields_set]
        if given:
            raise ValueError(f"model.{given[0]} comes from the tokenizer of the shards: leave it out")
        if self.shards_at is not None and not self.shuffle_shards:
            raise ValueError(
                "shards_at needs shuffle_shards, or every record would ask for another shard: set it to as many shards "
                "as fit into half of shards_cache_mb"
            )
        if self.max_tokens > self.model.max_positions:
            raise ValueError(f"max_tokens {self.max_tokens} is above model.max_positions {self.model.max_positions}")
        return self


def pretrain(
    params: PretrainParams,
    *,
    shards: Path,
    weights: Path,
    curves: Path,
    runtime: Runtime = Runtime(),
) -> None:
    """Pre-train on `shards` (records and tokenizer); write the student to `weights` and DVCLive curves to `curves`.

    `weights`: model.safetensors, config.json, tokenizer.json, lineage.json, metrics.json (losses of the first and the
    last points of the curves). With `assign_text`, ``weights/assign_text`` holds the same of the text assignment
    that follows, and its curves. A stopped training goes on from its last checkpoint under
    ``runtime.work/pretrain``. Raises UserError for data that hold no whole batch, a damaged picture, a warm-up that
    does not fit, a loss that is no number, and workers lost too often.
    """
    from components.training.albef_tasks import WEIGHTS_FILE, train_pretraining
    from components.training.stage import train_stage
    from components.training.task_training import ASSIGNED, train_text_assignment

    alone = params.model_copy(update={"assign_text": None})  # what is trained first does not depend on what follows
    train_stage(
        "pretrain",
        alone,
        {"shards": shards},
        lambda storage: partial(train_pretraining, alone, shards.resolve(), storage),
        weights=weights,
        curves=curves,
        runtime=runtime,
    )
    assign = params.assign_text
    if assign is None:
        return
    pretrained = weights.resolve()
    train_stage(
        "assign_text",
        assign,
        {"shards": shards, "pretrained": weights / WEIGHTS_FILE},
        lambda storage: partial(train_text_assignment, assign, shards.resolve(), pretrained, storage),
        weights=weights / ASSIGNED,
        curves=weights / ASSIGNED / "curves",
        runtime=runtime,
    )
