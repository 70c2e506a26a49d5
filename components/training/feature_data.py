"""Batches of cached features, and of pictures and token ids once the towers learn too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from components.data.tokenizer import load_tokenizer
from components.io.errors import UserError
from components.io.records import sha256_file
from components.io.shards import ShardReader
from components.training.data import Draw, PairData
from components.training.feature_store import MANIFEST_FILE, FeatureReader
from components.training.settings import AugmentParams

FIXED = 5  # tensors before the levels


class _Folder(NamedTuple):
    folder: Path


class TowerBatch(tuple[Tensor, ...]):
    """Pairs of pictures and captions: five tensors, then regions (B, k, width) and words (B, n, width) of each level.

    Either there are levels and no pictures, or the other way round.
    """

    def __new__(cls, *parts: Tensor) -> Self:
        return super().__new__(cls, parts)

    @property
    def images(self) -> Tensor:
        """(B, 3, S, S) uint8, or (0, 3, 1, 1) where there are levels."""
        return self[0]

    @property
    def input_ids(self) -> Tensor:
        """(B, n) int64, or (B, 0)."""
        return self[1]

    @property
    def mask(self) -> Tensor:
        """(B, n) int64, 0 over padding."""
        return self[2]

    @property
    def image_ids(self) -> Tensor:
        """(B,) int64: the picture's position."""
        return self[3]

    @property
    def caption_ids(self) -> Tensor:
        """(B,) int64: the caption's position."""
        return self[4]

    @property
    def regions(self) -> list[Tensor]:
        """Of each level; empty where there are pictures."""
        return list(self[FIXED : FIXED + (len(self) - FIXED) // 2])

    @property
    def words(self) -> list[Tensor]:
        """Of each level; empty where there are pictures."""
        return list(self[FIXED + (len(self) - FIXED) // 2 :])


class FeatureData(Dataset["TowerBatch | UserError"]):
    """Batches by `Draw`, a sample being a caption with its picture. Can be pickled.

    Epochs before `freeze_epochs` are of the features in ``features/train``; later ones of the pictures in `records`.
    With `pooled` the features are the mean region and word of the last level, as if there were one of each.
    Raises UserError when the features are not whole, or not of these records.
    """

    def __init__(
        self,
        features: Path,
        records: Path,
        *,
        freeze_epochs: int,
        pooled: bool = False,
        image_size: int,
        max_tokens: int,
        augment: AugmentParams,
        seed: int,
    ) -> None:
        self.features = FeatureReader(features / "train")
        self.reader = _Folder(features / "train")  # what the loop names in messages
        self.freeze_epochs, self.pooled = freeze_epochs, pooled
        reader = ShardReader(records)
        if reader.column("id").to_pylist() != self.features.picture_ids:
            raise UserError(f"{features} was not made from {records}: run the stage features again")
        self.pictures = PairData(
            reader,
            load_tokenizer(features),
            image_size=image_size,
            max_tokens=max_tokens,
            augment=augment,
            seed=seed,
            every_caption=True,
        )

    def __len__(self) -> int:
        """Captions."""
        return len(self.features.picture_of)

    @property
    def samples_per_shard(self) -> tuple[int, ...]:
        """Samples in one epoch, shard by shard: one shard, since features lie on this machine."""
        return (len(self),)

    @property
    def version(self) -> str:
        """Sha256 of the features' manifest."""
        return sha256_file(self.features.folder / MANIFEST_FILE)

    def __getitem__(self, draw: Draw) -> TowerBatch | UserError:
        """One batch; an error is returned, since the loader would bury its message in a traceback."""
        try:
            return self._cached(draw) if draw.epoch < self.freeze_epochs else self._fresh(draw)
        except UserError as error:
            return error

    def _cached(self, draw: Draw) -> TowerBatch:
        captions = np.array(draw.samples, np.int64)
        pictures = self.features.picture_of[captions]
        if self.pooled:
            means = self.features.pooled()
            regions, words = (
                [means[0][torch.from_numpy(pictures)][:, None]],
                [means[1][torch.from_numpy(captions)][:, None]],
            )
            mask = torch.ones(len(captions), 1, dtype=torch.bool)
        else:
            regions, (words, mask) = self.features.regions(pictures), self.features.words(captions)
        none = torch.zeros(0, 3, 1, 1, dtype=torch.uint8)
        ids = (torch.from_numpy(pictures), torch.from_numpy(captions))
        fixed = (none, torch.zeros(len(captions), 0, dtype=torch.int64), mask.long(), *ids)
        return TowerBatch(*fixed, *regions, *words)

    def _fresh(self, draw: Draw) -> TowerBatch:
        batch: Any = self.pictures[draw]
        if isinstance(batch, UserError):
            raise batch
        captions = torch.tensor(draw.samples)
        return TowerBatch(batch.images, batch.input_ids, batch.attention_mask, batch.image_ids, captions)
