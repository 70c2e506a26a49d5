"""Visual question answering: the best answer of a list, or a free one, and the official accuracy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from components.data.tasks.answers import normalise_answer, strip_space
from components.data.tokenizer import load_tokenizer
from components.evaluation.scoring import Texts
from components.evaluation.task_inputs import TaskSplit
from components.io.progress import silent
from components.training.task_data import encode_answers
from models.albef.vqa import AlbefVqa

AGREE = 3  # people whose agreement makes an answer wholly right


class Answer(NamedTuple):
    """What was answered: the text, its probability among the ranked ones, and how they were ranked (best first)."""

    text: str
    probability: float
    ranked: tuple[str, ...]


def rank_answers(
    model: AlbefVqa,
    split: TaskSplit,
    texts: Texts,
    tokenizer: Path,
    candidates: Sequence[str],
    *,
    top_k: int,
    max_answer_tokens: int,
    part: range | None = None,
    batch_size: int = 16,
    device: str | torch.device = "cpu",
    advance: Callable[[int], None] = silent,
) -> list[Answer]:
    """The best of `candidates` for every item, of the `top_k` whose first token is likeliest, as published.

    With `part` for its items alone, in the order of `TaskSplit.members`.
    """
    answer_ids, answer_mask = (
        part.to(device) for part in encode_answers(load_tokenizer(tokenizer), list(candidates), max_answer_tokens)
    )
    answers: dict[int, Answer] = {}
    for items, ids, mask in split.batches(texts, batch_size, part):
        images = split.images(items).to(device)
        ranking = model.rank(images, ids.to(device), mask.to(device), answer_ids, answer_mask, top_k)
        best, likely = ranking.candidates.cpu().tolist(), ranking.probabilities.cpu().tolist()
        for item, order, probabilities in zip(items, best, likely, strict=True):
            ranked = tuple(candidates[place] for place in order)
            answers[item] = Answer(ranked[0], float(probabilities[0]), ranked)
        advance(len(items))
    return [answers[item] for item in sorted(answers)]


def generate_answers(
    model: AlbefVqa,
    split: TaskSplit,
    texts: Texts,
    tokenizer: Path,
    *,
    max_answer_tokens: int,
    part: range | None = None,
    batch_size: int = 16,
    device: str | torch.device = "cpu",
    advance: Callable[[int], None] = silent,
) -> list[Answer]:
    """A free answer to every item, or to every one of `part`, by the likeliest next token."""
    words = load_tokenizer(tokenizer)
    answers: dict[int, Answer] = {}
    for items, ids, mask in split.batches(texts, batch_size, part):
        said = model.generate(split.images(items).to(device), ids.to(device), mask.to(device), max_answer_tokens)
        for item, tokens in zip(items, said.cpu().tolist(), strict=True):
            text = words.decode(tokens)
            answers[item] = Answer(text, 1.0, (text,))
        advance(len(items))
    return [answers[item] for item in sorted(answers)]


def vqa_accuracy(answer: str, people: Sequence[str]) -> float:
    """The official accuracy of an answer in [0, 1]: for each person left out, a third per other person who agrees.

    All is normalised unless the people's answers are the same to the letter; then so must be the answer. Where so few
    answered that three others could not agree (Visual Genome, the built-in corpus), any of their answers is right.
    """
    said, own = [strip_space(one) for one in people], strip_space(answer)
    if len(set(said)) > 1 or len(said) <= AGREE:
        said, own = [normalise_answer(one) for one in said], normalise_answer(own)
    if len(said) <= AGREE:
        return float(own in said)
    agreeing = said.count(own)
    return sum(min(1.0, (agreeing - (one == own)) / AGREE) for one in said) / len(said)


def answer_metrics(
    answers: Sequence[str], people: Sequence[Sequence[str]], types: Sequence[str], commonest: str, candidates: int
) -> dict[str, Any]:
    """Accuracies in percent over the questions that people answered: overall, by type, of always saying `commonest`.

    `chance` is that of one of `candidates` at random, as if a single one were right.
    """
    asked = [index for index, given in enumerate(people) if given]
    by_type: dict[str, list[float]] = defaultdict(list)
    scores = []
    for index in asked:
        score = vqa_accuracy(answers[index], people[index])
        scores.append(score)
        by_type[types[index] or "all"].append(score)
    return {
        "questions": len(answers),
        "questions_with_answers": len(asked),
        "accuracy": _percent(scores),
        "by_type": {name: _percent(found) for name, found in sorted(by_type.items())},
        "majority": _percent([vqa_accuracy(commonest, people[index]) for index in asked]),
        "majority_answer": commonest,
        "chance": 100 / max(1, candidates),
    }


def _percent(scores: Sequence[float]) -> float | None:
    return 100 * sum(scores) / len(scores) if scores else None
