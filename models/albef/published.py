"""Whole models from published checkpoints, and back into their layout."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from models.albef.checkpoints import ImportReport, Kind, import_official, official_config, recognise
from models.albef.config import AlbefConfig
from models.albef.entailment import AlbefEntailment
from models.albef.nlvr2 import AlbefNlvr2
from models.albef.pretraining import AlbefPretraining
from models.albef.retrieval import AlbefRetrieval
from models.albef.text_assignment import AlbefTextAssignment
from models.albef.vqa import AlbefVqa

MODELS: dict[Kind, Any] = {
    "pretraining": AlbefPretraining,
    "retrieval": AlbefRetrieval,
    "entailment": AlbefEntailment,
    "vqa": AlbefVqa,
    "nlvr2": AlbefNlvr2,
    "assign_text": AlbefTextAssignment,
}
QUEUES = {"queue.images": "image_queue", "queue.texts": "text_queue", "queue.ids": "idx_queue"}


def import_checkpoint(state_dict: Mapping[str, Tensor], **others: Any) -> tuple[Kind, nn.Module, ImportReport]:
    """The model that a published state dict holds: its kind, the model, and what became of the tensors.

    `others` are fields of its config that shapes don't tell, or another `image_size`. Raises ValueError as
    `official_config` and `import_official` do.
    """
    kind = recognise(state_dict)
    model = MODELS[kind](official_config(state_dict, **others))
    return kind, model, import_official(model, state_dict)


def export_official(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors in the layout of the published checkpoint of its kind, tied and shared ones written out."""
    config = model.config
    assert isinstance(config, AlbefConfig)
    pretraining = isinstance(model, AlbefPretraining)
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name == "queue.pointer":
            state["queue_ptr"] = value.reshape(1).clone()
        elif name in QUEUES:
            if name != "queue.ids":
                state[QUEUES[name]] = value.clone()
            elif not pretraining:  # pre-training knows no picture ids
                state[QUEUES[name]] = value.reshape(1, -1).clone()
        else:
            state[_official_name(name, bare=not pretraining)] = value.clone()
    for name in [name for name in state if name.endswith("embeddings.word_embeddings.weight")]:
        prefix = name.removesuffix("word_embeddings.weight")
        state[f"{prefix}position_ids"] = torch.arange(config.max_positions).reshape(1, -1)
        encoder = name.removesuffix(".bert.embeddings.word_embeddings.weight")
        if f"{encoder}.cls.predictions.bias" in state:
            state[f"{encoder}.cls.predictions.decoder.weight"] = state[name].clone()
            state[f"{encoder}.cls.predictions.decoder.bias"] = state[f"{encoder}.cls.predictions.bias"].clone()
    return state


def _official_name(name: str, *, bare: bool) -> str:
    if name.startswith("teacher."):
        tower, _, rest = name.removeprefix("teacher.").partition(".")
        name = f"{tower}_m.{rest}"
    return re.sub(r"^(text_encoder(?:_m)?)\.bert\.", r"\1.", name) if bare else name
