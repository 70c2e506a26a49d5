"""The text tower: word vectors of several layers of a BERT-like Transformer or a GRU (HAT section 3.1, figure 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import BertConfig, BertModel

from models.towers.config import TextTowerConfig


class TextTower(nn.Module):
    """Token ids to word vectors of each chosen layer, all of one width."""

    def __init__(self, config: TextTowerConfig) -> None:
        super().__init__()
        self.config = config
        self.widths = [config.width] * len(config.take)
        self.net: nn.Module = _bert(config) if config.kind == "bert" else _Gru(config)

    def forward(self, input_ids: Tensor, mask: Tensor) -> list[Tensor]:
        """Ids (B, n) and mask (B, n), 0 over padding at the end, to (B, n, width) of each chosen layer."""
        if self.config.kind == "bert":
            states = self.net(input_ids=input_ids, attention_mask=mask, output_hidden_states=True).hidden_states
        else:
            states = self.net(input_ids, mask)
        return [states[layer] for layer in self.config.take]

    def above(self, level: int) -> UpperLayers:
        """The layers above the `level`-th chosen one, from 1; their weights are this tower's.

        Raises ValueError for a GRU, and where no chosen layer lies above.
        """
        if self.config.kind != "bert":
            raise ValueError("only a Transformer learns from a level on: set learn_above to 0")
        if not 0 < level < len(self.config.take):
            raise ValueError(
                f"above level {level} of {len(self.config.take)} there is none: choose 1 or more, and less"
            )
        return UpperLayers(self, level)


class UpperLayers(nn.Module):
    """A Transformer from the outputs of one of its chosen layers on."""

    def __init__(self, tower: TextTower, level: int) -> None:
        super().__init__()
        self.level, self.start = level, tower.config.take[level - 1]
        self.take = tower.config.take[level:]
        self.layers = nn.ModuleList(tower.net.encoder.layer[self.start :])  # type: ignore[union-attr,index]

    def forward(self, words: Tensor, mask: Tensor) -> list[Tensor]:
        """Outputs (B, n, width) of layer `level` and mask (B, n) to the outputs of each chosen layer above it."""
        hidden = words.new_zeros(mask.shape).masked_fill(~mask.bool(), torch.finfo(words.dtype).min)[:, None, None]
        found = []
        for number, layer in enumerate(self.layers, self.start + 1):
            words = layer(words, attention_mask=hidden)
            if number in self.take:
                found.append(words)
        return found


def _bert(config: TextTowerConfig) -> BertModel:
    sizes = BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.intermediate,
        max_position_embeddings=config.max_positions,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
    )
    return BertModel(sizes, add_pooling_layer=False)


class _Gru(nn.Module):
    def __init__(self, config: TextTowerConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            nn.GRU(config.width, config.width // 2, batch_first=True, bidirectional=True) for _ in range(config.layers)
        )

    def forward(self, input_ids: Tensor, mask: Tensor) -> list[Tensor]:
        """The embeddings and each layer's outputs, (B, n, width)."""
        lengths = mask.sum(dim=1).cpu()
        states = [self.dropout(self.embedding(input_ids))]
        for layer in self.layers:
            packed = pack_padded_sequence(states[-1], lengths, batch_first=True, enforce_sorted=False)
            output, _ = pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=input_ids.shape[1])
            states.append(output)
        return states
