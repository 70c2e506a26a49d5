"""The image encoder: a ViT with a [CLS] token (ALBEF §3.1). timm's names are those of the published checkpoints."""

import math
from functools import partial

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from models.albef.config import AlbefConfig

TIMM_STD = 0.02  # what timm starts a ViT's weights with


class ImageEncoder(VisionTransformer):
    """A timm ViT without classifier: pictures (B, 3, S, S) to normalised tokens (B, 1 + N, Dv), [CLS] first."""

    def __init__(self, config: AlbefConfig) -> None:
        super().__init__(
            img_size=config.image_size,
            patch_size=config.patch_size,
            num_classes=0,
            global_pool="",
            embed_dim=config.vision_width,
            depth=config.vision_depth,
            num_heads=config.vision_heads,
            mlp_ratio=config.vision_mlp_ratio,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
        )
        if config.init_std != TIMM_STD:
            for module in self.blocks.modules():
                if isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=config.init_std)
        self.expected = (3, config.image_size, config.image_size)

    def forward(self, images: Tensor) -> Tensor:
        """Encode float pictures (B, 3, S, S). Another shape is a ValueError."""
        if images.ndim != 4 or images.shape[1:] != torch.Size(self.expected):
            raise ValueError(f"images must be (B, {', '.join(map(str, self.expected))}), not {tuple(images.shape)}")
        tokens: Tensor = self.forward_features(images)  # (B, 1 + N, Dv)
        return tokens


def resize_position_embeddings(
    pos_embed: Tensor,
    tokens: int | None = None,
    *,
    grid: tuple[int, int] | None = None,
    old_grid: tuple[int, int] | None = None,
    prefix_tokens: int = 1,
) -> Tensor:
    """Position embeddings (1, P + h * w, D) resized for another resolution, to (1, P + H * W, D).

    `grid` is (H, W) in patches; or `tokens` in all, for a square one. `old_grid` is (h, w), square if left out. The
    positions of the P `prefix_tokens` ([CLS], DeiT's distillation token) are kept. Bicubic without antialiasing, as in
    the published code. Raises ValueError where a grid that should be square isn't, or the numbers do not add up.
    """
    if grid is None:
        grid = _square((tokens or pos_embed.shape[1]) - prefix_tokens, prefix_tokens)
    if old_grid is None:
        old_grid = _square(pos_embed.shape[1] - prefix_tokens, prefix_tokens)
    if old_grid[0] * old_grid[1] + prefix_tokens != pos_embed.shape[1]:
        raise ValueError(f"{pos_embed.shape[1]} positions are not {prefix_tokens} and a grid of {old_grid}")
    resized: Tensor = resample_abs_pos_embed(
        pos_embed, list(grid), old_size=list(old_grid), num_prefix_tokens=prefix_tokens, antialias=False
    )
    return resized


def _square(patches: int, prefix_tokens: int) -> tuple[int, int]:
    side = math.isqrt(max(patches, 0))
    if side * side != patches or not side:
        raise ValueError(f"{patches + prefix_tokens} tokens are not {prefix_tokens} and a square grid of patches")
    return side, side
