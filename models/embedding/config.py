"""Sizes of VSE∞ and VSRN++. No torch here, so that parameters can be validated quickly."""

from __future__ import annotations

from pydantic import BaseModel, Field


class VseConfig(BaseModel, frozen=True, extra="forbid"):
    """VSE∞ (Chen et al., CVPR 2021); the defaults are its own."""

    width: int = Field(default=1024, ge=1, le=65_536, description="common width of pictures and captions")
    position_width: int = Field(
        default=32, ge=2, le=1024, multiple_of=2, description="width of the pooling's position code and of its GRU"
    )
    drop: float = Field(
        default=0.2, ge=0, lt=1, description="share of regions and of words that a training step leaves out"
    )


class VsrnConfig(BaseModel, frozen=True, extra="forbid"):
    """VSRN++ (Li et al., TPAMI 2022) without its caption generator; the defaults are its own."""

    width: int = Field(default=2048, ge=1, le=65_536, description="common width of pictures and captions")
    reasoning_steps: int = Field(default=4, ge=0, le=100, description="graph convolutions over the regions")
