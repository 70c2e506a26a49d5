"""RefCOCO, RefCOCO+ and RefCOCOg as pictures with captions: each expression is a caption of its whole picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from components.data.sources.json_stream import iter_members
from components.data.sources.local import inside_of, local_row
from components.data.sources.rows import SourceRow, malformed_row
from components.data.tasks.items import PICKLES, load_json, load_plain_pickle
from components.io.errors import UserError

INSTANCES_FILE = "instances.json"  # COCO's annotations, beside the references: what their pictures are called


def read_refcoco(file: Path, root: Path, splits: tuple[str, ...] | None) -> Iterator[SourceRow]:
    """Rows of ``refs(umd).p`` (or the same as JSON), one a sentence, of `splits` if given.

    Nothing in the pickle is run. Raises UserError when a file is missing, damaged or of another layout.
    """
    refs = load_plain_pickle(file) if file.suffix in PICKLES else load_json(file)
    beside = file.with_name(INSTANCES_FILE)
    if not isinstance(refs, list):
        raise UserError(f"{file} holds no list of references: set the source's `format` to its layout")
    if not beside.is_file():
        raise UserError(f"{beside} does not exist, which names the pictures of {file.name}: put it there")
    names = {
        item["id"]: item.get("file_name")
        for _, item in iter_members(beside, ("images",))
        if isinstance(item, dict) and isinstance(item.get("id"), int)
    }
    inside = inside_of(root)
    row = 0
    for index, ref in enumerate(refs):
        location = f"{file.name}:[{index}]"
        sentences = ref.get("sentences") if isinstance(ref, dict) else None
        if not isinstance(sentences, list) or not sentences:
            yield malformed_row(row, location, "no `sentences`", content=ref)
            row += 1
            continue
        split, picture = str(ref.get("split")), ref.get("image_id")
        for place, sentence in enumerate(sentences):
            where = f"{location}.sentences[{place}]"
            said = sentence if isinstance(sentence, dict) else {}
            if splits is not None and split not in splits:
                pass
            elif not isinstance(picture, int) or picture not in names:
                yield malformed_row(row, where, f"its image_id is not in {INSTANCES_FILE}", split, content=picture)
            else:
                caption = said.get("raw", said.get("sent"))
                yield local_row(row, where, names[picture], caption, split, inside, coco_id=picture)
            row += 1
