"""Sizes and readings of HAT. No torch here, so that parameters can be validated quickly."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from models.towers.config import Level


class HatHeadConfig(BaseModel, frozen=True, extra="forbid"):
    """What stands on the two towers; the defaults are the paper's, where its code differs as the code has it."""

    direction: Literal["i2t", "t2i", "both"] = Field(
        default="both",
        description="cross attention of HAT(i-t), of HAT(t-i), or one of each, whose mean similarity is the ensemble "
        "HAT*",
    )
    width: int = Field(default=768, ge=1, le=65_536, description="common width of regions and words at each level")
    levels: tuple[Level, ...] = Field(
        default=(1, 2, 3),
        min_length=1,
        description="levels that are aligned, from 1: the towers' chosen stages and layers, pair by pair (table 3)",
    )
    smoothing: float = Field(default=9.0, gt=0, le=1000, description="lambda, the attention's inverse temperature")
    clip: Literal["leaky", "relu"] = Field(
        default="leaky", description="negative similarities: LeakyReLU(0.1) in the code, max(x, 0) in the paper"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="of regions and words before their projections")
    pooled: bool = Field(
        default=False,
        description="a score of mean regions and words beside the directions', which learns with a contrastive loss; "
        "not in the paper: it gives the projections a start, and chooses candidates well",
    )
