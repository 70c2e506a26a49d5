"""Searching an evaluated run's split with words or a picture of one's own: ``vlp search``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from components.data.tokenizer import load_tokenizer
from components.evaluation.explain import read_caption, read_picture
from components.evaluation.global_vectors import made_from, read_vectors
from components.evaluation.results import EXTRA
from components.evaluation.summary import METRICS_FILE
from components.evaluation.tower_models import OnDemandSplit, TowerModel, is_tower_model, load_tower_model
from components.evaluation.tower_scoring import Source
from components.evaluation.tower_search import CANDIDATES, Ranked, TowerSearch
from components.evaluation.vector_index import EXACT, IndexSettings
from components.io.errors import UserError
from components.training.augment import evaluation_view, normalise, to_batch
from components.training.feature_store import TOWERS_FILE, FeatureReader
from components.training.feature_work import load_towers


class Hit(NamedTuple):
    """A picture or a caption that was found."""

    score: float  # the model's
    cosine: float  # of global vectors
    picture: str  # record id
    caption: str  # that was found; of a picture, its first
    caption_id: str


class RunSearch:
    """The split that `run` was evaluated on, to be searched by the run's model.

    Global vectors are those that the stage `evaluate` left in its folder; pictures and captions are read where they are
    candidates: from `features`, the outputs of the stage `features` for the same towers, or else from the task.

    Args:
        run: the run's name, for messages.
        weights: its weights folder.
        task: its task's folder.
        evaluation: what `evaluate` left of it.
        features: a folder ``data/features/NAME`` or None.
        index: how candidates are found.

    Raises UserError when the run is not evaluated, was trained or given other data since, is no HAT, VITR or baseline
    of theirs, or `features` is of other towers or of another split.
    """

    def __init__(
        self,
        run: str,
        *,
        weights: Path,
        task: Path,
        evaluation: Path,
        features: Path | None = None,
        index: IndexSettings = EXACT,
    ) -> None:
        self.model, self.sizes, split = open_run(run, weights=weights, evaluation=evaluation)
        device = next(self.model.parameters()).device
        self.tokenizer = load_tokenizer(weights, clip=True)
        self.split = OnDemandSplit(task / split, self.model, self.sizes, weights, device)
        images, texts = read_vectors(evaluation / EXTRA, run, made_from(weights, task / split))
        source: Source = self.split if features is None else self._features(features, split)
        self.search = TowerSearch(self.model.head, source, images, texts, index=index, device=device)

    @torch.inference_mode()
    def pictures(self, texts: Sequence[str], top: int, candidates: int | None = CANDIDATES) -> list[list[Hit]]:
        """The `top` pictures of each text, best first. Raises UserError when a text holds no word."""
        cleaned = [read_caption(text) for text in texts]
        ids, mask = self.tokenizer.encode_batch(cleaned, int(self.sizes["max_tokens"]))
        assert self.model.text is not None
        device = self.search.device
        words = self.model.text(ids.to(device), mask.to(device))
        first = np.searchsorted(self.split.picture_of, np.arange(len(self.split)))
        return [
            [self._hit(found, place, int(first[found.places[place]])) for place in range(min(top, len(found.places)))]
            for found in self.search.pictures_for(words, mask.bool(), candidates)
        ]

    @torch.inference_mode()
    def captions(self, images: Sequence[Path], top: int, candidates: int | None = CANDIDATES) -> list[list[Hit]]:
        """The `top` captions of each picture's file, best first. Raises UserError when one is no picture."""
        views = [evaluation_view(read_picture(path), self.split.image_size) for path in images]
        regions = self.split.read(normalise(to_batch(views)))
        return [
            [self._hit(found, place, int(found.places[place])) for place in range(min(top, len(found.places)))]
            for found in self.search.captions_for(regions, candidates)
        ]

    def _hit(self, found: Ranked, place: int, caption: int) -> Hit:
        split = self.split
        picture = split.picture_ids[int(split.picture_of[caption])]
        score, cosine = float(found.scores[place]), float(found.cosines[place])
        return Hit(score, cosine, picture, split.captions[caption], split.caption_ids[caption])

    def _features(self, folder: Path, split: str) -> FeatureReader:
        if not (folder / TOWERS_FILE).is_file():
            raise UserError(f"{folder} holds no features: name a folder of data/features, or leave --features out")
        reader = FeatureReader(folder / split)
        if reader.picture_ids != self.split.picture_ids or reader.captions != self.split.captions:
            raise UserError(f"{folder / split} is of other pictures or captions: run the stage features again")
        towers = load_towers(folder)
        for mine, theirs in zip((self.model.image, self.model.text), towers, strict=True):
            assert mine is not None
            own, other = mine.state_dict(), theirs.state_dict()
            if own.keys() != other.keys() or not all(torch.equal(own[key].cpu(), other[key]) for key in own):
                raise UserError(f"{folder} is of other towers than the run's (they learnt?): leave --features out")
        return reader


def open_run(run: str, *, weights: Path, evaluation: Path) -> tuple[TowerModel, dict[str, Any], str]:
    """An evaluated run's model, on a CUDA device where there is one, its configuration, and the name of its split.

    Raises UserError when the run is not evaluated, or is no HAT, VITR or baseline of theirs.
    """
    path = evaluation / METRICS_FILE
    try:
        split = str(json.loads(path.read_text(encoding="utf-8"))["split"])
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: evaluate the run first (vlp run evaluate@{run})") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what evaluate writes ({error!r}): evaluate the run again") from None
    if not is_tower_model(weights):
        raise UserError(
            f"{weights} holds no HAT, VITR or dual encoder, whose global vectors choose candidates: name another run"
        )
    model, sizes = load_tower_model(weights, "cuda" if torch.cuda.is_available() else "cpu")
    return model, sizes, split
