"""Published HAT checkpoints: a Lightning file's ``state_dict``, with a Swin in timm 0.4's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from models.hat.model import HatDirection
from models.towers.image import ImageTower
from models.towers.published import load_image_tower, load_text_tower
from models.towers.text import TextTower

VISION, TEXT = "vit_model.", "text_transformer."
PROJECTIONS = {"image": "cross_modal_image_transform", "text": "cross_modal_text_transform"}
FIRST_STAGE = "norm_0."  # of stage 1, which is not aligned


class HatParts(NamedTuple):
    """A checkpoint's tensors by part, under the names that each part gives them."""

    vision: dict[str, Tensor]  # timm 0.4's names, without the stages' LayerNorms
    text: dict[str, Tensor]
    head: dict[str, Tensor]  # of a `HatDirection` with three levels


def split_checkpoint(state: Mapping[str, Tensor]) -> HatParts:
    """The parts of a ``state_dict``; raises ValueError for a tensor that belongs to none."""
    vision: dict[str, Tensor] = {}
    text: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    suffixes = {"_1": 0, "_2": 1, "": 2}  # low, middle, high
    norms = {"norm_1.": 0, "norm_2.": 1, "norm.": 2}
    transforms = {
        f"{stem}{suffix}.": f"{side}.{level}."
        for side, stem in PROJECTIONS.items()
        for suffix, level in suffixes.items()
    }
    for name, value in state.items():
        inner = name.removeprefix(VISION)
        norm = next((key for key in norms if inner.startswith(key)), None)
        transform = next((key for key in transforms if name.startswith(key)), None)
        if name.startswith(TEXT):
            text[name.removeprefix(TEXT)] = value
        elif transform is not None:
            head[transforms[transform] + name.removeprefix(transform)] = value
        elif not name.startswith(VISION):
            raise ValueError(f"{name} is no tensor of a published HAT")
        elif norm is not None:
            head[f"norms.{norms[norm]}.{inner.removeprefix(norm)}"] = value
            if norm == "norm.":
                vision[inner] = value  # timm's own last LayerNorm, unused by the levels
        elif not inner.startswith(FIRST_STAGE):
            vision[inner] = value
    return HatParts(vision, text, head)


def load_published(state: Mapping[str, Tensor], image: ImageTower, text: TextTower, direction: HatDirection) -> None:
    """Set both towers and one direction (all three levels) from a published ``state_dict``.

    Which direction a checkpoint was trained for it does not say. Raises ValueError that names what does not fit.
    """
    parts = split_checkpoint(state)
    load_image_tower(image, parts.vision)
    load_text_tower(text, parts.text)
    own = direction.state_dict()
    unlike = sorted(own.keys() ^ parts.head.keys())
    unlike += [name for name in own.keys() & parts.head.keys() if own[name].shape != parts.head[name].shape]
    if unlike:
        raise ValueError(f"{unlike[0]} of the head does not fit the checkpoint (of {len(unlike)})")
    direction.load_state_dict(parts.head)
