"""Perceptual hashes of pictures, as rows of 64-bit words."""

from __future__ import annotations

import imagehash
import numpy as np
from numpy.typing import NDArray
from PIL import Image

# Below this spread of grey levels (of 255) the cosine coefficients are rounding noise: plain areas, blank pages.
MIN_SPREAD = 2.0


def perceptual_hash(image: Image.Image, hash_size: int) -> bytes | None:
    """The cosine-transform hash ("pHash") of a picture: `hash_size`² bits, packed.

    None for a picture without enough detail to tell it from others.
    """
    grey = _grey(image, hash_size)
    return None if grey is None else _pack(grey, hash_size)


def perceptual_hashes(image: Image.Image, hash_size: int) -> tuple[bytes, bytes] | None:
    """The hash of a picture and that of its mirror image, for little more than the price of one."""
    grey = _grey(image, hash_size)
    if grey is None:
        return None
    return _pack(grey, hash_size), _pack(grey.transpose(Image.Transpose.FLIP_LEFT_RIGHT), hash_size)


def _grey(image: Image.Image, hash_size: int) -> Image.Image | None:
    side = 4 * hash_size  # what `phash` scales to, which is most of its time
    grey = image.convert("L").resize((side, side), Image.Resampling.LANCZOS)
    return grey if float(np.asarray(grey).std()) >= MIN_SPREAD else None


def _pack(grey: Image.Image, hash_size: int) -> bytes:
    return np.packbits(imagehash.phash(grey, hash_size).hash).tobytes()


def hash_words(hashes: list[bytes], hash_size: int) -> NDArray[np.uint64]:
    """Packed hashes as words, (n, hash_size² / 64); `hash_size` is a multiple of 8."""
    return np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, hash_size * hash_size // 64)


def distances(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Hamming distances of hashes row by row: (n, words) and (n, words) to (n,)."""
    apart: NDArray[np.int64] = np.bitwise_count(one ^ other).sum(axis=-1, dtype=np.int64)
    return apart
