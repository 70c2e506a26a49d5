"""Readers of lists whose pictures may lie on this machine: ALBEF's JSON, Karpathy's JSON, a folder with captions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from components.data.sources.rows import SourceRow, is_text, malformed_row
from components.io.errors import UserError
from components.io.outcomes import Reason

PICTURE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".avif"})


# -- JSON


def _load_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (at byte {error.start}): save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}): get it again, or set the source's `format`") from None


def read_albef(file: Path, root: Path) -> Iterator[SourceRow]:
    """Rows of a list of ``{"image": name or URL, "caption": text or [text, ...]}``."""
    content = _load_json(file)
    if not isinstance(content, list):
        raise UserError(f"{file} is not ALBEF's layout, a list of {{image, caption}}: set the source's `format`")
    inside = _inside(root)
    row = 0
    for index, item in enumerate(content):
        location = f"{file.name}:[{index}]"
        entry = item if isinstance(item, dict) else {}
        captions = entry.get("caption")
        several = isinstance(captions, list)
        for number, caption in enumerate((captions or [None]) if isinstance(captions, list) else [captions]):
            where = f"{location}.caption[{number}]" if several else location
            if not isinstance(item, dict):
                yield malformed_row(row, where, "not an object")
            else:
                yield _json_row(row, where, entry.get("image"), caption, None, inside)
            row += 1


def read_karpathy(file: Path, root: Path, splits: tuple[str, ...] | None) -> Iterator[SourceRow]:
    """Rows of ``{"images": [{"filename", "filepath"?, "split", "sentences": [{"raw"}]}]}``, of `splits` if given."""
    content = _load_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("images"), list) or "annotations" in content:
        raise UserError(f"{file} is not Karpathy's layout, {{images: [...]}} with sentences: set the source's `format`")
    inside = _inside(root)
    row = 0
    for index, item in enumerate(content["images"]):
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
                yield malformed_row(row, location, "not an object")
            elif sentence is not None and not isinstance(sentence, dict):
                yield malformed_row(row, where, "not an object", split)
            else:
                caption = None if sentence is None else sentence.get("raw")
                yield _json_row(row, where, name, caption, split, inside)
            row += 1


def _json_row(
    row: int, location: str, image: Any, caption: Any, split: str | None, inside: Callable[[str], Path | Reason]
) -> SourceRow:
    """A row from JSON values of any type; `image` is a URL or a name within the images folder."""
    if not (image is None or is_text(image)) or not (caption is None or is_text(caption)):
        return malformed_row(row, location, "picture or caption is not text", split)
    if caption is None:
        return SourceRow(row, location, None, None, None, split, Reason.MISSING_CAPTION)
    if image is None or not image:
        return SourceRow(row, location, None, None, caption, split, Reason.MISSING_URL)
    if image.lower().startswith(("http://", "https://")):
        return SourceRow(row, location, image, None, caption, split, None)
    path = inside(image)
    if isinstance(path, Reason):
        return SourceRow(row, location, None, None, caption, split, path, image, "outside of the images folder")
    return SourceRow(row, location, None, path, caption, split, None, image)


# -- folder


def read_folder(root: Path) -> Iterator[SourceRow]:
    """Pictures, each with a text file of the same stem beside it that holds a caption on each line."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: set the source's `path` and `images` to the folder of pictures")
    inside = _inside(root)
    row = 0
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files):
            picture = Path(folder) / file
            if picture.suffix.lower() not in PICTURE_SUFFIXES or file.startswith("."):
                continue
            name = picture.relative_to(root).as_posix()
            captions: Sequence[str | Reason | None] = _beside(picture) or [None]
            for caption in captions:
                if isinstance(caption, Reason) or not is_text(name):
                    yield malformed_row(row, repr(name), "its captions or its name are not UTF-8")
                else:
                    yield _json_row(row, name, name, caption, None, inside)
                row += 1


def _beside(picture: Path) -> Sequence[str | Reason]:
    """The captions of the text file beside a picture; a Reason in their place when it cannot be read."""
    try:
        text = picture.with_suffix(".txt").read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        return []
    except (UnicodeDecodeError, OSError):
        return [Reason.MALFORMED_ROW]
    return [line for line in (line.removesuffix("\r") for line in text.split("\n")) if line.strip()]


def _inside(root: Path) -> Callable[[str], Path | Reason]:
    """A function that turns a name of a list into a path within `root`, or into the reason why not.

    A name that is absolute, climbs or holds a NUL is malformed; one that a symbolic link leads outside counts as
    missing. Links are followed per folder once, so that a big list costs one look per picture.
    """
    real_root = root.resolve()
    folders: dict[Path, bool] = {}

    @lru_cache(maxsize=1024)  # the captions of a picture follow each other
    def inside(name: str) -> Path | Reason:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name or "\\" in name or not pure.parts:
            return Reason.MALFORMED_ROW
        path = root / pure
        try:
            if path.parent not in folders:
                folders[path.parent] = path.parent.resolve().is_relative_to(real_root)
            leaves = path.is_symlink() and not path.resolve().is_relative_to(real_root)
        except (OSError, RuntimeError):  # a loop of links, a name too long for the file system
            return Reason.FILE_MISSING
        return Reason.FILE_MISSING if leaves or not folders[path.parent] else path

    return inside
