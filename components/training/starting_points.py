"""Weights that a pre-training starts from: a ViT and a BERT by name, from a file or from S3."""

from __future__ import annotations

from torch import Tensor

from components.io.errors import UserError
from components.training.published import local_copy, read_checkpoint
from models.albef.pretraining import AlbefPretraining
from models.albef.starting import from_bert, from_vit, start_from

TIMM, TRANSFORMERS = "timm:", "transformers:"


def start(model: AlbefPretraining, vision: str | None, text: str | None) -> None:
    """Set the encoders of `model` from the sources; its teacher becomes equal.

    Raises UserError when a source cannot be had, or does not fit the model.
    """
    vit = None if vision is None else from_vit(_read(vision))
    bert = None if text is None else from_bert(_read(text), model.config.text_layers)
    try:
        start_from(model, vit, bert)
    except ValueError as error:
        named = " and ".join(source for source in (vision, text) if source is not None)
        raise UserError(f"pretrain.model does not fit {named}: {error}") from None


def _read(source: str) -> dict[str, Tensor]:
    try:
        if source.startswith(TIMM):
            import timm

            return dict(timm.create_model(source.removeprefix(TIMM), pretrained=True).state_dict())
        if source.startswith(TRANSFORMERS):
            from transformers import AutoModelForMaskedLM

            return dict(AutoModelForMaskedLM.from_pretrained(source.removeprefix(TRANSFORMERS)).state_dict())
    except Exception as error:  # the hub's client, timm and transformers raise whatever they meet
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{source} cannot be had ({reason}): check the name; HF_HUB_OFFLINE=0 lets it be fetched; or give a file"
        ) from None
    with local_copy(source) as path:
        return read_checkpoint(path).state
