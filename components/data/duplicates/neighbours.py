"""All pairs of hashes within a Hamming distance, exactly, without comparing every pair.

Multi-index hashing (Norouzi, Punjani & Fleet 2012, "Fast search in Hamming space with multi-index hashing", section 3):
the bits are dealt into m bands. Of two hashes at distance at most d = m·r + s, one of the first s + 1 bands differs in
at most r bits or one of the others in at most r - 1, or the distances would add up to more than d. So it is enough to
look up, band by band, the hashes whose band differs in that few bits, and to measure those in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from components.data.duplicates.hashing import distances

CANDIDATES = 1 << 19  # pairs measured at a time: 24 bytes a word of hash each
MAX_BAND = 24  # bits: a lookup table of 2^24 entries of 8 bytes
INFORMATION = 0.75  # of a bit of a real picture's hash, about; decides the bands' width, not the result

Pairs = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def neighbours(
    queries: NDArray[np.uint64], corpus: NDArray[np.uint64], max_distance: int, *, bands: int | None = None
) -> Pairs:
    """Every pair (query, corpus) at most `max_distance` bits apart.

    `queries` (q, words) and `corpus` (n, words) are hashes of the same length; returns indices into both and the
    distances, three arrays of one length, sorted by query, then corpus index. `bands` is chosen for the least work (0
    compares every pair, which for few hashes or a wide distance is the least) and changes nothing else.
    """
    return _search(queries, corpus, max_distance, bands, once=False)


def pairs_within(hashes: NDArray[np.uint64], max_distance: int) -> Pairs:
    """Every pair i < j of `hashes` (n, words) at most `max_distance` bits apart: i, j and the distances."""
    return _search(hashes, hashes, max_distance, None, once=True)


def _search(
    queries: NDArray[np.uint64], corpus: NDArray[np.uint64], max_distance: int, bands: int | None, *, once: bool
) -> Pairs:
    """`neighbours`; with `once` only pairs i < j, which spares a set every hash's pair with itself."""
    bits = 64 * corpus.shape[1]
    if len(queries) == 0 or len(corpus) == 0:
        return _unique_pairs([], len(corpus))
    found: list[Pairs] = []
    count = _choose_bands(len(queries), len(corpus), bits, max_distance) if bands is None else bands
    if count == 0:
        step = max(1, CANDIDATES // len(corpus))
        for start in range(0, len(queries), step):
            apart = distances(queries[start : start + step, None], corpus)
            left, right = np.nonzero(apart <= max_distance)
            kept = left + start < right if once else slice(None)
            left, right = left[kept], right[kept]
            found.append((left + start, right, apart[left, right]))
        return _unique_pairs(found, len(corpus))
    radius, remainder = divmod(min(max_distance, bits), count)
    for band in range(count):
        band_radius = radius if band <= remainder else radius - 1
        if band_radius < 0:
            break
        positions = range(band, bits, count)  # interleaved: neighbouring coefficients are alike
        width = len(positions)
        keys = _band_keys(corpus, positions)
        order = np.argsort(keys, kind="stable")
        starts = np.zeros((1 << width) + 1, np.int64)
        np.cumsum(np.bincount(keys, minlength=1 << width), out=starts[1:])
        query_keys = _band_keys(queries, positions)
        for mask in _masks(width, band_radius):
            probe = query_keys ^ mask
            low = starts[probe]
            for left, right in _expand(low, starts[probe + 1] - low, order):
                if once:
                    first = left < right
                    left, right = left[first], right[first]
                apart = distances(queries[left], corpus[right])
                near = apart <= max_distance
                found.append((left[near], right[near], apart[near]))
    return _unique_pairs(found, len(corpus))


def _choose_bands(queries: int, corpus: int, bits: int, max_distance: int) -> int:
    """The number of bands with the least expected work, 0 for comparing all; any number gives the same pairs."""

    def cost(count: int) -> float:
        if count == 0:
            return 4.0 * queries * corpus
        width = math.ceil(bits / count)
        radius, remainder = divmod(min(max_distance, bits), count)
        total = 0.0
        for bands, band_radius in ((remainder + 1, radius), (count - remainder - 1, radius - 1)):
            if band_radius < 0:
                continue
            masks = sum(math.comb(width, weight) for weight in range(band_radius + 1))
            per_probe = 1.0 + 4.0 * corpus / 2.0 ** (INFORMATION * width)
            total += bands * (2.0**width + 4.0 * corpus + masks * (100.0 + queries * per_probe))
        return total

    return min([0, *range(math.ceil(bits / MAX_BAND), bits + 1)], key=cost)


def _band_keys(hashes: NDArray[np.uint64], positions: range) -> NDArray[np.int64]:
    keys = np.zeros(len(hashes), np.uint64)
    for place, position in enumerate(positions):
        word, bit = divmod(position, 64)
        keys |= ((hashes[:, word] >> np.uint64(bit)) & np.uint64(1)) << np.uint64(place)
    return keys.astype(np.int64)


def _masks(width: int, radius: int) -> Iterator[int]:
    for weight in range(radius + 1):
        for places in combinations(range(width), weight):
            yield sum(1 << place for place in places)


def _expand(
    low: NDArray[np.int64], counts: NDArray[np.int64], order: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Candidate pairs (query, corpus) of one lookup, at most about CANDIDATES at a time."""
    hit = np.flatnonzero(counts)
    low, counts = low[hit], counts[hit]
    ends = np.cumsum(counts)
    start = 0
    while start < len(hit):
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + CANDIDATES, side="right")))
        size = counts[start:stop]
        left = np.repeat(hit[start:stop], size)
        within = np.arange(len(left)) - np.repeat(np.cumsum(size) - size, size)
        yield left, order[np.repeat(low[start:stop], size) + within]
        start = stop


def _unique_pairs(found: list[Pairs], corpus: int) -> Pairs:
    """Pairs found in several bands once, in order."""
    if not found:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    left, right, apart = (np.concatenate(column) for column in zip(*found, strict=True))
    _, first = np.unique(left * corpus + right, return_index=True)
    return left[first], right[first], apart[first]
