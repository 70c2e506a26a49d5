"""State dicts in and out: the student's own weights, and the layout of the published checkpoints."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from models.albef.config import TASK_CONFIGS, AlbefConfig, Sharing
from models.albef.model import Albef
from models.albef.vision import resize_position_embeddings

POSITIONS = "visual_encoder.pos_embed"
MLM_HEAD = "text_encoder.cls."
TRAINING_ONLY = ("teacher.", "queue.")
TOWERS = ("visual_encoder.", "text_encoder.bert.", "text_decoder.")


def student_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights that inference needs: no teacher, no queue. Keys are the published checkpoints' own.

    A tensor that several layers share stands once, under its first name.
    """
    seen: set[int] = set()
    weights = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not name.startswith(TRAINING_ONLY) and id(value) not in seen:
            seen.add(id(value))
            weights[name] = value.detach()
    return weights


def load_student(model: Albef, state_dict: Mapping[str, Tensor]) -> None:
    """Set the student of any ALBEF model from `student_state_dict`; teacher and queue stay as they are.

    Position embeddings are resized to the model's image size; an MLM head that the model doesn't have is left out.
    Raises ValueError, naming keys and shapes, for anything else that is missing, unknown or of another shape.
    """
    keep_head = model.text_encoder.cls is not None
    load_parts(model, {k: v for k, v in state_dict.items() if keep_head or not k.startswith(MLM_HEAD)})


def load_parts(model: nn.Module, weights: Mapping[str, Tensor], new: Sequence[str] = ()) -> None:
    """Set a model from `weights`, but for its teacher, its queue and what `new` names by a part of the name.

    Position embeddings are resized to the model's image size. Raises ValueError, naming keys and shapes, for anything
    else that is missing, unknown or of another shape.
    """
    own = {name: value for name, value in model.state_dict().items() if not name.startswith(TRAINING_ONLY)}
    unknown = sorted(weights.keys() - own.keys())
    missing = [name for name in _missing(model, weights) if name in own and not any(part in name for part in new)]
    if unknown or missing:
        raise ValueError(f"the weights do not fit this ALBEF: {_some('missing', missing)}, {_some('unknown', unknown)}")
    _copy(own, _resized(weights, own))


class ImportReport(NamedTuple):
    """What became of a published checkpoint's tensors: keys of the checkpoint, and of the model for `missing`."""

    matched: tuple[str, ...]
    ignored: tuple[str, ...]
    missing: tuple[str, ...]


def import_official(model: nn.Module, state_dict: Mapping[str, Tensor]) -> ImportReport:
    """Set `model` from a published state dict of its kind and say what matched.

    Teacher and queue are read too where both sides have them; a teacher that the checkpoint lacks is set to the
    student, a queue of another size stays random. Raises ValueError when an encoder or the answer decoder is not all
    there, a tensor has another shape, or tensors differ that the model shares.
    """
    renamed = {key: our_name(key) for key in state_dict}
    weights = {name: state_dict[key] for key, name in renamed.items() if name is not None}
    _check_tied_head(state_dict)
    own = model.state_dict()
    if "queue.images" in own and weights.get("queue.images", own["queue.images"]).shape != own["queue.images"].shape:
        weights = {name: value for name, value in weights.items() if not name.startswith("queue.")}
    missing = _missing(model, weights)
    for tower in TOWERS:
        absent = [name for name in missing if name.startswith(tower)]
        if absent:
            raise ValueError(f"the checkpoint lacks the tower {tower.rstrip('.')}: {_some('missing', absent)}")
    _check_shared(model, weights)
    _copy(own, _resized({name: value for name, value in weights.items() if name in own}, own))
    if any(name.startswith("teacher.") for name in missing):
        reset = getattr(model, "reset_teacher")  # noqa: B009 - whatever has a teacher has this
        reset()
    used = weights.keys() & own.keys()
    return ImportReport(
        matched=tuple(key for key, name in renamed.items() if name in used),
        ignored=tuple(key for key, name in renamed.items() if name not in used),
        missing=tuple(missing),
    )


Kind = Literal["pretraining", "retrieval", "entailment", "vqa", "nlvr2", "assign_text"]


def recognise(state_dict: Mapping[str, Tensor]) -> Kind:
    """What a published state dict was trained for, by its keys; RefCOCO+'s is one for retrieval.

    Raises ValueError, naming the beginnings of its keys, when it is of none of the kinds.
    """
    if "ta_head.weight" in state_dict:
        return "assign_text"
    if any(key.startswith("text_decoder.") for key in state_dict):
        return "vqa"
    if "cls_head.2.weight" in state_dict:
        return "nlvr2" if state_dict["cls_head.2.weight"].shape[0] == 2 else "entailment"
    if "itm_head.weight" in state_dict:
        return "pretraining" if any(key.startswith(MLM_HEAD) for key in state_dict) else "retrieval"
    found = sorted({key.partition(".")[0] for key in state_dict})
    raise ValueError(
        "this is no published ALBEF checkpoint: it has none of itm_head, cls_head, ta_head and text_decoder, but "
        f"{', '.join(found[:8]) or 'nothing'}{' …' if found[8:] else ''}"
    )


def official_config(state_dict: Mapping[str, Tensor], **others: Any) -> AlbefConfig:
    """The config that a published state dict's shapes imply; `others` are its fields that shapes don't tell.

    Its class is that of the checkpoint's kind. Heads are taken to be 64 wide unless given, as in ViT and BERT. Raises
    ValueError for a checkpoint without an image or a text tower, or of no known kind.
    """
    named = {name: value for key, value in state_dict.items() if (name := our_name(key)) is not None}
    shapes = {name: value.shape for name, value in named.items()}
    bert, vit = "text_encoder.bert.", "visual_encoder."
    layer = re.escape(f"{bert}encoder.layer.") + r"(\d+)\."
    try:
        vision_width, _, patch_size, _ = shapes[f"{vit}patch_embed.proj.weight"]
        vocab_size, text_width = shapes[f"{bert}embeddings.word_embeddings.weight"]
        layers, fusion = _count(shapes, layer + r"attention\."), _count(shapes, layer + r"crossattention\.")
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
            "fusion_layers": fusion,
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
    kind = recognise(state_dict)
    if kind == "entailment":
        sizes["classes"] = shapes["cls_head.2.weight"][0]
    elif kind == "vqa":
        sizes["decoder_layers"] = _count(shapes, r"text_decoder\.bert\.encoder\.layer\.(\d+)\.attention\.")
    elif kind in ("nlvr2", "assign_text"):
        sizes |= {"text_layers": layers - fusion // 2, "fusion_layers": fusion // 2}
        sizes["sharing"] = _sharing(named, layers - fusion, fusion // 2)
    return TASK_CONFIGS.get(kind, AlbefConfig).model_validate(sizes | others)


def _sharing(named: Mapping[str, Tensor], text_only: int, fusion: int) -> Sharing:
    """How much of each fusion layer's two blocks is equal: as much is taken to be shared."""
    different: set[str] = set()
    for index in range(fusion):
        first = f"text_encoder.bert.encoder.layer.{text_only + 2 * index}."
        second = f"text_encoder.bert.encoder.layer.{text_only + 2 * index + 1}."
        for name, value in named.items():
            part = name.removeprefix(first)
            if part != name and not (second + part in named and torch.equal(value, named[second + part])):
                different.add(part)
    if not different:
        return "all"
    if not any(part.startswith("crossattention.") for part in different):
        return "cross_attention"
    shared = ("crossattention.self.key.", "crossattention.self.value.")
    return "none" if any(part.startswith(shared) for part in different) else "key_value"


_QUEUES = {
    "image_queue": "queue.images",
    "text_queue": "queue.texts",
    "idx_queue": "queue.ids",
    "queue_ptr": "queue.pointer",
}
# BERT's pooler is never used, position ids are a constant, and the MLM output layer is the word embedding.
_NOT_WEIGHTS = re.compile(r"\.(embeddings\.position_ids|pooler\..*|cls\.predictions\.decoder\..*)$")


def our_name(key: str) -> str | None:
    """Our name for a tensor of a published checkpoint, None for one that holds nothing of its own."""
    if key in _QUEUES:
        return _QUEUES[key]
    if _NOT_WEIGHTS.search(key):
        return None
    name = re.sub(
        r"^(visual_encoder|vision_proj|text_encoder|text_proj|text_decoder|cls_head)_m\.", r"teacher.\1.", key
    )
    # Fine-tuned models hold a bare BERT where the pre-training model holds one under its MLM head.
    return re.sub(r"text_encoder\.(embeddings|encoder)\.", r"text_encoder.bert.\1.", name)


def _check_tied_head(state_dict: Mapping[str, Tensor]) -> None:
    for encoder in ("text_encoder", "text_encoder_m", "text_decoder", "text_decoder_m"):
        for copy, original in (
            ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ):
            a, b = state_dict.get(f"{encoder}.{copy}"), state_dict.get(f"{encoder}.{original}")
            if a is not None and b is not None and not torch.equal(a, b):
                raise ValueError(f"{encoder}.{copy} differs from {encoder}.{original}: ALBEF ties the two")


def _check_shared(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        other = first.setdefault(id(value), name)
        if other != name and name in weights and other in weights and not torch.equal(weights[name], weights[other]):
            raise ValueError(f"{name} differs from {other}, which this model shares: choose another `sharing`")


def _missing(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Names of the model's tensors that `weights` gives under none of their names, sorted."""
    own = model.state_dict(keep_vars=True)
    given = {id(value) for name, value in own.items() if name in weights}
    return sorted(name for name, value in own.items() if id(value) not in given)


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
