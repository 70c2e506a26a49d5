"""ALBEF's retrieval scores in parts: pictures and captions encoded, then each part's pairs given their match logits.

Kept are features, the captions' tokens and the logits. Of a picture the features alone are kept: its tokens are 1.8 MB
at ALBEF's size (577 x 768 floats), 9 GB for COCO's test split, and encoding it again when its pairs are scored costs
little beside the hundreds of fusion passes that then follow. A caption's tokens are 40 kB.
"""

from __future__ import annotations

from collections.abc import Callable
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
from components.evaluation.inputs import RetrievalSplit
from components.evaluation.scoring import (
    Candidates,
    ItmScores,
    Texts,
    by_length,
    caption_outputs,
    match_logits,
    picture_features,
)
from components.evaluation.sharing import CAPTIONS_A_PICTURE, AlbefEncoding, Shared, ranges, shared
from components.evaluation.weights import CONFIG_FILE, WEIGHTS_FILE, load_model
from components.io.runtime import Runtime
from models.albef.model import Albef

PICTURES, CAPTIONS = "pictures", "captions"


class RetrievalEncoding(AlbefEncoding, frozen=True):
    """That of retrieval."""


Job = sharing.Job[RetrievalEncoding]


@dataclass(frozen=True)
class RetrievalScores:
    """`similarity` (N, M) of `image_features` (N, E) and `text_features` (M, E), and the match logits of the best."""

    similarity: Tensor
    image_features: Tensor
    text_features: Tensor
    itm: ItmScores


def score_split(
    encoding: RetrievalEncoding,
    split: RetrievalSplit,
    texts: Texts,
    weights: Path,
    *,
    top_k: int,
    pair_batch_size: int,
    runtime: Runtime,
    label: str,
) -> RetrievalScores:
    """All scores of a split by the ALBEF in the folder `weights`, by the workers of `runtime`.

    What an earlier evaluation of the same weights and split has kept is read: encoded pictures and captions whatever is
    asked of them, logits where `top_k` and `pair_batch_size` are the same.
    """
    inputs = {name: weights / name for name in (WEIGHTS_FILE, CONFIG_FILE, TOKENIZER_FILE)}
    inputs["split"] = split.reader.folder
    with shared(encoding, inputs, runtime, _loaded.cache_clear) as parts:
        job = Job(encoding, weights.resolve(), split.reader.folder.resolve(), parts.work)
        pictures = ranges(len(split), encoding.pictures_per_part, encoding.batch_size)
        captions = ranges(len(texts), CAPTIONS_A_PICTURE * encoding.pictures_per_part, encoding.batch_size)
        items = [*((PICTURES, part) for part in pictures), *((CAPTIONS, part) for part in captions)]
        found = parts.map(partial(_encode, job), items, name="encoded", label=f"{label}: encode")
        features = [torch.from_numpy(np.load(folder / "features.npy")) for folder in found]
        image_features = torch.cat(features[: len(pictures)])
        text_features = torch.empty(len(texts), image_features.shape[1])
        text_features[by_length(texts.lengths)] = torch.cat(features[len(pictures) :])
        similarity = image_features @ text_features.T
        itm = _rerank(parts, job, found[len(pictures) :], similarity, pictures, top_k, pair_batch_size, label)
    return RetrievalScores(similarity, image_features, text_features, itm)


def _rerank(
    parts: Shared,
    job: Job,
    tokens: list[Path],
    similarity: Tensor,
    pictures: list[range],
    top_k: int,
    pair_batch_size: int,
    label: str,
) -> ItmScores:
    candidates = Candidates.of(similarity, top_k)
    wanted = [candidates.pairs(part) for part in pictures]
    items = [
        (part, *(side.to(torch.int32).numpy() for side in pairs)) for part, pairs in zip(pictures, wanted, strict=True)
    ]
    found = parts.map(
        partial(_match, job, tuple(tokens), pair_batch_size),
        items,
        name=f"logits-{top_k}-{pair_batch_size}",
        label=f"{label}: re-rank",
    )
    logits = torch.from_numpy(np.concatenate([np.load(folder / "logits.npy") for folder in found]))
    picture, text = (torch.cat(sides) for sides in zip(*wanted, strict=True))
    return candidates.scores(picture, text, logits)


@lru_cache(maxsize=1)
def _loaded(job: Job) -> tuple[Albef, RetrievalSplit, Texts]:
    """Model and split, once in each process."""
    model, config = load_model(job.weights, job.encoding.device, job.encoding.image_size)
    split = RetrievalSplit(job.split, config.image_size)
    return model, split, split.texts(job.weights, job.encoding.max_tokens)


def _encode(job: Job, item: tuple[str, range], folder: Path) -> dict[str, Any]:
    """Write features.npy (n, E) float32 of consecutive pictures, or of captions in the order of length.

    Of captions also tokens.npy (all tokens, D) float32.
    """
    model, split, texts = _loaded(job)
    kind, part = item
    how: dict[str, Any] = {"batch_size": job.encoding.batch_size, "device": job.encoding.device}
    if kind == PICTURES:
        np.save(folder / "features.npy", picture_features(model, split, part, **how).numpy())
        return {}
    features, tokens = [], []
    for index, states, vectors in caption_outputs(
        model, texts, by_length(texts.lengths)[part.start : part.stop], **how
    ):
        features.append(vectors.numpy())
        lengths = texts.lengths[index].tolist()
        tokens += [one[:length].float().numpy() for one, length in zip(states, lengths, strict=True)]
    np.save(folder / "features.npy", np.concatenate(features))
    np.save(folder / "tokens.npy", np.concatenate(tokens))
    return {}


def _match(
    job: Job,
    tokens: tuple[Path, ...],
    pair_batch_size: int,
    item: tuple[range, NDArray[np.int32], NDArray[np.int32]],
    folder: Path,
) -> dict[str, Any]:
    """Write logits.npy (pairs,) float32 of pictures `item[0]`: each pair of `item[1]` and `item[2]`."""
    model, split, texts = _loaded(job)
    part, picture, text = item
    logits = match_logits(
        model,
        split,
        texts,
        read_tokens(tokens, texts),
        (torch.from_numpy(picture).long(), torch.from_numpy(text).long()),
        part,
        batch_size=job.encoding.batch_size,
        pair_batch_size=pair_batch_size,
        device=job.encoding.device,
    )
    np.save(folder / "logits.npy", logits.numpy())
    return {}


def read_tokens(folders: tuple[Path, ...], texts: Texts) -> Callable[[Tensor, int], Tensor]:
    """Tokens (c, length, D) of captions (c,), padded with zeros, from the parts that `_encode` wrote.

    The files are mapped: workers of one machine share them, and only what is asked for is read.
    """
    files = [np.load(folder / "tokens.npy", mmap_mode="r") for folder in folders]
    order = by_length(texts.lengths)
    lengths = texts.lengths.numpy()
    place = np.empty((len(texts), 2), np.int64)  # of each caption's first token: file, row
    sorted_lengths = lengths[order.numpy()]
    starts = np.concatenate([[0], np.cumsum(sorted_lengths)[:-1]])  # in all files together
    ends = np.cumsum([len(file) for file in files])
    owner = np.searchsorted(ends, starts, side="right")
    place[order.numpy()] = np.stack([owner, starts - np.concatenate([[0], ends])[owner]], axis=1)

    def tokens(captions: Tensor, length: int) -> Tensor:
        found = np.zeros((len(captions), length, files[0].shape[1]), np.float32)
        for row, caption in enumerate(captions.tolist()):
            file, first = place[caption]
            found[row, : lengths[caption]] = files[file][first : first + lengths[caption]]
        return torch.from_numpy(found)

    return tokens
