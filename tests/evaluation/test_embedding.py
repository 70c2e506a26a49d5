"""Global vectors in the plane."""

import numpy as np

from components.evaluation.embedding import embedding_map


def vectors(count=24, captions=2):
    """Pictures far apart from one another, and captions close to their own."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(count, 16))
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    owner = np.repeat(np.arange(count), captions)
    texts = images[owner] + 0.01 * rng.normal(size=(len(owner), 16))
    return images, texts / np.linalg.norm(texts, axis=1, keepdims=True), owner


def test_what_is_near_stays_near():
    images, texts, owner = vectors()
    found = embedding_map(images, texts, owner, pictures=20)
    pictures, captions = np.array(found["pictures"]), np.array(found["captions"])
    assert pictures.shape == captions.shape == (20, 2)
    apart = np.linalg.norm(pictures[:, None] - captions[None], axis=2)
    assert (apart.argmin(axis=1) == np.arange(20)).mean() > 0.9


def test_the_same_again():
    first, second = (embedding_map(*vectors(), pictures=20) for _ in range(2))
    assert first == second


def test_too_few_have_none():
    images, texts, owner = vectors(3)
    assert embedding_map(images, texts, owner, pictures=100) is None
    assert embedding_map(*vectors(), pictures=0) is None
