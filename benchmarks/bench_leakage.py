"""How well perceptual hashes find altered copies of photographs, and how often they take two pictures for one.

    python benchmarks/leakage.py [FOLDER] [--pictures 8000] [--altered 300] [--hash-size 16]

Recall: the share of altered copies within the threshold of their original. Precision: of the pairs (altered copy, any
original) within the threshold, the share that are true. The photographs themselves hold bursts of one scene; pairs of
originals that are this near are printed apart, so that a person can look at them.

Measured on the 8,000 photographs of Flickr8k, 300 of them altered, 256 bits: at 16 bits every re-encoded, resized, grey
or mirrored copy is found and 74 % of those with 2 % cropped off; at 40 bits all of these and 81 % of those with 5 %
cropped off, still without a false pair among 58 million (the first comes at 56). Hence the defaults of `deduplicate`:
16 among the set, 40 against evaluation pictures.
"""

import argparse
import io
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from rich.console import Console
from rich.table import Table

from components.data.duplicates.hashing import hash_words, perceptual_hash, perceptual_hashes
from components.data.duplicates.neighbours import neighbours, pairs_within

THRESHOLDS = (0, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    sink = io.BytesIO()
    image.save(sink, "JPEG", quality=quality)
    return Image.open(sink).convert("RGB")


def scaled(image: Image.Image, factor: float) -> Image.Image:
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    return jpeg(image.resize(size, Image.Resampling.BICUBIC), 85)


def cropped(image: Image.Image, share: float, corner: bool = False) -> Image.Image:
    """`share` of width and of height taken off, around the middle or all from one corner."""
    x, y = round(image.width * share), round(image.height * share)
    box = (x, y, image.width, image.height) if corner else (x // 2, y // 2, image.width - x // 2, image.height - y // 2)
    return jpeg(image.crop(box), 85)


def square(image: Image.Image) -> Image.Image:
    return jpeg(image.resize((256, 256), Image.Resampling.BICUBIC), 85)


def mirrored(image: Image.Image) -> Image.Image:
    return jpeg(ImageOps.mirror(image), 85)


ALTERATIONS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG 90": partial(jpeg, quality=90),
    "JPEG 60": partial(jpeg, quality=60),
    "JPEG 40": partial(jpeg, quality=40),
    "scaled 50 %": partial(scaled, factor=0.5),
    "scaled 150 %": partial(scaled, factor=1.5),
    "squeezed to 256x256": square,
    "grey": lambda image: image.convert("L").convert("RGB"),
    "crop 2 %": partial(cropped, share=0.02),
    "crop 5 %": partial(cropped, share=0.05),
    "crop 2 % corner": partial(cropped, share=0.02, corner=True),
    "crop 5 % corner": partial(cropped, share=0.05, corner=True),
    "mirrored": mirrored,
}


def hashes_of(path: Path, alter: bool, hash_size: int) -> list[bytes | None]:
    """The hash of a file, of its mirror image, and then of each alteration."""
    image = Image.open(path).convert("RGB")
    found: list[bytes | None] = [*(perceptual_hashes(image, hash_size) or (None, None))]
    if alter:
        found += [perceptual_hash(change(image), hash_size) for change in ALTERATIONS.values()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path(os.environ.get("VLP_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    parser.add_argument("folder", type=Path, nargs="?", default=shared / "data" / "flickr8k" / "images")
    parser.add_argument("--pictures", type=int, default=1000, help="originals")
    parser.add_argument("--altered", type=int, default=200, help="of them also altered")
    parser.add_argument("--hash-size", type=int, default=16)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    if not given.folder.is_dir():
        print(f"skipped: {given.folder} is not there")
        return
    files = sorted(given.folder.glob("*.jpg"))[: given.pictures]
    count = min(given.altered, len(files))
    # the altered ones spread over all
    altered = set(np.linspace(0, len(files) - 1, count).astype(int).tolist())
    with ProcessPoolExecutor(given.processes) as pool:
        jobs = [pool.submit(hashes_of, file, i in altered, given.hash_size) for i, file in enumerate(files)]
        found = [job.result() for job in jobs]
    if any(None in hashes for hashes in found):
        raise SystemExit("a picture without enough detail for a hash is among them; leave it out")

    plain = hash_words([hashes[0] for hashes in found], given.hash_size)  # type: ignore[misc]
    mirror = hash_words([hashes[1] for hashes in found], given.hash_size)  # type: ignore[misc]
    chosen = np.array(sorted(altered))
    limits = [limit * given.hash_size**2 // 256 for limit in THRESHOLDS]
    console = Console(width=160)
    table = Table(
        title=f"{len(files)} photographs, {count} altered, {given.hash_size**2} bits: recall in %, by threshold"
    )
    table.add_column("alteration")
    for limit in limits:
        table.add_column(str(limit), justify="right")
    false = np.zeros(len(limits), int)
    true = np.zeros(len(limits), int)
    for place, name in enumerate(ALTERATIONS):
        copies = hash_words([found[i][2 + place] for i in chosen], given.hash_size)  # type: ignore[misc]
        # both sides are looked up plain, and the copies against the mirrored originals, as `deduplicate` does
        best: dict[tuple[int, int], int] = {}
        for originals in (plain, mirror):
            for left, right, apart in zip(*neighbours(copies, originals, limits[-1]), strict=True):
                pair = (int(left), int(right))
                best[pair] = min(int(apart), best.get(pair, 999))
        own = {left: apart for (left, right), apart in best.items() if right == chosen[left]}
        others = [apart for (left, right), apart in best.items() if right != chosen[left]]
        hits = np.array([sum(apart <= limit for apart in own.values()) for limit in limits])
        true += hits
        false += [sum(apart <= limit for apart in others) for limit in limits]
        table.add_row(name, *(f"{100 * hit / count:.1f}" for hit in hits))
    table.add_section()
    table.add_row("false pairs", *map(str, false))
    table.add_row("precision", *(f"{100 * t / max(t + f, 1):.2f}" for t, f in zip(true, false, strict=True)))
    left, right, apart = pairs_within(plain, limits[-1])
    table.add_row("near originals", *(str(int((apart <= limit).sum())) for limit in limits))
    console.print(table)
    for place in np.argsort(apart, kind="stable")[:40]:
        console.print(f"{int(apart[place]):4d}  {files[left[place]].name}  {files[right[place]].name}")


if __name__ == "__main__":
    main()
