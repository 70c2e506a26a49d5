"""What a picture and a caption must be: the parameters of the rules, apart from the code that needs Pillow or Arrow."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class PictureParams(BaseModel, frozen=True, extra="forbid"):
    """Which pictures are kept, and in what form."""

    min_side: int = Field(default=64, ge=1, le=8192, description="shortest side in pixels; smaller is rejected")
    max_aspect: float = Field(default=5.0, ge=1.0, le=1000.0, description="longest side over shortest side")
    max_pixels: int = Field(
        default=50_000_000,
        ge=1,
        le=150_000_000,
        description="declared width times height; larger is refused before decoding",
    )
    max_side: int | None = Field(
        default=None, ge=16, le=16384, description="longest side to scale down to; null: never"
    )
    resample: Literal["lanczos", "bicubic", "bilinear", "box"] = Field(
        default="lanczos", description="filter for scaling down"
    )
    encode: Literal["jpeg", "png"] = Field(default="jpeg", description="format of pictures that had to be changed")
    quality: int = Field(default=95, ge=1, le=100, description="JPEG quality of pictures that had to be changed")


class CaptionParams(BaseModel, frozen=True, extra="forbid"):
    """How captions are cleaned."""

    rules: Literal["albef"] = Field(default="albef", description="the published rule set")
    web: bool = Field(
        default=True,
        description="first remove what only web pages have: HTML entities and tags, URLs, e-mail addresses, control "
        "characters; compose Unicode (NFC). False: the published rules alone",
    )
    max_words: int = Field(default=30, ge=1, le=1000, description="words kept; the rest is cut")
    max_characters: int = Field(
        default=2000, ge=1, le=100_000, description="longer than this as it came in is no caption and is rejected"
    )
