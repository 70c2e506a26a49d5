"""Batches of a task's items: pictures with questions and answers, or with a sentence and its class."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from components.data.tasks.annotations import Annotations
from components.data.tokenizer import Tokenizer
from components.io.errors import UserError
from components.io.shards import ShardReader
from components.training.augment import augment, to_batch
from components.training.data import VIEW, Draw, PairData
from components.training.settings import AugmentParams


class LabelledBatch(NamedTuple):
    """Sentences with their pictures and classes."""

    images: torch.Tensor  # (P * B, 3, S, S) uint8: all items' first pictures, then, if P is 2, all second ones
    input_ids: torch.Tensor  # (B, L) int64, padded to the longest of the batch
    attention_mask: torch.Tensor  # (B, L) int64, 0 over padding
    targets: torch.Tensor  # (B,) int64


class QuestionBatch(NamedTuple):
    """Questions with their pictures, and the different answers to each."""

    images: torch.Tensor  # (B, 3, S, S) uint8
    input_ids: torch.Tensor  # (B, L) int64, padded to the longest of the batch
    attention_mask: torch.Tensor  # (B, L) int64, 0 over padding
    answer_ids: torch.Tensor  # (A, La) int64: [CLS] answer [SEP]
    answer_mask: torch.Tensor  # (A, La) int64
    answer_rows: torch.Tensor  # (A,) int64: the question that each answers, ascending
    weights: torch.Tensor  # (A,) float32


def encode_answers(tokenizer: Tokenizer, answers: list[str], max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers as the decoder learns and ranks them: ids (A, La) and mask, [CLS] first, [SEP] last.

    A tokenizer that ends texts without [SEP], as the published one, gets it here.
    """
    ids, mask = tokenizer.encode_batch(answers, max_tokens)
    last = mask.sum(dim=1, keepdim=True)  # (A, 1): where the next token would stand
    ended = ids.gather(1, last - 1) == tokenizer.sep_id
    if bool(ended.all()):
        return ids, mask
    ids = torch.nn.functional.pad(ids, (0, 1), value=tokenizer.pad_id)
    mask = torch.nn.functional.pad(mask, (0, 1))
    place = torch.where(ended, last - 1, last)
    ids, mask = ids.scatter(1, place, tokenizer.sep_id), mask.scatter(1, place, 1)
    return ids[:, : int(mask.sum(dim=1).max())], mask[:, : int(mask.sum(dim=1).max())]


class TaskData(PairData):
    """Batches of the items in ``data/tasks/TASK/train``, by `Draw`: `QuestionBatch` for vqa, else `LabelledBatch`.

    Questions without an answer are left out. Raises UserError when the split is of another kind of task, and when
    nothing is left.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        tokenizer: Tokenizer,
        *,
        image_size: int,
        max_tokens: int,
        max_answer_tokens: int = 3,
        augment: AugmentParams,
        seed: int,
        cache_bytes: int = 0,
    ) -> None:
        super().__init__(
            ShardReader(folder),
            tokenizer,
            image_size=image_size,
            max_tokens=max_tokens,
            augment=augment,
            seed=seed,
            cache_bytes=cache_bytes,
        )
        self.items, self.kind, self.max_answer_tokens = Annotations(folder, kind), kind, max_answer_tokens
        self.usable: NDArray[np.int64] = np.arange(len(self.items))
        if kind == "vqa":
            self.usable = np.flatnonzero([bool(targets) for targets in self.items.column("targets")])
        if not len(self.usable):
            raise UserError(f"{folder} holds no item to learn from: look at the rejects of prepare_tasks")

    def __len__(self) -> int:
        return len(self.usable)

    def _batch(self, draw: Draw) -> LabelledBatch | QuestionBatch:  # type: ignore[override]
        items = [self.items[int(self.usable[sample])] for sample in draw.samples]
        views: list[list[NDArray[np.uint8]]] = []
        for sample, item in zip(draw.samples, items, strict=True):
            rng = np.random.default_rng((self.seed, VIEW, draw.epoch, sample))
            pictures = [self._picture(place)[0] for place in item["pictures"]]
            views.append([augment(picture, [item["text"]], self.image_size, self.augment, rng) for picture in pictures])
        images = to_batch([view for place in zip(*views, strict=True) for view in place])  # first ones first
        ids, mask = self.tokenizer.encode_batch([item["text"] for item in items], self.max_tokens)
        if self.kind != "vqa":
            return LabelledBatch(images, ids, mask, torch.tensor([item["label"] for item in items]))
        answers = [answer for item in items for answer in item["targets"]]
        rows = [row for row, item in enumerate(items) for _ in item["targets"]]
        weights = [weight for item in items for weight in item["weights"]]
        answer_ids, answer_mask = encode_answers(self.tokenizer, answers, self.max_answer_tokens)
        return QuestionBatch(
            images, ids, mask, answer_ids, answer_mask, torch.tensor(rows), torch.tensor(weights, dtype=torch.float32)
        )
