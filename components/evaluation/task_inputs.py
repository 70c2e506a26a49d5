"""One split of a task other than retrieval, as its scorer wants it: items by batch, with their pictures and texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from components.data.cleaning.pictures import open_picture
from components.data.tasks.annotations import Annotations
from components.data.tokenizer import load_tokenizer
from components.evaluation.inputs import DECODERS
from components.evaluation.scoring import Texts, by_length
from components.io.errors import UserError
from components.io.shards import ShardReader
from components.training.augment import evaluation_view, normalise, to_batch


class TaskSplit:
    """The items of ``data/tasks/TASK/SPLIT`` of one kind, with their pictures squeezed to squares of `image_size`.

    Raises UserError when the split is missing, empty, or of another kind of task.
    """

    def __init__(self, folder: Path, kind: str, image_size: int) -> None:
        self.items = Annotations(folder, kind)
        if not len(self.items):
            raise UserError(f"{folder} holds no item: nothing to evaluate; look at the rejects of prepare_tasks")
        self.folder, self.image_size, self.reader = folder, image_size, ShardReader(folder)
        self.picture_ids: list[str] = self.reader.column("id").to_pylist()

    def __len__(self) -> int:
        """Items."""
        return len(self.items)

    def texts(self, tokenizer: Path, max_tokens: int) -> Texts:
        """All items' texts by the tokenizer in the folder (or file) `tokenizer`, cut to `max_tokens`."""
        return Texts(*load_tokenizer(tokenizer).encode_batch(self.items.column("text"), max_tokens))

    def images(self, items: Sequence[int]) -> Tensor:
        """Pictures (P * b, 3, S, S) float32 of some items: all their first pictures, then, if P is 2, all second."""
        places = [self.items[item]["pictures"] for item in items]
        wanted = [place for of_slot in zip(*places, strict=True) for place in of_slot]
        with ThreadPoolExecutor(DECODERS) as pool:
            return normalise(to_batch(list(pool.map(self._view, wanted))))

    def members(self, texts: Texts, part: range | None = None) -> list[int]:
        """The numbers of the items of a part, rising; all without one. A part counts in the order of length."""
        order = by_length(texts.lengths)
        return sorted((order if part is None else order[part.start : part.stop]).tolist())

    def batches(self, texts: Texts, size: int, part: range | None = None) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """A part's items in batches of at most `size`, short texts first: their numbers, token ids (b, l) and mask."""
        order = by_length(texts.lengths)
        for some in (order if part is None else order[part.start : part.stop]).split(size):
            length = int(texts.lengths[some].max())
            yield some.tolist(), texts.input_ids[some, :length], texts.attention_mask[some, :length]

    def name(self, item: int, own: str | None = None) -> str:
        """How an item is called: by the annotations' own id (column `own`) or by its first row."""
        row = self.items[item]
        return str(row[own]) if own else str(row["row_ids"][0])

    def about(self, item: int) -> dict[str, Any]:
        """What an example says of an item: its pictures' record ids and its text."""
        row = self.items[item]
        return {"pictures": [self.picture_ids[place] for place in row["pictures"]], "text": row["text"]}

    def _view(self, index: int) -> NDArray[np.uint8]:
        try:
            return evaluation_view(open_picture(self.reader[index]["image"]), self.image_size)
        except (OSError, SyntaxError) as error:  # what Pillow raises on damaged files
            raise UserError(
                f"picture {self.picture_ids[index]} in {self.folder} cannot be decoded ({error}): "
                "run the stage prepare_tasks again"
            ) from None
