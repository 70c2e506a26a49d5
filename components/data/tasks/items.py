"""One item of a task's annotations, and reading JSON of lists, objects or lines."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn

from components.io.errors import UserError
from components.io.outcomes import Reason

PICKLES = (".p", ".pkl", ".pickle")


@dataclass(frozen=True)
class Item:
    """Pictures with a text and whatever the task knows of them, or the reason why it cannot be used.

    `pictures` gives for each picture the names within the images folder where it may lie, the likeliest first.
    """

    location: str  # for a person: "dev.jsonl:17"
    split: str | None
    pictures: tuple[tuple[str, ...], ...]
    text: str | None
    values: dict[str, Any] = field(default_factory=dict)
    error: Reason | None = None
    note: str = ""


def refused(location: str, split: str | None, pictures: int, note: str, error: Reason = Reason.MALFORMED_ROW) -> Item:
    """An item that cannot be used; it still stands for as many (picture, text) rows as its task has pictures."""
    return Item(location, split, ((),) * pictures, None, error=error, note=note)


def load_json(file: Path) -> Any:
    """The content of a JSON file, or a list of the objects of a file with one on each line.

    Lines that are no JSON become None. Raises UserError when the file is missing, is no UTF-8, or is neither.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: set `annotations` to the task's annotation files") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): set `annotations` to annotation files") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (at byte {error.start}): save it as UTF-8") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = [line for line in text.splitlines() if line.strip()]
        objects = [_line(line) for line in lines]
        if len(lines) < 2 or not any(isinstance(one, dict) for one in objects):
            raise UserError(f"{file} is neither JSON nor JSON by lines ({error}): get it again") from None
        return objects


def _line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries; whatever would name a class or a function is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to things outside itself")


def load_plain_pickle(file: Path) -> Any:
    """The plain data in a pickle (RefCOCO's ``refs(unc).p``), without running anything that the file says.

    Raises UserError when it is missing, damaged, or holds more than plain data.
    """
    try:
        stream: BinaryIO
        with file.open("rb") as stream:
            return _PlainUnpickler(stream, encoding="utf-8").load()
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: set `annotations` to the task's annotation files") from None
    except pickle.UnpicklingError as error:
        raise UserError(f"{file} is not plain data and is not read ({error}): get the published file again") from None
    except (EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError, MemoryError, OSError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}): get it again") from None


def inside(root: Path, names: tuple[str, ...]) -> tuple[Path, str] | None:
    """The first of `names` that is a file within `root`, else the first that could be one; None when none could.

    Names come from annotations, so absolute ones and those that lead out of `root` are not taken.
    """
    safe = [name for name in names if name and not PurePosixPath(name).is_absolute() and ".." not in name.split("/")]
    safe = [name for name in safe if "\0" not in name]
    for name in safe:
        if (root / name).is_file():
            return root / name, name
    return (root / safe[0], safe[0]) if safe else None
