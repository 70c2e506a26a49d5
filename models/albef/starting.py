"""Pre-trained weights under the names that each task's model gives them."""

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from models.albef.checkpoints import load_parts
from models.albef.config import AlbefConfig, VqaConfig
from models.albef.pretraining import AlbefPretraining

ENCODERS = ("visual_encoder.", "text_encoder.bert.")
PROJECTIONS = ("vision_proj.", "text_proj.", "temp")
LAYER = re.compile(r"(text_encoder\.bert\.encoder\.layer\.)(\d+)(\..*)")
KEY_OR_VALUE = re.compile(r"\.crossattention\.self\.(key|value)\.")


def encoders_of(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the two encoders alone."""
    return {name: value for name, value in state_dict.items() if name.startswith(ENCODERS)}


def towers_of(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the two encoders, their projections and the temperature."""
    return {name: value for name, value in state_dict.items() if name.startswith(ENCODERS + PROJECTIONS)}


def with_doubled_blocks(weights: Mapping[str, Tensor], config: AlbefConfig) -> dict[str, Tensor]:
    """Weights whose fusion layers stand twice, as the two blocks of a text about two pictures; twice already: as is."""
    layers = {int(match[2]) for name in weights if (match := LAYER.fullmatch(name))}
    if len(layers) == config.text_only_layers + 2 * config.fusion_layers:
        return dict(weights)
    doubled = {}
    for name, value in weights.items():
        match = LAYER.fullmatch(name)
        fusion = int(match[2]) - config.text_only_layers if match else -1
        if match is None or fusion < 0:
            doubled[name] = value
            continue
        for block in range(2):
            doubled[f"{match[1]}{config.text_only_layers + 2 * fusion + block}{match[3]}"] = value
    return doubled


def decoder_of(state_dict: Mapping[str, Tensor], config: VqaConfig, *, skip_key_value: bool) -> dict[str, Tensor]:
    """The answer decoder's weights: the last `decoder_layers` layers, the embeddings, the vocabulary head.

    Raises ValueError when there are fewer fusion layers than that, or no vocabulary head.
    """
    first = config.text_layers - config.decoder_layers
    if first < config.text_only_layers:
        raise ValueError(
            f"decoder_layers={config.decoder_layers} is more than the {config.fusion_layers} fusion layers that the "
            "answer decoder starts from"
        )
    if not any(name.startswith("text_encoder.cls.") for name in state_dict):
        raise ValueError("the weights hold no vocabulary head (text_encoder.cls), which the answer decoder starts from")
    weights = {}
    for name, value in state_dict.items():
        if not name.startswith("text_encoder.") or (skip_key_value and KEY_OR_VALUE.search(name)):
            continue
        match = LAYER.fullmatch(name)
        if match is None:
            weights[name.replace("text_encoder.", "text_decoder.", 1)] = value
        elif int(match[2]) >= first:
            prefix = match[1].replace("text_encoder.", "text_decoder.", 1)
            weights[f"{prefix}{int(match[2]) - first}{match[3]}"] = value
    return weights


def start_teacher(
    model: nn.Module,
    training: Mapping[str, Tensor] | None,
    renamed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    new: Sequence[str] = (),
) -> None:
    """Go on with pre-training's teacher and queue, as published, where `training` holds them.

    `training` are tensors named ``teacher.…`` and ``queue.…``; `renamed` gives the teacher's under the names of this
    model's, `new` is as in `load_parts`. A queue of another size stays as it is. Raises ValueError where the teacher
    does not fit.
    """
    training = training or {}
    old = {name.removeprefix("teacher."): value for name, value in training.items() if name.startswith("teacher.")}
    teacher = model.get_submodule("teacher")
    if old:
        load_parts(teacher, renamed(old), new)
    own = model.state_dict()
    for name in ("queue.images", "queue.texts"):
        if name in own and name in training and own[name].shape == training[name].shape:
            own[name].copy_(training[name])


def without_head(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights but the vocabulary head's."""
    return {name: value for name, value in state_dict.items() if not name.startswith("text_encoder.cls.")}


NOT_OF_VIT = ("head.", "head_dist.", "dist_token", "fc_norm.", "pre_logits.")
OLD_NORM = {"gamma": "weight", "beta": "bias"}  # LayerNorm's parameters in BERT's oldest files


def from_vit(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A ViT or DeiT of timm as the image encoder: without classifier, and without DeiT's distillation token."""
    weights = {f"visual_encoder.{k}": v for k, v in state_dict.items() if not k.startswith(NOT_OF_VIT)}
    positions = "visual_encoder.pos_embed"
    if "dist_token" in state_dict and positions in weights:  # [CLS], the distillation token, the patches
        weights[positions] = torch.cat([weights[positions][:, :1], weights[positions][:, 2:]], dim=1)
    return weights


def from_bert(state_dict: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """A BERT of transformers, with or without its MLM head, as the text encoder: the first `layers` layers."""
    weights = {}
    for key, value in state_dict.items():
        name = key if key.startswith(("bert.", "cls.")) else f"bert.{key}"
        stem, _, last = name.rpartition(".")
        name = f"{stem}.{OLD_NORM[last]}" if last in OLD_NORM else name
        match = re.match(r"bert\.encoder\.layer\.(\d+)\.", name)
        unused = name.startswith(("bert.pooler.", "cls.seq_relationship.", "cls.predictions.decoder."))
        if unused or name.endswith("position_ids") or (match and int(match[1]) >= layers):
            continue
        weights[f"text_encoder.{name}"] = value
    return weights


def start_from(model: AlbefPretraining, vit: Mapping[str, Tensor] | None, bert: Mapping[str, Tensor] | None) -> None:
    """Set a pre-training model's encoders from `from_vit` and `from_bert`; what neither has stays as it is.

    Cross-attention, projections and heads are ALBEF's own. The teacher becomes equal to the student. Raises ValueError
    where the weights are not whole or of other sizes.
    """
    new = ["vision_proj.", "text_proj.", "temp", "itm_head.", ".crossattention."]
    if vit is None:
        new.append("visual_encoder.")
    if bert is None:
        new.append("text_encoder.")
    elif not any(name.startswith("text_encoder.cls.") for name in bert):
        new.append("text_encoder.cls.")
    load_parts(model, dict(vit or {}) | dict(bert or {}), new=new)
    model.reset_teacher()
