"""Reading a folder of records by position, for training and evaluation; and checking that it is whole."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from components.io.errors import UserError
from components.io.records import Manifest, open_records, read_manifest, sha256_file
from components.io.storage import is_s3

if TYPE_CHECKING:
    from components.io.shard_cache import ShardCache


BESIDE = ("tokenizer", "annotations")  # keys of a manifest that name a further file with its sha256


class ShardReader:
    """The records of a folder (``data/shards``, ``data/tasks/TASK/SPLIT``, …) as a sequence of dictionaries.

    Shards are memory-mapped when first touched, in whichever process touches them, so a reader can be pickled or
    forked into data-loading workers. Raises UserError when the folder has no manifest or a shard is missing or damaged.

    With `cache`, or where `folder` is ``s3://…``, shards are fetched when touched and at most `cache_bytes` of them
    kept in the folder `cache`; read in an order of few shards at a time then (`components.io.order`).
    """

    def __init__(self, folder: Path | str, *, cache: Path | None = None, cache_bytes: int | None = None) -> None:
        self._cache: ShardCache | None = None
        if cache is not None or is_s3(folder):
            from components.io.shard_cache import CACHE_BYTES, ShardCache

            self._cache = ShardCache(folder, cache or Path("work/shards"), cache_bytes or CACHE_BYTES)
        self.folder = Path(folder) if self._cache is None else self._cache.home
        self.manifest: Manifest = read_manifest(self.folder)
        self._ends = list(accumulate(file.rows for file in self.manifest.files))
        self._tables: dict[int, pa.Table] = {}

    @property
    def rows_per_shard(self) -> list[int]:
        """Pictures in each shard, in order."""
        return [file.rows for file in self.manifest.files]

    def __len__(self) -> int:
        """Pictures."""
        return self.manifest.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Record `index` by field name: `image` as bytes, `captions` and `row_ids` as lists of text."""
        shard, row = self._find(index)
        record: dict[str, Any] = self._table(shard).slice(row, 1).to_pylist()[0]
        return record

    def image(self, index: int) -> bytes:
        """The picture of record `index` alone, a tenth of the time of the whole record."""
        shard, row = self._find(index)
        data: bytes = self._table(shard)["image"][row].as_py()
        return data

    def _find(self, index: int) -> tuple[int, int]:
        """The shard of a record, and its row there."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of {len(self)} in {self.folder}")
        index %= len(self)
        shard = bisect_right(self._ends, index)
        return shard, index - (self._ends[shard - 1] if shard else 0)

    def column(self, name: str) -> pa.ChunkedArray:
        """One field of all records, in order. Of `image` only what is touched is read, unless there is a cache."""
        if not self.manifest.files:
            return pa.chunked_array([], pa.null())
        parts: list[pa.Array] = []
        for shard in range(len(self._ends)):
            chunks = self._table(shard)[name]
            parts += chunks.chunks if self._cache is None else [_copied(chunks)]  # a fetched shard may have to go
        return pa.chunked_array(parts, self._table(0).schema.field(name).type)

    @property
    def captions(self) -> list[list[str]]:
        """The captions of each picture, in order."""
        captions: list[list[str]] = self.column("captions").to_pylist()
        return captions

    def caption_index(self) -> NDArray[np.int64]:
        """(C, 2) int64: for each of the C captions in order, its picture's position and its own place there."""
        if not len(self):
            return np.zeros((0, 2), np.int64)
        counts = pc.list_value_length(self.column("captions")).to_numpy().astype(np.int64)  # (N,)
        pictures = np.repeat(np.arange(len(counts)), counts)  # (C,)
        places = np.arange(len(pictures)) - np.repeat(np.cumsum(counts) - counts, counts)  # (C,)
        return np.stack([pictures, places], axis=1)

    def _table(self, shard: int) -> pa.Table:
        if shard in self._tables:
            if self._cache is not None:
                self._tables[shard] = self._tables.pop(shard)  # the last one used stands last
            return self._tables[shard]
        entry = self.manifest.files[shard]
        path = self.folder / entry.name
        if self._cache is not None:
            self._let_go(entry.bytes, self._cache.limit)
            table = self._cache.open(entry)
        else:
            table = open_records(path)
        if table.num_rows != entry.rows:
            raise UserError(
                f"{path} holds {table.num_rows} records where its manifest says {entry.rows}: "
                "run the stage that writes it again"
            )
        self._tables[shard] = table
        return table

    def _let_go(self, needed: int, limit: int) -> None:
        """Unmap the longest unused shards: a mapped file takes its room on the disk even when it was removed."""
        while self._tables and needed + sum(self.manifest.files[shard].bytes for shard in self._tables) > limit:
            del self._tables[next(iter(self._tables))]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}  # a memory map is this process's own


def _copied(chunks: pa.ChunkedArray) -> pa.Array:
    """A column in memory of its own."""
    whole = chunks.combine_chunks()
    whole = whole if isinstance(whole, pa.Array) else pa.concat_arrays(whole.chunks)
    return whole.take(pa.array(range(len(whole))))


def verify(folder: Path) -> list[str]:
    """What is wrong with a folder of records: one sentence per missing, truncated, altered or unlisted file.

    Reads every byte. An empty list means that all files are exactly those of the manifest, tokenizer and annotations
    included where the manifest names them.
    """
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        return [str(error)]
    problems = [
        problem
        for file in manifest.files
        if (problem := _compare(folder, file.name, file.sha256, file.bytes)) is not None
    ]
    listed = {file.name for file in manifest.files}
    problems += [
        f"{path.name} is not in the manifest" for path in sorted(folder.glob("*.arrow")) if path.name not in listed
    ]
    for beside in BESIDE:
        listed_one = manifest.extra.get(beside)
        if isinstance(listed_one, dict):
            problem = _compare(folder, str(listed_one.get("file")), str(listed_one.get("sha256")), None)
            problems += [problem] if problem is not None else []
    return problems


def require_whole(folder: Path) -> None:
    """Raise UserError, naming the first damaged file, unless `verify` finds the folder whole."""
    problems = verify(folder)
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise UserError(f"{folder} is not whole: {problems[0]}{more}; run the stage that writes it again")


def _compare(folder: Path, name: str, sha256: str, size: int | None) -> str | None:
    path = folder / name
    if path.parent != folder or not path.is_file():
        return f"{name} is missing"
    if size is not None and path.stat().st_size != size:
        kind = "truncated" if path.stat().st_size < size else "too long"
        return f"{name} is {kind}: {path.stat().st_size} bytes where the manifest says {size}"
    if sha256_file(path) != sha256:
        return f"{name} was altered: its sha256 is not the manifest's"
    return None
