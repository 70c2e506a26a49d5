"""One split of a retrieval task, as the scorer wants it: pictures by slice, captions as token ids, names of both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from components.data.cleaning.pictures import open_picture
from components.data.tokenizer import load_tokenizer
from components.evaluation.scoring import Texts
from components.io.errors import UserError
from components.io.shards import ShardReader
from components.training.augment import evaluation_view, normalise, to_batch

DECODERS = min(8, os.cpu_count() or 1)  # threads: Pillow decodes outside Python's lock


class RetrievalSplit:
    """N pictures with M captions. ``split[start:stop]`` is their images (b, 3, S, S) float32, decoded on demand.

    Raises UserError when the folder is missing, empty, or holds a picture without captions.
    """

    def __init__(self, folder: Path, image_size: int) -> None:
        if not folder.is_dir():
            present = ", ".join(sorted(path.name for path in folder.parent.glob("*") if path.is_dir())) or "(none)"
            raise UserError(f"{folder.parent} has no split {folder.name!r}: set evaluate.split to one of {present}")
        self.reader = ShardReader(folder)
        index = self.reader.caption_index()  # (M, 2)
        self.picture_of: NDArray[np.int64] = index[:, 0]  # (M,)
        self.captions = [caption for captions in self.reader.captions for caption in captions]
        self.picture_ids: list[str] = self.reader.column("id").to_pylist()
        self.caption_ids: list[str] = [row for rows in self.reader.column("row_ids").to_pylist() for row in rows]
        bare = np.flatnonzero(np.bincount(self.picture_of, minlength=len(self.reader)) == 0)
        if len(self.reader) == 0:
            raise UserError(f"{folder} holds no picture: nothing to evaluate; look at the rejects of prepare_tasks")
        if len(bare):
            raise UserError(
                f"picture {self.picture_ids[bare[0]]} in {folder} has no caption, so it has no right answer: "
                "mend the task's annotations"
            )
        self.image_size = image_size

    def check_folds(self, folds: int | None) -> None:
        """Raise UserError unless the pictures divide into so many folds."""
        if folds and len(self) % folds:
            raise UserError(
                f"evaluate.folds is {folds}, which does not divide the {len(self)} pictures of {self.reader.folder}: "
                "choose a divisor"
            )

    def __len__(self) -> int:
        """Pictures."""
        return len(self.reader)

    def __getitem__(self, part: slice) -> Tensor:
        return self.views(range(*part.indices(len(self))))

    def views(self, pictures: Sequence[int]) -> Tensor:
        """The images (b, 3, S, S) float32 of these pictures."""
        with ThreadPoolExecutor(DECODERS) as pool:
            return normalise(to_batch(list(pool.map(self._view, pictures))))

    def texts(self, tokenizer: Path, max_tokens: int) -> Texts:
        """All captions by the tokenizer in the folder (or file) `tokenizer`, cut to `max_tokens`."""
        return Texts(*load_tokenizer(tokenizer).encode_batch(self.captions, max_tokens))

    def _view(self, index: int) -> NDArray[np.uint8]:
        try:
            return evaluation_view(open_picture(self.reader[index]["image"]), self.image_size)
        except (OSError, SyntaxError) as error:  # what Pillow raises on damaged files
            raise UserError(
                f"picture {self.picture_ids[index]} in {self.reader.folder} cannot be decoded ({error}): "
                "run the stage prepare_tasks again"
            ) from None
