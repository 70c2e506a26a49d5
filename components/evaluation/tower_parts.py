"""Scores of a head over two towers in parts: captions read, then each part's pictures read and scored.

Kept are the captions' words, the global vectors and the scores. Regions are not: they take hundreds of kilobytes a
picture, and reading it again costs little beside its scores with all captions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.data.tokenizer import TOKENIZER_FILE
from components.evaluation import sharing
from components.evaluation.sharing import CAPTIONS_A_PICTURE, Encoding, Shared, ranges, shared
from components.evaluation.tower_models import CONFIG_FILE, WEIGHTS_FILE, EncodedSplit, TowerModel, load_tower_model
from components.evaluation.tower_scoring import (
    CAPTIONS,
    TwoStage,
    embed_captions,
    embed_pictures,
    mean_of_directions,
    nearest,
    score_pairs,
    score_rows,
    two_stage,
)
from components.evaluation.vector_index import EXACT, IndexSettings
from components.io.runtime import Runtime
from models.towers.clip import ClipTextTower
from models.towers.text import TextTower

NAMES_FILE, VECTORS_FILE = "names.json", "vectors.npy"


class TowerEncoding(Encoding, frozen=True):
    """That of towers, whose sizes stand in their folder."""


Job = sharing.Job[TowerEncoding]


@dataclass(frozen=True)
class AllScores:
    """Scores (P, C) of all pictures with all captions by name, and the global vectors: (P, D) and (C, D)."""

    scores: dict[str, Tensor]
    images: Tensor
    texts: Tensor


def score_split(
    encoding: TowerEncoding,
    split: EncodedSplit,
    weights: Path,
    *,
    top: int | None,
    index: IndexSettings = EXACT,
    runtime: Runtime,
    label: str,
) -> AllScores | TwoStage:
    """All scores of a split, or with `top` those of each query's candidates by `index`, by the workers of `runtime`."""
    inputs = {name: weights / name for name in (WEIGHTS_FILE, CONFIG_FILE, TOKENIZER_FILE)}
    inputs["split"] = split.reader.folder
    with shared(encoding, inputs, runtime, _loaded.cache_clear) as parts:
        job = Job(encoding, weights.resolve(), split.reader.folder.resolve(), parts.work)
        pieces = caption_parts(len(split.captions), encoding)
        words = tuple(parts.map(partial(_read_captions, job), pieces, name="captions", label=f"{label}: captions"))
        found = _vectors(words)
        texts = torch.empty_like(found)
        texts[torch.from_numpy(np.argsort(split.lengths, kind="stable"))] = found
        pictures = ranges(len(split), encoding.pictures_per_part)
        if top is not None:
            return _candidates(parts, job, words, texts, pictures, top, index, label)
        folders = parts.map(partial(_score, job, words), pictures, name="scores", label=f"{label}: scores")
        scores = {name: torch.from_numpy(np.concatenate(rows)) for name, rows in _named(folders).items()}
        return AllScores(mean_of_directions(scores), _vectors(folders), texts)


def _candidates(
    parts: Shared,
    job: Job,
    words: tuple[Path, ...],
    texts: Tensor,
    pictures: list[range],
    top: int,
    index: IndexSettings,
    label: str,
) -> TwoStage:
    folders = parts.map(partial(_embed, job), pictures, name="pictures", label=f"{label}: pictures")
    images = _vectors(folders)
    candidates = nearest(images, texts, top, index)
    wanted = [candidates.pairs(part) for part in pictures]
    items = [(part, *(side.numpy() for side in pairs)) for part, pairs in zip(pictures, wanted, strict=True)]
    name = f"scores-{top}" if index.kind == "exact" else f"scores-{top}-{index.depth}-{index.seed}"
    folders = parts.map(partial(_score_some, job, words), items, name=name, label=f"{label}: scores")
    scores = {name: torch.from_numpy(np.concatenate(values)) for name, values in _named(folders).items()}
    picture, text = (torch.cat(sides) for sides in zip(*wanted, strict=True))
    return two_stage(images, texts, candidates, (picture, text), scores)


def caption_parts(captions: int, encoding: TowerEncoding) -> list[range]:
    """The parts that captions are read in, of whole blocks."""
    return ranges(captions, CAPTIONS_A_PICTURE * encoding.pictures_per_part, CAPTIONS)


class FiledSplit(EncodedSplit):
    """A split whose captions other workers have read into files, which are mapped."""

    def find_words(self, folders: tuple[Path, ...], parts: list[range]) -> None:
        """Read words from the files in `folders`, which hold all captions in the order of length, by `parts`."""
        levels = len(list(folders[0].glob("words-*.npy")))
        files = [
            [np.load(folder / f"words-{level}.npy", mmap_mode="r") for level in range(levels)] for folder in folders
        ]
        order = np.argsort(self.lengths, kind="stable")
        self._places: dict[int, tuple[list[NDArray[np.float16]], int]] = {}
        for number, part in enumerate(parts):
            starts = np.concatenate([[0], np.cumsum(self.lengths[order[part.start : part.stop]])])
            for caption, start in zip(order[part.start : part.stop].tolist(), starts.tolist(), strict=False):
                self._places[caption] = (files[number], start)

    def words_of(self, caption: int) -> list[Tensor]:
        """Words (n, width) float16 of each level of one caption."""
        if caption in self._words:  # read by this worker
            return self._words[caption]
        files, start = self._places[caption]
        return [torch.from_numpy(np.array(file[start : start + self.lengths[caption]])) for file in files]


@lru_cache(maxsize=1)
def _loaded(job: Job) -> tuple[TowerModel, FiledSplit]:
    """Model and split, once in each process."""
    model, sizes = load_tower_model(job.weights, job.encoding.device)
    return model, FiledSplit(job.split, sizes, job.weights)


def _read_captions(job: Job, part: range, folder: Path) -> dict[str, Any]:
    """Write words-LEVEL.npy (all words, width) float16 and vectors.npy (n, D) float32, in the order of length."""
    model, split = _loaded(job)
    assert isinstance(model.text, TextTower | ClipTextTower)
    order = np.argsort(split.lengths, kind="stable")[part.start : part.stop]
    split.read_captions(model.text, order, job.encoding.device)
    levels = zip(*(split.words_of(caption) for caption in order.tolist()), strict=True)
    for number, level in enumerate(levels):
        np.save(folder / f"words-{number}.npy", torch.cat(level).numpy())
    np.save(folder / VECTORS_FILE, embed_captions(model.head, split, order, device=job.encoding.device).numpy())
    return {}


def _embed(job: Job, part: range, folder: Path) -> dict[str, Any]:
    """Write vectors.npy (n, D) float32 of consecutive pictures."""
    model, split = _read_pictures(job, part)
    np.save(folder / VECTORS_FILE, embed_pictures(model.head, split, part, device=job.encoding.device).numpy())
    return {}


def _score(job: Job, words: tuple[Path, ...], part: range, folder: Path) -> dict[str, Any]:
    """Write NAME.npy (n, C) float32 of consecutive pictures with all captions, and the pictures' vectors.npy."""
    model, split = _read_pictures(job, part)
    split.find_words(words, caption_parts(len(split.captions), job.encoding))
    captions = np.arange(len(split.captions))
    _write_scores(folder, score_rows(model.head, split, part, captions, device=job.encoding.device))
    np.save(folder / VECTORS_FILE, embed_pictures(model.head, split, part, device=job.encoding.device).numpy())
    return {}


def _score_some(
    job: Job, words: tuple[Path, ...], item: tuple[range, NDArray[np.int64], NDArray[np.int64]], folder: Path
) -> dict[str, Any]:
    """Write NAME.npy (pairs,) float32 of the pictures `item[0]`: each pair of `item[1]` and `item[2]`."""
    part, picture, text = item
    model, split = _read_pictures(job, part)
    split.find_words(words, caption_parts(len(split.captions), job.encoding))
    pairs = (torch.from_numpy(picture), torch.from_numpy(text))
    _write_scores(folder, score_pairs(model.head, split, pairs, device=job.encoding.device))
    return {}


def _read_pictures(job: Job, part: range) -> tuple[TowerModel, FiledSplit]:
    model, split = _loaded(job)
    assert model.image is not None  # a trained model's folder holds its towers
    split.read_pictures(model.image, part, job.encoding.device)
    return model, split


def _write_scores(folder: Path, scores: dict[str, Tensor]) -> None:
    for name, values in scores.items():
        np.save(folder / f"{name}.npy", values.numpy())
    (folder / NAMES_FILE).write_text(json.dumps(list(scores)), encoding="utf-8")


def _named(folders: list[Path]) -> dict[str, list[NDArray[np.float32]]]:
    names = json.loads((folders[0] / NAMES_FILE).read_text(encoding="utf-8"))
    return {name: [np.load(folder / f"{name}.npy") for folder in folders] for name in names}


def _vectors(folders: Sequence[Path]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.load(folder / VECTORS_FILE) for folder in folders]))
