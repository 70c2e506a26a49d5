"""Where in a picture each word of a text is, by HAT's or VITR's own attention (figures 3 and 4)."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from components.data.tokenizer import Tokenizer
from components.evaluation.explain import Explanation, Word, heat_over
from components.evaluation.tower_models import TowerModel
from components.evaluation.tower_scoring import main_score, mean_of_directions
from components.training.augment import evaluation_view, to_batch
from models.hat.cross_attention import attention_weights
from models.hat.model import HatDirection, HatHead
from models.vitr.head import VitrHead
from models.vitr.model import heat_map


@torch.inference_mode()
def explain_towers(
    model: TowerModel, sizes: dict[str, Any], tokenizer: Tokenizer, picture: Image.Image, caption: str
) -> Explanation:
    """Explain an RGB picture and a caption that are as training saw them; `match` is the model's own score.

    HAT: which regions each word attends to, at each level ("dog, level 2"); of its directions t-i where there are both.
    VITR: the regions that answer to the whole caption, then to each word. Maps run from a picture's least to its most
    attended region. Raises ValueError for a model that compares whole captions, such as a dual encoder.
    """
    assert model.image is not None
    assert model.text is not None
    device = next(model.parameters()).device
    ids, mask = (part.to(device) for part in tokenizer.encode_batch([caption], int(sizes["max_tokens"])))
    views = to_batch([evaluation_view(picture, int(sizes["image"]["image_size"]))])
    regions, words = model.image(views.to(device).float() / 255), model.text(ids, mask)
    scores = mean_of_directions(model.head(regions, words, mask.bool()))
    places = tokenizer.words(ids[0].tolist())
    head = model.head
    found: list[tuple[str, Tensor]] = []  # labels and weights (k,) over regions
    if isinstance(head, HatHead):
        levels = _hat_attention(head, regions, words, mask)
        for word, pieces in places:
            for level, attention in zip(head.config.levels, levels, strict=True):
                label = word if len(levels) == 1 else f"{word}, level {level}"
                found.append((label, attention[:, pieces].mean(dim=1)))
    elif isinstance(head, VitrHead) and head.config.relations:
        vitr = head.vitr
        aligned = vitr.align(vitr.reason(regions[-1]), vitr.word_projection(words[-1]), mask)
        attention = aligned.attention[0, 0]  # (k, n)
        found = [("the whole caption", heat_map(attention, mask[0]))]
        found += [(word, attention[:, pieces].mean(dim=1)) for word, pieces in places]
    else:
        raise ValueError("this model compares whole captions, so its words have no heat")
    shown = tuple(Word(label, heat_over(_square(weights), picture.size)) for label, weights in found)
    return Explanation(picture, caption, shown, float(scores[main_score(list(scores))]))


def _hat_attention(head: HatHead, regions: list[Tensor], words: list[Tensor], mask: Tensor) -> list[Tensor]:
    """The attention (k, n) of each level that is aligned."""
    name = "t2i" if "t2i" in head.directions else "i2t"
    direction = head.directions[name]
    assert isinstance(direction, HatDirection)
    image = direction.project_images(head.pick(regions))
    text = direction.project_texts(head.pick(words))
    config = head.config
    return [
        attention_weights(level, own, mask.bool(), direction.direction, config.smoothing, config.clip)[0, 0]
        for level, own in zip(image, text, strict=True)
    ]


def _square(weights: Tensor) -> Tensor:
    """Weights (k,) as the map (h, w) they stand for, its least at 0. Raises ValueError when k is no square."""
    side = round(len(weights) ** 0.5)
    if side * side != len(weights):
        raise ValueError(f"{len(weights)} regions make no square map")
    return (weights - weights.min()).view(side, side).cpu()
