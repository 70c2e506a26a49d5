"""Lists of pictures to keep out: read in the layouts of the data sets that publish them, known by all their names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from components.data.duplicates.names import Kind, entry_files, entry_names, show
from components.io.errors import UserError

PROTECTED_FILE = "protected.parquet"
# where the entries of an object stand, the first that is there; a list by split (`{"testA": [...]}`) has none of them
_BODIES = ("images", "questions", "refs", "annotations", "data")


class Entry(NamedTuple):
    """One picture of a list."""

    split: str | None
    value: Any  # text, number or object


class Origin(NamedTuple):
    """Why a name is protected."""

    task: str  # the task or the list
    split: str | None
    picture: str  # the evaluation picture: a record's id, or a name where only that is known


def read_entries(path: Path) -> Iterator[Entry]:
    """The entries of a list of pictures: JSON in its many layouts, JSON lines, or text with one name a line.

    A pickle is read where it holds plain data alone, as RefCOCO's ``refs(unc).p``.

    Raises UserError when the file is missing, not UTF-8, or of none of these layouts.
    """
    if path.suffix.lower() in (".p", ".pkl", ".pickle"):  # RefCOCO's refs(unc).p
        from components.data.tasks.items import load_plain_pickle

        yield from _entries(path, load_plain_pickle(path))
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist: correct its path in the section `deduplicate` of params.yaml"
        ) from None
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is no readable UTF-8 text ({error}): give a JSON or text list of pictures") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not text.lstrip().startswith(("[", "{")):
        for line in lines:  # a second column, such as the split's name, is not read
            yield Entry(None, line.replace(",", "\t").split("\t")[0].strip().strip('"'))
        return
    try:
        content = json.loads(text)
    except ValueError as whole:
        try:  # JSON lines
            content = [json.loads(line) for line in lines]
        except ValueError:
            raise UserError(f"{path} is not JSON ({whole}): mend the file or give another list") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply to be a list of pictures: give another list") from None
    yield from _entries(path, content)


def _entries(path: Path, content: Any) -> Iterator[Entry]:
    if isinstance(content, dict):
        body = next((content[key] for key in _BODIES if isinstance(content.get(key), list)), None)
        if body is None:
            lists = {key: value for key, value in content.items() if isinstance(value, list)}
            if not lists:
                raise UserError(f"{path} holds no list of pictures: give one of JSON, JSON lines or one name a line")
            for split, values in lists.items():
                yield from (Entry(split, value) for value in values)
            return
        content = body
    if not isinstance(content, list):
        raise UserError(f"{path} holds no list of pictures: give one of JSON, JSON lines or one name a line")
    for value in content:
        split = value.get("split") if isinstance(value, dict) else None
        yield Entry(split if isinstance(split, str) else None, value)


def select(path: Path, splits: Sequence[str]) -> list[Entry]:
    """The entries of a list that are of one of `splits`; all of them where none is given.

    Raises UserError when that leaves nothing: a list that protects nothing is a mistake.
    """
    entries = list(read_entries(path))
    chosen = [entry for entry in entries if not splits or entry.split in splits]
    missing = [split for split in splits if all(entry.split != split for entry in chosen)]
    if not chosen or missing:
        found = ", ".join(sorted({entry.split for entry in entries if entry.split is not None})) or "none"
        what = f"no picture of split {missing[0]!r} (its splits: {found})" if missing else "no picture"
        raise UserError(f"{path} holds {what}: correct `splits` or `path` of this list in deduplicate.protected")
    return chosen


def listed_names(task: str, path: Path, splits: Sequence[str], numbers: Kind) -> dict[str, Origin]:
    """The names of a list's pictures. Raises UserError when an entry has none, since it would be left unprotected."""
    found: dict[str, Origin] = {}
    for number, entry in enumerate(select(path, splits)):
        names = entry_names(entry.value, numbers)
        if not names and not list(entry_files(entry.value)):
            raise UserError(f"{path}: entry {number + 1} names no picture: mend the list or remove the entry")
        for name in sorted(names):
            found.setdefault(name, Origin(task, entry.split, show(name, names)))
    return found


def with_synonyms(names: Mapping[str, Origin], files: Sequence[Path]) -> dict[str, Origin]:
    """`names` and every other name that `files` give to the same pictures.

    Files are such as Visual Genome's ``image_data.json`` (its own id, `coco_id`, `flickr_id`) and COCO's annotations
    (id, file name, Flickr URL). What one file adds, another may name once more, in whatever order they are given.
    """
    groups = [names_ for file in files for entry in read_entries(file) if len(names_ := _synonyms(entry.value)) > 1]
    found = dict(names)
    size = -1
    while size != len(found):
        size = len(found)
        for group in groups:
            origin = next((found[name] for name in sorted(group) if name in found), None)
            if origin is not None:
                for name in group:
                    found.setdefault(name, origin)
    return found


def _synonyms(entry: Any) -> set[str]:
    """The names of one picture in a file of synonyms, where an entry that is not an object says nothing."""
    return entry_names(entry, "coco") if isinstance(entry, dict) else set()


def find_files(folder: Path, path: Path, splits: Sequence[str]) -> list[tuple[str, str | None, Path]]:
    """The pictures of a list that lie in `folder`: name in the list, split, file; each once, in the list's order.

    A file is looked for under its full name within the folder, then by its last part alone. Raises UserError when none
    is there.
    """
    found: dict[Path, tuple[str, str | None, Path]] = {}
    root = folder.resolve()
    for entry in select(path, splits):
        for name in entry_files(entry.value):
            for candidate in (name, name.replace("\\", "/").rsplit("/", 1)[-1]):
                file = folder / candidate
                if "\0" not in candidate and file.resolve().is_relative_to(root) and file.is_file():
                    found.setdefault(file, (name, entry.split, file))
                    break
    if not found:
        raise UserError(f"{folder} holds none of the pictures that {path} names: correct `images` of this list")
    return list(found.values())
