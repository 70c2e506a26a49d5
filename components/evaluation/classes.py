"""Visual entailment and NLVR2: class logits of every item, and accuracies beside what guessing would get."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.evaluation.scoring import Texts
from components.evaluation.task_inputs import TaskSplit
from components.io.progress import silent

NOTES = {
    "entailment": "SNLI-VE's test labels were carried over from sentences without pictures and are known to be noisy."
}
CLASSES = {"entailment": ("contradiction", "neutral", "entailment"), "nlvr2": ("false", "true")}


class Classifier(Protocol):
    """What is asked of a model."""

    def classify(self, images: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (B, C) of pictures (P * B, 3, S, S) and texts (B, L)."""


@torch.inference_mode()
def class_logits(
    model: Classifier,
    split: TaskSplit,
    texts: Texts,
    *,
    part: range | None = None,
    batch_size: int = 64,
    device: str | torch.device = "cpu",
    advance: Callable[[int], None] = silent,
) -> NDArray[np.float32]:
    """Logits (N, C) of a part's N items, or of all, in the order of `TaskSplit.members`."""
    logits: dict[int, NDArray[np.float32]] = {}
    for items, ids, mask in split.batches(texts, batch_size, part):
        found = model.classify(split.images(items).to(device), ids.to(device), mask.to(device)).float().cpu().numpy()
        logits.update(zip(items, found, strict=True))
        advance(len(items))
    return np.stack([logits[item] for item in sorted(logits)])


def class_metrics(
    logits: NDArray[np.floating[Any]], labels: NDArray[np.int64], names: tuple[str, ...]
) -> dict[str, Any]:
    """Accuracies in percent of logits (N, C) against labels (N,), and of always saying the commonest class."""
    right = logits.argmax(axis=1) == labels
    counts = np.bincount(labels, minlength=len(names))
    return {
        "accuracy": 100 * float(right.mean()),
        "by_class": {
            name: 100 * float(right[labels == number].mean()) for number, name in enumerate(names) if counts[number]
        },
        "majority": 100 * float(counts.max() / counts.sum()),
        "chance": 100 / len(names),
    }


def sentence_consistency(right: Sequence[bool] | NDArray[np.bool_], sentences: Sequence[str]) -> dict[str, Any]:
    """NLVR2's consistency: the percentage of sentences that are judged rightly with all their pairs of pictures.

    `right` (N,) says it of each item; sentences are told apart by their text.
    """
    whole: dict[str, bool] = defaultdict(lambda: True)
    for hit, sentence in zip(right, sentences, strict=True):
        whole[sentence] &= bool(hit)
    return {
        "sentences": len(whole),
        "consistency": 100 * sum(whole.values()) / len(whole) if whole else None,
    }


def label_ranks(logits: NDArray[np.floating[Any]], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """From 1, the place of each right class among all classes; ties count against the model. (N, C), (N,) to (N,)."""
    own = logits[np.arange(len(labels)), labels][:, None]
    return (logits >= own).sum(axis=1)
