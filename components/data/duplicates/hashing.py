"""Perceptual hashes of pictures, as rows of 64-bit words."""

from __future__ import annotations

from functools import lru_cache

import imagehash
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.fft import dct

# Below this spread of grey levels (of 255) the cosine coefficients are rounding noise: plain areas, blank pages.
MIN_SPREAD = 2.0
CROP_SIDE = 256  # pixels of the longer side from which crops are hashed: four times what a hash of 256 bits sees


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


def cropped_hashes(image: Image.Image, hash_size: int, cuts: tuple[float, ...], mirror: bool = True) -> bytes | None:
    """The hashes of crops of a picture and, with `mirror`, of their mirror images, one after the other.

    From each of the four sides each share of `cuts` is taken off, so of c shares come c⁴ hashes or twice as many, each
    (up to a few bits of rounding) that of `perceptual_hash` of the crop. None for a picture without enough detail.

    Scaling and cosine transform are both linear in rows and in columns, so that all crops come from two products of
    matrices: for three shares 162 hashes in the time of three by `perceptual_hash`.
    """
    if _grey(image, hash_size) is None:
        return None
    grey = image.convert("L")
    grey.thumbnail((CROP_SIDE, CROP_SIDE), Image.Resampling.LANCZOS)
    pixels = np.asarray(grey, np.float64)  # (h, w); in single precision rounding would differ by machine
    rows, columns = (_crop_transforms(side, hash_size, cuts) for side in pixels.shape)  # (c² · s, side)
    count = len(cuts) ** 2
    blocks = (rows @ pixels @ columns.T).reshape(count, hash_size, count, hash_size)
    waves = blocks.transpose(0, 2, 1, 3).reshape(-1, hash_size, hash_size)  # (c⁴, s, s) coefficients
    # mirroring turns the sign of every odd wave along a row
    mirrored = [waves * np.where(np.arange(hash_size) % 2, -1.0, 1.0)] if mirror else []
    each = np.concatenate([waves, *mirrored]).reshape(-1, hash_size**2)
    return np.packbits(each > np.median(each, axis=1, keepdims=True), axis=1).tobytes()


@lru_cache(maxsize=256)  # up to 300 KiB each
def _crop_transforms(side: int, hash_size: int, cuts: tuple[float, ...]) -> NDArray[np.float64]:
    """Crop, scale and transform a row of `side` pixels, for each pair of shares cut off its ends: (c² · s, side)."""
    scaled = 4 * hash_size
    waves = dct(np.eye(scaled), axis=0)[:hash_size]  # (s, 4s)
    each = Image.fromarray(np.eye(side, dtype=np.float32))
    transforms = []
    for start in cuts:
        for end in cuts:
            box = (0, start * side, side, side - end * side)
            scale = np.asarray(each.resize((side, scaled), Image.Resampling.LANCZOS, box=box))  # (4s, side)
            transforms.append(waves @ scale)
    return np.concatenate(transforms)


def hash_words(hashes: list[bytes], hash_size: int) -> NDArray[np.uint64]:
    """Packed hashes as words, (n, hash_size² / 64); `hash_size` is a multiple of 8."""
    return np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, hash_size * hash_size // 64)


def distances(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Hamming distances of hashes row by row: (n, words) and (n, words) to (n,)."""
    apart: NDArray[np.int64] = np.bitwise_count(one ^ other).sum(axis=-1, dtype=np.int64)
    return apart
