"""CLIP as the towers' dual encoder: its own vectors of pictures and captions, beside regions of any timm model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

from models.towers.config import ClipConfig, ImageTowerConfig, TextTowerConfig
from models.towers.image import ImageTower
from models.towers.text import TextTower

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # colours that CLIP's ViT saw
MLP = 4  # times the width, in every published CLIP with these sizes


class ClipImageTower(nn.Module):
    """Pictures to CLIP's vector of each, then (unless `ClipConfig.alone`) the regions of an image tower beside it.

    Both see the same picture, each in the colours that its weights were trained with.
    Raises ValueError as `ImageTower` does, and when the picture's side is no multiple of the patches'.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, image: ImageTowerConfig, clip: ClipConfig) -> None:
        super().__init__()
        if image.image_size % clip.patch_size:
            raise ValueError(f"image_size {image.image_size} is no multiple of clip.patch_size {clip.patch_size}")
        self.net = CLIPVisionModelWithProjection(
            CLIPVisionConfig(
                hidden_size=clip.image_width,
                intermediate_size=MLP * clip.image_width,
                num_hidden_layers=clip.image_layers,
                num_attention_heads=clip.image_heads,
                image_size=image.image_size,
                patch_size=clip.patch_size,
                projection_dim=clip.joint_width,
                hidden_act=clip.activation,
            )
        )
        self.local = None if clip.alone else ImageTower(image)
        self.widths = [clip.joint_width, *(self.local.widths if self.local is not None else ())]
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Pictures (B, 3, S, S), colours in [0, 1], to (B, 1, joint_width) float and each stage's (B, k, width)."""
        vectors = self.net(pixel_values=(images - self.mean) / self.std).image_embeds
        return [vectors[:, None], *(self.local(images) if self.local is not None else ())]


class ClipTextTower(nn.Module):
    """Token ids to CLIP's vector of each caption, then (unless `ClipConfig.alone`) its words."""

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__()
        self.clip = clip
        self.net = CLIPTextModelWithProjection(
            CLIPTextConfig(
                vocab_size=clip.vocab_size,
                hidden_size=clip.text_width,
                intermediate_size=MLP * clip.text_width,
                num_hidden_layers=clip.text_layers,
                num_attention_heads=clip.text_heads,
                max_position_embeddings=clip.max_positions,
                projection_dim=clip.joint_width,
                hidden_act=clip.activation,
            )
        )
        self.widths = [clip.joint_width] * (1 if clip.alone else 2)

    def forward(self, input_ids: Tensor, mask: Tensor) -> list[Tensor]:
        """Ids (B, n) and mask (B, n), 0 over padding at the end, to (B, 1, joint_width) and words (B, n, joint_width).

        A caption's vector is the projected state of its last token, which the tokenizer makes [EOS].
        """
        states = self.net.text_model(input_ids=input_ids, attention_mask=mask).last_hidden_state
        projected: Tensor = self.net.text_projection(states)
        last = mask.sum(dim=1).long() - 1
        caption = projected[torch.arange(len(projected), device=projected.device), last][:, None]
        if self.clip.alone:
            return [caption]
        return [caption, projected if self.clip.words == "projected" else states]

    def above(self, level: int) -> NoReturn:
        """Always raises ValueError: cached words of CLIP are those of its last layer."""
        raise ValueError(f"CLIP's text encoder does not learn from level {level} on: set learn_above to 0")


Towers = tuple[ImageTower | ClipImageTower, TextTower | ClipTextTower]


def make_towers(image: ImageTowerConfig, text: TextTowerConfig, clip: ClipConfig | None) -> Towers:
    """The image and the text tower; with `clip`, `text` plays no part. Raises ValueError as they do."""
    if clip is None:
        return ImageTower(image), TextTower(text)
    return ClipImageTower(image, clip), ClipTextTower(clip)


def read_towers(sizes: Mapping[str, Any]) -> Towers:
    """The towers of such sizes, with random weights. Raises KeyError and ValueError when they are no sizes."""
    return make_towers(*check_sizes(sizes))


def check_sizes(sizes: Mapping[str, Any]) -> tuple[ImageTowerConfig, TextTowerConfig, ClipConfig | None]:
    """The configurations that two towers' sizes hold. Raises KeyError and ValueError when they are no sizes."""
    text, clip = sizes.get("text"), sizes.get("clip")
    if text is None and clip is None:
        raise ValueError("it names nothing that reads captions")
    return (
        ImageTowerConfig.model_validate_json(json.dumps(sizes["image"])),
        TextTowerConfig() if text is None else TextTowerConfig.model_validate_json(json.dumps(text)),
        None if clip is None else ClipConfig.model_validate_json(json.dumps(clip)),
    )
