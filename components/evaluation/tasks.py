"""Evaluating a fine-tuned model on one split of its task, by the task's kind; retrieval has its own way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.data.tasks.annotations import read_answers
from components.evaluation.answering import answer_metrics, vqa_accuracy
from components.evaluation.classes import CLASSES, NOTES, class_metrics, label_ranks, sentence_consistency
from components.evaluation.grounding import grounding_metrics, right_ranks
from components.evaluation.sharing import encoding_of
from components.evaluation.task_inputs import TaskSplit
from components.evaluation.task_parts import ENCODINGS, load_task_config, run_model
from components.evaluation.task_results import Verdict, write_task_results
from components.io.errors import UserError
from components.io.runtime import Runtime

if TYPE_CHECKING:
    from components.evaluation.evaluate import EvaluateParams


def evaluate_task(
    params: EvaluateParams, *, kind: str, run: str, task: Path, weights: Path, evaluation: Path, runtime: Runtime
) -> None:
    """Evaluate `weights` on ``task/SPLIT``, a task of `kind`; write metrics, ranks and examples into `evaluation`.

    Raises UserError when the split is empty or of another kind, and when the weights are not those of the kind.
    """
    config = load_task_config(weights, kind, params.image_size)
    if params.max_tokens > config.max_positions:
        raise UserError(
            f"evaluate.max_tokens is {params.max_tokens}, but the model in {weights} reads at most "
            f"{config.max_positions} tokens: lower it"
        )
    split = TaskSplit(task / params.split, kind, config.image_size)
    texts = split.texts(weights, params.max_tokens)
    found = run_model(
        encoding_of(ENCODINGS[kind], params, runtime),
        kind,
        split,
        texts,
        weights,
        runtime=runtime,
        label=f"evaluate {run}: {kind}",
    )
    judge = {"vqa": _vqa, "entailment": _classes, "nlvr2": _classes, "grounding": _grounding}[kind]
    verdicts, metrics = judge(Said(params, kind, split, found))
    about = {"run": run, "task": task.name, "kind": kind, "split": params.split, "items": len(split)}
    about["image_size"] = config.image_size
    questions = split.items.column("question_id") if kind == "vqa" else None
    write_task_results(evaluation, verdicts, about | metrics, params.examples, questions)


@dataclass(frozen=True)
class Said:
    """What a model was asked, and what it said of each item."""

    params: EvaluateParams
    kind: str
    split: TaskSplit
    found: list[Any]


Judged = tuple[list[Verdict], dict[str, Any]]


def _classes(said: Said) -> Judged:
    split = said.split
    logits = np.stack(said.found)
    labels, names = np.array(split.items.column("label"), np.int64), CLASSES[said.kind]
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
    if said.kind == "nlvr2":
        metrics |= sentence_consistency(logits.argmax(axis=1) == labels, split.items.column("text"))
    return verdicts, metrics | ({"note": NOTES[said.kind]} if said.kind in NOTES else {})


def _vqa(said: Said) -> Judged:
    split = said.split
    params = said.params
    candidates = read_answers(split.folder.parent)
    answers = said.found
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


def _grounding(said: Said) -> Judged:
    split = said.split
    params = said.params
    pointed = said.found
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
