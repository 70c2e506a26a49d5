"""Stage `shard`: equal Arrow shards of the unique records, and the tokenizer that reads their captions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from components.io.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from components.data.tokenizer import Tokenizer
    from components.io.records import FileEntry

ROWS_PER_BATCH = 256  # pictures in memory at a time, and in one Arrow batch of a shard


class TokenizerParams(BaseModel, frozen=True, extra="forbid"):
    """Which WordPiece tokenizer goes with the shards."""

    kind: Literal["train", "file", "name"] = Field(
        default="train",
        description="train on the corpus's captions; read `path`; or take `name` from the Hugging Face Hub",
    )
    vocab_size: int = Field(default=30522, ge=100, le=1_000_000, description="train: entries at most; BERT has 30522")
    min_frequency: int = Field(default=2, ge=1, description="train: occurrences that a merged piece needs")
    words: tuple[str, ...] = Field(
        default=(),
        max_length=10_000,
        description="train: words that are a piece of their own whatever the captions say, such as those of questions "
        "and answers; a character that neither has is unknown to the model",
    )
    path: Path | None = Field(default=None, description="file: a tokenizer.json or a BERT vocab.txt")
    name: str | None = Field(default=None, min_length=1, description="name: a model, such as bert-base-uncased")
    revision: str = Field(default="main", min_length=1, description="name: a commit of that model; pin one")

    @model_validator(mode="after")
    def _path_or_name(self) -> Self:
        for kind, value in (("file", self.path), ("name", self.name)):
            field = {"file": "path", "name": "name"}[kind]
            if (self.kind == kind) != (value is not None):
                need = "is needed" if self.kind == kind else "has no effect"
                raise ValueError(f"`{field}` {need} where kind is {self.kind!r}")
        if self.words and self.kind != "train":
            raise ValueError(f"`words` has no effect where kind is {self.kind!r}")
        for word in self.words:
            if not word.isalnum() or word != word.lower():
                raise ValueError(f"`words` holds {word!r}: one lower-case word of letters and digits each")
        return self


class ShardParams(BaseModel, frozen=True, extra="forbid"):
    """Parameters of `shard`."""

    pictures_per_shard: int = Field(default=1000, ge=1, le=1_000_000, description="pictures in each shard but the last")
    tokenizer: TokenizerParams = TokenizerParams()


# One piece of a shard: a record file of the input, the first row and the number of rows to take.
Piece = tuple[str, int, int]


def plan_shards(rows: list[tuple[str, int]], pictures_per_shard: int) -> list[list[Piece]]:
    """Cut a sequence of files, each (name, rows), into shards of `pictures_per_shard` rows; the last is smaller."""
    shards: list[list[Piece]] = []
    room = 0
    for name, count in rows:
        start = 0
        while start < count:
            if room == 0:
                shards.append([])
                room = pictures_per_shard
            take = min(room, count - start)
            shards[-1].append((name, start, take))
            start, room = start + take, room - take
    return shards


def shard(params: ShardParams, *, unique: Path, shards: Path, runtime: Runtime = Runtime()) -> None:
    """Re-pack `unique` into ``shard-00000.arrow`` …, with ``tokenizer.json``, outcomes and a manifest.

    Raises UserError when no record is left to shard, a file is missing or damaged, or the tokenizer cannot be had.
    """
    from components.data.parts import link
    from components.data.tokenizer import TOKENIZER_FILE
    from components.io.errors import UserError
    from components.io.outcomes import write_outcomes
    from components.io.records import FileEntry, manifest_digest, read_manifest, sha256_file, write_manifest
    from components.io.work import discard, map_partitions, publish, stage_work

    manifest = read_manifest(unique)
    if not manifest.rows:
        raise UserError(f"{unique} holds no record: see its outcomes.parquet for why every row was rejected")
    inputs = {"unique": unique}
    if params.tokenizer.path is not None:
        inputs["tokenizer"] = params.tokenizer.path
        if not params.tokenizer.path.is_file():
            raise UserError(f"shard.tokenizer.path is {params.tokenizer.path}, where no file is: correct it")
    work = stage_work(runtime, "shard", params, inputs)

    plan = plan_shards([(file.name, file.rows) for file in manifest.files], params.pictures_per_shard)
    items = [(unique, f"shard-{index:05d}.arrow", pieces) for index, pieces in enumerate(plan)]
    parts = map_partitions(write_shard, items, work=work, runtime=runtime, label="shard")
    tokenizer = _make_tokenizer(params.tokenizer, unique)

    built = work / "built"
    shutil.rmtree(built, ignore_errors=True)  # of a run killed here
    built.mkdir()
    entries: list[FileEntry] = []
    for folder, entry in parts:
        link(folder / entry["name"], built / entry["name"])
        entries.append(FileEntry(**entry))
    tokenizer.save(built / TOKENIZER_FILE)
    write_outcomes(built, _outcomes(built, entries))
    write_manifest(
        built,
        "shards",
        entries,
        pictures_per_shard=params.pictures_per_shard,
        records=manifest_digest(unique),
        tokenizer={
            "file": TOKENIZER_FILE,
            "kind": params.tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "sha256": sha256_file(built / TOKENIZER_FILE),
        },
    )
    publish(built, shards)
    discard(work)


def write_shard(item: tuple[Path, str, list[Piece]], folder: Path) -> dict[str, Any]:
    """Partition function: write one shard, `item` = (input folder, file name, its pieces); returns its entry."""
    from components.io.records import RecordWriter

    unique, name, pieces = item
    with RecordWriter(folder / name) as writer:
        for batch in _read_pieces(unique, pieces):
            writer.write(batch)
    return vars(writer.entry())


def _read_pieces(folder: Path, pieces: list[Piece]) -> Iterator[pa.Table]:
    """The rows of a shard, `ROWS_PER_BATCH` at a time, in buffers that do not depend on the cut of the input files."""
    import pyarrow as pa

    from components.io.records import open_records

    tables = [open_records(folder / name).slice(start, count) for name, start, count in pieces]
    table = pa.concat_tables(tables)
    for start in range(0, table.num_rows, ROWS_PER_BATCH):
        batch = table.slice(start, ROWS_PER_BATCH).combine_chunks()
        yield batch.take(pa.array(range(batch.num_rows)))  # slices and joints leave their marks in offsets and masks


def _outcomes(built: Path, entries: list[FileEntry]) -> Iterator[pa.Table]:
    """Every row is kept: re-packing rejects nothing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from components.io.outcomes import Reason, Status, outcome_schema
    from components.io.records import open_records

    for entry in entries:
        row_ids = pc.list_flatten(open_records(built / entry.name)["row_ids"].combine_chunks())
        size = len(row_ids)
        columns = [row_ids, pa.repeat(Status.KEPT.value, size), pa.repeat(Reason.OK.value, size), pa.nulls(size)]
        yield pa.table(columns, names=outcome_schema().names).cast(outcome_schema())


def _make_tokenizer(params: TokenizerParams, unique: Path) -> Tokenizer:
    from components.data.tokenizer import load_tokenizer, train_tokenizer
    from components.io.records import iter_batches

    def captions() -> Iterator[str]:
        for batch in iter_batches(unique, ["captions"], rows=8192):
            for of_picture in batch["captions"].to_pylist():
                yield from of_picture

    if params.path is not None:
        return load_tokenizer(params.path)
    if params.name is not None:
        return load_tokenizer(_fetch_tokenizer(params.name, params.revision))
    return train_tokenizer(captions, params.vocab_size, params.min_frequency, params.words)


def _fetch_tokenizer(name: str, revision: str) -> Path:
    """A model's tokenizer.json, from the Hub's local cache or else from the Hub."""
    from huggingface_hub import hf_hub_download

    from components.io.errors import UserError

    try:
        return Path(hf_hub_download(name, "tokenizer.json", revision=revision))
    except Exception as error:  # the Hub client's errors have many roots; each says what went wrong
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"the tokenizer {name!r} of shard.tokenizer.name cannot be had from the Hugging Face Hub ({reason}): check "
            "the name, set HF_HUB_OFFLINE=0 to let it be fetched, or download its tokenizer.json and set `kind: file`"
        ) from None
