"""Record folders and pictures made for tests of the data stages."""

import hashlib
import io

import numpy as np
from PIL import Image

from components.io.outcomes import Reason, Status, outcome_schema, write_outcomes
from components.io.records import RecordWriter, row_name, write_manifest


def photo(seed, size=(96, 72)):
    """A smooth random picture, unlike any of another seed: low-frequency colour noise, as photographs have."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (9, 12, 3), np.uint8))
    fine = Image.fromarray(rng.integers(0, 255, (36, 48, 3), np.uint8))
    return Image.blend(coarse.resize(size, 3), fine.resize(size, 3), 0.25)


def encoded(image, kind="JPEG", **options):
    sink = io.BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


def record(source, first_row, data, captions, **fields):
    """One record whose rows are numbered from `first_row`."""
    row_ids = [row_name(source, first_row + index) for index in range(len(captions))]
    return {
        "id": row_ids[0],
        "source": source,
        "url": f"http://example.org/{first_row}.jpg",
        "image": data,
        "sha256": hashlib.sha256(data).hexdigest(),
        "width": None,
        "height": None,
        "captions": list(captions),
        "row_ids": row_ids,
        "coco_id": None,
        **fields,
    }


def record_folder(folder, records, per_file=4, kind="raw"):
    """Write records as a stage would: files of `per_file`, outcomes, manifest."""
    import pyarrow as pa

    folder.mkdir(parents=True)
    entries = []
    for start in range(0, len(records), per_file):
        with RecordWriter(folder / f"records-{len(entries):05d}.arrow") as writer:
            writer.write(records[start : start + per_file])
        entries.append(writer.entry())
    rows = [
        {"row_id": row_id, "status": Status.KEPT, "reason": Reason.OK, "detail": None}
        for one in records
        for row_id in one["row_ids"]
    ]
    write_outcomes(folder, [pa.Table.from_pylist(rows, schema=outcome_schema())])
    write_manifest(folder, kind, entries)


def folder_bytes(folder):
    """File names to contents."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
