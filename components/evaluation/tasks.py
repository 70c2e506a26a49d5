"""Evaluating a fine-tuned model on one split of its task, by the task's kind; retrieval has its own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from components.data.tasks.annotations import read_answers
from components.evaluation.answering import answer_metrics, generate_answers, rank_answers, vqa_accuracy
from components.evaluation.classes import (
    CLASSES,
    NOTES,
    class_logits,
    class_metrics,
    label_ranks,
    sentence_consistency,
)
from components.evaluation.grounding import grounding_metrics, point, right_ranks
from components.evaluation.scoring import Texts
from components.evaluation.submission import SUBMISSION_FILE, write_submission
from components.evaluation.task_inputs import TaskSplit
from components.evaluation.task_results import Verdict, write_task_results
from components.evaluation.weights import CONFIG_FILE, WEIGHTS_FILE, load_model
from components.io.errors import UserError
from components.io.progress import progress
from models.albef.checkpoints import load_parts
from models.albef.config import AlbefConfig, parse_config
from models.albef.entailment import AlbefEntailment
from models.albef.nlvr2 import AlbefNlvr2
from models.albef.vqa import AlbefVqa

if TYPE_CHECKING:
    from components.evaluation.evaluate import EvaluateParams

MODELS: dict[str, Any] = {"vqa": AlbefVqa, "entailment": AlbefEntailment, "nlvr2": AlbefNlvr2}


def evaluate_task(
    params: EvaluateParams, *, kind: str, run: str, task: Path, weights: Path, evaluation: Path, device: str
) -> None:
    """Evaluate `weights` on ``task/SPLIT``, a task of `kind`; write metrics, ranks and examples into `evaluation`.

    Raises UserError when the split is empty or of another kind, and when the weights are not those of the kind.
    """
    model, config = load_task_model(weights, kind, device, params.image_size)
    if params.max_tokens > config.max_positions:
        raise UserError(
            f"evaluate.max_tokens is {params.max_tokens}, but the model in {weights} reads at most "
            f"{config.max_positions} tokens: lower it"
        )
    split = TaskSplit(task / params.split, kind, config.image_size)
    texts = split.texts(weights, params.max_tokens)
    judge = {"vqa": _vqa, "entailment": _classes, "nlvr2": _classes, "grounding": _grounding}[kind]
    with progress(f"evaluate {run}: {kind}", len(split), "items") as advance:
        verdicts, metrics = judge(Asked(params, kind, model, split, texts, weights, device, advance))
    about = {"run": run, "task": task.name, "kind": kind, "split": params.split, "items": len(split)}
    about["image_size"] = config.image_size
    if kind == "vqa":
        evaluation.mkdir(parents=True, exist_ok=True)
        write_submission(
            evaluation / SUBMISSION_FILE, split.items.column("question_id"), [one.prediction for one in verdicts]
        )
    write_task_results(evaluation, verdicts, about | metrics, params.examples)


def load_task_model(
    folder: Path, kind: str, device: str | torch.device, image_size: int | None = None
) -> tuple[nn.Module, AlbefConfig]:
    """The model of a kind in `folder`, in evaluation mode on `device`, and its config; as `load_model`.

    Grounding uses a retrieval model. Raises UserError when a file is missing or damaged, or of another kind.
    """
    if kind == "grounding":
        return load_model(folder, device, image_size)
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
        model: nn.Module = MODELS[kind](config)
        load_parts(model, load_file(folder / WEIGHTS_FILE))
    except (ValidationError, SafetensorError, ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{folder} is damaged or not of its {CONFIG_FILE} ({error}): train the weights again") from None
    return model.eval().to(device), config


@dataclass(frozen=True)
class Asked:
    """A model, what it is asked, and how."""

    params: EvaluateParams
    kind: str
    model: Any
    split: TaskSplit
    texts: Texts
    weights: Path
    device: str
    advance: Callable[[int], None]

    @property
    def running(self) -> dict[str, Any]:
        """How the model is run over the items."""
        return {"batch_size": self.params.batch_size, "device": self.device, "advance": self.advance}


Judged = tuple[list[Verdict], dict[str, Any]]


def _classes(asked: Asked) -> Judged:
    split = asked.split
    logits = class_logits(asked.model, split, asked.texts, **asked.running)
    labels, names = np.array(split.items.column("label"), np.int64), CLASSES[asked.kind]
    ranks, best = label_ranks(logits, labels), logits.argmax(axis=1)
    sure = np.exp(logits.max(axis=1) - np.logaddexp.reduce(logits, axis=1))
    verdicts = [
        Verdict(
            split.name(item),
            split.about(item),
            names[best[item]],
            names[labels[item]],
            float(sure[item]),
            int(ranks[item]),
        )
        for item in range(len(split))
    ]
    metrics = class_metrics(logits, labels, names)
    if asked.kind == "nlvr2":
        metrics |= sentence_consistency(logits.argmax(axis=1) == labels, split.items.column("text"))
    return verdicts, metrics | ({"note": NOTES[asked.kind]} if asked.kind in NOTES else {})


def _vqa(asked: Asked) -> Judged:
    split = asked.split
    params = asked.params
    candidates = read_answers(split.folder.parent)
    given = (asked.model, split, asked.texts, asked.weights)
    how = asked.running | {"max_answer_tokens": params.max_answer_tokens}
    if params.answers == "generate":
        answers = generate_answers(*given, **how)
    else:
        answers = rank_answers(*given, candidates, top_k=params.answer_top_k, **how)
    people, types = split.items.column("answers"), split.items.column("type")
    verdicts = []
    for item, answer in enumerate(answers):
        right = [place for place, text in enumerate(answer.ranked) if vqa_accuracy(text, people[item]) > 0]
        rank = None if not people[item] else right[0] + 1 if right else len(answer.ranked) + 1
        shown = " / ".join(dict.fromkeys(people[item])) or None
        name = split.name(item, "question_id")
        verdicts.append(Verdict(name, split.about(item), answer.text, shown, answer.probability, rank))
    texts_said = [answer.text for answer in answers]
    return verdicts, {
        "answers": params.answers,
        **answer_metrics(texts_said, people, types, candidates[0], len(candidates)),
    }


def _grounding(asked: Asked) -> Judged:
    split = asked.split
    params = asked.params
    try:
        pointed = point(
            asked.model,
            split,
            asked.texts,
            mode=params.gradcam,
            layer=params.gradcam_layer,
            power=params.gradcam_area_power,
            **asked.running,
        )
    except ValueError as error:
        raise UserError(f"evaluate.gradcam_layer: {error}") from None
    boxes, candidates = split.items.column("box"), split.items.column("candidates")
    ranks = right_ranks(pointed, boxes, candidates)
    verdicts = []
    for item, one in enumerate(pointed):
        chosen = str(candidates[item][one.order[0]]) if one.order else "none"
        answer = None if boxes[item] is None else str(boxes[item])
        score = one.scores[0] if one.scores else 0.0
        verdicts.append(Verdict(split.name(item, "ref_id"), split.about(item), chosen, answer, score, ranks[item]))
    metrics = grounding_metrics(pointed, boxes, candidates, split.items.column("subset"))
    return verdicts, {"gradcam": params.gradcam, **metrics}
