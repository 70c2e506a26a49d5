"""Pre-trained weights under the names that each task's model gives them."""

import re
from collections.abc import Mapping

from torch import Tensor

from models.albef.config import AlbefConfig, VqaConfig

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
