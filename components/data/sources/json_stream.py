"""JSON lists element by element: a file of gigabytes never lies in memory as a whole.

The standard library's scanner does the parsing; this module only feeds it. It is as strict as ``json.loads`` and, being
the same code, reads every value the same way (lone surrogates, which a later rule rejects, come through).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from components.io.errors import UserError

READ_BYTES = 1 << 20
ELEMENT_CHARACTERS = 64 << 20  # a longer element is no pair of a list, or a quotation mark was lost
_WHITE = " \t\n\r"
_scan = json.JSONDecoder().raw_decode


def iter_array(file: Path) -> Iterator[Any]:
    """The elements of a file that is one JSON list.

    Raises UserError when the file is no list, is not UTF-8 or JSON (elements before the damage have been yielded then).
    """
    with file.open("rb") as stream:
        text = _Text(file, stream)
        if text.peek() != "[":
            raise UserError(f"{file} is not a JSON list: set the source's `format` to its layout")
        yield from text.array()
        text.end()


def iter_members(file: Path, keys: Collection[str], *, required: bool = True) -> Iterator[tuple[str, Any]]:
    """Of a file that is one JSON object, the elements of the lists under `keys`, as (key, element) in file order.

    What stands under other keys is passed over. Raises UserError as `iter_array` does, when a key holds no list, and
    when none of the keys is there although `required`.
    """
    missing = required
    with file.open("rb") as stream:
        text = _Text(file, stream)
        if text.peek() != "{":
            raise UserError(f"{file} is not a JSON object: set the source's `format` to its layout")
        for key in text.members():
            listed = text.peek() == "["
            missing = missing and key not in keys
            if key in keys and not listed:
                raise UserError(f"{file} holds no list under {key!r}: set the source's `format` to its layout")
            if not listed:
                text.value()
                continue
            for element in text.array():
                if key in keys:
                    yield key, element
        text.end()
    if missing:
        raise UserError(f"{file} holds no list under {' or '.join(keys)}: set the source's `format` to its layout")


class _Text:
    """A file's text as far as it is read, and the place in it."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file = file
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._ended = False

    def _read(self, count: int = READ_BYTES) -> None:
        data = self._stream.read(count)
        self._ended = not data
        try:
            more = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError:
            before = self._stream.tell() - len(data)
            raise UserError(f"{self._file} is not UTF-8 (after byte {before}): save it as UTF-8") from None
        self._text, self._at = self._text[self._at :] + more, 0

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self._file} is not JSON ({what}): get it again, or set the source's `format`")

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _WHITE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read()

    def _take(self, allowed: str) -> str:
        found = self.peek()
        if found not in allowed or not found:
            got = repr(found) if found else "the end"
            raise self._damaged(f"{got} where one of {' '.join(allowed)} should stand")
        self._at += 1
        return found

    def value(self) -> Any:
        """The value that begins here."""
        self.peek()
        while True:
            try:
                value, end = _scan(self._text, self._at)
            except RecursionError:
                raise self._damaged("nested too deeply") from None
            except ValueError as error:
                # an error well before the end of what is read is none of what is still to come
                at = getattr(error, "pos", len(self._text))
                cut = str(error).startswith("Unterminated string") or at >= len(self._text) - 16
                if self._ended or not cut:
                    raise self._damaged(str(error)) from None
            else:
                if end < len(self._text) or self._ended:  # a number may go on
                    self._at = end
                    return value
            held = len(self._text) - self._at
            if held > ELEMENT_CHARACTERS:
                raise self._damaged(f"an element of more than {ELEMENT_CHARACTERS} characters")
            self._read(max(READ_BYTES, held))  # doubling: an element is scanned a few times, not once per piece

    def array(self) -> Iterator[Any]:
        """The elements of the list that begins here."""
        self._take("[")
        if self.peek() == "]":
            self._at += 1
            return
        while True:
            yield self.value()
            if self._take(",]") == "]":
                return

    def members(self) -> Iterator[str]:
        """The keys of the object that begins here; after each, its value must be taken."""
        self._take("{")
        if self.peek() == "}":
            self._at += 1
            return
        while True:
            if self.peek() != '"':
                raise self._damaged("a key is missing")
            key = self.value()
            self._take(":")
            yield key
            if self._take(",}") == "}":
                return

    def end(self) -> None:
        """Nothing but white space may follow."""
        if self.peek():
            raise self._damaged("more after its end")
