"""Sizes of the dual encoder. No torch here, so that parameters can be validated quickly."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, model_validator

from models.towers.config import Level


class DualConfig(BaseModel, frozen=True, extra="forbid"):
    """Two linear projections of pooled features, or what a CLIP among the towers says by itself."""

    projection: bool = Field(
        default=True,
        description="false: the first level of both towers as it is, a CLIP's own vectors; nothing is learned on top",
    )
    width: int = Field(default=512, ge=1, le=65_536, description="common width of pictures and captions")
    levels: tuple[Level, ...] = Field(
        default=(),
        description="levels of the towers, from 1, whose means are normalised and read side by side; empty: the last, "
        "as it is",
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="of pooled features before their projections")
    temperature: float = Field(default=0.05, gt=0, le=10, description="of the contrastive loss, at its start")
    learn_temperature: bool = Field(default=True, description="whether the temperature is learned")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if not self.projection and (self.levels or self.dropout):
            raise ValueError("levels and dropout are of the projections: leave them out where projection is false")
        return self
