"""Scores of every picture against every caption: by contrastive similarity, then by the fusion encoder for the best.

The published inference (ALBEF, section 6.1 and appendix A): rank by the similarity of the two unimodal features
(ITC); then, for each picture, give the `top_k` captions the match logit of the fusion encoder (ITM), and likewise for
each caption its `top_k` pictures. The score is the second ITM logit itself, neither a probability nor added to the
similarity, as in the published code. The published code runs one query at a time; here the pairs of both directions are
one list without repetitions (a pair has one logit, whichever side asks), run in batches that share few pictures, whose
keys and values are then computed once per batch, and captions of similar length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from components.io.progress import silent

MATCH = 1  # the ITM head's output that means "the two belong together"
SORTED_BATCHES = 8  # batches of pairs that are sorted by length together: more pad less, but mix more pictures
OUTSIDE = float("-inf")  # the score of a candidate outside the top k (the published code writes -100)


class RetrievalModel(Protocol):
    """What evaluation asks of a model; `features` are normalised, (B, E)."""

    def encode_image(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B, P, D) and features (B, E) of images (B, 3, H, W)."""

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B, L, D) and features (B, E) of token ids (B, L)."""

    def match(
        self, image_tokens: Tensor, text_tokens: Tensor, attention_mask: Tensor, image_rows: Tensor | None = None
    ) -> Tensor:
        """Match logits (B, 2) of text b with picture `image_rows[b]` of C pictures, tokens (C, P, D)."""


class Pictures(Protocol):
    """N pictures by slice, ready for the model. A tensor (N, 3, H, W) is one; so is a folder that decodes on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class Texts:
    """M captions: `input_ids` and `attention_mask`, (M, L) int64, the mask 1 over tokens, then 0 over padding."""

    input_ids: Tensor
    attention_mask: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each caption, (M,) int64."""
        return self.attention_mask.sum(dim=1)


@dataclass(frozen=True)
class ItcScores:
    """`similarity` (N, M) float32, cosines, of `image_features` (N, E) and `text_features` (M, E).

    `text_tokens` (M, L, D) are kept because re-ranking needs them again.

    Picture tokens are not kept: at 577 tokens each they outgrow memory, and encoding a picture again costs little
    beside its hundreds of fusion passes.
    """

    similarity: Tensor
    text_tokens: Tensor
    image_features: Tensor
    text_features: Tensor


@dataclass(frozen=True)
class ItmScores:
    """Match logits, minus infinity outside each query's top k: `image_to_text` (N, M), `text_to_image` (M, N)."""

    image_to_text: Tensor
    text_to_image: Tensor


@torch.inference_mode()
def score_itc(
    model: RetrievalModel,
    pictures: Pictures,
    texts: Texts,
    *,
    batch_size: int = 64,
    device: str | torch.device = "cpu",
    advance: Callable[[int], None] = silent,
) -> ItcScores:
    """Similarities of all pictures and captions, in batches of `batch_size` pictures, then of captions.

    `advance` is called with the number of pictures or captions just finished. Results lie on the CPU.
    """
    if not len(pictures) or not len(texts):
        raise ValueError(f"{len(pictures)} pictures and {len(texts)} captions: nothing to score")
    given: dict[str, Any] = {"batch_size": batch_size, "device": device, "advance": advance}
    image_features = picture_features(model, pictures, range(len(pictures)), **given)
    text_tokens: Tensor | None = None
    text_features = torch.zeros(len(texts), image_features.shape[1])  # (M, E)
    for index, tokens, features in caption_outputs(model, texts, by_length(texts.lengths), **given):
        if text_tokens is None:
            text_tokens = tokens.new_zeros(*texts.input_ids.shape, tokens.shape[-1])  # (M, L, D)
        text_tokens[index, : tokens.shape[1]] = tokens
        text_features[index] = features
    assert text_tokens is not None  # there are captions
    return ItcScores(image_features @ text_features.T, text_tokens, image_features, text_features)


@torch.inference_mode()
def picture_features(
    model: RetrievalModel,
    pictures: Pictures,
    part: range,
    *,
    batch_size: int,
    device: str | torch.device = "cpu",
    advance: Callable[[int], None] = silent,
) -> Tensor:
    """Features (len(part), E) float32 on the CPU of the pictures of `part`, consecutive ones."""
    found = []
    for start in range(part.start, part.stop, batch_size):
        images = pictures[start : min(start + batch_size, part.stop)]  # (b, 3, H, W)
        found.append(model.encode_image(images.to(device))[1].float().cpu())
        advance(len(images))
    return torch.cat(found)


@torch.inference_mode()
def caption_outputs(
    model: RetrievalModel,
    texts: Texts,
    order: Tensor,
    *,
    batch_size: int,
    device: str | torch.device = "cpu",
    advance: Callable[[int], None] = silent,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Captions `order` in batches: their indices (b,), tokens (b, l, D) and features (b, E) float32, on the CPU."""
    for index in order.split(batch_size):
        ids, mask = _trimmed(texts, index)  # (b, l)
        tokens, features = model.encode_text(ids.to(device), mask.to(device))
        yield index, tokens.cpu(), features.float().cpu()
        advance(len(index))


@torch.inference_mode()
def rerank_itm(
    model: RetrievalModel,
    pictures: Pictures,
    texts: Texts,
    itc: ItcScores,
    *,
    top_k: int,
    batch_size: int = 64,
    pair_batch_size: int = 64,
    device: str | torch.device = "cpu",
    advance: Callable[[int], None] = silent,
) -> ItmScores:
    """Match logits of each query's `top_k` candidates by similarity (fewer where there are fewer candidates).

    `batch_size` pictures are encoded at once and their pairs run in batches of `pair_batch_size`; neither changes the
    scores but for rounding. `advance` is called with the number of pairs just finished (`Candidates.count` in all).
    """
    candidates = Candidates.of(itc.similarity, top_k)
    picture, text = candidates.pairs(range(len(pictures)))
    logits = match_logits(
        model,
        pictures,
        texts,
        lambda captions, length: itc.text_tokens[captions, :length],
        (picture, text),
        range(len(pictures)),
        batch_size=batch_size,
        pair_batch_size=pair_batch_size,
        device=device,
        advance=advance,
    )
    return candidates.scores(picture, text, logits)


@torch.inference_mode()
def match_logits(
    model: RetrievalModel,
    pictures: Pictures,
    texts: Texts,
    text_tokens: Callable[[Tensor, int], Tensor],
    pairs: tuple[Tensor, Tensor],
    part: range,
    *,
    batch_size: int,
    pair_batch_size: int,
    device: str | torch.device = "cpu",
    advance: Callable[[int], None] = silent,
) -> Tensor:
    """Match logits (pairs,) float32 of `pairs`: picture indices in `part`, rising, and caption indices.

    `text_tokens(captions, length)` gives the first tokens (c, length, D) of captions (c,), on any device.
    """
    logits = torch.zeros(len(pairs[0]))
    for start in range(part.start, part.stop, batch_size):
        stop = min(start + batch_size, part.stop)
        low, high = torch.searchsorted(pairs[0], torch.tensor([start, stop])).tolist()
        if low == high:
            continue
        picture, text = pairs[0][low:high], pairs[1][low:high]  # (pairs,) twice
        image_tokens = model.encode_image(pictures[start:stop].to(device))[0]  # (b, P, D)
        for first in range(0, len(picture), SORTED_BATCHES * pair_batch_size):
            some = slice(first, first + SORTED_BATCHES * pair_batch_size)
            for order in by_length(texts.lengths[text[some]]).split(pair_batch_size):
                of_picture, of_text = picture[some][order], text[some][order]  # (p,)
                mask = _trimmed(texts, of_text)[1].to(device)  # (p, l)
                tokens = text_tokens(of_text, mask.shape[1]).to(device)  # (p, l, D)
                shown, rows = torch.unique(of_picture - start, return_inverse=True)  # (c,), (p,)
                match = model.match(image_tokens[shown.to(device)], tokens, mask, rows.to(device))  # (p, 2)
                logits[low + first + order] = match[:, MATCH].float().cpu()
                advance(len(of_text))
    return logits


@dataclass(frozen=True)
class Candidates:
    """Who is re-ranked: `texts_of` (N, k) the best captions of each picture, `pictures_of` (M, k) the other way."""

    texts_of: Tensor
    pictures_of: Tensor

    @classmethod
    def of(cls, similarity: Tensor, top_k: int) -> Self:
        """The `top_k` best of each query by `similarity` (N, M); all where there are fewer."""
        pictures, texts = similarity.shape
        return cls(
            similarity.topk(min(top_k, texts), dim=1).indices,
            similarity.T.topk(min(top_k, pictures), dim=1).indices,
        )

    def pairs(self, part: range) -> tuple[Tensor, Tensor]:
        """The pairs of the pictures of `part` that either side asks for: picture and caption indices, each pair once.

        In the order of pictures, then of captions.
        """
        wanted = torch.zeros(len(part), len(self.pictures_of), dtype=torch.bool)  # (b, M)
        wanted.scatter_(1, self.texts_of[part.start : part.stop], True)
        text, place = torch.nonzero((self.pictures_of >= part.start) & (self.pictures_of < part.stop), as_tuple=True)
        wanted[self.pictures_of[text, place] - part.start, text] = True
        picture, text = torch.nonzero(wanted, as_tuple=True)
        return picture + part.start, text

    def count(self) -> int:
        """All pairs: those in a picture's top k, in a caption's, or in both (counted once)."""
        return len(self.pairs(range(len(self.texts_of)))[0])

    def scores(self, picture: Tensor, text: Tensor, logits: Tensor) -> ItmScores:
        """The logits of all pairs as matrices, in which each side has what it asked for."""
        whole = torch.full((len(self.texts_of), len(self.pictures_of)), OUTSIDE)  # (N, M)
        whole[picture, text] = logits
        return ItmScores(only(whole, self.texts_of), only(whole.T, self.pictures_of))


def with_tail(reranked: Tensor, similarity: Tensor) -> Tensor:
    """Scores (Q, C) float64 in which candidates outside the top k follow all of the top k, in the order of similarity.

    The published code gives them all one score and leaves their order to the sorting routine. Recall at K up to
    `top_k` is the same.
    """
    tail = similarity.double()
    inside = reranked.double()
    floor = inside.where(inside > OUTSIDE, torch.inf).amin(dim=1, keepdim=True)  # (Q, 1) lowest logit of the top k
    return torch.where(inside > OUTSIDE, inside, floor - 1 - (tail.amax(dim=1, keepdim=True) - tail))


def by_length(lengths: Tensor) -> Tensor:
    """Indices, short texts first: batches of them hold little padding, so little wasted work."""
    return torch.argsort(lengths, stable=True)


def _trimmed(texts: Texts, index: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and mask of some texts without the columns that are padding in all of them."""
    mask = texts.attention_mask[index]
    length = int(mask.sum(dim=1).max())
    return texts.input_ids[index, :length], mask[:, :length]


def only(scores: Tensor, candidates: Tensor) -> Tensor:
    """The scores of each row's candidates (rows, k); the rest OUTSIDE, whatever the other direction asked for."""
    kept = torch.full_like(scores, OUTSIDE)
    return kept.scatter_(1, candidates, scores.gather(1, candidates))
