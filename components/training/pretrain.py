"""The stage `pretrain`: ALBEF on shards of picture-caption pairs (ALBEF section 3)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from components.io.runtime import Runtime
from components.training.settings import TrainingParams
from models.albef.config import AlbefConfig

FROM_TOKENIZER = ("vocab_size", "pad_id", "cls_id", "sep_id", "mask_id")


class PretrainParams(TrainingParams, frozen=True, extra="forbid"):
    """How to pre-train; the defaults are the paper's base model (3.5), where its code differs as the code has it."""

    model: AlbefConfig = Field(
        default=AlbefConfig(), description="sizes; vocabulary and special ids are the tokenizer's"
    )
    mlm_weight: float = Field(default=1.0, ge=0, le=100, description="weight of MLM in the sum; 1 in the paper (eq. 5)")
    max_tokens: int = Field(
        default=25, ge=3, le=512, description="tokens of a caption, [CLS] and [SEP] included; 25 in the published code"
    )

    @model_validator(mode="after")
    def _model_agrees(self) -> Self:
        given = [name for name in FROM_TOKENIZER if name in self.model.model_fields_set]
        if given:
            raise ValueError(f"model.{given[0]} comes from the tokenizer of the shards: leave it out")
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
    last points of the curves). A stopped training goes on from its last checkpoint under
    ``runtime.work/pretrain``. Raises UserError for data that hold no whole batch, a damaged picture, a warm-up that
    does not fit, a loss that is no number, and workers lost too often.
    """
    from components.training.albef_tasks import train_pretraining
    from components.training.stage import train_stage

    train_stage(
        "pretrain",
        params,
        {"shards": shards},
        lambda storage: partial(train_pretraining, params, shards.resolve(), storage),
        weights=weights,
        curves=curves,
        runtime=runtime,
    )
