"""Cached outputs of frozen towers: how they lie on disk, and reading them by picture and caption.

Per split: ``captions.parquet`` (a row per picture: id, captions, row_ids) and, per part of so many pictures,
``PART-regions-LEVEL.npy`` (pictures, k, width) float16, the same as ``PART-mirrored-LEVEL.npy`` of their mirror images
where `features` was asked for them, ``PART-words-LEVEL.npy`` (tokens, width) float16, all captions
one after the other, and ``PART-lengths.npy`` (captions,) int32 tokens. ``manifest.json`` comes last.
Where the towers are a CLIP, the first level is its own vectors: one region a picture, and one word (captions, width).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.io.errors import UserError
from components.io.records import sha256_file
from components.io.shards import ShardReader

if TYPE_CHECKING:
    from components.training.features import TowersParams

TOWERS_FILE, WEIGHTS_FILE = "towers.json", "towers.safetensors"
MANIFEST_FILE, CAPTIONS_FILE = "manifest.json", "captions.parquet"
TRAIN = "train"
REGIONS, MIRRORED, WORDS = "regions", "mirrored", "words"  # regions of pictures as they are, of mirror images; words
SEMANTIC_FILE = "semantic.npy"  # (C, d5) float32: LSEH's reduced term vectors


class Part(NamedTuple):
    """Pictures `start` to `stop` - 1 of a split."""

    split: str
    start: int
    stop: int


def split_parts(task: Path, params: TowersParams) -> list[Part]:
    """The parts of all splits, in order. Raises UserError when a split is empty."""
    parts = []
    for split in params.splits:
        rows = len(ShardReader(task / split))
        if rows == 0:
            raise UserError(f"{task / split} holds no picture: look at the rejects of prepare_tasks")
        step = params.pictures_per_part
        parts += [Part(split, start, min(start + step, rows)) for start in range(0, rows, step)]
    return parts


def assemble_features(
    params: TowersParams, work: Path, task: Path, parts: Sequence[Part], done: Sequence[tuple[Path, dict[str, Any]]]
) -> Path:
    """Put the finished parts together in ``work/built``, which is returned; the parts stay as they are.

    Raises UserError when there are too few captions for `params.semantic_values`.
    """
    built = work / "built"
    shutil.rmtree(built, ignore_errors=True)
    shutil.copytree(work / "towers", built)
    for split in dict.fromkeys(part.split for part in parts):
        folder = built / split
        folder.mkdir()
        reader = ShardReader(task / split)
        table = pa.table({name: reader.column(name) for name in ("id", "captions", "row_ids")})
        pq.write_table(table, folder / CAPTIONS_FILE, compression="zstd")
        mine = [(part, *found) for part, found in zip(parts, done, strict=True) if part.split == split]
        files = []
        for number, (_, source, _) in enumerate(mine):
            for path in sorted(source.glob("*.npy")):
                _link(path, folder / f"{number:05d}-{path.name}")
                files.append(f"{number:05d}-{path.name}")
        if params.semantic_values and split == TRAIN:
            _write_semantic(reader, params.semantic_values, folder / SEMANTIC_FILE)
            files.append(SEMANTIC_FILE)
        content = {
            "rows": [part.stop - part.start for part, _, _ in mine],
            "tokens": [report["tokens"] for _, _, report in mine],
            "levels": mine[0][2]["levels"],
            "mirrored": params.mirrored and split == TRAIN,
            "vectors": params.clip is not None,
            "files": {name: sha256_file(folder / name) for name in [CAPTIONS_FILE, *files]},
        }
        _write_json(folder / MANIFEST_FILE, content)
    whole = sorted(path for path in built.rglob("*") if path.parent == built or path.name == MANIFEST_FILE)
    digests = {path.relative_to(built).as_posix(): sha256_file(path) for path in whole if path.is_file()}
    _write_json(built / MANIFEST_FILE, {"kind": "features", "files": digests})
    return built


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _write_semantic(reader: ShardReader, values: int, path: Path) -> None:
    from models.vitr.lseh import semantic_vectors

    captions = [caption for texts in reader.captions for caption in texts]
    try:
        found = semantic_vectors(captions, values)
    except ValueError as error:
        raise UserError(f"semantic_values does not fit {reader.folder}: {error}") from None
    np.save(path, found.numpy().astype(np.float32))


class FeatureReader:
    """The features of one split, memory-mapped. Can be pickled.

    Raises UserError when the folder is not whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            content = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
            self.rows, self.levels = list(content["rows"]), int(content["levels"])
            self.mirrored = bool(content["mirrored"])
            self.vectors = bool(content.get("vectors"))  # whether the first level is one vector a caption
            table = pq.read_table(folder / CAPTIONS_FILE)
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowInvalid) as error:
            raise UserError(f"{folder} holds no features ({error}): run the stage features first") from None
        self.picture_ids: list[str] = table["id"].to_pylist()
        self.captions_of: list[list[str]] = table["captions"].to_pylist()
        self.row_ids_of: list[list[str]] = table["row_ids"].to_pylist()
        counts = np.array([len(captions) for captions in self.captions_of], np.int64)
        self.picture_of: NDArray[np.int64] = np.repeat(np.arange(len(counts)), counts)  # (C,)
        self._starts = np.cumsum([0, *self.rows])
        self._lengths = [np.load(self._name(part, "lengths")) for part in range(len(self.rows))]
        self.lengths: NDArray[np.int64] = np.concatenate(self._lengths).astype(np.int64)  # (C,)
        if len(self.lengths) != len(self.picture_of) or self._starts[-1] != len(counts):
            raise UserError(f"{folder} is not whole: run the stage features again")
        self._caption_starts = np.cumsum([0, *(len(one) for one in self._lengths)])
        self._maps: dict[str, NDArray[np.float16]] = {}
        self._pooled: dict[str, list[Tensor]] = {}  # computed once

    def __len__(self) -> int:
        """Pictures."""
        return len(self.captions_of)

    @property
    def captions(self) -> list[str]:
        """All captions, in order."""
        return [caption for captions in self.captions_of for caption in captions]

    def regions(
        self, pictures: Sequence[int] | NDArray[np.int64], mirrored: NDArray[np.bool_] | None = None
    ) -> list[Tensor]:
        """Regions (P, k, width) float32 of each level; of the mirror image where `mirrored` (P,) says so."""
        places = [self._place(int(picture), self._starts) for picture in pictures]
        kinds = [
            MIRRORED if turned else REGIONS for turned in (mirrored if mirrored is not None else [False] * len(places))
        ]
        found = []
        for level in range(self.levels):
            rows = [self._map(part, f"{kind}-{level}")[row] for kind, (part, row) in zip(kinds, places, strict=True)]
            found.append(torch.from_numpy(np.stack(rows).astype(np.float32)))
        return found

    def words(self, captions: Sequence[int] | NDArray[np.int64]) -> tuple[list[Tensor], Tensor]:
        """Words (C, n, width) float32 of each level, padded with zeros to the longest, and their mask (C, n) bool.

        A level of captions' own vectors is (C, 1, width).
        """
        lengths = self.lengths[np.asarray(captions)]
        longest = int(lengths.max())
        mask = torch.arange(longest)[None] < torch.from_numpy(lengths)[:, None]
        places = [self._place(int(caption), self._caption_starts) for caption in captions]
        found = []
        for level in range(self.levels):
            if self._is_vector(level):
                rows = [self._map(part, f"{WORDS}-{level}")[caption] for part, caption in places]
                found.append(torch.from_numpy(np.stack(rows).astype(np.float32))[:, None])
                continue
            width = self._map(places[0][0], f"words-{level}").shape[1]
            block = np.zeros((len(places), longest, width), np.float32)
            for row, ((part, caption), length) in enumerate(zip(places, lengths, strict=True)):
                start = self._token_starts(part)[caption]
                block[row, :length] = self._map(part, f"words-{level}")[start : start + length]
            found.append(torch.from_numpy(block))
        return found, mask

    def pooled_regions(self, kind: str = REGIONS) -> list[Tensor]:
        """The mean region (N, width) of each level, float32, of pictures or of their mirror images."""
        if kind not in self._pooled:
            self._pooled[kind] = [self._mean_regions(f"{kind}-{level}") for level in range(self.levels)]
        return self._pooled[kind]

    def pooled_words(self) -> list[Tensor]:
        """The mean word (C, width) of each level, float32."""
        if WORDS not in self._pooled:
            self._pooled[WORDS] = [
                self._vectors(f"{WORDS}-{level}") if self._is_vector(level) else self._mean_words(f"{WORDS}-{level}")
                for level in range(self.levels)
            ]
        return self._pooled[WORDS]

    def _is_vector(self, level: int) -> bool:
        return self.vectors and level == 0

    def _vectors(self, name: str) -> Tensor:
        whole = np.concatenate([self._map(part, name) for part in range(len(self.rows))])
        return torch.from_numpy(whole.astype(np.float32))

    def _mean_regions(self, name: str) -> Tensor:
        means = []
        for part in range(len(self.rows)):
            block = self._map(part, name)
            means += [block[at : at + 256].astype(np.float32).mean(axis=1) for at in range(0, len(block), 256)]
        return torch.from_numpy(np.concatenate(means))

    def _mean_words(self, name: str) -> Tensor:
        means = []
        for part in range(len(self.rows)):
            starts = self._token_starts(part)
            if len(starts) > 1:
                sums = np.add.reduceat(self._map(part, name).astype(np.float32), starts[:-1], axis=0)
                means.append(sums / self._lengths[part].astype(np.float32)[:, None])
        return torch.from_numpy(np.concatenate(means))

    def _token_starts(self, part: int) -> NDArray[np.int64]:
        key = f"{part}-starts"
        if key not in self._maps:
            self._maps[key] = np.cumsum([0, *self._lengths[part]])
        return self._maps[key]  # type: ignore[return-value]

    def _name(self, part: int, name: str) -> Path:
        return self.folder / f"{part:05d}-{name}.npy"

    def _map(self, part: int, name: str) -> NDArray[np.float16]:
        key = f"{part}-{name}"
        if key not in self._maps:
            self._maps[key] = np.load(self._name(part, name), mmap_mode="r")
        return self._maps[key]

    @staticmethod
    def _place(index: int, starts: NDArray[np.int64]) -> tuple[int, int]:
        part = int(np.searchsorted(starts, index, side="right")) - 1
        return part, index - int(starts[part])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}, "_pooled": {}}  # a memory map is this process's own
