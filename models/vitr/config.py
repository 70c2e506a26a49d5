"""Sizes and readings of VITR."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class VitrConfig(BaseModel, frozen=True, extra="forbid"):
    """Sizes, with the paper's names beside them, and the readings of the places where its text leaves room."""

    regions: int = Field(default=49, ge=1, description="k: regions of the local encoder (7 x 7)")
    global_width: int = Field(default=512, ge=1, description="d1: width of the dual encoder's outputs and words")
    region_width: int = Field(default=2048, ge=1, description="d2: width of a region's features")
    local_width: int = Field(default=512, ge=1, description="d3: common width of regions and words")
    join_width: int = Field(default=128, ge=1, description="d4: width of the fusion graph's nodes")
    reasoning_steps: int = Field(default=4, ge=0, description="g1: repetitions of eq. 4 to 8")
    fusion_steps: int = Field(default=2, ge=0, description="g2: repetitions of eq. 16 and 17")
    gamma: float = Field(default=12.0, gt=0, description="inverse temperature of eq. 10")
    fusion: Literal["self", "neighbour"] = Field(
        default="neighbour",
        description="eq. 17: 'self' as printed (the gate scales node j), 'neighbour' as message passing (node l)",
    )
    read_state: Literal["first", "last"] = Field(
        default="first", description="eq. 18: which hidden state of the GRU is scored; the paper prints the first"
    )
    share_steps: bool = Field(default=False, description="one set of parameters for all repetitions of a graph")
    relations: bool = Field(
        default=True, description="false: VITR-NoRel (table 7), a GRU sums up the regions and another the words"
    )
