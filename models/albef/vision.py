"""The image encoder: a ViT with a [CLS] token (ALBEF §3.1). timm's names are those of the published checkpoints."""

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


def resize_position_embeddings(pos_embed: Tensor, tokens: int) -> Tensor:
    """Position embeddings (1, 1 + n, D) of a square grid, resized to (1, tokens, D) for another resolution.

    Bicubic without antialiasing, as in the published code; the [CLS] position is kept.
    """
    side = int((tokens - 1) ** 0.5)
    if side * side != tokens - 1:
        raise ValueError(f"{tokens} tokens are not one [CLS] and a square grid of patches")
    resized: Tensor = resample_abs_pos_embed(pos_embed, [side, side], num_prefix_tokens=1, antialias=False)
    return resized
