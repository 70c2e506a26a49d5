"""Readers of the JSON layouts: ALBEF's, Karpathy's, COCO's captions, Visual Genome's region descriptions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.data.sources.formats import Format
from components.data.sources.json_stream import iter_array, iter_members
from components.data.sources.local import inside_of, local_row
from components.data.sources.rows import SourceRow, malformed_row
from components.io.errors import UserError

IMAGE_DATA_FILE = "image_data.json"  # Visual Genome's list of pictures, beside its region descriptions


def layout_of(file: Path) -> Format | None:
    """Which of the layouts a JSON file is of, by its first picture; None when of none."""
    try:
        with file.open("rb") as stream:
            start = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if start == b"[":
            first = next(iter_array(file), None)
            return "visual_genome" if isinstance(first, dict) and "regions" in first else "albef"
        if start == b"{":
            image = next((item for _, item in iter_members(file, ("images",))), None)
            coco = isinstance(image, dict) and "file_name" in image and "sentences" not in image
            return "coco" if coco else "karpathy"
    except UserError:  # its reader says what is wrong
        return "karpathy" if start == b"{" else "albef"
    return None


def read_albef(file: Path, root: Path) -> Iterator[SourceRow]:
    """Rows of a list of ``{"image": name or URL, "caption": text or [text, ...]}``; `sha256` if it is there."""
    inside = inside_of(root)
    row = 0
    for index, item in enumerate(iter_array(file)):
        location = f"{file.name}:[{index}]"
        entry = item if isinstance(item, dict) else {}
        captions = entry.get("caption")
        several = isinstance(captions, list)
        for number, caption in enumerate((captions or [None]) if isinstance(captions, list) else [captions]):
            where = f"{location}.caption[{number}]" if several else location
            if not isinstance(item, dict):
                yield malformed_row(row, where, "not an object", content=item)
            else:
                yield local_row(row, where, entry.get("image"), caption, None, inside, sha256=entry.get("sha256"))
            row += 1


def read_karpathy(file: Path, root: Path, splits: tuple[str, ...] | None) -> Iterator[SourceRow]:
    """Rows of ``{"images": [{"filename", "filepath"?, "split", "sentences": [{"raw"}]}]}``, of `splits` if given."""
    inside = inside_of(root)
    row = 0
    wrong = UserError(f"{file} is not Karpathy's layout, {{images: [...]}} with sentences: set the source's `format`")
    for index, (key, item) in enumerate(iter_members(file, ("images", "annotations"))):
        if key == "annotations":
            raise wrong
        location = f"{file.name}:images[{index}]"
        entry = item if isinstance(item, dict) else {}
        split = entry.get("split") if isinstance(entry.get("split"), str) else None
        selected = splits is None or split in splits
        sentences = entry.get("sentences")
        sentences = sentences if isinstance(sentences, list) and sentences else [None]
        folder, name = entry.get("filepath"), entry.get("filename")
        if isinstance(folder, str) and folder and isinstance(name, str):
            name = f"{folder}/{name}"
        for number, sentence in enumerate(sentences):
            where = f"{location}.sentences[{number}]"
            if not selected:
                pass
            elif not isinstance(item, dict):
                yield malformed_row(row, location, "not an object", content=item)
            elif sentence is not None and not isinstance(sentence, dict):
                yield malformed_row(row, where, "not an object", split, content=sentence)
            else:
                caption = None if sentence is None else sentence.get("raw")
                coco_id = whole_number(entry.get("cocoid"))
                yield local_row(row, where, name, caption, split, inside, coco_id=coco_id)
            row += 1


def read_coco(file: Path, root: Path, *, local: bool) -> Iterator[SourceRow]:
    """Rows of ``{"images": [{"id", "file_name", "coco_url"}], "annotations": [{"image_id", "caption"}]}``.

    A row per annotation in their order, then one for each picture without any (its caption is missing). Pictures are
    files under `root` when `local`, or when the list gives no URL for them.
    """
    inside = inside_of(root)
    pictures: dict[int, tuple[Any, Any]] = {}  # COCO has 330,000
    for _, item in iter_members(file, ("images",)):
        number = whole_number(item.get("id")) if isinstance(item, dict) else None
        if number is not None:
            url = item.get("coco_url") or item.get("flickr_url")
            pictures[number] = (item.get("file_name"), None if local else url)
    row = 0
    without = set(pictures)
    for _, item in iter_members(file, ("annotations",), required=False):
        location = f"{file.name}:annotations[{row}]"
        number = whole_number(item.get("image_id")) if isinstance(item, dict) else None
        if number is None or number not in pictures:
            note = "its image_id names no picture of the list" if isinstance(item, dict) else "not an object"
            yield malformed_row(row, location, note, content=item)
        else:
            without.discard(number)
            name, url = pictures[number]
            yield local_row(row, location, url or name, item.get("caption"), None, inside, coco_id=number)
        row += 1
    for number, (name, url) in pictures.items():
        if number in without:
            yield local_row(row, f"{file.name}:images, id {number}", url or name, None, None, inside, coco_id=number)
            row += 1


def read_visual_genome(file: Path, root: Path, *, local: bool, image_data: Path | None) -> Iterator[SourceRow]:
    """Rows of ``[{"id", "regions": [{"phrase"}]}]``, a row per region.

    `image_data` is Visual Genome's own list of pictures, ``[{"image_id", "url", "coco_id"}]``: from it come URLs, the
    folder a picture lies in (``VG_100K_2/1.jpg``) and its number in COCO. Pictures are files under `root` when `local`,
    or when there is no URL: as ``VG_100K_2/1.jpg``, or ``1.jpg`` where there is no such file.
    """
    known: dict[int, tuple[str | None, int | None]] = {}  # 108,000 pictures
    for item in iter_array(image_data) if image_data is not None else ():
        number = whole_number(item.get("image_id", item.get("id"))) if isinstance(item, dict) else None
        if number is not None:
            url = item.get("url")
            known[number] = (url if isinstance(url, str) else None, whole_number(item.get("coco_id")))
    inside = inside_of(root)
    row = 0
    for index, item in enumerate(iter_array(file)):
        location = f"{file.name}:[{index}]"
        number = whole_number(item.get("id", item.get("image_id"))) if isinstance(item, dict) else None
        if number is None:
            yield malformed_row(row, location, "no object with the id of a picture", content=item)
            row += 1
            continue
        regions = item.get("regions")
        url, coco_id = known.get(number, (None, None))
        image = url if url is not None and not local else _genome_name(root, number, url)
        for place, region in enumerate(regions if isinstance(regions, list) and regions else [{}]):
            where = f"{location}.regions[{place}]"
            if isinstance(region, dict):
                yield local_row(row, where, image, region.get("phrase"), None, inside, coco_id=coco_id)
            else:
                yield malformed_row(row, where, "not an object", content=region)
            row += 1


def _genome_name(root: Path, number: int, url: str | None) -> str:
    """A picture's name under `root`: in the folder of its URL, or flat."""
    flat = f"{number}.jpg"
    folder = url.rstrip("/").split("/")[-2:-1] if url is not None else []
    if not folder or folder[0] in ("", ".", "..") or (root / flat).is_file():
        return flat
    return f"{folder[0]}/{flat}"


def whole_number(value: Any) -> int | None:
    """A picture's number as the lists have it; None for anything else, numbers too large for a column included."""
    return value if type(value) is int and 0 <= value < 1 << 63 else None
