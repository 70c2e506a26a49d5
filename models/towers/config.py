"""Sizes of the two towers, checked. No torch here, so that parameters can be validated quickly."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

Stage = Annotated[int, Field(ge=1, le=100)]
Level = Annotated[int, Field(ge=1, le=100)]  # of the chosen stages and layers, from 1
Colour = Annotated[float, Field(gt=0, lt=1)]
Option = Annotated[int, Field(ge=0, le=100_000)]


class ImageTowerConfig(BaseModel, frozen=True, extra="forbid"):
    """A timm model and what is taken from it; the defaults are HAT's Swin-B (section 3.2)."""

    model: str = Field(
        default="swin_base_patch4_window7_224",
        pattern=r"^[a-z0-9_]+$",
        description="timm's name of an architecture with feature maps of several stages: Swin, ResNet, EfficientNet, …",
    )
    image_size: int = Field(default=224, ge=32, le=2048, description="side of the square picture, pixels")
    stages: tuple[Stage, ...] = Field(
        default=(2, 3, 4),
        min_length=1,
        description="feature maps to take, lowest first, counted from 1; one past the last stage: the map that the "
        "classifier pools",
    )
    grid: int | None = Field(
        default=None, ge=1, le=512, description="average larger maps down to so many regions a side; null: as they are"
    )
    mean: tuple[Colour, Colour, Colour] = Field(
        default=(0.485, 0.456, 0.406), description="mean colour that the weights were trained with"
    )
    std: tuple[Colour, Colour, Colour] = Field(
        default=(0.229, 0.224, 0.225), description="spread of colours that the weights were trained with"
    )
    options: dict[str, Option | tuple[Option, ...]] = Field(
        default={}, description="sizes that differ from the named architecture's, by timm's names (depths, embed_dim)"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if list(self.stages) != sorted(set(self.stages)):
            raise ValueError(f"stages are {list(self.stages)}: name each once, the lowest first")
        return self


class TextTowerConfig(BaseModel, frozen=True, extra="forbid"):
    """BERT, a Transformer of its shape without its weights, or a GRU; the defaults are BERT-base with HAT's layers."""

    kind: Literal["bert", "gru"] = Field(
        default="bert", description="bert: also the vanilla Transformer, where there are no weights; gru: bidirectional"
    )
    layers: int = Field(default=12, ge=1, le=100, description="layers that there are")
    take: tuple[Stage, ...] = Field(
        default=(4, 10, 12), min_length=1, description="layers whose outputs are taken, lowest first, counted from 1"
    )
    width: int = Field(default=768, ge=2, le=65_536, description="width of a word's vector")
    heads: int = Field(default=12, ge=1, le=1024, description="bert: attention heads")
    intermediate: int = Field(default=3072, ge=1, le=262_144, description="bert: width within a layer's MLP")
    vocab_size: int = Field(default=30_522, ge=5, le=10_000_000, description="words, special ones included")
    max_positions: int = Field(default=512, ge=3, le=65_536, description="bert: longest text, tokens")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="while training")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if list(self.take) != sorted(set(self.take)) or self.take[-1] > self.layers:
            raise ValueError(f"take is {list(self.take)}: name each of the {self.layers} layers at most once, in order")
        if self.kind == "bert" and self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of heads {self.heads}")
        if self.kind == "gru" and self.width % 2:
            raise ValueError(f"width {self.width} is odd, and a GRU here has two directions of equal width")
        return self


class ClipConfig(BaseModel, frozen=True, extra="forbid"):
    """CLIP (Radford et al., ICML 2021), a dual encoder; the defaults are ViT-B/16's sizes.

    Its vectors of whole pictures and captions are the towers' first level, one region and one word wide; its words are
    the second, beside the regions of the image tower. All are `joint_width` wide: d1 of VITR.
    """

    patch_size: int = Field(default=16, ge=1, le=1024, description="side of the ViT's patches, pixels")
    image_layers: int = Field(default=12, ge=1, le=200, description="layers of the ViT")
    image_width: int = Field(default=768, ge=2, le=65_536, description="width of the ViT")
    image_heads: int = Field(default=12, ge=1, le=1024, description="attention heads of the ViT")
    text_layers: int = Field(default=12, ge=1, le=200, description="layers of the text encoder")
    text_width: int = Field(default=512, ge=2, le=65_536, description="width of the text encoder")
    text_heads: int = Field(default=8, ge=1, le=1024, description="attention heads of the text encoder")
    joint_width: int = Field(default=512, ge=1, le=65_536, description="width of the vectors that are compared")
    vocab_size: int = Field(default=49_408, ge=5, le=10_000_000, description="words, special ones included")
    max_positions: int = Field(default=77, ge=3, le=65_536, description="longest text, tokens")
    activation: Literal["quick_gelu", "gelu"] = Field(
        default="quick_gelu", description="quick_gelu in OpenAI's weights, gelu in most of open_clip's others"
    )
    words: Literal["projected", "states"] = Field(
        default="projected",
        description="a word's vector: its last state, projected as the caption's is (always d1 wide), or as it is",
    )
    alone: bool = Field(
        default=False, description="the vectors of whole pictures and captions, and nothing beside them"
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for side, width, heads in (
            ("image", self.image_width, self.image_heads),
            ("text", self.text_width, self.text_heads),
        ):
            if width % heads:
                raise ValueError(f"{side}_width {width} is no multiple of {side}_heads {heads}")
        if self.words == "states" and self.text_width != self.joint_width:
            raise ValueError(
                f"words: states are {self.text_width} wide (text_width) and would have to be as wide as the caption's "
                f"vector, {self.joint_width} (joint_width): use projected"
            )
        return self
