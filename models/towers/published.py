"""Published weights under today's names of timm and transformers: Swin of timm 0.4, EfficientNet-Lite, BERT, CLIP."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

from models.towers.clip import ClipImageTower, ClipTextTower
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
CLIP_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.([\w.]+)\.(\w+)$")
CLIP_PARTS = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
CLIP_PARTS |= {"attn.out_proj": "self_attn.out_proj"}
CLIP_OUTER = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # transformers' own spelling
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "visual.proj": "visual_projection.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
}
TRANSPOSED = ("visual.proj", "text_projection")  # open_clip multiplies by these from the right
CLIP_NOT_NEEDED = ("logit_scale", "position_ids", "attn_mask", "input_resolution", "context_length", "vocab_size")
CLIP_IMAGE, CLIP_TEXT = ("vision_model.", "visual_projection."), ("text_model.", "text_projection.")
OWN_IMAGE, OWN_TEXT = "image.net.", "text.net."  # in the weights of this project's own runs
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


def open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A CLIP with a ViT in open_clip's and OpenAI's layout as transformers names it.

    Raises ValueError where a name is not of that layout, as of CLIP's ResNets.
    """
    weights = {}
    for name, value in state.items():
        match = CLIP_BLOCK.match(name)
        if name.endswith(CLIP_NOT_NEEDED):
            continue
        if name in CLIP_OUTER:
            weights[CLIP_OUTER[name]] = value.T if name in TRANSPOSED else value
            continue
        if match is None:
            raise ValueError(f"{name} is no weight of a CLIP whose image encoder is a ViT")
        side, number, part, last = match.groups()
        stem = f"{'vision' if side else 'text'}_model.encoder.layers.{number}"
        if part == "attn" and last.startswith("in_proj_"):
            for one, third in zip("qkv", value.chunk(3), strict=True):
                weights[f"{stem}.self_attn.{one}_proj.{last.removeprefix('in_proj_')}"] = third
        elif part in CLIP_PARTS:
            weights[f"{stem}.{CLIP_PARTS[part]}.{last}"] = value
        else:
            raise ValueError(f"{name} is no weight of a CLIP whose image encoder is a ViT")
    return weights


def load_clip(image: ClipImageTower, text: ClipTextTower, state: Mapping[str, Tensor]) -> None:
    """Set both encoders of a CLIP from transformers', open_clip's or OpenAI's layout, or a run's of this project.

    The temperature is the loss's, and left out; so are the heads and regions of a run. Raises ValueError that names
    what is missing or unknown, as where there is one encoder only.
    """
    if any(name.startswith((OWN_IMAGE, OWN_TEXT)) for name in state):
        own = [(OWN_IMAGE, CLIP_IMAGE), (OWN_TEXT, CLIP_TEXT)]
        state = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            for prefix, parts in own
            if name.startswith(tuple(prefix + part for part in parts))
        }
    elif any(name.startswith(("visual.", "transformer.resblocks.")) for name in state):
        state = open_clip(state)
    state = {name: value for name, value in state.items() if not name.endswith(CLIP_NOT_NEEDED)}
    for side, parts in (("image", CLIP_IMAGE), ("text", CLIP_TEXT)):
        if not any(name.startswith(parts) for name in state):
            raise ValueError(f"the weights hold no {side} encoder of a CLIP (no {parts[0]}…)")
    _load(image.net, {name: value for name, value in state.items() if not name.startswith(CLIP_TEXT)})
    _load(text.net, {name: value for name, value in state.items() if name.startswith(CLIP_TEXT)})


def load_image_tower(tower: ImageTower, state: Mapping[str, Tensor]) -> None:
    """Set the tower from weights in timm's layout, timm 0.4's or EfficientNet-Lite's, or a run's of this project.

    Classifiers are left out. Raises ValueError that names what is missing or unknown.
    """
    state = _of_run(state, OWN_IMAGE)
    if any(name.startswith("_blocks.") for name in state):
        state = efficientnet_lite(state, [len(stage) for stage in tower.net.blocks])
    elif any(name.startswith("layers.") for name in state):
        state = old_swin(state)
    _load(tower.net, {name: value for name, value in state.items() if not name.startswith(NOT_NEEDED)})


def load_text_tower(tower: TextTower, state: Mapping[str, Tensor]) -> None:
    """Set the tower from a BERT's weights or a run's of this project; raises ValueError as `load_image_tower`."""
    state = _of_run(state, OWN_TEXT)
    if tower.config.kind == "bert":
        layer = re.compile(r"encoder\.layer\.(\d+)\.")
        last = tower.config.layers
        state = {
            name: value
            for name, value in old_bert(state).items()
            if not ((match := layer.match(name)) and int(match[1]) >= last)
        }
    _load(tower.net, state)


def _of_run(state: Mapping[str, Tensor], prefix: str) -> Mapping[str, Tensor]:
    """The tower under `prefix` in the weights of a run; other weights as they are."""
    inside = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return inside or state


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
