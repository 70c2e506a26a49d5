"""The repeated blocks of transformers: compiled one by one, or computed anew in the backward pass to save memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LISTS = ("blocks", "layer", "layers")  # how timm, transformers and our models call the list of their blocks


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The innermost modules that stand in a list of blocks, each once: a Swin's blocks, not its stages."""
    found: dict[nn.Module, None] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LISTS and isinstance(module, nn.ModuleList | nn.Sequential):
            found |= dict.fromkeys(child for child in module.children() if not any(_lists_in(child)))
    return list(found)


def prepare_blocks(model: nn.Module, *, compiled: bool, recomputed: bool) -> None:
    """Compile the blocks, and have those that learn recompute their activations in the backward pass.

    Parameters keep their names. Blocks that are equal but for their weights are compiled once, in seconds, where a
    whole model with its queues and negatives would break into pieces. Dropout draws the same when it is recomputed.
    """
    for block in blocks_of(model):
        forward = torch.compile(block.forward) if compiled else block.forward
        if recomputed and any(weight.requires_grad for weight in block.parameters()):
            forward = partial(checkpoint, forward, use_reentrant=False)
        if compiled or recomputed:
            block.forward = forward  # type: ignore[method-assign]


def _lists_in(module: nn.Module) -> Iterator[bool]:
    for name, inner in module.named_modules():
        if name.rpartition(".")[2] in LISTS and isinstance(inner, nn.ModuleList | nn.Sequential):
            yield True
