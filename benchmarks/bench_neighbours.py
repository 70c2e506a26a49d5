"""How the search for near hashes grows: time and memory at 10^4, 10^5 and 10^6 hashes of 256 bits.

    python benchmarks/bench_neighbours.py [SIZE ...]

`duplicates` is the search within the set (at most 16 bits), `crops` that of 500 evaluation pictures with 162 hashes
each (24 bits), `whole` that of the same pictures with two hashes each (40 bits). One in a hundred of the set is a copy
of another, and half of the evaluation pictures are in it, all a few bits off. Each size runs in a process of its own;
seconds are of the processor, and peak memory is that process's, hashes, interpreter and libraries included.

Hashes are made from Flickr8k's where it is there: each takes its bits from two photographs, one coefficient in eight
from neither, so that bits are as uneven and as dependent as real ones; random bits would make the search look faster.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

from components.data.duplicates.hashing import hash_words, perceptual_hash
from components.data.duplicates.neighbours import neighbours, pairs_within

ROOT = Path(__file__).resolve().parents[1]
IMAGES = Path(os.environ.get("VLP_SHARED", ROOT.parent / "shared")) / "data" / "flickr8k" / "images"
SIZES = (10**4, 10**5, 10**6)


def seeds(count: int = 2000) -> np.ndarray:
    """Hashes of photographs, (n, 4); random ones where there are none."""
    files = sorted(IMAGES.glob("*.jpg"))[:count]
    if not files:
        print(f"{IMAGES} is not there: random bits instead")
        return np.random.default_rng(0).integers(0, 2**64, (count, 4), np.uint64)
    hashes = [perceptual_hash(Image.open(file), 16) for file in files]
    return hash_words([each for each in hashes if each is not None], 16)


def made(base: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` hashes with bits from two of `base` each and an eighth of noise, (count, 4)."""
    one, other = base[rng.integers(len(base), size=(2, count))]
    low = np.uint64(0xFF00FF00FF00FF00)  # left halves of rows of 16: the waves that matter most
    noise = rng.integers(0, 2**64, (3, count, 4), np.uint64)
    return (one & low | other & ~low) ^ (noise[0] & noise[1] & noise[2])


def copied(hashes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Hashes of the same shape, each a few bits from its original: one bit in 64 is drawn anew, so 2 change."""
    noise = rng.integers(0, 2**64, (7, *hashes.shape), np.uint64)
    return hashes ^ np.bitwise_and.reduce(noise)


def measure(base: np.ndarray, size: int) -> list[tuple[str, int, float, float]]:
    """Name, pairs found, seconds and peak MiB of each search in a set of `size` hashes."""
    rng = np.random.default_rng(size)
    hashes = made(base, size, rng)
    hashes[-size // 100 :] = copied(hashes[: size // 100], rng)
    shown = made(base, 500, rng)
    shown[:250] = copied(hashes[:250], rng)
    flips = rng.integers(0, 2**64, (3, 500, 161, 4), np.uint64)
    crops = np.concatenate([shown[:, None], shown[:, None] ^ np.bitwise_and.reduce(flips)], axis=1).reshape(-1, 4)
    lines = []
    for name, search in (
        ("duplicates", lambda: pairs_within(hashes, 16)),
        ("crops", lambda: neighbours(crops, hashes, 24)),
        ("whole", lambda: neighbours(np.concatenate([shown, ~shown]), hashes, 40)),
    ):
        started = time.process_time()
        found = search()
        seconds = time.process_time() - started
        lines.append((name, len(found[0]), seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    return lines


def main() -> None:
    sizes = [int(size) for size in sys.argv[1:]] or SIZES
    base = seeds()
    print(f"{'hashes':>10} {'search':12}{'seconds':>9}{'pairs':>10}{'peak MiB':>10}")
    for size in sizes:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            for name, pairs, seconds, peak in pool.submit(measure, base, size).result():
                print(f"{size:>10,} {name:12}{seconds:>9.2f}{pairs:>10,}{peak:>10.0f}", flush=True)


if __name__ == "__main__":
    main()
