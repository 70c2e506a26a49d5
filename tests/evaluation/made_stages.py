"""Small folders as the stages leave them, with hostile captions: what tests of the report read."""

import hashlib
import io
import json
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
from PIL import Image

from components.evaluation.page.gather import Folders
from components.evaluation.report import ReportParams, report
from components.evaluation.results import write_results
from components.io.outcomes import Reason, Status, outcome_schema, write_outcomes
from components.io.records import RecordWriter, row_name, write_manifest

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)> \"quoted\" {{ 7*7 }} & more"
FOLDERS = tuple(field.name for field in fields(Folders))
KEPT, REJECTED = Status.KEPT, Status.REJECTED


def jpeg(seed, size=(60, 40)):
    colours = np.random.default_rng(seed).integers(0, 255, (4, 6, 3), np.uint8)
    sink = io.BytesIO()
    Image.fromarray(colours).resize(size).save(sink, "JPEG")
    return sink.getvalue()


def make_record(source, row, captions, image=None):
    data = jpeg(row) if image is None else image
    row_ids = [row_name(source, row + index) for index in range(len(captions))]
    return {
        "id": row_ids[0],
        "source": source,
        "url": f"http://corpus.test/{row}.jpg",
        "image": data,
        "sha256": hashlib.sha256(data).hexdigest(),
        "width": 60,
        "height": 40,
        "captions": captions,
        "row_ids": row_ids,
    }


def make_folder(folder, records, outcomes=None, extra=()):
    """A folder of records; `outcomes` are (row_id, status, reason, detail, …)."""
    folder.mkdir(parents=True)
    with RecordWriter(folder / "records-00000.arrow") as writer:
        writer.write(records)
    write_manifest(folder, "records", [writer.entry()])
    if outcomes is not None:
        schema = outcome_schema(*extra)
        rows = [dict(zip(schema.names, outcome, strict=True)) for outcome in outcomes]
        write_outcomes(folder, [pa.Table.from_pylist(rows, schema=schema)])


def row(number):
    return row_name("web", number)


def make_data(data):
    """Eight rows: two refused by download, one cut picture, one duplicate, four kept in two pictures."""
    good = [make_record("web", 0, [HOSTILE, "a dog on the beach"]), make_record("web", 2, ["a red kite", "a kite"])]
    cut = make_record("web", 4, ["half of a picture"], jpeg(4)[:200])
    copy = make_record("web", 5, ["a red kite"], jpeg(2))
    url = [("url", pa.string())]
    make_folder(
        data / "raw" / "web",
        [*good, cut, copy],
        [(row(n), KEPT, Reason.OK, None, f"http://corpus.test/{n}") for n in range(6)]
        + [(row(6), REJECTED, Reason.HTTP_NOT_FOUND, "404", "http://corpus.test/<b>gone</b>")]
        + [(row(7), REJECTED, Reason.URL_SCHEME, None, "ftp://user:secret@corpus.test/x")],
        url,
    )
    make_folder(
        data / "clean",
        [*good, copy],
        [(row(n), KEPT, Reason.OK, None) for n in (0, 1, 2, 3, 5)] + [(row(4), REJECTED, Reason.TRUNCATED_IMAGE, None)],
    )
    make_folder(
        data / "unique",
        good,
        [(row(n), KEPT, Reason.OK, None) for n in range(4)] + [(row(5), REJECTED, Reason.DUPLICATE_EXACT, None)],
    )
    make_folder(data / "shards", good)


def make_ills(data, **changes):
    counts = {
        "download": {"ok": 6, "http_not_found": 1, "url_scheme": 1},
        "clean": {"ok": 5, "truncated_image": 1},
        "deduplicate": {"ok": 4, "duplicate_exact": 1},
    }
    for name, value in changes.items():
        counts["deduplicate"][name] = value
    (data / "corpus").mkdir(parents=True)
    content = {"rows_in": 8, **{stage: {"counts": found} for stage, found in counts.items()}}
    (data / "corpus" / "ills.json").write_text(json.dumps(content))


@dataclass(frozen=True)
class Split:
    """What was scored: names and texts."""

    picture_ids: list
    caption_ids: list
    captions: list
    picture_of: np.ndarray


# four pictures with two captions each, the first one hostile
SPLIT = Split(
    [row_name("task", 2 * n) for n in range(4)],
    [row_name("task", n) for n in range(8)],
    [HOSTILE, *(f"caption number {n}" for n in range(1, 8))],
    np.repeat(np.arange(4), 2),
)


def make_evaluation(data, split=SPLIT, wrong=0):
    records = [make_record("task", 2 * n, split.captions[2 * n : 2 * n + 2]) for n in range(4)]
    make_folder(data / "tasks" / "task" / "test", records)
    scores = np.random.default_rng(3).random((4, 8)) + 2 * (np.arange(4)[:, None] == split.picture_of)
    scores[:wrong] *= -1
    similarity = np.random.default_rng(4).random((4, 8)) + 0.5 * (np.arange(4)[:, None] == split.picture_of)
    write_results(
        data / "evaluation" / "task",
        split,
        itc=(similarity, similarity.T),
        itm=(scores, scores.T),
        examples=3,
        example_candidates=5,
        placed={"pictures": [[0.0, n] for n in range(4)], "captions": [[1.0, n] for n in range(4)]},
        about={"run": "task", "task": "task", "split": "test", "top_k": 8, "image_size": 32},
    )


def make_training(data):
    for name, metrics in (("pretrain", ("loss", "loss_mlm")), ("task", ("loss",))):
        curves = data / "curves" / name / "plots" / "metrics" / "train"
        curves.mkdir(parents=True)
        for metric in metrics:
            lines = [f"{step}\t{9.5 / step + 1:.4f}" for step in range(1, 60)]
            (curves / f"{metric}.tsv").write_text("\n".join([f"step\t{metric}", *lines]) + "\n")
        (data / "models" / name).mkdir(parents=True)
        lineage = {
            "stage": name,
            "params": {"epochs": 3, "model": {"image_size": 32}, "note": "<i>tilted</i>"},
            "inputs": {"shards": "a" * 64},
            "code": "b" * 64,
            "packages": {"torch": "2.14.1"},
        }
        (data / "models" / name / "lineage.json").write_text(json.dumps(lineage))


def make_validation(data, success=True):
    (data / "validation" / "docs").mkdir(parents=True)
    (data / "validation" / "docs" / "index.html").write_text("<p>docs</p>")
    checks = [
        {"description": "every caption has words", "sentence": "every caption has words", "success": True},
        {
            "description": "pictures are distinct",
            "sentence": "pictures are distinct: <u>web/000000005</u> is not",
            "success": success,
        },
    ]
    content = {"success": success, "suites": [{"suite": "unique", "success": success, "expectations": checks}]}
    (data / "validation" / "results.json").write_text(json.dumps(content))


def make_all(data):
    make_data(data)
    make_ills(data)
    make_evaluation(data)
    make_training(data)
    make_validation(data)


def build_report(data, **params):
    """The page that the stage makes of the folders in `data`."""
    folders = {name: data / name for name in FOLDERS}
    report(ReportParams(**params), **folders)
    return (folders["report"] / "index.html").read_text(encoding="utf-8")
