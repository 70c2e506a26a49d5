"""The first steps of `deduplicate`: hash every picture, and gather the names of those that are protected."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, UnidentifiedImageError
from threadpoolctl import threadpool_limits

from components.data.cleaning.pictures import open_picture
from components.data.deduplicate import DeduplicateParams
from components.data.duplicates.decide import HASH_SCHEMA
from components.data.duplicates.hashing import cropped_hashes, perceptual_hashes
from components.data.duplicates.names import KINDS, names_of
from components.data.duplicates.protected import PROTECTED_FILE, Origin, find_files, listed_names, with_synonyms
from components.io.records import open_records

BATCH = 64  # records at a time
PICTURES_PER_PART = 1000
HASHES_FILE = "hashes.parquet"
NAMES_SCHEMA = pa.schema(
    [
        ("name", pa.string()),  # such as coco:123456; sorted
        ("task", pa.string()),  # the task, or the list, that protects it
        ("split", pa.string()),
        ("picture", pa.string()),  # the record's id, or the surest name of a picture that is only listed
    ]
)

ListPart = tuple[str, list[tuple[str, str | None, Path]]]  # the list's name; of each picture name, split and file


def hash_part(params: DeduplicateParams, names: Path, file: Path, folder: Path) -> dict[str, Any]:
    """Hash the pictures of one record file into ``hashes.parquet``; those with a protected name, their crops too."""
    protected = _protected(names / PROTECTED_FILE)
    with _one_thread(), pq.ParquetWriter(folder / HASHES_FILE, HASH_SCHEMA) as writer:
        for batch in open_records(file).select(_COLUMNS).to_batches(max_chunksize=BATCH):
            rows = []
            for record in batch.to_pylist():
                found = [name for name in _names(record, record["source"]) if name in protected]
                row = _hashes(open_picture(record["image"]), params, crops=bool(found))
                row["named"] = protected[min(found, key=_surest)] if found else None
                rows.append({**row, "id": record["id"], "sha256": record["sha256"], "bytes": len(record["image"])})
            writer.write_table(pa.Table.from_pylist(rows, schema=HASH_SCHEMA))
    return {}


_COLUMNS = ["id", "source", "url", "sha256", "image", "coco_id"]


def _names(record: dict[str, Any], hint: str | None) -> set[str]:
    """The names of a record's picture: what its source states, and what its URL or file name says."""
    stated = set() if record["coco_id"] is None else {f"coco:{record['coco_id']}"}
    return stated | names_of(record["url"] or "", hint or "")


def hash_task_part(params: DeduplicateParams, file: Path, folder: Path) -> dict[str, Any]:
    """Hash the evaluation pictures of one record file, ``TASK/SPLIT/records-*.arrow``, with crops and names."""
    task, split = file.parent.parent.name, file.parent.name
    with _one_thread(), pq.ParquetWriter(folder / HASHES_FILE, HASH_SCHEMA) as writer:
        for batch in open_records(file).select(_COLUMNS).to_batches(max_chunksize=BATCH):
            rows = [
                {
                    **_hashes(open_picture(record["image"]), params, crops=True),
                    "id": record["id"],
                    "sha256": record["sha256"],
                    "bytes": len(record["image"]),
                    "task": task,
                    "split": split,
                    "names": sorted(_names(record, task)),
                }
                for record in batch.to_pylist()
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema=HASH_SCHEMA))
    return {}


def list_parts(params: DeduplicateParams) -> list[ListPart]:
    """The pictures of the protected lists that are on this machine, cut into partitions."""
    parts: list[ListPart] = []
    for task, each in params.protected.items():
        if each.images is not None:
            files = find_files(each.images, each.path, each.splits)
            parts += [(task, files[at : at + PICTURES_PER_PART]) for at in range(0, len(files), PICTURES_PER_PART)]
    return parts


def hash_list_part(params: DeduplicateParams, part: ListPart, folder: Path) -> dict[str, Any]:
    """Hash pictures of a protected list from their files; one that cannot be decoded counts by its bytes alone."""
    import hashlib

    task, pictures = part
    rows = []
    for name, split, path in pictures:
        data = path.read_bytes()
        image = _open(data)
        with _one_thread():
            row = {"pixels": 0} if image is None else _hashes(image, params, crops=True)
        sha256 = hashlib.sha256(data).hexdigest()
        rows.append({**row, "id": name, "sha256": sha256, "bytes": len(data), "task": task, "split": split})
    pq.write_table(pa.Table.from_pylist(rows, schema=HASH_SCHEMA), folder / HASHES_FILE)
    return {}


def _one_thread() -> threadpool_limits:
    """A context in which linear algebra keeps to one core: on small matrices more threads are eight times slower."""
    return threadpool_limits(1, user_api="blas")


def _open(data: bytes) -> Image.Image | None:
    """A picture from a file that no stage has normalised, or None when it cannot be decoded."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def _hashes(image: Image.Image, params: DeduplicateParams, *, crops: bool) -> dict[str, Any]:
    hashed, mirrored = (perceptual_hashes(image, params.hash_size) if params.near else None) or (None, None)
    return {
        "pixels": image.width * image.height,
        "hash": hashed,
        "mirrored": mirrored if params.mirror else None,
        "crops": cropped_hashes(image, params.hash_size, params.cuts, params.mirror) if crops and params.cuts else None,
    }


def protect_part(params: DeduplicateParams, hashes: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Gather every protected name, from tasks (their `hashes`) and from lists, into ``protected.parquet``."""
    names: dict[str, Origin] = {}
    for part in hashes:
        for row in pq.read_table(part / HASHES_FILE, columns=["id", "task", "split", "names"]).to_pylist():
            for name in row["names"] or []:
                names.setdefault(name, Origin(row["task"], row["split"], row["id"]))
    for task, each in params.protected.items():
        for name, origin in listed_names(task, each.path, each.splits, each.ids).items():
            names.setdefault(name, origin)
    names = with_synonyms(names, params.synonyms)
    rows = [{"name": name, **names[name]._asdict()} for name in sorted(names)]
    pq.write_table(pa.Table.from_pylist(rows, schema=NAMES_SCHEMA), folder / PROTECTED_FILE)
    return {"names": len(rows)}


@lru_cache(maxsize=1)  # each process hashes many parts
def _protected(file: Path) -> dict[str, int]:
    """The place of each protected name."""
    names = pq.read_table(file, columns=["name"])["name"].to_pylist()
    return {name: place for place, name in enumerate(names)}


def _surest(name: str) -> tuple[int, str]:
    return KINDS.index(name.partition(":")[0]), name
