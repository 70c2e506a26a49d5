"""Grad-CAM: where in the picture a text is, by attention and its gradient, without boxes (§6.4, appendix A)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from timm.layers import Attention
from torch import Tensor, nn

from models.albef.model import Albef
from models.albef.text import BertLayer, MultiHeadAttention


@contextmanager
def recorded(attention: MultiHeadAttention | Attention) -> Iterator[list[Tensor]]:
    """The attention probabilities (B, H, L, N) of each call within the context, part of the graph."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept.append(output)

    fused, handle = attention.fused_attn, attention.attn_drop.register_forward_hook(keep)
    attention.fused_attn = False  # the fused kernel never has the probabilities
    try:
        yield kept
    finally:
        attention.fused_attn = fused
        handle.remove()


def gradcam_itm(model: Albef, images: Tensor, input_ids: Tensor, attention_mask: Tensor, layer: int) -> Tensor:
    """Maps (B, L, H, W) of each token by ITM: cross-attention of BERT layer `layer` times its positive gradient.

    Averaged over heads; padding's maps are zero. The published evaluation takes layer 8 of 12, the third that fuses,
    and means over the tokens. Raises ValueError for a layer that does not attend to the image.
    """
    layers = model.text_encoder.bert.layers
    if not model.text_encoder.bert.text_only_layers <= layer < len(layers):
        raise ValueError(
            f"layer {layer} does not attend to the image: "
            f"choose one of {model.text_encoder.bert.text_only_layers} to {len(layers) - 1}"
        )
    chosen = layers[layer]
    assert isinstance(chosen, BertLayer)
    with torch.enable_grad(), recorded(chosen.crossattention.self) as kept:
        image = model.encode_image(images)
        text = model.encode_text(input_ids, attention_mask)
        score = model.match(image.tokens, text.tokens, attention_mask)[:, 1].sum()
    (gradient,) = torch.autograd.grad(score, kept)
    attention, gradient = (part.detach()[..., 1:] for part in (kept[0], gradient))  # (B, H, L, N): [CLS] is no place
    cam = (attention * gradient.clamp(min=0)).mean(dim=1) * attention_mask[..., None]  # (B, L, N)
    return _as_grid(cam, model)


def gradcam_itc(model: Albef, images: Tensor, input_ids: Tensor, attention_mask: Tensor, block: int) -> Tensor:
    """Maps (B, H, W) of each text by ITC: [CLS]'s attention in image-encoder block `block` times positive gradient.

    Averaged over heads. The published evaluation takes the last block. Raises ValueError when there is no such block.
    """
    blocks = model.visual_encoder.blocks
    if not 0 <= block < len(blocks):
        raise ValueError(f"the image encoder has no block {block}: choose one of 0 to {len(blocks) - 1}")
    attention = blocks[block].attn
    assert isinstance(attention, Attention)
    with torch.enable_grad(), recorded(attention) as kept:
        image = model.encode_image(images)
        text = model.encode_text(input_ids, attention_mask)
        score = ((image.feature * text.feature).sum(dim=1) / model.temp).sum()
    (gradient,) = torch.autograd.grad(score, kept)
    cam = kept[0].detach()[:, :, 0, 1:] * gradient[:, :, 0, 1:].clamp(min=0)  # (B, H, N)
    return _as_grid(cam.mean(dim=1), model)


def _as_grid(cam: Tensor, model: Albef) -> Tensor:
    side = model.config.image_size // model.config.patch_size
    return cam.unflatten(-1, (side, side))
