"""How well perceptual hashes find altered copies of photographs, and how often they take two pictures for one.

    python benchmarks/bench_leakage.py [FOLDER] [--pictures 1000] [--altered 100] [--hash-size 16]

`altered` of the photographs are the evaluation pictures; altered copies of them are what a web list might hold. Recall:
the share of copies within the threshold of their own original, by the rule for whole pictures (hash and mirrored hash)
and by the rule for crops (hashes of the evaluation picture's crops). False pairs: an evaluation picture with another
photograph within the threshold; precision: of all pairs found, copies and other photographs alike, the true share. The
photographs hold bursts of one scene; the nearest pairs are printed, so that a person can look at them.

Measured on the 8,000 photographs of Flickr8k, 250 of them altered, 256 bits. Whole pictures: every re-encoded, resized,
grey or mirrored copy is within 8 bits, copies with 1 % off all sides within 28, and at 40 bits 93 % of those with 2 %
off a corner but none with 5 %. Crops: at 24 bits every copy with up to 5 % off any side is found (99.2 % where the cuts
lie between the steps, 100 % otherwise), mirrored or not, up to 6 %; at 16 bits 84 to 100 %; 10 % off a corner is never
found. No false pair among two million up to 64 bits, by either rule. Hence `leak_crop_distance` 24, the least at which
recall is whole, and `leak_distance` 40 for cuts the other way round (the evaluation picture is the smaller one).
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

from components.data.deduplicate import DeduplicateParams
from components.data.duplicates.hashing import cropped_hashes, hash_words, perceptual_hash, perceptual_hashes
from components.data.duplicates.neighbours import neighbours

THRESHOLDS = (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    sink = io.BytesIO()
    image.save(sink, "JPEG", quality=quality)
    return Image.open(sink).convert("RGB")


def scaled(image: Image.Image, factor: float) -> Image.Image:
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    return jpeg(image.resize(size, Image.Resampling.BICUBIC), 85)


def cropped(
    image: Image.Image, left: float = 0, top: float = 0, right: float = 0, bottom: float = 0, mirror: bool = False
) -> Image.Image:
    """Shares of width and height taken off the four sides."""
    width, height = image.size
    box = (round(left * width), round(top * height), width - round(right * width), height - round(bottom * height))
    image = image.crop(box)
    return jpeg(ImageOps.mirror(image) if mirror else image, 85)


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
    "mirrored": mirrored,
    "1 % off all sides": partial(cropped, left=0.01, top=0.01, right=0.01, bottom=0.01),
    "2.5 % off all sides": partial(cropped, left=0.025, top=0.025, right=0.025, bottom=0.025),
    "5 % off all sides": partial(cropped, left=0.05, top=0.05, right=0.05, bottom=0.05),
    "5 % off one side": partial(cropped, left=0.05),
    "3 % off the bottom": partial(cropped, bottom=0.03),
    "2 % off a corner": partial(cropped, left=0.02, top=0.02),
    "5 % off a corner": partial(cropped, left=0.05, top=0.05),
    "1, 3, 5 % off three sides": partial(cropped, left=0.01, top=0.03, right=0.05),
    "mirrored, 5 % off a corner": partial(cropped, left=0.05, top=0.05, mirror=True),
    "6 % off a corner": partial(cropped, left=0.06, top=0.06),
    "10 % off a corner": partial(cropped, left=0.1, top=0.1),
}


def hashes_of(path: Path, alter: bool, hash_size: int) -> tuple[list[bytes | None], bytes | None]:
    """The hash of a file, of its mirror image, and of each alteration; and those of its crops."""
    image = Image.open(path).convert("RGB")
    found: list[bytes | None] = [*(perceptual_hashes(image, hash_size) or (None, None))]
    if not alter:
        return found, None
    found += [perceptual_hash(change(image), hash_size) for change in ALTERATIONS.values()]
    return found, cropped_hashes(image, hash_size, DeduplicateParams().cuts)


def nearest(queries: np.ndarray, corpus: np.ndarray, limit: int) -> dict[tuple[int, int], int]:
    """The least distance of each pair (picture, corpus) within `limit`; `queries` (n, hashes each, words)."""
    _, each, words = queries.shape
    best: dict[tuple[int, int], int] = {}
    left, right, apart = neighbours(queries.reshape(-1, words), corpus, limit)
    for one, other, bits in zip((left // each).tolist(), right.tolist(), apart.tolist(), strict=True):
        best[one, other] = min(bits, best.get((one, other), bits))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path(os.environ.get("VLP_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    parser.add_argument("folder", type=Path, nargs="?", default=shared / "data" / "flickr8k" / "images")
    parser.add_argument("--pictures", type=int, default=1000, help="photographs")
    parser.add_argument("--altered", type=int, default=100, help="of them evaluation pictures with altered copies")
    parser.add_argument("--hash-size", type=int, default=16)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    if not given.folder.is_dir():
        print(f"skipped: {given.folder} is not there")
        return
    files = sorted(given.folder.glob("*.jpg"))[: given.pictures]
    count = min(given.altered, len(files))
    chosen = np.linspace(0, len(files) - 1, count).astype(int)  # spread over all
    altered = set(chosen.tolist())
    with ProcessPoolExecutor(given.processes) as pool:
        jobs = [pool.submit(hashes_of, file, i in altered, given.hash_size) for i, file in enumerate(files)]
        found = [job.result() for job in jobs]
    if any(None in hashes for hashes, _ in found):
        raise SystemExit("a picture without enough detail for a hash is among them; leave it out")

    def words(hashes: list[bytes]) -> np.ndarray:
        return hash_words(hashes, given.hash_size)

    plain = words([hashes[0] for hashes, _ in found])  # type: ignore[misc]
    limits = [limit * given.hash_size**2 // 256 for limit in THRESHOLDS]
    whole = np.stack([words(found[i][0][:2]) for i in chosen])  # type: ignore[arg-type]
    crops = np.stack([words([found[i][1]]) for i in chosen])  # type: ignore[list-item]
    console = Console(width=160)
    for title, queries in (("whole pictures", whole), (f"crops, {crops.shape[1]} hashes each", crops)):
        table = Table(title=f"{title}: recall in % by threshold ({len(files)} photographs, {count} altered)")
        table.add_column("alteration")
        for limit in limits:
            table.add_column(str(limit), justify="right")
        pairs = nearest(queries, plain, limits[-1])
        others = {pair: bits for pair, bits in pairs.items() if pair[1] != chosen[pair[0]]}
        true = np.zeros(len(limits), int)
        for place, name in enumerate(ALTERATIONS):
            copies = words([found[i][0][2 + place] for i in chosen])  # type: ignore[misc]
            apart = np.bitwise_count(queries ^ copies[:, None]).sum(-1, dtype=int).min(-1)
            hits = np.array([(apart <= limit).sum() for limit in limits])
            true += hits
            table.add_row(name, *(f"{100 * hit / count:.1f}" for hit in hits))
        table.add_section()
        false = np.array([sum(bits <= limit for bits in others.values()) for limit in limits])
        table.add_row(f"false pairs of {count * (len(files) - 1):,}", *map(str, false))
        table.add_row("precision", *(f"{100 * t / max(t + f, 1):.2f}" for t, f in zip(true, false, strict=True)))
        console.print(table)
        for (one, other), bits in sorted(others.items(), key=lambda item: item[1])[:10]:
            console.print(f"{bits:4d}  {files[chosen[one]].name}  {files[other].name}")


if __name__ == "__main__":
    main()
