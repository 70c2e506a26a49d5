"""A task's model run over its items in parts: class logits, answers, or what a heat map points at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from components.data.tasks.annotations import ANSWERS_FILE, read_answers
from components.data.tokenizer import TOKENIZER_FILE
from components.evaluation import sharing
from components.evaluation.answering import Answer, generate_answers, rank_answers
from components.evaluation.classes import class_logits
from components.evaluation.grounding import Pointed, point
from components.evaluation.scoring import Texts
from components.evaluation.sharing import AlbefEncoding, ranges, shared
from components.evaluation.task_inputs import TaskSplit
from components.evaluation.weights import CONFIG_FILE, WEIGHTS_FILE, load_config, load_model
from components.io.errors import UserError
from components.io.runtime import Runtime
from models.albef.checkpoints import load_parts
from models.albef.config import AlbefConfig, parse_config
from models.albef.entailment import AlbefEntailment
from models.albef.nlvr2 import AlbefNlvr2
from models.albef.vqa import AlbefVqa

MODELS: dict[str, Any] = {"vqa": AlbefVqa, "entailment": AlbefEntailment, "nlvr2": AlbefNlvr2}
LOGITS_FILE, FOUND_FILE = "logits.npy", "found.json"


class ClassEncoding(AlbefEncoding, frozen=True):
    """That of visual entailment and NLVR2."""


class VqaEncoding(AlbefEncoding, frozen=True):
    """That of questions, whose answers depend on how they are asked for."""

    answers: Literal["rank", "generate"]
    answer_top_k: int
    max_answer_tokens: int


class GroundingEncoding(AlbefEncoding, frozen=True):
    """That of grounding."""

    gradcam: Literal["itm", "itc"]
    gradcam_layer: int | None
    gradcam_area_power: float


ENCODINGS: dict[str, type[AlbefEncoding]] = {
    "entailment": ClassEncoding,
    "nlvr2": ClassEncoding,
    "vqa": VqaEncoding,
    "grounding": GroundingEncoding,
}


@dataclass(frozen=True)
class Job(sharing.Job[AlbefEncoding]):
    """The same, and the task's kind."""

    kind: str


def run_model(
    encoding: AlbefEncoding, kind: str, split: TaskSplit, texts: Texts, weights: Path, *, runtime: Runtime, label: str
) -> list[Any]:
    """What the model in the folder `weights` says of every item, in their order, by the workers of `runtime`.

    Rows (C,) of logits for a task of classes, an `Answer`, or a `Pointed`. What an earlier evaluation has kept is read.
    """
    inputs = {name: weights / name for name in (WEIGHTS_FILE, CONFIG_FILE, TOKENIZER_FILE)}
    inputs["split"] = split.folder
    if kind == "vqa":
        inputs["answers"] = split.folder.parent / ANSWERS_FILE
    with shared(encoding, inputs, runtime, _loaded.cache_clear) as parts:
        job = Job(encoding, weights.resolve(), split.folder.resolve(), parts.work, kind)
        pieces = ranges(len(split), encoding.pictures_per_part, encoding.batch_size)
        folders = parts.map(partial(RUN[kind], job), pieces, name=kind, label=label)
        found: dict[int, Any] = {}
        for piece, folder in zip(pieces, folders, strict=True):
            found.update(zip(split.members(texts, piece), READ[kind](split, folder), strict=True))
    return [found[item] for item in range(len(split))]


def load_task_config(folder: Path, kind: str, image_size: int | None = None) -> AlbefConfig:
    """The configuration of the model of a kind in `folder`; grounding uses a retrieval model.

    Raises UserError when a file is missing or damaged, or of another kind.
    """
    if kind == "grounding":
        return load_config(folder, image_size)
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} does not exist: run the stage that trains these weights first")
    try:
        config = parse_config((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        found = getattr(config, "task", "retrieval")
        if found != kind:
            raise UserError(f"{folder} holds a model for {found}, the task is of kind {kind}: fine-tune one for it")
        if image_size is not None:
            config = type(config).model_validate(config.model_dump() | {"image_size": image_size})
    except (ValidationError, ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{folder} is damaged or not of its {CONFIG_FILE} ({error}): train the weights again") from None
    return config


def load_task_model(
    folder: Path, kind: str, device: str | torch.device, image_size: int | None = None
) -> tuple[nn.Module, AlbefConfig]:
    """The model of a kind in `folder`, in evaluation mode on `device`, and its config; as `load_model`.

    Grounding uses a retrieval model. Raises UserError when a file is missing or damaged, or of another kind.
    """
    if kind == "grounding":
        return load_model(folder, device, image_size)
    config = load_task_config(folder, kind, image_size)
    try:
        model: nn.Module = MODELS[kind](config)
        load_parts(model, load_file(folder / WEIGHTS_FILE))
    except (ValidationError, SafetensorError, ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{folder} is damaged or not of its {CONFIG_FILE} ({error}): train the weights again") from None
    return model.eval().to(device), config


@lru_cache(maxsize=1)
def _loaded(job: Job) -> tuple[Any, TaskSplit, Texts]:
    """Model and split, once in each process."""
    model, config = load_task_model(job.weights, job.kind, job.encoding.device, job.encoding.image_size)
    split = TaskSplit(job.split, job.kind, config.image_size)
    return model, split, split.texts(job.weights, job.encoding.max_tokens)


def _how(job: Job, part: range) -> dict[str, Any]:
    return {"part": part, "batch_size": job.encoding.batch_size, "device": job.encoding.device}


def _classify(job: Job, part: range, folder: Path) -> dict[str, Any]:
    np.save(folder / LOGITS_FILE, class_logits(*_loaded(job), **_how(job, part)))
    return {}


def _read_logits(split: TaskSplit, folder: Path) -> list[NDArray[np.float32]]:
    return list(np.load(folder / LOGITS_FILE))


def _answer(job: Job, part: range, folder: Path) -> dict[str, Any]:
    """Write [text, probability, ranked] of each item; ranked answers by their place in the list of candidates."""
    encoding = job.encoding
    assert isinstance(encoding, VqaEncoding)
    candidates = read_answers(job.split.parent)
    given = (*_loaded(job), job.weights)
    how = _how(job, part) | {"max_answer_tokens": encoding.max_answer_tokens}
    found: list[tuple[str, float, list[int] | None]]
    if encoding.answers == "generate":
        found = [(one.text, one.probability, None) for one in generate_answers(*given, **how)]
    else:
        place = {text: number for number, text in enumerate(candidates)}
        answers = rank_answers(*given, candidates, top_k=encoding.answer_top_k, **how)
        found = [(one.text, one.probability, [place[text] for text in one.ranked]) for one in answers]
    (folder / FOUND_FILE).write_text(json.dumps(found), encoding="utf-8")
    return {}


def _read_answers(split: TaskSplit, folder: Path) -> list[Answer]:
    candidates = read_answers(split.folder.parent)
    found = json.loads((folder / FOUND_FILE).read_text(encoding="utf-8"))
    return [
        Answer(text, probability, (text,) if ranked is None else tuple(candidates[place] for place in ranked))
        for text, probability, ranked in found
    ]


def _point(job: Job, part: range, folder: Path) -> dict[str, Any]:
    encoding = job.encoding
    assert isinstance(encoding, GroundingEncoding)
    try:
        found = point(
            *_loaded(job),
            mode=encoding.gradcam,
            layer=encoding.gradcam_layer,
            power=encoding.gradcam_area_power,
            **_how(job, part),
        )
    except ValueError as error:
        raise UserError(f"evaluate.gradcam_layer: {error}") from None
    (folder / FOUND_FILE).write_text(json.dumps(found), encoding="utf-8")
    return {}


def _read_pointed(split: TaskSplit, folder: Path) -> list[Pointed]:
    found = json.loads((folder / FOUND_FILE).read_text(encoding="utf-8"))
    return [
        Pointed(tuple(order), tuple(scores), None if peak is None else (peak[0], peak[1]), box)
        for order, scores, peak, box in found
    ]


RUN = {"entailment": _classify, "nlvr2": _classify, "vqa": _answer, "grounding": _point}
READ: dict[str, Any] = {
    "entailment": _read_logits,
    "nlvr2": _read_logits,
    "vqa": _read_answers,
    "grounding": _read_pointed,
}
