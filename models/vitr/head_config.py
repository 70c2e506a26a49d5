"""Sizes of VITR over two towers. No torch here, so that parameters can be validated quickly."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from models.towers.config import Level


class VitrHeadConfig(BaseModel, frozen=True, extra="forbid"):
    """Sizes with the paper's names beside them; d1 and d2 are the towers' own."""

    regions: int = Field(default=49, ge=1, le=100_000, description="k: regions of the image tower's last level")
    local_width: int = Field(default=512, ge=1, le=65_536, description="d3: common width of regions and words")
    join_width: int = Field(default=128, ge=1, le=65_536, description="d4: width of the fusion graph's nodes")
    reasoning_steps: int = Field(default=4, ge=0, le=100, description="g1: repetitions of eq. 4 to 8")
    fusion_steps: int = Field(default=2, ge=0, le=100, description="g2: repetitions of eq. 16 and 17")
    gamma: float = Field(default=12.0, gt=0, le=1000, description="inverse temperature of eq. 10")
    fusion: Literal["self", "neighbour"] = Field(
        default="neighbour", description="eq. 17: 'self' as printed, 'neighbour' as message passing"
    )
    read_state: Literal["first", "last"] = Field(default="first", description="eq. 18: which state of the GRU is read")
    share_steps: bool = Field(default=False, description="one set of parameters for all repetitions of a graph")
    use_global: bool = Field(default=True, description="false: VITR-NoViT, without the global vectors")
    relations: bool = Field(
        default=True, description="false: VITR-NoRel, where a GRU sums up the regions and another the words"
    )
    projection: bool = Field(
        default=True,
        description="whether two projections learn to be the dual encoder; false: the towers' own CLIP, as it is",
    )
    temperature: float = Field(default=0.05, gt=0, le=10, description="of the dual encoder's contrastive loss")
    dual_levels: tuple[Level, ...] = Field(
        default=(), description="levels of the towers, from 1, that the dual encoder reads; empty: the last"
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="of regions, words and pooled features before their projections"
    )
