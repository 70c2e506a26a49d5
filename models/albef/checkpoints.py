"""State dicts in and out: the student's own weights, and the layout of the published checkpoints."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.albef.config import AlbefConfig
from models.albef.distilled import DistilledAlbef
from models.albef.model import Albef
from models.albef.vision import resize_position_embeddings

POSITIONS = "visual_encoder.pos_embed"
MLM_HEAD = "text_encoder.cls."
TRAINING_ONLY = ("teacher.", "queue.")


def student_state_dict(model: Albef) -> dict[str, Tensor]:
    """The weights that inference needs: no teacher, no queue. Keys are the published checkpoints' own."""
    return {name: value for name, value in model.state_dict().items() if not name.startswith(TRAINING_ONLY)}


def load_student(model: Albef, state_dict: Mapping[str, Tensor]) -> None:
    """Set the student of any ALBEF model from `student_state_dict`; teacher and queue stay as they are.

    Position embeddings are resized to the model's image size; an MLM head that the model doesn't have is left out.
    Raises ValueError, naming keys and shapes, for anything else that is missing, unknown or of another shape.
    """
    weights = {k: v for k, v in state_dict.items() if model.text_encoder.cls is not None or not k.startswith(MLM_HEAD)}
    own = student_state_dict(model)
    unknown, missing = sorted(weights.keys() - own.keys()), sorted(own.keys() - weights.keys())
    if unknown or missing:
        raise ValueError(f"the weights do not fit this ALBEF: {_some('missing', missing)}, {_some('unknown', unknown)}")
    _copy(own, _resized(weights, own))


class ImportReport(NamedTuple):
    """What became of a published checkpoint's tensors: keys of the checkpoint, and of the model for `missing`."""

    matched: tuple[str, ...]
    ignored: tuple[str, ...]
    missing: tuple[str, ...]


def import_official(model: Albef, state_dict: Mapping[str, Tensor]) -> ImportReport:
    """Set `model` from a published state dict (pre-training or retrieval layout) and say what matched.

    Teacher and queue are read too where both sides have them; a teacher that the checkpoint lacks is set to the
    student, a queue of another size stays random. Raises ValueError when the image or the text tower is not all there
    or a tensor has another shape.
    """
    renamed = {key: _our_name(key) for key in state_dict}
    weights = {name: state_dict[key] for key, name in renamed.items() if name is not None}
    _check_tied_head(state_dict)
    own = model.state_dict()
    if "queue.images" in own and weights.get("queue.images", own["queue.images"]).shape != own["queue.images"].shape:
        weights = {name: value for name, value in weights.items() if not name.startswith("queue.")}
    missing = sorted(own.keys() - weights.keys())
    for tower in ("visual_encoder.", "text_encoder.bert."):
        absent = [name for name in missing if name.startswith(tower)]
        if absent:
            raise ValueError(f"the checkpoint lacks the tower {tower.rstrip('.')}: {_some('missing', absent)}")
    _copy(own, _resized({name: value for name, value in weights.items() if name in own}, own))
    if isinstance(model, DistilledAlbef) and any(name.startswith("teacher.") for name in missing):
        model.reset_teacher()
    used = weights.keys() & own.keys()
    return ImportReport(
        matched=tuple(key for key, name in renamed.items() if name in used),
        ignored=tuple(key for key, name in renamed.items() if name not in used),
        missing=tuple(missing),
    )


def official_config(state_dict: Mapping[str, Tensor], **others: Any) -> AlbefConfig:
    """The config that a published state dict's shapes imply; `others` are AlbefConfig fields that shapes don't tell.

    Heads are taken to be 64 wide unless given, as in ViT and BERT. Raises ValueError for a checkpoint without an image
    or a text tower.
    """
    shapes = {name: value.shape for key, value in state_dict.items() if (name := _our_name(key)) is not None}
    bert, vit = "text_encoder.bert.", "visual_encoder."
    try:
        vision_width, _, patch_size, _ = shapes[f"{vit}patch_embed.proj.weight"]
        vocab_size, text_width = shapes[f"{bert}embeddings.word_embeddings.weight"]
        layers = _count(shapes, re.escape(f"{bert}encoder.layer.") + r"(\d+)\.attention\.")
        sizes: dict[str, Any] = {
            "image_size": patch_size * math.isqrt(shapes[POSITIONS][1] - 1),
            "patch_size": patch_size,
            "vision_width": vision_width,
            "vision_depth": _count(shapes, re.escape(f"{vit}blocks.") + r"(\d+)\."),
            "vision_heads": max(1, vision_width // 64),
            "vision_mlp_ratio": shapes[f"{vit}blocks.0.mlp.fc1.weight"][0] / vision_width,
            "vocab_size": vocab_size,
            "text_width": text_width,
            "text_layers": layers,
            "fusion_layers": _count(shapes, re.escape(f"{bert}encoder.layer.") + r"(\d+)\.crossattention\."),
            "text_heads": max(1, text_width // 64),
            "text_intermediate": shapes[f"{bert}encoder.layer.0.intermediate.dense.weight"][0],
            "max_positions": shapes[f"{bert}embeddings.position_embeddings.weight"][0],
            "token_types": shapes[f"{bert}embeddings.token_type_embeddings.weight"][0],
        }
    except KeyError as error:
        raise ValueError(f"not an ALBEF checkpoint with both towers: {error.args[0]} is missing") from None
    if "text_proj.weight" in shapes:
        sizes["embed_dim"] = shapes["text_proj.weight"][0]
    if "queue.images" in shapes:
        sizes["queue_size"] = shapes["queue.images"][1]
    return AlbefConfig.model_validate(sizes | others)


_QUEUES = {
    "image_queue": "queue.images",
    "text_queue": "queue.texts",
    "idx_queue": "queue.ids",
    "queue_ptr": "queue.pointer",
}
# BERT's pooler is never used, position ids are a constant, and the MLM output layer is the word embedding.
_NOT_WEIGHTS = re.compile(r"\.(embeddings\.position_ids|pooler\..*|cls\.predictions\.decoder\..*)$")


def _our_name(key: str) -> str | None:
    """Our name for a tensor of a published checkpoint, None for one that holds nothing of its own."""
    if key in _QUEUES:
        return _QUEUES[key]
    if _NOT_WEIGHTS.search(key):
        return None
    name = re.sub(r"^(visual_encoder|vision_proj|text_encoder|text_proj)_m\.", r"teacher.\1.", key)
    # Fine-tuned models hold a bare BERT where the pre-training model holds one under its MLM head.
    return re.sub(r"text_encoder\.(embeddings|encoder)\.", r"text_encoder.bert.\1.", name)


def _check_tied_head(state_dict: Mapping[str, Tensor]) -> None:
    for encoder in ("text_encoder", "text_encoder_m"):
        for copy, original in (
            ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ):
            a, b = state_dict.get(f"{encoder}.{copy}"), state_dict.get(f"{encoder}.{original}")
            if a is not None and b is not None and not torch.equal(a, b):
                raise ValueError(f"{encoder}.{copy} differs from {encoder}.{original}: ALBEF ties the two")


def _resized(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: resize_position_embeddings(value, own[name].shape[1]) if name.endswith(POSITIONS) else value
        for name, value in weights.items()
    }


@torch.no_grad()
def _copy(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy into `own`, whose tensors share the model's memory. One-element tensors may differ in their axes."""
    wrong = [
        f"{name} {tuple(value.shape)} instead of {tuple(own[name].shape)}"
        for name, value in weights.items()
        if value.squeeze().shape != own[name].squeeze().shape
    ]
    if wrong:
        raise ValueError(f"the weights do not fit this ALBEF's sizes: {_some('wrong', wrong)}")
    for name, value in weights.items():
        own[name].copy_(value.reshape(own[name].shape))


def _count(names: Mapping[str, Any], pattern: str) -> int:
    return len({match.group(1) for name in names if (match := re.match(pattern, name))})


def _some(word: str, items: list[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return f"{len(items)} {word}" + (f" ({', '.join(items[:3])}{more})" if items else "")
