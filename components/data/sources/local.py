"""Pictures that lie on this machine: names that stay within their folder, and the reader of a folder with captions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from components.data.sources.rows import SHA256, SourceRow, is_text, malformed_row
from components.io.errors import UserError
from components.io.outcomes import Reason

PICTURE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".avif"})


Inside = Callable[[str], "Path | Reason"]


def local_row(
    row: int,
    location: str,
    image: Any,
    caption: Any,
    split: str | None,
    inside: Inside,
    *,
    sha256: Any = None,
    coco_id: int | None = None,
) -> SourceRow:
    """A row from values of any type; `image` is a URL or a name within the images folder."""
    values = {"picture": image, "caption": caption, "sha256": sha256}
    if not all(value is None or is_text(value) for value in values.values()):
        return malformed_row(row, location, "picture, caption or sha256 is not text", split, content=values)
    sha256 = sha256.strip().lower() if sha256 is not None else None
    if sha256 is not None and SHA256.fullmatch(sha256) is None:
        return malformed_row(row, location, "its sha256 is not 64 hexadecimal digits", split, content=values)
    more: dict[str, Any] = {"sha256": sha256, "coco_id": coco_id}
    if caption is None:
        return SourceRow(row, location, None, None, None, split, Reason.MISSING_CAPTION)
    if image is None or not image:
        return SourceRow(row, location, None, None, caption, split, Reason.MISSING_URL)
    if image.lower().startswith(("http://", "https://")):
        return SourceRow(row, location, image, None, caption, split, None, **more)
    path = inside(image)
    if isinstance(path, Reason):
        note, content = "outside of the images folder", image if path is Reason.MALFORMED_ROW else None
        return SourceRow(row, location, None, None, caption, split, path, image, note, content=content)
    return SourceRow(row, location, None, path, caption, split, None, image, **more)


def read_folder(root: Path, names: Iterable[str] | None = None) -> Iterator[SourceRow]:
    """Pictures, each with a text file of the same stem beside it that holds a caption on each line.

    `names` are those of all files where the pictures themselves are elsewhere (in a bucket); the text files are under
    `root` even then.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder: set the source's `path` and `images` to the folder of pictures")
    inside = inside_of(root)
    row = 0
    for name in _walk(root) if names is None else names:
        parts = PurePosixPath(name).parts
        if PurePosixPath(name).suffix.lower() not in PICTURE_SUFFIXES or any(part.startswith(".") for part in parts):
            continue
        captions: Sequence[str | Reason | None] = _beside(path_below(root, name)) or [None]
        for caption in captions:
            if isinstance(caption, Reason) or not is_text(name):
                yield malformed_row(row, repr(name), "its captions or its name are not UTF-8", content=name)
            else:
                yield local_row(row, name, name, caption, None, inside)
            row += 1


def _walk(root: Path) -> Iterator[str]:
    """The names of all files below `root`: a folder's own in order, then those of its folders."""
    for folder, folders, files in os.walk(root):
        folders.sort()
        for file in sorted(files):
            name = os.fsencode((Path(folder) / file).relative_to(root).as_posix())
            yield name.decode("utf-8", "surrogateescape")


def path_below(root: Path, name: str) -> Path:
    """The path of `name`, which is UTF-8 on the disk whatever the locale says of file names."""
    return root / os.fsdecode(name.encode("utf-8", "surrogateescape"))


def _beside(picture: Path) -> Sequence[str | Reason]:
    """The captions of the text file beside a picture; a Reason in their place when it cannot be read."""
    try:
        text = picture.with_suffix(".txt").read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        return []
    except (UnicodeDecodeError, OSError):
        return [Reason.MALFORMED_ROW]
    return [line for line in (line.removesuffix("\r") for line in text.split("\n")) if line.strip()]


def inside_of(root: Path) -> Inside:
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
        path = path_below(root, name)
        try:
            if path.parent not in folders:
                folders[path.parent] = path.parent.resolve().is_relative_to(real_root)
            leaves = path.is_symlink() and not path.resolve().is_relative_to(real_root)
        except (OSError, RuntimeError):  # a loop of links, a name too long for the file system
            return Reason.FILE_MISSING
        return Reason.FILE_MISSING if leaves or not folders[path.parent] else path

    return inside
