"""BERT whose first layers read text alone and whose last layers also attend to the image (ALBEF §3.1).

Module names follow the published checkpoints (`bert.encoder.layer.6.crossattention.self.query`, ...). Embeddings and
feed-forward parts are transformers' own; attention is written here, because its keys may come from an image encoder of
another width and be shared by several texts.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig
from transformers.models.bert.modeling_bert import (
    BertEmbeddings,
    BertIntermediate,
    BertOutput,
    BertPredictionHeadTransform,
    BertSelfOutput,
)

from models.albef.config import AlbefConfig


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention from a sequence to itself or to a context of another width."""

    def __init__(self, width: int, context_width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.fused_attn = True  # False: the probabilities exist and pass through `attn_drop`, as in timm's attention
        self.attn_drop = nn.Dropout(dropout)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(context_width, width)
        self.value = nn.Linear(context_width, width)

    def forward(
        self, hidden: Tensor, context: Tensor, mask: Tensor | None = None, context_rows: Tensor | None = None
    ) -> Tensor:
        """Attend from `hidden` (B, L, D) to `context` (C, N, Dc).

        `mask` is boolean, broadcastable to (B, H, L, N), true where attention is allowed. `context_rows` (B,) gives the
        row of `context` that each row of `hidden` attends to (its own by default): a context shared by many rows is
        projected once.
        """
        query = self._split(self.query(hidden))  # (B, H, L, D/H)
        key = self._split(self.key(context))  # (C, H, N, D/H)
        value = self._split(self.value(context))
        if context_rows is not None:
            key, value = key[context_rows], value[context_rows]  # (B, H, N, D/H)
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        else:
            scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])  # (B, H, L, N)
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf)
            attended = self.attn_drop(scores.softmax(dim=-1)) @ value
        return attended.transpose(1, 2).flatten(2)  # (B, L, D)

    def _split(self, projected: Tensor) -> Tensor:
        rows, length, _ = projected.shape
        return projected.view(rows, length, self.heads, -1).transpose(1, 2)  # (B, L, D) -> (B, H, L, D/H)


class AttentionBlock(nn.Module):
    """Attention, then projection, dropout, residual and LayerNorm."""

    def __init__(self, bert: BertConfig, context_width: int) -> None:
        super().__init__()
        self.self = MultiHeadAttention(
            bert.hidden_size, context_width, bert.num_attention_heads, bert.attention_probs_dropout_prob
        )
        self.output = BertSelfOutput(bert)

    def forward(
        self, hidden: Tensor, context: Tensor, mask: Tensor | None = None, context_rows: Tensor | None = None
    ) -> Tensor:
        """As `MultiHeadAttention`: (B, L, D) to (B, L, D)."""
        out: Tensor = self.output(self.self(hidden, context, mask, context_rows), hidden)
        return out


class BertLayer(nn.Module):
    """Self-attention, in fusion layers cross-attention to a context (the image's tokens), then the MLP."""

    def __init__(self, bert: BertConfig, context_width: int | None) -> None:
        super().__init__()
        self.attention = AttentionBlock(bert, bert.hidden_size)
        if context_width is not None:
            self.crossattention = AttentionBlock(bert, context_width)
        self.intermediate = BertIntermediate(bert)
        self.output = BertOutput(bert)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor,
        context: Tensor | None = None,
        context_rows: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, L, D) to (B, L, D). `context` (C, N, Dc) belongs to fusion layers alone; the rest as in attention."""
        hidden = self.attention(hidden, hidden, mask)
        if context is not None:
            hidden = self.crossattention(hidden, context, context_mask, context_rows)
        out: Tensor = self.output(self.intermediate(hidden), hidden)
        return out


class Bert(nn.Module):
    """The embeddings and all layers, text-only ones first.

    `contexts` gives each layer's width of context, None for text-only layers; by default ALBEF's text encoder, whose
    last layers attend to the image.
    """

    def __init__(self, config: AlbefConfig, contexts: Sequence[int | None] | None = None) -> None:
        super().__init__()
        bert = _bert_config(config)
        if contexts is None:
            contexts = [None] * config.text_only_layers + [config.vision_width] * config.fusion_layers
        self.text_only_layers = list(contexts).count(None)
        self.max_positions = config.max_positions
        self.embeddings = BertEmbeddings(bert)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(BertLayer(bert, width) for width in contexts)

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Text tokens (B, L, Dt) of token ids (B, L) int64; `attention_mask` (B, L) is 1 at tokens and 0 at padding.

        Raises ValueError for other shapes or a text longer than the position embeddings.
        """
        if input_ids.ndim != 2 or input_ids.shape != attention_mask.shape:
            raise ValueError(
                f"input_ids and attention_mask must both be (B, L), not {tuple(input_ids.shape)} "
                f"and {tuple(attention_mask.shape)}"
            )
        if input_ids.shape[1] > self.max_positions:
            raise ValueError(f"{input_ids.shape[1]} tokens are more than max_positions={self.max_positions}")
        hidden: Tensor = self.embeddings(input_ids)
        mask = allowed(attention_mask)
        for layer in self.layers[: self.text_only_layers]:
            hidden = layer(hidden, mask)
        return hidden

    def fuse(
        self, text_tokens: Tensor, attention_mask: Tensor, image_tokens: Tensor, image_rows: Tensor | None = None
    ) -> Tensor:
        """Multimodal tokens (B, L, Dt) of text tokens (B, L, Dt) and image tokens (C, 1 + N, Dv).

        Text b sees picture `image_rows[b]`, or picture b when `image_rows` is None (then C = B, else ValueError).
        """
        if image_rows is None and image_tokens.shape[0] != text_tokens.shape[0]:
            raise ValueError(f"{text_tokens.shape[0]} texts against {image_tokens.shape[0]} pictures: give image_rows")
        mask = allowed(attention_mask)
        hidden = text_tokens
        for layer in self.layers[self.text_only_layers :]:
            hidden = layer(hidden, mask, image_tokens, image_rows)
        return hidden

    @property
    def layers(self) -> nn.ModuleList:
        """All layers in order."""
        layers = self.encoder.layer
        assert isinstance(layers, nn.ModuleList)
        return layers


class MlmPredictions(nn.Module):
    """BERT's masked-language head; its output weight is the word embedding, so it isn't stored twice."""

    def __init__(self, bert: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(bert)
        self.bias = nn.Parameter(Tensor(bert.vocab_size).zero_())

    def forward(self, hidden: Tensor, word_embeddings: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., Dt)."""
        return F.linear(self.transform(hidden), word_embeddings, self.bias)


class TextEncoder(nn.Module):
    """`bert`, and with `mlm_head` the vocabulary head `cls.predictions`. `contexts` as in `Bert`."""

    def __init__(
        self, config: AlbefConfig, *, mlm_head: bool = False, contexts: Sequence[int | None] | None = None
    ) -> None:
        super().__init__()
        self.bert = Bert(config, contexts)
        self.cls = nn.ModuleDict({"predictions": MlmPredictions(_bert_config(config))}) if mlm_head else None
        self.apply(partial(_initialise, config.init_std))

    def predict_tokens(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits (..., V) of multimodal tokens (..., Dt). RuntimeError without the MLM head."""
        if self.cls is None:
            raise RuntimeError("this text encoder was built without its MLM head (mlm_head=False)")
        logits: Tensor = self.cls["predictions"](hidden, self.bert.embeddings.word_embeddings.weight)
        return logits


def _bert_config(config: AlbefConfig) -> BertConfig:
    return BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.text_width,
        num_hidden_layers=config.text_layers,
        num_attention_heads=config.text_heads,
        intermediate_size=config.text_intermediate,
        max_position_embeddings=config.max_positions,
        type_vocab_size=config.token_types,
        hidden_dropout_prob=config.text_dropout,
        attention_probs_dropout_prob=config.text_dropout,
        pad_token_id=config.pad_id,
    )


def allowed(attention_mask: Tensor) -> Tensor:
    """Which keys any query may see: (B, L), 1 at tokens, to boolean (B, 1, 1, L)."""
    return attention_mask.bool()[:, None, None, :]


def _initialise(std: float, module: nn.Module) -> None:
    """BERT's start: normal weights, zero biases; torch's LayerNorm already starts at one and zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        nn.init.zeros_(module.weight[module.padding_idx])
