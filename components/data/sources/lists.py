"""Reading source lists of any layout: caption<TAB>url, parquet, the JSON layouts, folders of pictures.

Every reader yields one :class:`SourceRow` per (picture, caption) pair, in reading order, and drops nothing: what cannot
be used comes out as a row with its `error`. Text files are UTF-8 whatever the locale. Memory does not grow with the
number of rows, but for the pictures of a COCO or Visual Genome list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from components.data.sources.formats import Format
from components.data.sources.json_lists import (
    IMAGE_DATA_FILE,
    layout_of,
    read_albef,
    read_coco,
    read_karpathy,
    read_visual_genome,
)
from components.data.sources.local import read_folder
from components.data.sources.rows import SourceRow, malformed_row, web_row
from components.io.errors import UserError

__all__ = ["Format", "SourceRow", "read_source"]

LIST_SUFFIXES: dict[str, Format] = {".tsv": "tsv", ".txt": "tsv", ".parquet": "parquet"}
URL_COLUMNS = ("url", "image_url")  # looked for without regard to case when `url_column` is not given
CAPTION_COLUMNS = ("text", "caption")
LINE_BYTES = 1 << 20  # a longer line is no caption and URL, and must not fill the memory
PARQUET_ROWS = 4096
WITH_SPLITS = ("karpathy", "refcoco", "clevr")


def read_source(
    path: Path,
    *,
    format: Format = "auto",
    list: str | None = None,
    images: str | None = None,
    url_column: str | None = None,
    caption_column: str | None = None,
    splits: tuple[str, ...] | None = None,
    sha256_column: str | None = None,
    names: Iterable[str] | None = None,
) -> Iterator[SourceRow]:
    """The rows of a source, in reading order.

    `path` is a list file or a folder; in a folder `list` names the list file and `images` the folder of local pictures
    (default: the folder itself; for COCO's and Visual Genome's lists: their URLs). `splits` keeps rows of these splits
    only (Karpathy's JSON, RefCOCO's references, CLEVR's scenes). `sha256_column` is a parquet's column of expected
    hashes. `names` are the files of a folder whose pictures are elsewhere. Raises UserError when the list is missing,
    is not of the format, lacks a column, or is damaged in a way that leaves no rows to report.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: set the source's `path` to a list file or a folder")
    file = _list_file(path, list, format)
    root = images_folder(path, images)
    kind = _detect(file) if format == "auto" else format
    if (file.is_dir() and kind not in ("folder", "parquet")) or (kind == "folder" and not file.is_dir()):
        raise UserError(f"{file} cannot be read as `{kind}`: set `list` to a file in the folder, or another `format`")
    if sha256_column is not None and kind != "parquet":
        raise UserError(f"{file} is read as `{kind}`, which has no columns: remove `sha256_column` for this source")
    if splits is not None and kind not in WITH_SPLITS:
        raise UserError(f"{file} is read as `{kind}`, which has no splits: remove `splits` for this source")
    if kind == "tsv":
        return _read_tsv(file)
    if kind == "parquet":
        return _read_parquet(file, url_column, caption_column, sha256_column)
    if kind == "folder":
        return read_folder(root, names)
    if kind == "coco":
        return read_coco(file, root, local=images is not None)
    if kind == "visual_genome":
        beside = file.with_name(IMAGE_DATA_FILE)
        return read_visual_genome(file, root, local=images is not None, image_data=beside if beside.is_file() else None)
    if kind == "refcoco":
        from components.data.sources.refcoco import read_refcoco

        return read_refcoco(file, root, splits)
    if kind == "clevr":
        from components.data.sources.clevr import read_clevr

        return read_clevr(file, root, splits)
    return read_albef(file, root) if kind == "albef" else read_karpathy(file, root, splits)


def images_folder(path: Path, images: str | None) -> Path:
    """The folder of a source's local pictures."""
    base = path if path.is_dir() else path.parent
    return base / images if images else base


def _list_file(path: Path, name: str | None, format: Format) -> Path:
    """The list that `path` and the parameter `list` mean; `path` itself for a folder of pictures."""
    if path.is_file() or format == "folder":
        return path
    if name is not None:
        if not (path / name).is_file():
            raise UserError(f"{path / name} does not exist: set the source's `list` to a file in {path}")
        return path / name
    suffixes = {*LIST_SUFFIXES, ".json"} - {".txt"}
    lists = sorted(
        file
        for file in path.iterdir()
        if file.is_file() and file.suffix.lower() in suffixes and file.name != IMAGE_DATA_FILE
    )
    if len(lists) == 1:
        return lists[0]
    if lists and not all(file.suffix.lower() == ".parquet" for file in lists):
        names = ", ".join(file.name for file in lists)
        raise UserError(f"{path} holds several lists ({names}): set the source's `list` to one of them")
    return path  # a folder of parquet files or of pictures


def _detect(file: Path) -> Format:
    """The format by the name's suffix, and by the content where the suffix leaves it open."""
    if file.is_dir():
        return "parquet" if any(file.glob("*.parquet")) else "folder"
    suffix = file.suffix.lower()
    if suffix in LIST_SUFFIXES:
        return LIST_SUFFIXES[suffix]
    with file.open("rb") as stream:
        start = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"PAR1"):
        return "parquet"
    layout = layout_of(file)
    if layout is not None:
        return layout
    if b"\t" in start.split(b"\n", 1)[0]:
        return "tsv"
    raise UserError(f"{file} is of no format that its name or content shows: set the source's `format`")


# -- caption<TAB>url


def _read_tsv(file: Path) -> Iterator[SourceRow]:
    with file.open("rb") as stream:
        if stream.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(f"{file} is UTF-16: save it as UTF-8")
        stream.seek(0)
        for row, (line, whole) in enumerate(_lines(stream)):
            location = f"{file.name}:{row + 1}"
            if not whole:
                yield malformed_row(row, location, f"longer than {LINE_BYTES} bytes", content=line)
                continue
            try:
                fields = line.decode("utf-8-sig" if row == 0 else "utf-8").split("\t")
            except UnicodeDecodeError as error:
                yield malformed_row(row, location, f"not UTF-8 at byte {error.start}", content=line)
                continue
            if len(fields) != 2:
                yield malformed_row(row, location, f"{len(fields)} field{'s' * (len(fields) > 1)}, not 2", content=line)
                continue
            yield web_row(row, location, fields[1], fields[0])


def _lines(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Lines without their ends, split at LF or CRLF alone; of one that is too long to hold the beginning and False."""
    while line := stream.readline(LINE_BYTES):
        if len(line) == LINE_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield line, False
            continue
        yield line.removesuffix(b"\n").removesuffix(b"\r"), True


# -- parquet


def _read_parquet(
    path: Path, url_column: str | None, caption_column: str | None, sha256_column: str | None
) -> Iterator[SourceRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        try:
            with pq.ParquetFile(file) as parquet:
                names = parquet.schema_arrow.names
                columns = [
                    _column(file, names, url_column, URL_COLUMNS, "url_column"),
                    _column(file, names, caption_column, CAPTION_COLUMNS, "caption_column"),
                ]
                if sha256_column is not None:
                    columns.append(_column(file, names, sha256_column, (), "sha256_column"))
                line = 0
                for batch in parquet.iter_batches(PARQUET_ROWS, columns=list(dict.fromkeys(columns))):
                    for values in zip(*(_text_values(batch.column(name)) for name in columns), strict=True):
                        line += 1
                        yield _parquet_row(row, f"{file.name}:{line}", columns, values)
                        row += 1
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"{file} is not a whole parquet file ({reason}): get it again") from None


def _parquet_row(row: int, location: str, columns: list[str], values: tuple[str | _NotText | None, ...]) -> SourceRow:
    texts = [value for value in values if not isinstance(value, _NotText)]
    if len(texts) < len(values):
        content = {
            name: value.value if isinstance(value, _NotText) else value
            for name, value in zip(columns, values, strict=True)
        }
        return malformed_row(row, location, "URL, caption or sha256 is not text", content=content)
    return web_row(row, location, *texts)


def _column(file: Path, names: list[str], wanted: str | None, usual: tuple[str, ...], key: str) -> str:
    if wanted is not None and wanted in names:
        return wanted
    for candidate in usual if wanted is None else (wanted,):
        found = [name for name in names if name.lower() == candidate.lower()]
        if len(found) == 1:
            return found[0]
    what = " or ".join(usual) if wanted is None else wanted
    raise UserError(f"{file} has no column {what}: set `{key}` to one of {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class _NotText:
    """A value that is there but is no text."""

    value: Any


def _text_values(column: Any) -> Iterator[str | _NotText | None]:
    """The values of an Arrow array as text. Taken as bytes, so that broken UTF-8 spoils its row and not the file."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.view(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
    for value in column.to_pylist():
        if isinstance(value, bytes):
            try:
                yield value.decode("utf-8")
            except UnicodeDecodeError:
                yield _NotText(value)
        else:
            yield None if value is None else _NotText(value)
