"""Hashes of altered copies, and the neighbour search against comparing every pair."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from components.data.cleaning.pictures import open_picture
from components.data.duplicates.hashing import distances, hash_words, perceptual_hash, perceptual_hashes
from components.data.duplicates.neighbours import neighbours, pairs_within
from tests.data.making import encoded, photo


def brute(queries, corpus, max_distance):
    apart = np.bitwise_count(queries[:, None] ^ corpus[None]).sum(-1)
    left, right = np.nonzero(apart <= max_distance)
    return left, right, apart[left, right]


def flipped(words, rng, bits):
    """A copy of one hash with `bits` of its bits flipped."""
    raw = np.unpackbits(words.view(np.uint8))
    raw[rng.choice(len(raw), bits, replace=False)] ^= 1
    return np.packbits(raw).view(np.uint64)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4]), st.integers(0, 40), st.integers(0, 60), st.integers(0, 14))
def test_equals_comparing_every_pair(seed, words, corpus_size, query_count, max_distance):
    rng = np.random.default_rng(seed)
    corpus = rng.integers(0, 2**63, (corpus_size, words), np.uint64)
    queries = rng.integers(0, 2**63, (query_count, words), np.uint64)
    for index in range(min(corpus_size, query_count)):  # some queries around the limit
        queries[index] = flipped(corpus[index], rng, min(64 * words, max(0, max_distance + int(rng.integers(-2, 3)))))
    want = brute(queries, corpus, max_distance)
    for bands in (None, 0, 4 * words, 5 * words, 13 * words, 32 * words):
        for got, one in zip(neighbours(queries, corpus, max_distance, bands=bands), want, strict=True):
            assert (got == one).all()


@pytest.mark.parametrize("max_distance", [0, 3, 12, 24])
def test_pairs_among_many(max_distance):
    rng = np.random.default_rng(3)
    hashes = rng.integers(0, 2**63, (1500, 4), np.uint64)
    copies = np.stack([flipped(hashes[i], rng, i % 30) for i in range(500)])
    hashes = np.concatenate([hashes, copies, hashes[:100]])
    left, right, apart = pairs_within(hashes, max_distance)
    assert (neighbours(hashes, hashes, max_distance, bands=13)[2] == neighbours(hashes, hashes, max_distance)[2]).all()
    want = [(i, j, d) for i, j, d in zip(*brute(hashes, hashes, max_distance), strict=True) if i < j]
    assert list(zip(left, right, apart, strict=True)) == want
    assert len(want) > 100


def test_work_grows_far_slower_than_the_square():
    """60,000 hashes: 1.8 thousand million pairs, of which only the near ones are ever measured."""
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**63, (60_000, 4), np.uint64)
    for index in range(100):
        hashes[index] = flipped(hashes[index + 1000], rng, 10)
    left, right, apart = pairs_within(hashes, 10)
    assert (left == np.arange(100)).all()
    assert (right == left + 1000).all()
    assert (apart == 10).all()


def test_altered_copies_are_near_and_others_far():
    photos = [photo(seed, (320, 240)) for seed in range(12)]
    hashes = hash_words([perceptual_hash(image, 16) for image in photos], 16)
    far = [distances(hashes[i], hashes[j]) for i in range(12) for j in range(i)]
    assert min(far) > 60
    for index, image in enumerate(photos):
        copies = {
            "itself": image,
            "re-encoded": open_picture(encoded(image, quality=50)),
            "half size": image.resize((160, 120), Image.Resampling.BICUBIC),
            "brighter": image.point(lambda value: min(255, int(value * 1.1))),
        }
        for name, copy in copies.items():
            other = hash_words([perceptual_hash(copy, 16)], 16)[0]
            assert distances(hashes[index], other) <= (0 if name == "itself" else 12), name


def test_mirrored_hash_is_the_mirror_images_hash():
    for seed in range(5):
        image = photo(seed)
        plain, mirror = perceptual_hashes(image, 16)
        assert plain == perceptual_hash(image, 16)
        assert mirror == perceptual_hash(ImageOps.mirror(image.convert("L").resize((64, 64), 1)), 16)
        other, itself = (hash_words([perceptual_hash(i, 16)], 16) for i in (ImageOps.mirror(image), image))
        assert distances(hash_words([mirror], 16), other)[0] <= 4
        assert distances(itself, other)[0] > 60


@pytest.mark.parametrize("hash_size", [8, 16, 24])
def test_length(hash_size):
    assert len(perceptual_hash(photo(1), hash_size)) == hash_size**2 // 8


def test_blank_pictures_have_no_hash():
    assert perceptual_hash(Image.new("RGB", (64, 64), "white"), 16) is None
    assert perceptual_hashes(Image.new("RGB", (64, 64), "black"), 16) is None
    page = Image.new("RGB", (256, 256), "white")
    page.paste("black", (100, 100, 140, 120))
    assert perceptual_hash(page, 16) is not None
