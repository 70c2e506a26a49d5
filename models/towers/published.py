"""Published weights under the names of today's timm and transformers: Swin of timm 0.4, EfficientNet-Lite, BERT."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

from models.towers.image import ImageTower
from models.towers.text import TextTower

NOT_NEEDED = ("head.", "classifier.", "fc.", "head_dist.")  # classifiers
SWIN_BUFFERS = ("relative_position_index", "attn_mask")
DOWNSAMPLE = re.compile(r"layers\.(\d+)\.downsample\.")
LITE_BLOCK = re.compile(r"_blocks\.(\d+)\.(_\w+)\.(\w+)$")
LITE_OUTER = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
LITE_FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
LITE_LATER = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
OLD_NORM = {"gamma": "weight", "beta": "bias"}  # LayerNorm's parameters in BERT's oldest files


def old_swin(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Swin in timm 0.4's layout, which reduced at the end of a stage; today's reduces at the start of the next."""
    if not any(DOWNSAMPLE.match(name) for name in state) or "layers.0.downsample.norm.weight" not in state:
        return dict(state)
    weights = {}
    for name, value in state.items():
        match = DOWNSAMPLE.match(name)
        if match:
            name = f"layers.{int(match[1]) + 1}.downsample.{name[match.end() :]}"
        if not name.endswith(SWIN_BUFFERS):
            weights[name] = value
    return weights


def efficientnet_lite(state: Mapping[str, Tensor], per_stage: list[int]) -> dict[str, Tensor]:
    """An EfficientNet of the package efficientnet_pytorch as timm names it; `per_stage` counts the blocks of a stage.

    Raises ValueError where a name is not of that layout.
    """
    places = [(stage, block) for stage, count in enumerate(per_stage) for block in range(count)]
    weights = {}
    for name, value in state.items():
        if name.startswith("_fc."):
            continue
        match = LITE_BLOCK.match(name)
        outer, _, rest = name.partition(".")
        if match and int(match[1]) < len(places):
            stage, block = places[int(match[1])]
            part = (LITE_LATER if stage else LITE_FIRST).get(match[2])
            if part is not None:
                weights[f"blocks.{stage}.{block}.{part}.{match[3]}"] = value
                continue
        if outer not in LITE_OUTER:
            raise ValueError(f"{name} is no weight of an EfficientNet-Lite")
        weights[f"{LITE_OUTER[outer]}.{rest}"] = value
    return weights


def old_bert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A BERT with or without heads, also from the oldest files, as the encoder alone is named."""
    weights = {}
    for name, value in state.items():
        if name.startswith(("cls.", "pooler.", "bert.pooler.")) or name.endswith("position_ids"):
            continue
        stem, _, last = name.removeprefix("bert.").rpartition(".")
        weights[f"{stem}.{OLD_NORM.get(last, last)}"] = value
    return weights


def load_image_tower(tower: ImageTower, state: Mapping[str, Tensor]) -> None:
    """Set the tower from weights in timm's layout, timm 0.4's or EfficientNet-Lite's; classifiers are left out.

    Raises ValueError that names what is missing or unknown.
    """
    if any(name.startswith("_blocks.") for name in state):
        state = efficientnet_lite(state, [len(stage) for stage in tower.net.blocks])
    elif any(name.startswith("layers.") for name in state):
        state = old_swin(state)
    _load(tower.net, {name: value for name, value in state.items() if not name.startswith(NOT_NEEDED)})


def load_text_tower(tower: TextTower, state: Mapping[str, Tensor]) -> None:
    """Set the tower from a BERT's weights (or a GRU's of this project); raises ValueError as `load_image_tower`."""
    if tower.config.kind == "bert":
        layer = re.compile(r"encoder\.layer\.(\d+)\.")
        last = tower.config.layers
        state = {
            name: value
            for name, value in old_bert(state).items()
            if not ((match := layer.match(name)) and int(match[1]) >= last)
        }
    _load(tower.net, state)


def _load(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    own = net.state_dict()
    missing = sorted(own.keys() - state.keys())
    unknown = sorted(state.keys() - own.keys())
    if missing or unknown:
        kind, names = ("lack", missing) if missing else ("hold the unknown", unknown)
        raise ValueError(f"the weights {kind} {names[0]} (of {len(names)})")
    other = next((name for name in sorted(own) if own[name].shape != state[name].shape), None)
    if other is not None:
        raise ValueError(f"{other} is {tuple(state[other].shape)} in the weights, {tuple(own[other].shape)} here")
    net.load_state_dict(state)
