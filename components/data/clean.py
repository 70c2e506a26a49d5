"""Stage `clean`: decodable, normalised pictures and cleaned captions; what is rejected says why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from components.data.cleaning.rules import CaptionParams, PictureParams
from components.io.errors import UserError
from components.io.runtime import Runtime

if TYPE_CHECKING:
    from components.io.outcomes import Reason, Status

BATCH = 64  # records decoded and written at a time


class CleanParams(BaseModel, frozen=True, extra="forbid"):
    """Rules for pictures and captions."""

    picture: PictureParams = Field(default=PictureParams(), description="which pictures are kept, and in what form")
    caption: CaptionParams = Field(default=CaptionParams(), description="how captions are cleaned")


def clean(params: CleanParams, *, raw: Path, clean: Path, runtime: Runtime = Runtime()) -> None:
    """Clean the records of all sources under `raw` into one folder of records, `clean`.

    Reads ``raw/SOURCE/`` (record folders), sources in order of their names. Writes ``records-*.arrow``,
    ``manifest.json`` (with `changes`: how many pictures and captions each rule changed; and `rejects`: how many rows
    each reason took) and ``outcomes.parquet``, where every (picture, caption) row of the sources stands once. A picture
    that is rejected takes all its rows with it; a picture without any caption left is dropped, and its rows bear their
    captions' reasons.

    Raises UserError when `raw` holds no source, a source's stage has not finished, or the tokenizer cannot be read.
    """
    from components.data.parts import assemble
    from components.io.records import read_manifest
    from components.io.work import map_partitions, stage_work

    folders = source_folders(raw)
    manifests = [read_manifest(folder) for folder in folders]
    files = [folder / file.name for folder, manifest in zip(folders, manifests, strict=True) for file in manifest.files]
    inputs = {folder.name: folder for folder in folders}
    tokenizer = params.caption.tokenizer
    if tokenizer is not None:
        from components.data.tokenizer import load_tokenizer

        load_tokenizer(tokenizer)  # say what is wrong with it once, before the work is spread
        inputs["caption.tokenizer"] = tokenizer  # a dot: no source has this name
    work = stage_work(runtime, "clean", params, inputs)
    parts = map_partitions(partial(clean_part, params), files, work=work, runtime=runtime, label="clean")
    changes: Counter[str] = Counter()
    rejects: Counter[str] = Counter()
    for _, report in parts:
        changes.update(report["changes"])
        rejects.update(report["rejects"])
    assemble(
        parts,
        work=work,
        out=clean,
        kind="clean",
        rows_in=sum(manifest.captions for manifest in manifests),
        sources=[folder.name for folder in folders],
        changes=dict(changes),
        rejects=dict(rejects),
    )


def source_folders(raw: Path) -> list[Path]:
    """The sources under `raw`, by name. Raises UserError when there is none."""
    folders = sorted(path for path in raw.glob("*") if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise UserError(f"{raw} holds no source: run `download` for at least one source of params.yaml first")
    return folders


def clean_part(params: CleanParams, file: Path, folder: Path) -> dict[str, Any]:
    """Clean one record file into `folder`; reports its manifest entry and the counts of changes."""
    from components.data.parts import PartWriter
    from components.io.records import open_records

    changes: Counter[str] = Counter()
    rejects: Counter[str] = Counter()
    with PartWriter(folder) as part:

        def outcome(row_id: str, status: Status, reason: Reason, detail: str | None) -> None:
            rejects[reason.value] += status == "rejected"
            part.outcome(row_id, status, reason, detail)

        for batch in open_records(file).to_batches(max_chunksize=BATCH):
            records = []
            for record in batch.to_pylist():
                cleaned = clean_record(record, params, outcome, changes)
                if cleaned is not None:
                    records.append(cleaned)
            part.write(records)
    return {**part.report(), "changes": dict(+changes), "rejects": dict(+rejects)}


def clean_record(
    record: dict[str, Any], params: CleanParams, outcome: Callable[..., None], changes: Counter[str]
) -> dict[str, Any] | None:
    """One record cleaned, or None when nothing of it is kept; calls ``outcome(row_id, status, reason, detail)``."""
    from components.data.cleaning.captions import apply_rules
    from components.data.cleaning.pictures import normalise, why
    from components.io.outcomes import Reason, Status

    rows = list(zip(record["row_ids"], record["captions"], strict=True))
    picture = normalise(record["image"], params.picture)
    if isinstance(picture, Reason):
        detail = why(record["image"], picture)
        for row_id, _ in rows:
            outcome(row_id, Status.REJECTED, picture, detail)
        return None
    changes.update(f"picture_{change}" for change in picture.changes)
    changed = f"picture: {', '.join(picture.changes)}" if picture.changes else None

    captions: list[str] = []
    row_ids: list[str] = []
    for row_id, raw in rows:
        caption = apply_rules(raw, params.caption)
        changes.update(f"caption_{change}" for change in caption.changes)
        if not caption.text:
            outcome(row_id, Status.REJECTED, caption.reason, caption.detail)
            continue
        changes["caption_changed"] += caption.text != raw
        changes["caption_truncated"] += caption.reason is Reason.CAPTION_TRUNCATED
        captions.append(caption.text)
        row_ids.append(row_id)
        notes = [note for note in (changed, caption.detail and f"caption: {caption.detail}") if note]
        outcome(row_id, Status.KEPT, caption.reason, "; ".join(notes) or None)
    if not captions:
        return None
    shape = {"width": picture.width, "height": picture.height}
    return {**record, "image": picture.data, **shape, "captions": captions, "row_ids": row_ids}
