"""Batches of cached features, and of pictures and token ids once the towers learn too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from components.data.tokenizer import load_tokenizer
from components.io.errors import UserError
from components.io.records import sha256_file
from components.io.shards import ShardReader
from components.training.augment import SIDES
from components.training.data import VIEW, Draw, PairData
from components.training.feature_store import MANIFEST_FILE, MIRRORED, FeatureReader
from components.training.settings import AugmentParams

FIXED = 5  # tensors before the levels


class _Folder(NamedTuple):
    folder: Path


class TowerBatch(tuple[Tensor, ...]):
    """Pairs of pictures and captions: five tensors, then regions (B, k, width) and words (B, n, width) of each level.

    Of each side there are levels, or what its tower makes them from: pictures, or token ids.
    """

    def __new__(cls, *parts: Tensor) -> Self:
        return super().__new__(cls, parts)

    @property
    def images(self) -> Tensor:
        """(B, 3, S, S) uint8, or (0, 3, 1, 1) where there are regions."""
        return self[0]

    @property
    def input_ids(self) -> Tensor:
        """(B, n) int64, or (B, 0) where there are words."""
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
        return [level for level in self[FIXED : FIXED + (len(self) - FIXED) // 2] if len(level)]

    @property
    def words(self) -> list[Tensor]:
        """Of each level; empty where there are token ids."""
        return [level for level in self[FIXED + (len(self) - FIXED) // 2 :] if len(level)]


class FeatureData(Dataset["TowerBatch | UserError"]):
    """Batches by `Draw`, a sample being a caption with its picture. Can be pickled.

    Epochs before `freeze_epochs` are of the features in ``features/train``; later ones have in their place the pictures
    in `records` where `learn` names "image", and token ids where it names "text".
    Where ``features`` holds mirror images and `augment` flips, half of the samples are read from those.
    With `pooled` the features are the mean region and word of each level, as if there were one of each.
    Raises UserError when the features are not whole, or not of these records.
    """

    def __init__(
        self,
        features: Path,
        records: Path,
        *,
        freeze_epochs: int,
        learn: Sequence[str] = ("image", "text"),
        pooled: bool = False,
        image_size: int,
        max_tokens: int,
        augment: AugmentParams,
        seed: int,
    ) -> None:
        self.features = FeatureReader(features / "train")
        self.reader = _Folder(features / "train")  # what the loop names in messages
        self.freeze_epochs, self.learn, self.pooled = freeze_epochs, tuple(learn), pooled
        self._captions = self.features.captions
        reader = ShardReader(records)
        if reader.column("id").to_pylist() != self.features.picture_ids:
            raise UserError(f"{features} was not made from {records}: run the stage features again")
        self.pictures = PairData(
            reader,
            load_tokenizer(features, clip=True),
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
            return self._batch(draw, self.learn if draw.epoch >= self.freeze_epochs else ())
        except UserError as error:
            return error

    def _batch(self, draw: Draw, fresh: Sequence[str]) -> TowerBatch:
        captions = np.array(draw.samples, np.int64)
        pictures = self.features.picture_of[captions]
        images, regions = torch.zeros(0, 3, 1, 1, dtype=torch.uint8), self._regions(pictures, self._mirrored(draw))
        if "image" in fresh:
            drawn: Any = self.pictures[draw]
            if isinstance(drawn, UserError):
                raise drawn
            images, regions = drawn.images, [level[:0] for level in regions]
        ids = torch.zeros(len(captions), 0, dtype=torch.int64)
        if "text" in fresh:
            texts = [self._captions[caption] for caption in captions]
            ids, mask = self.pictures.tokenizer.encode_batch(texts, self.pictures.max_tokens)
            words = [torch.zeros(0, 1, 1)] * len(regions)
        else:
            words, mask = self._words(captions)
        return TowerBatch(
            images, ids, mask.long(), torch.from_numpy(pictures), torch.from_numpy(captions), *regions, *words
        )

    def _mirrored(self, draw: Draw) -> NDArray[np.bool_]:
        """Of which samples the mirror image is read, (B,): half of them where it was kept and they may be flipped."""
        augment = self.pictures.augment
        if not (self.features.mirrored and augment.flip):
            return np.zeros(len(draw.samples), np.bool_)
        draws = [np.random.default_rng((self.pictures.seed, VIEW, draw.epoch, one)).random() for one in draw.samples]
        allowed = [augment.flip_with_sides or not SIDES.search(self._captions[sample]) for sample in draw.samples]
        return (np.array(draws) < 0.5) & np.array(allowed)

    def _regions(self, pictures: NDArray[np.int64], mirrored: NDArray[np.bool_]) -> list[Tensor]:
        if not self.pooled:
            return self.features.regions(pictures, mirrored)
        chosen, turned = torch.from_numpy(pictures), torch.from_numpy(mirrored)
        means = [level[chosen] for level in self.features.pooled_regions()]
        if mirrored.any():
            for level, other in zip(means, self.features.pooled_regions(MIRRORED), strict=True):
                level[turned] = other[chosen[turned]]
        return [level[:, None] for level in means]

    def _words(self, captions: NDArray[np.int64]) -> tuple[list[Tensor], Tensor]:
        if not self.pooled:
            return self.features.words(captions)
        chosen = torch.from_numpy(captions)
        words = [level[chosen][:, None] for level in self.features.pooled_words()]
        return words, torch.ones(len(captions), 1, dtype=torch.bool)
