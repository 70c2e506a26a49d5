"""ALBEF at inference: two towers whose features are compared, and a fusion encoder that judges a pair (§3.1)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.albef.config import AlbefConfig
from models.albef.text import TextEncoder
from models.albef.vision import ImageEncoder


class Encoding(NamedTuple):
    """What a tower says of a batch: tokens (B, T, D) and one L2-normalised feature (B, E), float32 or wider."""

    tokens: Tensor
    feature: Tensor


class Towers(nn.Module):
    """Image encoder, text encoder and their projections: what the momentum teacher copies (§3.2)."""

    def __init__(self, config: AlbefConfig, *, mlm_head: bool = False) -> None:
        super().__init__()
        self.visual_encoder = ImageEncoder(config)
        self.text_encoder = TextEncoder(config, mlm_head=mlm_head)
        self.vision_proj = nn.Linear(config.vision_width, config.embed_dim)
        self.text_proj = nn.Linear(config.text_width, config.embed_dim)

    def encode_image(self, images: Tensor) -> Encoding:
        """Image tokens (B, 1 + N, Dv) and features (B, E) of normalised float pictures (B, 3, S, S)."""
        tokens = self.visual_encoder(images)
        return Encoding(tokens, _feature(self.vision_proj, tokens))

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> Encoding:
        """Text tokens (B, L, Dt) and features (B, E) of token ids (B, L), [CLS] first; the mask is 0 at padding."""
        tokens = self.text_encoder.bert.encode(input_ids, attention_mask)
        return Encoding(tokens, _feature(self.text_proj, tokens))

    def fuse(
        self, image_tokens: Tensor, text_tokens: Tensor, attention_mask: Tensor, image_rows: Tensor | None = None
    ) -> Tensor:
        """Multimodal tokens (B, L, Dt) of image tokens (C, 1 + N, Dv) and text tokens (B, L, Dt).

        Text b sees picture b, or picture `image_rows[b]` (B,) when given: then a picture's keys and values are computed
        once for all its texts.
        """
        return self.text_encoder.bert.fuse(text_tokens, attention_mask, image_tokens, image_rows)


class Albef(Towers):
    """The student alone: enough to embed, compare and match. `config` is kept for saving."""

    def __init__(self, config: AlbefConfig, *, mlm_head: bool = False) -> None:
        super().__init__(config, mlm_head=mlm_head)
        self.config = config
        self.itm_head = nn.Linear(config.text_width, 2)
        self.temp = nn.Parameter(torch.tensor(config.temperature))

    def match(
        self, image_tokens: Tensor, text_tokens: Tensor, attention_mask: Tensor, image_rows: Tensor | None = None
    ) -> Tensor:
        """Image-text matching logits (B, 2); column 1 is "they match". Arguments as in `fuse` (§3.2, Eq. 4)."""
        logits: Tensor = self.itm_head(self.fuse(image_tokens, text_tokens, attention_mask, image_rows)[:, 0])
        return logits

    @torch.no_grad()
    def clamp_temperature(self) -> None:
        """Keep the learned temperature within the config's bounds (published code, not in the paper)."""
        self.temp.clamp_(self.config.temperature_min, self.config.temperature_max)


def _feature(projection: nn.Linear, tokens: Tensor) -> Tensor:
    projected = projection(tokens[:, 0])
    # In half precision a unit vector's dot products would be too coarse for temperatures of a few hundredths.
    return F.normalize(projected.to(torch.promote_types(projected.dtype, torch.float32)), dim=-1)
