"""Texts about two pictures: each fusion layer is two blocks, the first for one picture, the second for the other (§5).

The blocks stand one after the other in `text_encoder.bert.encoder.layer`, as in the published checkpoints.
"""

from typing import NamedTuple

from torch import Tensor, nn

from models.albef.config import AlbefConfig, Sharing
from models.albef.text import BertLayer, TextEncoder
from models.albef.vision import ImageEncoder


class Shown(NamedTuple):
    """A picture for each text: tokens (C, 1 + N, Dv), and which of them each text sees (B,), its own when None."""

    tokens: Tensor
    rows: Tensor | None = None


class PairReader(nn.Module):
    """Image encoder, and a text encoder whose fusion layers are doubled and share what `sharing` says."""

    def __init__(self, config: AlbefConfig, sharing: Sharing) -> None:
        super().__init__()
        self.visual_encoder = ImageEncoder(config)
        blocks = [None] * config.text_only_layers + [config.vision_width] * (2 * config.fusion_layers)
        self.text_encoder = TextEncoder(config, contexts=blocks)
        share_blocks(self.text_encoder.bert.layers, config.text_only_layers, sharing)

    def read_pair(self, first: Shown, second: Shown, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Multimodal tokens (B, L, Dt) of token ids (B, L) and two pictures for each."""
        bert = self.text_encoder.bert
        hidden = bert.encode(input_ids, attention_mask)
        mask = attention_mask.bool()[:, None, None, :]
        for index, layer in enumerate(bert.layers[bert.text_only_layers :]):
            shown = second if index % 2 else first
            hidden = layer(hidden, mask, shown.tokens, shown.rows)
        return hidden


def share_blocks(layers: nn.ModuleList, text_only: int, sharing: Sharing) -> None:
    """Let the two blocks of each fusion layer share parameters, those of the second block."""
    for index in range(text_only, len(layers), 2):
        first, second = layers[index], layers[index + 1]
        assert isinstance(first, BertLayer)
        assert isinstance(second, BertLayer)
        if sharing == "all":
            layers[index] = second
        elif sharing == "cross_attention":
            first.crossattention = second.crossattention
        elif sharing == "key_value":
            first.crossattention.self.key = second.crossattention.self.key
            first.crossattention.self.value = second.crossattention.self.value
