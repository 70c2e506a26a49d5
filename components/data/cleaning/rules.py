"""What a picture and a caption must be: the parameters of the rules, apart from the code that needs Pillow or Arrow."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator


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
        "characters and invisible ones; make words of placeholders such as <PERSON>; compose Unicode. False: the "
        "published rules alone",
    )
    unicode: Literal["NFC", "NFKC"] = Field(
        default="NFC", description="form of Unicode when `web` is on; NFKC also makes plain letters of ornate ones"
    )
    max_words: int = Field(default=30, ge=1, le=1000, description="words kept; the rest is cut")
    max_tokens: int | None = Field(
        default=None,
        ge=3,
        le=1000,
        description="tokens kept, [CLS] and [SEP] counted, cut at a word's end (ALBEF trains on 25, and cuts while it "
        "trains); null: no cap",
    )
    tokenizer: Path | None = Field(
        default=None,
        description="tokenizer.json whose tokens `max_tokens` counts; null: words and punctuation marks, as BERT "
        "splits a text before it looks for word pieces",
    )
    max_characters: int = Field(
        default=2000, ge=1, le=100_000, description="longer than this as it came in is no caption and is rejected"
    )

    @model_validator(mode="after")
    def _tokenizer_is_used(self) -> Self:
        if self.tokenizer is not None and self.max_tokens is None:
            raise ValueError("tokenizer counts tokens for max_tokens, which is not set: set it, or leave tokenizer out")
        return self
