"""Peak memory of the data stages' processes at 10^4 and 10^5 rows: it must not follow the number of rows past 1 GiB.

    python benchmarks/bench_memory.py [ROWS ...]

Five rows a picture, pictures of 96×72 pixels made from noise, all different; a tenth of them evaluation pictures.
`download` fetches them over HTTP from a server that runs in its process, as the built-in corpus is fetched. Each stage
runs as its own command; peak memory is that of its largest process (the kernel's high-water mark).
"""

from __future__ import annotations

import hashlib
import io
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from bench_flickr8k import ROOT, run
from PIL import Image

from components.io.outcomes import Reason, Status, outcome_schema, write_outcomes
from components.io.records import RecordWriter, row_name, write_manifest

PER_PICTURE, PER_FILE = 5, 1000
LIMIT = 1024  # MiB


def picture(rng: np.random.Generator) -> bytes:
    """A smooth random picture."""
    sink = io.BytesIO()
    coarse = Image.fromarray(rng.integers(0, 255, (9, 12, 3), np.uint8))
    coarse.resize((96, 72), Image.Resampling.BICUBIC).save(sink, "JPEG", quality=85)
    return sink.getvalue()


def write(folder: Path, source: str, pictures: int, *, outcomes: bool = True) -> pa.Table:
    """A folder of records; returns its outcomes."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(pictures)
    entries, tables = [], []
    for start in range(0, pictures, PER_FILE):
        records = []
        for number in range(start, min(start + PER_FILE, pictures)):
            rows = [row_name(source, PER_PICTURE * number + place) for place in range(PER_PICTURE)]
            data = picture(rng)
            captions = [f"thing {number} seen from side {place} of the room" for place in range(PER_PICTURE)]
            texts = {"captions": captions, "row_ids": rows, "url": f"{source}{number}.jpg"}
            sha256 = hashlib.sha256(data).hexdigest()
            records.append({"id": rows[0], "source": source, "image": data, "sha256": sha256, **texts})
            tables.append({"row_id": rows, "status": Status.KEPT, "reason": Reason.OK, "split": "test"})
        for record in records if source == "task" else []:
            record |= {"width": 96, "height": 72}
        with RecordWriter(folder / f"records-{len(entries):05d}.arrow") as writer:
            writer.write(records)
        entries.append(writer.entry())
    write_manifest(folder, "raw", entries)
    schema = outcome_schema(("split", pa.string()))
    lines = [{**line, "row_id": row, "detail": None} for line in tables for row in line["row_id"]]
    table = pa.Table.from_pylist(lines, schema=schema)
    if outcomes:
        write_outcomes(folder, [table.drop_columns("split")])
    return table


def write_site(folder: Path, pictures: int) -> None:
    """A list of five rows a picture, and a folder to serve."""
    (folder / "web").mkdir(parents=True)
    rng = np.random.default_rng(pictures)
    lines = []
    for number in range(pictures):
        (folder / "web" / f"{number}.jpg").write_bytes(picture(rng))
        lines += [f"thing {number} seen from side {n}\thttp://corpus.test/{number}.jpg" for n in range(PER_PICTURE)]
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    print(f"{'stage':14}{'rows':>10}{'seconds':>9}{'peak MiB':>10}")
    over = False
    for rows in [int(rows) for rows in sys.argv[1:]] or [10**4, 10**5]:
        with tempfile.TemporaryDirectory() as temporary:
            data = Path(temporary)
            paths = {name: str(data / name) for name in ("raw", "tasks", "clean", "unique", "shards", "validation")}
            write(data / "raw" / "web", "web", rows // PER_PICTURE)
            table = write(data / "tasks" / "demo" / "test", "task", rows // PER_PICTURE // 10, outcomes=False)
            write_outcomes(data / "tasks" / "demo", [table])
            params = ["--params", str(ROOT / "pipelines/recipes/pairs.yaml"), "--set", f"runtime.work={data / 'work'}"]
            write_site(data / "site", rows // PER_PICTURE)
            fetched = ["--source", "pairs", "--input", str(data / "site"), "--raw", str(data / "fetched")]
            fetched += ["--set", "download.sources.pairs.list=pairs.tsv", "--set", "download.sources.pairs.serve=web"]
            options_of = {"download": fetched}
            for stage, needs in (
                ("clean", ["raw", "clean"]),
                ("deduplicate", ["clean", "tasks", "unique"]),
                ("shard", ["unique", "shards"]),
                ("validate", ["raw", "clean", "unique", "shards", "tasks", "validation"]),
            ):
                options_of[stage] = [part for name in needs for part in (f"--{name}", paths[name])]
            for stage, options in options_of.items():
                seconds, peak = run(["run", stage, *options, *params])
                over = over or peak > LIMIT
                print(f"{stage:14}{rows:>10,}{seconds:>9.1f}{peak:>10.0f}", flush=True)
    if over:
        sys.exit(f"a process took more than {LIMIT} MiB")


if __name__ == "__main__":
    main()
