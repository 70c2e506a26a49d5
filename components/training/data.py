"""Batches of pictures and captions from shards.

A batch is a pure function of (seed, epoch, samples): the number of loading processes does not matter, and a resumed run
sees what the stopped one would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset, Sampler

from components.data.cleaning.pictures import open_picture
from components.data.tokenizer import Tokenizer
from components.io.errors import UserError
from components.io.order import epoch_order
from components.io.records import MANIFEST_FILE, sha256_file
from components.io.shards import ShardReader
from components.training.augment import augment, to_batch
from components.training.settings import AugmentParams, TrainingParams

CACHE_FOLDER = Path("work/shards")
VIEW = 2  # keeps the random stream of a picture's augmentation apart from that of the epoch's order


class Batch(NamedTuple):
    """Matching pictures and captions, row by row."""

    images: torch.Tensor  # (B, 3, S, S) uint8; `augment.normalise` makes it float
    input_ids: torch.Tensor  # (B, L) int64, padded to the longest of the batch
    attention_mask: torch.Tensor  # (B, L) int64, 0 over padding
    image_ids: torch.Tensor  # (B,) int64: the picture's position; equal for captions of one picture


@dataclass(frozen=True)
class Draw:
    """The samples of one batch: what a loading process is asked for."""

    epoch: int
    samples: tuple[int, ...]


class PairData(Dataset["Batch | UserError"]):
    """Batches of (picture, caption) pairs, by `Draw`. Can be pickled.

    With `every_caption` a sample is one caption with its picture (fine-tuning); without, it is a picture with one of
    its captions, drawn anew in each epoch (pre-training).
    """

    def __init__(
        self,
        reader: ShardReader,
        tokenizer: Tokenizer,
        *,
        image_size: int,
        max_tokens: int,
        augment: AugmentParams,
        seed: int,
        every_caption: bool = False,
        cache_bytes: int = 0,
    ) -> None:
        self.reader, self.tokenizer = reader, tokenizer
        self.image_size, self.max_tokens, self.augment, self.seed = image_size, max_tokens, augment, seed
        self._pairs: NDArray[np.int64] | None = reader.caption_index() if every_caption else None  # (C, 2)
        fits = cache_bytes > 0 and 0 < _decoded_bytes(reader) <= cache_bytes  # asks all shards, which may be far away
        self._cache: dict[int, NDArray[np.uint8]] | None = {} if fits else None
        self._captions = reader.captions if self._cache is not None else None

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self.reader) if self._pairs is None else len(self._pairs)

    @property
    def samples_per_shard(self) -> tuple[int, ...]:
        """Samples in one epoch, shard by shard."""
        files = self.reader.manifest.files
        counts = tuple(file.rows if self._pairs is None else file.captions for file in files)
        return counts if sum(counts) == len(self) else (len(self),)

    @property
    def version(self) -> str:
        """Sha256 of the records' manifest, which holds those of all shards."""
        return sha256_file(self.reader.folder / MANIFEST_FILE)

    def __getitem__(self, draw: Draw) -> Batch | UserError:
        """One batch; an error is returned, since the loader would bury its message in a traceback."""
        try:
            return self._batch(draw)
        except UserError as error:
            return error

    def _batch(self, draw: Draw) -> Batch:
        views, captions, pictures = [], [], []
        for sample in draw.samples:
            rng = np.random.default_rng((self.seed, VIEW, draw.epoch, sample))
            picture, place = (sample, -1) if self._pairs is None else map(int, self._pairs[sample])
            image, texts = self._picture(picture)
            if place < 0:
                if not texts:
                    raise UserError(f"picture {picture} of {self.reader.folder} has no caption: run `clean` again")
                place = int(rng.integers(len(texts)))
            views.append(augment(image, texts[place : place + 1], self.image_size, self.augment, rng))
            captions.append(texts[place])
            pictures.append(picture)
        input_ids, attention_mask = self.tokenizer.encode_batch(captions, self.max_tokens)
        return Batch(to_batch(views), input_ids, attention_mask, torch.tensor(pictures))

    def _picture(self, index: int) -> tuple[Image.Image, list[str]]:
        if self._cache is None or self._captions is None:
            record = self.reader[index]
            return self._decode(record["image"], index), record["captions"]
        if index not in self._cache:
            self._cache[index] = np.asarray(self._decode(self.reader[index]["image"], index))
        return Image.fromarray(self._cache[index]), self._captions[index]

    def _decode(self, data: bytes, index: int) -> Image.Image:
        try:
            return open_picture(data)
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise UserError(
                f"picture {index} of {self.reader.folder} cannot be decoded ({error}): the shard is damaged, "
                "run the stage that writes it again"
            ) from None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_cache": None, "_captions": None}  # each process would hold its own copy


def open_shards(folder: Path, place: str | None, cache_mb: int) -> ShardReader:
    """The records of `folder`, or the same ones at `place`, of which `cache_mb` MiB are kept on this machine.

    Raises UserError when those at `place` are others.
    """
    if place is None:
        return ShardReader(folder)
    reader = ShardReader(place, cache=CACHE_FOLDER, cache_bytes=cache_mb << 20)
    if sha256_file(reader.folder / MANIFEST_FILE) != sha256_file(folder / MANIFEST_FILE):
        raise UserError(f"the shards at {place} are not those of {folder}: publish those there, or correct shards_at")
    return reader


def _decoded_bytes(reader: ShardReader) -> int:
    """Bytes of all pictures, decoded; 0 when the records do not say."""
    width, height = reader.column("width"), reader.column("height")
    if not len(reader) or width.null_count or height.null_count:
        return 0
    return int(3 * (width.to_numpy().astype(np.int64) * height.to_numpy().astype(np.int64)).sum())


@dataclass(frozen=True)
class Plan:
    """Which samples each worker sees at each step. The workers' shares, in rank order, are the one-worker batch.

    A worker takes its share in `parts` draws of one size. Where `world` and `parts` do not divide the batch (a training
    that has lost workers), the samples that are left over wait for another epoch: no worker ever has more to do.
    """

    samples: int
    batch_size: int  # of all workers together
    seed: int
    rank: int = 0
    world: int = 1
    parts: int = 1
    samples_per_shard: tuple[int, ...] = ()
    window: int = 0  # shards mixed at a time; 0: all

    @property
    def per_epoch(self) -> int:
        """Steps in an epoch; samples that do not fill a last batch wait for another epoch's order."""
        return self.samples // self.batch_size

    @property
    def part(self) -> int:
        """Samples of one draw."""
        return self.batch_size // (self.world * self.parts)

    def draws(self, start: int, stop: int) -> Iterator[Draw]:
        """The worker's samples for the steps `start` to `stop` - 1, counted over all epochs; `parts` draws a step."""
        order: NDArray[np.int64] | None = None
        for step in range(start, stop):
            epoch, iteration = divmod(step, self.per_epoch)
            if order is None or iteration == 0:
                order = epoch_order(self.samples_per_shard or (self.samples,), self.seed, epoch, self.window)
            first = iteration * self.batch_size + self.rank * self.parts * self.part
            for at in range(first, first + self.parts * self.part, self.part):
                yield Draw(epoch, tuple(order[at : at + self.part].tolist()))


class _Steps(Sampler[Draw]):
    """The plan as the loader wants it."""

    def __init__(self, plan: Plan, start: int, stop: int) -> None:
        self.plan, self.start, self.stop = plan, start, stop

    def __len__(self) -> int:
        return (self.stop - self.start) * self.plan.parts

    def __iter__(self) -> Iterator[Draw]:
        return self.plan.draws(self.start, self.stop)


def batches(
    data: Dataset[Batch | UserError], plan: Plan, start: int, stop: int, params: TrainingParams
) -> Iterator[Batch]:
    """The batches of the steps `start` to `stop` - 1, as many a step as the plan has parts.

    `params.loader_workers` processes read ahead.

    Raises UserError when a picture cannot be read.
    """
    workers = params.loader_workers
    loader: DataLoader[Batch | UserError] = DataLoader(
        data,
        sampler=_Steps(plan, start, stop),
        batch_size=None,
        collate_fn=_as_is,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        # forkserver: a fork of a process with torch's and Arrow's threads can deadlock
        multiprocessing_context=get_context("forkserver") if workers else None,
    )
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        yield batch


def _as_is(batch: Any) -> Any:
    return batch
