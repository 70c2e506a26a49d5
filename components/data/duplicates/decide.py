"""Which pictures leak and which repeat others, decided on their hashes alone.

A picture is a row number here; nothing of its bytes or captions is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from components.data.duplicates.neighbours import neighbours, pairs_within

HASH_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("sha256", pa.string()),
        ("pixels", pa.int64()),
        ("bytes", pa.int64()),
        ("hash", pa.binary()),  # null: not enough detail, or not asked for
        ("mirrored", pa.binary()),  # hash of the mirror image; null likewise
        # of protected pictures alone
        ("crops", pa.binary()),  # hashes of crops, one after the other
        ("task", pa.string()),  # null for the set's own pictures
        ("split", pa.string()),
        ("names", pa.list_(pa.string())),
        # of the set's own pictures alone
        ("named", pa.int64()),  # place of its name among the protected ones; null where it bears none
    ]
)
KEEP, LEAK, DUPLICATE = 0, 1, 2
BY_SHA256, BY_HASH, BY_MIRRORED_HASH, BY_CROPPED_HASH, BY_NAME = range(5)
RULES = ("sha256", "hash", "mirrored_hash", "cropped_hash", "name")

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Decisions:
    """What becomes of each of n pictures."""

    action: Ints  # (n,) KEEP, LEAK or DUPLICATE
    # (n,) of a DUPLICATE the row of the kept picture; of a LEAK the row of the evaluation picture, or their number plus
    # the row of the own picture that leaks by bytes or name and that this one is like; -1 for KEEP and BY_NAME
    match: Ints
    rule: Ints  # (n,) BY_..., -1 for KEEP
    distance: Ints  # (n,) bits, 0 for equal bytes and names; -1 for KEEP


def decide(
    pictures: pa.Table,
    evaluation: pa.Table,
    *,
    exact: bool,
    max_distance: int | None,
    leak_distance: int | None,
    crop_distance: int | None = None,
) -> Decisions:
    """Judge `pictures` (HASH_SCHEMA) against `evaluation` (same schema) and among themselves.

    Leaks first: equal sha256; else a protected name; else a hash at most `leak_distance` bits from that of a protected
    picture or of its mirror image, or at most `crop_distance` bits from that of one of its crops (the nearest picture
    is named, by the simplest rule). Protected are the evaluation pictures and own ones that leak by bytes or name.

    Of the rest, duplicates give way to the best picture: more pixels, then more bytes, then the lower id. Best first,
    each picture that has not given way keeps its place and takes in those with its sha256 (`exact`) and those at most
    `max_distance` bits away (which takes in equal bytes too). So every picture removed is that near to the one kept for
    it: likeness is not handed on along a chain.

    A distance of None leaves that perceptual rule out.
    """
    count = len(pictures)
    found = Decisions(*(np.full(count, value, np.int64) for value in (KEEP, -1, -1, -1)))
    _find_leaks(found, pictures, evaluation, {BY_HASH: leak_distance, BY_CROPPED_HASH: crop_distance})
    _find_duplicates(found, pictures, exact, max_distance)
    return found


def _settle(
    found: Decisions, rows: Ints, action: int, match: Ints | int, rule: Ints | int, distance: Ints | int
) -> None:
    found.action[rows], found.match[rows], found.rule[rows], found.distance[rows] = action, match, rule, distance


def _find_leaks(found: Decisions, pictures: pa.Table, evaluation: pa.Table, limits: dict[int, int | None]) -> None:
    _find_equal(found, pictures, evaluation["sha256"], 0)
    named = pc.is_valid(pictures["named"]).to_numpy().astype(bool)
    _settle(found, np.flatnonzero(named & (found.action == KEEP)), LEAK, -1, BY_NAME, 0)
    own = np.flatnonzero(found.action == LEAK)
    protected = pa.concat_tables([evaluation, pictures.take(own)])
    place = np.concatenate([np.arange(len(evaluation)), len(evaluation) + own])  # what `match` says
    _find_equal(found, pictures, protected["sha256"].slice(len(evaluation)), place[len(evaluation) :])

    hashed, words = _words(pictures, "hash")
    left_over = found.action[hashed] == KEEP
    hashed, words = hashed[left_over], words[left_over]
    candidates: list[tuple[Ints, Ints, Ints, Ints]] = []
    for rule, column, limit in (
        (BY_HASH, "hash", limits[BY_HASH]),
        (BY_MIRRORED_HASH, "mirrored", limits[BY_HASH]),
        (BY_CROPPED_HASH, "crops", limits[BY_CROPPED_HASH]),
    ):
        if limit is None:
            continue
        shown, queries = _words(protected, column, words.shape[1])
        left, right, apart = neighbours(queries, words, limit)
        candidates.append((hashed[right], apart, np.full(len(left), rule), place[shown[left]]))
    if not candidates:
        return
    row, apart, rule_of, match = (np.concatenate(column) for column in zip(*candidates, strict=True))
    # a crop is hashed a few bits off, so that the plain rules name the match where they apply
    order = np.lexsort((match, rule_of, apart, rule_of == BY_CROPPED_HASH, row))
    row, nearest = np.unique(row[order], return_index=True)
    nearest = order[nearest]
    _settle(found, row, LEAK, match[nearest], rule_of[nearest], apart[nearest])


def _find_equal(found: Decisions, pictures: pa.Table, sha256: pa.ChunkedArray, place: Ints | int) -> None:
    """Settle what has not been settled and has one of these sha256 as a leak; `place` is what to match them with."""
    first = pc.index_in(pictures["sha256"], value_set=sha256.combine_chunks()).fill_null(-1).to_numpy().astype(np.int64)
    rows = np.flatnonzero((first >= 0) & (found.action == KEEP))
    match = first[rows] if isinstance(place, int) else place[first[rows]]
    _settle(found, rows, LEAK, match, BY_SHA256, 0)


def _find_duplicates(found: Decisions, pictures: pa.Table, exact: bool, max_distance: int | None) -> None:
    rank = _ranks(pictures)
    left = np.flatnonzero(found.action == KEEP)
    left = left[np.argsort(rank[left])]  # best first, from here on
    codes = pictures["sha256"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    if exact or max_distance is not None:
        _, first, group = np.unique(codes[left], return_index=True, return_inverse=True)
        best = left[first][group]  # of the equal ones; `first` is the best one since `left` is in order
        gives_way = best != left
        _settle(found, left[gives_way], DUPLICATE, best[gives_way], BY_SHA256, 0)
    if max_distance is None:
        return
    left = left[~gives_way]
    hashed, words = _words(pictures.take(left), "hash")
    _, mirrored = _words(pictures.take(left), "mirrored")
    nodes = left[hashed]
    keeper, rule, apart = _stars(words, mirrored, max_distance)
    gives_way = keeper != np.arange(len(nodes))
    _settle(found, nodes[gives_way], DUPLICATE, nodes[keeper[gives_way]], rule[gives_way], apart[gives_way])
    # those with equal bytes follow the picture that stood for them
    follower = np.flatnonzero((found.action == DUPLICATE) & (found.rule == BY_SHA256))
    moved = follower[found.action[found.match[follower]] == DUPLICATE]
    via = found.match[moved]
    _settle(found, moved, DUPLICATE, found.match[via], found.rule[via], found.distance[via])


def _stars(words: NDArray[np.uint64], mirrored: NDArray[np.uint64], max_distance: int) -> tuple[Ints, Ints, Ints]:
    """Assign each of n hashes, best first, to the one kept for it: its row, the rule and the distance, each (n,).

    `mirrored` is empty when mirror images are not asked for.
    """
    if len(words) == 0:
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing
    # equal hashes first, so that a picture that stands there ten thousand times makes no fifty million pairs
    _, first, group = np.unique(words, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)  # distinct hashes, best first
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    node, best = place[group.reshape(-1)], first[order]

    pairs = [(*pairs_within(words[best], max_distance), BY_HASH)]
    if len(mirrored):
        one, other, apart = neighbours(mirrored[best], words[best], max_distance)
        apart_nodes = one != other
        one, other, apart = one[apart_nodes], other[apart_nodes], apart[apart_nodes]
        pairs.append((np.minimum(one, other), np.maximum(one, other), apart, BY_MIRRORED_HASH))
    better = np.concatenate([pair[0] for pair in pairs])
    worse = np.concatenate([pair[1] for pair in pairs])
    apart = np.concatenate([pair[2] for pair in pairs])
    rule = np.concatenate([np.full(len(pair[0]), pair[3], np.int64) for pair in pairs])

    keeper = np.arange(len(best))
    keeper_rule = np.full(len(best), BY_HASH, np.int64)
    keeper_apart = np.zeros(len(best), np.int64)
    # by the better picture, then nearest first within the worse one: the first pair that applies is the one to name
    for index in np.lexsort((rule, apart, worse, better)).tolist():
        one, other = better[index], worse[index]
        if keeper[one] == one and keeper[other] == other:
            keeper[other], keeper_rule[other], keeper_apart[other] = one, rule[index], apart[index]
    return best[keeper[node]], keeper_rule[node], keeper_apart[node]


def _ranks(pictures: pa.Table) -> Ints:
    """The place of each picture, best first: (n,)."""
    keys = [("pixels", "descending"), ("bytes", "descending"), ("id", "ascending")]
    order = pc.sort_indices(pictures, sort_keys=keys).to_numpy().astype(np.int64)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank


def _words(pictures: pa.Table, column: str, words: int | None = None) -> tuple[Ints, NDArray[np.uint64]]:
    """The row of each hash, (m,), and the hashes, (m, words).

    Where `words` is given a row may hold several hashes; otherwise their length is that of the first.
    """
    hashes = pictures[column].combine_chunks()
    rows = np.flatnonzero(pc.is_valid(hashes).to_numpy(zero_copy_only=False))
    packed = hashes.drop_null().to_pylist()
    width = words or (len(packed[0]) // 8 if packed else 1)
    flat = np.frombuffer(b"".join(packed), np.uint64).reshape(-1, width)
    return np.repeat(rows, [len(each) // (8 * width) for each in packed]), flat
