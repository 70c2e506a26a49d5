"""Global vectors of pictures and captions in the plane, by t-SNE (HAT figure 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

EMBEDDING_FILE = "embedding.json"
FEWEST = 4  # pictures: fewer have no neighbourhoods
PERPLEXITY = 30.0  # scikit-learn's default; less where there are few points
DIGITS = 2


def embedding_map(
    images: NDArray[np.floating[Any]],
    texts: NDArray[np.floating[Any]],
    picture_of: NDArray[np.int64],
    *,
    pictures: int,
) -> dict[str, list[list[float]]] | None:
    """Points of the first `pictures` pictures and of each one's first caption, as "pictures" and "captions", (P, 2).

    The start is by principal components, so that nothing is drawn.

    Args:
        images: (N, D), of length 1.
        texts: (M, D), of length 1.
        picture_of: (M,) each caption's picture, ascending; every picture has one.
        pictures: how many; None is returned where there are fewer than four.

    """
    count = min(pictures, len(images))
    if count < FEWEST:
        return None
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    first = np.searchsorted(picture_of, np.arange(count))
    vectors = np.concatenate([images[:count], texts[first]]).astype(np.float64)
    tsne = TSNE(perplexity=min(PERPLEXITY, (len(vectors) - 1) / 3), init="pca", random_state=0, method="exact")
    with threadpool_limits(1):  # sums in one order: the map's bytes do not depend on the machine's cores
        points = tsne.fit_transform(vectors).astype(np.float64).round(DIGITS).tolist()
    return {"pictures": points[:count], "captions": points[count:]}
