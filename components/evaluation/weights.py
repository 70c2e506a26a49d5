"""A trained model from its folder: ``model.safetensors`` and ``config.json``, no pickle."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from components.io.errors import UserError
from models.albef.checkpoints import load_student
from models.albef.config import AlbefConfig, parse_config
from models.albef.model import Albef

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


def load_config(folder: Path, image_size: int | None = None) -> AlbefConfig:
    """The configuration of the model in `folder`, for pictures of `image_size` where that is given.

    Raises UserError when a file is missing or damaged, or the size does not divide into patches.
    """
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} does not exist: run the stage that trains these weights first")
    try:
        config = parse_config((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (ValidationError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(
            f"{folder / CONFIG_FILE} is no ALBEF configuration ({reason}): train the weights again"
        ) from None
    if kind := getattr(config, "task", None):
        raise UserError(
            f"{folder} holds a model for {kind}, which does not say how well a picture and a text match: name weights "
            "of a pre-training or of a run of kind retrieval or grounding"
        )
    if image_size is None:
        return config
    if image_size % config.patch_size:
        raise UserError(
            f"evaluate.image_size is {image_size}, but the model in {folder} reads patches of {config.patch_size} "
            "pixels: choose a multiple"
        )
    return config.model_copy(update={"image_size": image_size})


def load_model(
    folder: Path, device: str | torch.device = "cpu", image_size: int | None = None
) -> tuple[Albef, AlbefConfig]:
    """The model in `folder` in evaluation mode on `device`, and its configuration.

    With `image_size` the model reads pictures of another size than it was trained on: its position embeddings are
    resized. An MLM head is left out.
    Raises UserError when a file is missing or damaged, or the weights are not those of the configuration.
    """
    config = load_config(folder, image_size)
    model = Albef(config)
    try:
        load_student(model, load_file(folder / WEIGHTS_FILE))
    except (SafetensorError, ValueError) as error:
        raise UserError(
            f"{folder / WEIGHTS_FILE} is damaged or not of its {CONFIG_FILE} ({error}): train the weights again"
        ) from None
    return model.eval().to(device), config
