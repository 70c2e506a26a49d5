"""Grounding by Grad-CAM: proposals ranked by the heat within them, and what the map alone finds without proposals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor
from torch.nn import functional as F

from components.evaluation.scoring import Texts
from components.evaluation.task_inputs import TaskSplit
from components.io.progress import silent
from models.albef.gradcam import gradcam_itc, gradcam_itm
from models.albef.model import Albef

THRESHOLD = 0.5  # of the map's highest value: what is hotter belongs to the box without proposals
OVERLAP = 0.5  # intersection over union from which a box counts as found
Mode = Literal["itm", "itc"]
Box = Sequence[float]  # left, top, width, height, pixels


class Pointed(NamedTuple):
    """Candidates of an item by score, best first: their numbers, and the scores in that order.

    Without proposals: `peak`, the hottest pixel (x, y), and `box`, around the hottest region. A map without heat has
    none of all this, so it counts as a miss everywhere.
    """

    order: tuple[int, ...]
    scores: tuple[float, ...]
    peak: tuple[int, int] | None = None
    box: Box | None = None


def default_layer(model: Albef, mode: Mode) -> int:
    """The published choice: the third layer that fuses (8 of 12) for ITM, the last image block for ITC.

    Never the last that fuses if there is another: in it [CLS] alone reaches ITM's score, and words have no heat.
    """
    if mode == "itc":
        return len(model.visual_encoder.blocks) - 1
    bert = model.text_encoder.bert
    return max(min(bert.text_only_layers + 2, len(bert.layers) - 2), bert.text_only_layers)


def heat_maps(model: Albef, mode: Mode, layer: int, images: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Maps (B, H, W) of texts in pictures; ITM's are means over the tokens."""
    if mode == "itc":
        return gradcam_itc(model, images, ids, mask, layer)
    return gradcam_itm(model, images, ids, mask, layer).mean(dim=1)


def rank_proposals(heat: Tensor, size: tuple[int, int], boxes: Sequence[Box], power: float = 0.5) -> Pointed:
    """Boxes by the heat (h, w) within them over area to the `power`, the published ranking (0.5).

    The map is first enlarged to the picture's `size` (width, height) by bicubic interpolation. Equal scores keep the
    order of the boxes. A map that is nowhere above zero, or not a number, ranks nothing.
    """
    width, height = size
    if not bool((heat > 0).any()) or not bool(torch.isfinite(heat).all()):
        return Pointed((), ())
    large = F.interpolate(heat[None, None].float(), size=(height, width), mode="bicubic", align_corners=False)[0, 0]
    scores = []
    for left, top, wide, high in (box[:4] for box in boxes):
        part = large[int(top) : int(top + high), int(left) : int(left + wide)]
        scores.append(float(part.sum()) / (wide * high) ** power)
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    place = divmod(int(large.argmax()), width)
    return Pointed(
        tuple(order), tuple(scores[place] for place in order), (place[1], place[0]), hottest_box(large.numpy())
    )


def hottest_box(heat: NDArray[np.floating[Any]], threshold: float = THRESHOLD) -> Box:
    """The box (left, top, width, height) around the region of the map's peak that is above a share of its height.

    `heat` (H, W) has a positive value. The region is 4-connected: separate spots do not stretch the box.
    """
    regions, _ = ndimage.label(heat >= threshold * heat.max())
    rows, columns = np.nonzero(regions == regions.flat[int(heat.argmax())])
    left, top = int(columns.min()), int(rows.min())
    return (float(left), float(top), float(columns.max() - left + 1), float(rows.max() - top + 1))


def overlap(one: Box, other: Box) -> float:
    """Intersection over union of two boxes, pixels counted inclusively as in the published evaluation."""
    left, top = max(one[0], other[0]), max(one[1], other[1])
    right = min(one[0] + one[2] - 1, other[0] + other[2] - 1)
    bottom = min(one[1] + one[3] - 1, other[1] + other[3] - 1)
    common = (right - left + 1) * (bottom - top + 1) if left < right and top < bottom else 0.0
    return common / (one[2] * one[3] + other[2] * other[3] - common)


def point(
    model: Albef,
    split: TaskSplit,
    texts: Texts,
    *,
    mode: Mode = "itm",
    layer: int | None = None,
    power: float = 0.5,
    part: range | None = None,
    batch_size: int = 32,
    device: str | torch.device = "cpu",
    advance: Callable[[int], None] = silent,
) -> list[Pointed]:
    """The candidates of every item, or of a part's in the order of `TaskSplit.members`; items without any have none."""
    layer = default_layer(model, mode) if layer is None else layer
    sizes = list(zip(*(split.reader.column(name).to_pylist() for name in ("width", "height")), strict=True))
    pointed: dict[int, Pointed] = {}
    for items, ids, mask in split.batches(texts, batch_size, part):
        heat = heat_maps(model, mode, layer, split.images(items).to(device), ids.to(device), mask.to(device)).cpu()
        for item, one in zip(items, heat, strict=True):
            row = split.items[item]
            pointed[item] = rank_proposals(one, sizes[row["pictures"][0]], row["candidates"], power)
        advance(len(items))
    return [pointed[item] for item in sorted(pointed)]


def grounding_metrics(
    pointed: Sequence[Pointed], boxes: Sequence[Box | None], candidates: Sequence[Sequence[Box]], subsets: Sequence[str]
) -> dict[str, Any]:
    """Accuracies in percent over items whose box is known: overall, by subset; of the largest candidate; of chance.

    `ceiling` is the share of items that have a right candidate at all. `without_proposals`: `pointing`, how often the
    hottest pixel lies in the box, and `box`, how often the box around the hottest region is right. Subsets of which no
    box is known are None: not available.
    """
    known = [index for index, box in enumerate(boxes) if box is not None]
    right: dict[str, list[bool]] = defaultdict(list, {subset or "all": [] for subset in subsets})
    every, largest, chance, possible, pointing, boxed = [], [], [], [], [], []
    for index in known:
        box = boxes[index]
        assert box is not None
        fits = [overlap(box, candidate) >= OVERLAP for candidate in candidates[index]]
        hit = bool(pointed[index].order) and fits[pointed[index].order[0]]
        every.append(hit)
        right[subsets[index] or "all"].append(hit)
        areas = [candidate[2] * candidate[3] for candidate in candidates[index]]
        largest.append(bool(areas) and fits[areas.index(max(areas))])
        chance.append(sum(fits) / len(fits) if fits else 0.0)
        possible.append(any(fits))
        pointing.append(_inside(pointed[index].peak, box))
        alone = pointed[index].box
        boxed.append(alone is not None and overlap(box, alone) >= OVERLAP)
    return {
        "accuracy": _percent(every),
        "by_subset": {name: _percent(found) for name, found in sorted(right.items())},
        "majority": _percent(largest),
        "majority_answer": "the largest candidate",
        "chance": _percent(chance),
        "ceiling": _percent(possible),
        "without_proposals": {"pointing": _percent(pointing), "box": _percent(boxed)},
    }


def right_ranks(
    pointed: Sequence[Pointed], boxes: Sequence[Box | None], candidates: Sequence[Sequence[Box]]
) -> list[int | None]:
    """From 1, the place of each item's first right candidate; one after the last where none is; None without a box."""
    ranks: list[int | None] = []
    for one, box, offered in zip(pointed, boxes, candidates, strict=True):
        places = [place for place, number in enumerate(one.order) if box and overlap(box, offered[number]) >= OVERLAP]
        ranks.append(None if box is None else places[0] + 1 if places else len(offered) + 1)
    return ranks


def _inside(peak: tuple[int, int] | None, box: Box) -> bool:
    return peak is not None and box[0] <= peak[0] < box[0] + box[2] and box[1] <= peak[1] < box[1] + box[3]


def _percent(scores: Sequence[float | bool]) -> float | None:
    return 100 * sum(scores) / len(scores) if scores else None
