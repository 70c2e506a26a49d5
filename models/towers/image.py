"""The image tower: any timm model with feature maps of several stages (HAT section 3.2: Swin; figure 2: ResNet)."""

from __future__ import annotations

from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.towers.config import ImageTowerConfig


class ImageTower(nn.Module):
    """Pictures to regions of each chosen stage.

    Raises ValueError when timm has no such model, or the model no such stages.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: ImageTowerConfig) -> None:
        super().__init__()
        self.config = config
        self.net = _create(config).to(memory_format=torch.channels_last)  # convolutions take two thirds of the time
        info = [int(entry["num_chs"]) for entry in self.net.feature_info]
        self.depth = len(info)
        if config.stages[-1] > self.depth + 1:
            raise ValueError(
                f"{config.model} has {self.depth} stages and the map that its classifier pools: "
                f"there is no stage {config.stages[-1]}"
            )
        self.widths: list[int] = [(*info, int(self.net.num_features))[stage - 1] for stage in config.stages]
        self.register_buffer("mean", torch.tensor(config.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.std).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Pictures (B, 3, S, S), colours in [0, 1], to regions (B, k, width) float of each chosen stage."""
        images = ((images - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        indices = [stage - 1 for stage in self.config.stages if stage <= self.depth]
        last, maps = self.net.forward_intermediates(images, indices=indices or [self.depth - 1])
        taken = list(maps) if indices else []
        if self.config.stages[-1] > self.depth:
            channels_last = getattr(self.net, "output_fmt", "NCHW") == "NHWC"
            taken.append(last.permute(0, 3, 1, 2) if channels_last else last)
        return [self._regions(one) for one in taken]

    def _regions(self, image_map: Tensor) -> Tensor:
        """(B, d, h, w) to (B, k, d)."""
        grid = self.config.grid
        if grid is not None and max(image_map.shape[2:]) > grid:
            image_map = F.adaptive_avg_pool2d(image_map, grid)
        return image_map.flatten(2).transpose(1, 2).contiguous()


def _create(config: ImageTowerConfig) -> Any:
    options: dict[str, Any] = dict(config.options)
    if config.model.startswith("swin"):  # published: windows of a 32nd of the picture's side
        options = {"img_size": config.image_size, "window_size": config.image_size // 32} | options
    try:
        net = timm.create_model(config.model, pretrained=False, num_classes=0, **options)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"timm cannot make {config.model} with {options}: {error}") from None
    if not hasattr(net, "forward_intermediates"):
        raise ValueError(f"{config.model} of timm gives no feature maps of its stages: choose another")
    if hasattr(net, "head"):  # pools and classifies; its weights (CLIP's ResNets, ConvNeXt) are no part of the maps
        net.head = nn.Identity()
    return net
