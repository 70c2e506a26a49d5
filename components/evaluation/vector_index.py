"""Nearest vectors by inner product: exactly, or approximately by a graph (HNSW) for collections of millions."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IndexKind = Literal["exact", "approximate"]
NEIGHBOURS, BUILD_DEPTH = 16, 200  # of the graph: HNSW's M and ef_construction, its authors' middle settings
BLOCK_SCORES = 1 << 24  # inner products at once: 64 MiB


class IndexSettings(NamedTuple):
    """How to search: exactly, or by a graph that looks at `depth` times as many vectors as are asked for."""

    kind: IndexKind = "exact"
    depth: int = 4
    seed: int = 0  # of the graph


EXACT = IndexSettings()


class VectorIndex:
    """The rows of `vectors` (M, D) float32, to be searched; cosines where all are of length 1 or 0.

    `exact` is a matrix product by torch. `approximate` is an HNSW graph by Spotify's voyager, built by one thread from
    a seed, so that the same vectors give the same graph. It misses some of the nearest, and more where most vectors are
    equal (of zeros, for one): equal ones are each other's neighbours and may hide the rest.

    Raises ValueError when `vectors` is no matrix with rows, or a number in it is not finite.
    """

    def __init__(self, vectors: Tensor, settings: IndexSettings = EXACT) -> None:
        self.vectors = _checked(vectors, "vectors")
        if not len(self.vectors):
            raise ValueError("there is no vector to search")
        self.settings = settings
        self._graph = _graph(self.vectors, settings.seed) if settings.kind == "approximate" else None

    def __len__(self) -> int:
        """Vectors."""
        return len(self.vectors)

    def search(self, queries: Tensor, count: int) -> NDArray[np.int64]:
        """The positions (Q, min(count, M)) of each query's nearest vectors, best first; equal ones by position.

        Where `count` covers all vectors, or the graph reaches too few, the search is exact whatever the kind.

        Args:
            queries: (Q, D) float32. A query of zeros has the same product with all, so it gets the first positions.
            count: how many, at least 1.

        Raises:
            ValueError: when `count` is less than 1, or the queries are of another width or not finite.

        """
        queries = _checked(queries, "queries")
        if queries.shape[1] != self.vectors.shape[1]:
            raise ValueError(f"queries are {queries.shape[1]} wide, the vectors {self.vectors.shape[1]}")
        if count < 1:
            raise ValueError(f"{count} neighbours asked for: ask for one or more")
        count = min(count, len(self))
        step = max(1, BLOCK_SCORES // len(self))
        found = [self._search(block, count) for block in queries.split(step)]
        return np.concatenate(found) if found else np.zeros((0, count), np.int64)

    def _search(self, queries: Tensor, count: int) -> NDArray[np.int64]:
        if self._graph is None or count == len(self):
            return _exact(queries, self.vectors, count)
        from voyager import RecallError

        depth = min(self.settings.depth * count, len(self))
        try:
            found, _ = self._graph.query(queries.numpy(), k=count, num_threads=1, query_ef=depth)
        except RecallError:  # many equal vectors can cut a graph into parts that do not see each other
            return _exact(queries, self.vectors, count)
        places = torch.from_numpy(found.astype(np.int64)).sort(dim=1).values
        products = torch.einsum("qd,qkd->qk", queries, self.vectors[places])
        return places.gather(1, products.argsort(dim=1, descending=True, stable=True)).numpy()


def _checked(vectors: Tensor, name: str) -> Tensor:
    if vectors.ndim != 2:
        raise ValueError(f"{name} are {tuple(vectors.shape)}, expected (count, width)")
    vectors = vectors.detach().float().cpu().contiguous()
    bad = ~torch.isfinite(vectors).all(dim=1)
    if bool(bad.any()):
        raise ValueError(f"row {int(bad.long().argmax())} of {name} holds numbers that are not finite")
    return vectors


def _exact(queries: Tensor, vectors: Tensor, count: int) -> NDArray[np.int64]:
    products = queries @ vectors.T  # (Q, M)
    best, places = products.topk(count, dim=1)
    # topk takes any of those that are equal to the last; the first ones are wanted
    last = best[:, -1:]
    torn = (products == last).sum(dim=1) > (best == last).sum(dim=1)
    for row in torch.nonzero(torn)[:, 0]:
        places[row] = products[row].argsort(descending=True, stable=True)[:count]
    places = places.sort(dim=1).values
    order = products.gather(1, places).argsort(dim=1, descending=True, stable=True)
    return places.gather(1, order).numpy()


def _graph(vectors: Tensor, seed: int) -> Any:
    import voyager

    graph = voyager.Index(
        voyager.Space.InnerProduct,
        num_dimensions=vectors.shape[1],
        M=NEIGHBOURS,
        ef_construction=BUILD_DEPTH,
        random_seed=seed,
        max_elements=len(vectors),
    )
    graph.add_items(vectors.numpy(), ids=list(range(len(vectors))), num_threads=1)  # in order: more threads mix it
    return graph
