"""Fetching and reading against img2dataset, webdataset and bare decoding: ratios in one run, medians of five.

    python benchmarks/bench_speed.py [--pictures 600] [--rounds 5] [--environment FOLDER]

Fetching: pictures of 640×480 from a server on loopback, scaled to 224 pixels on the long side and written as JPEG of
quality 90; ours are the stages `download` and `clean`, theirs img2dataset with as many processes. Reading: pictures of
224 pixels decoded to arrays by one process, from our shards in a new order (a batch of one shard's window at a time),
from webdataset's tars in their own order, and from bytes that are in memory already; seconds are the process's own.
Contenders take turns within each round, so that a machine that others use disturbs all of them. Fetching is timed by
the clock, whole commands, their start included: with few pictures that start is most of the time.

img2dataset and webdataset pin older libraries than the project's. They go into an environment of their own, made by uv
in `--environment` when it is not there (which asks the package index); without it their rows are left out.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from components.data.cleaning.pictures import open_picture
from components.io.order import epoch_order
from components.io.records import RecordWriter, iter_batches, write_manifest
from components.io.shards import ShardReader

ROOT = Path(__file__).resolve().parents[1]
IMAGES = Path(os.environ.get("VLP_SHARED", ROOT.parent / "shared")) / "data" / "flickr8k" / "images"
PACKAGES = ("img2dataset==1.47.0", "webdataset==0.2.111", "setuptools<81", f"pillow=={Image.__version__}")
PER_SHARD = 250

READ_TARS = """
    import sys, time
    import numpy as np, webdataset
    data = webdataset.WebDataset(sys.argv[1:], shardshuffle=False).decode("pil").to_tuple("jpg", "txt")
    started, count, total = time.process_time(), 0, 0
    for image, _ in data:
        total += np.asarray(image).shape[0]
        count += 1
    print(count / (time.process_time() - started))
"""
SERVE = """
    import sys
    from pathlib import Path
    from components.data.corpus.server import serve
    with serve(Path(sys.argv[1])) as port:
        print(port, flush=True)
        sys.stdin.read()
"""


def environment(folder: Path) -> Path | None:
    """The Python of the contenders' environment, made when it is not there; None when it cannot be made."""
    python = folder / "bin" / "python"
    if (folder / "complete").is_file():
        return python
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        return None
    for command in (
        [uv, "venv", "-q", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "-q", "--python"],
    ):
        more = [str(python), *PACKAGES] if command[1] == "pip" else []
        if subprocess.run([*command, *more], check=False).returncode:
            return None
    (folder / "complete").touch()
    return python


def photographs(count: int, size: tuple[int, int] | None) -> list[bytes]:
    """JPEGs of Flickr8k's pictures, or of smooth noise where they are not there; `size` in pixels, null: 224×224."""
    files = sorted(IMAGES.glob("*.jpg"))[:count]
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        if number < len(files):
            image = Image.open(files[number]).convert("RGB")
        else:
            image = Image.fromarray(rng.integers(0, 255, (28, 28, 3), np.uint8))
        sink = io.BytesIO()
        image.resize(size or (224, 224), Image.Resampling.BICUBIC).save(sink, "JPEG", quality=90)
        found.append(sink.getvalue())
    return found


def run(command: list[str], **options: object) -> float:
    """Wall seconds of a command that must succeed."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.perf_counter() - started


def fetching(data: Path, count: int, rounds: int, python: Path | None) -> None:
    web = data / "source" / "web"
    web.mkdir(parents=True)
    for number, image in enumerate(photographs(count, (640, 480))):
        (web / f"{number}.jpg").write_bytes(image)
    lines = [f"picture {number}\thttp://corpus.test/{number}.jpg\n" for number in range(count)]
    (data / "source" / "pairs.tsv").write_text("".join(lines))
    server = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVE), str(web)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert server.stdout is not None
    port = int(server.stdout.readline())
    urls = "".join(f"http://127.0.0.1:{port}/{number}.jpg\n" for number in range(count))
    (data / "urls.txt").write_text(urls)
    settings = {
        "download.sources": json.dumps({"web": {"path": str(data / "source"), "list": "pairs.tsv", "serve": "web"}}),
        "clean.picture": json.dumps({"max_side": 224, "encode": "jpeg", "quality": 90}),
        "download.records_per_file": PER_SHARD,
        "runtime.work": data / "work",
    }
    params = ["--params", str(ROOT / "pipelines/recipes/pairs.yaml")]
    params += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    vlp = [sys.executable, "-m", "pipelines.cli", "run"]

    def ours() -> float:
        shutil.rmtree(data / "raw", ignore_errors=True)
        source = ["--source", "web", "--input", str(data / "source"), "--raw", str(data / "raw" / "web")]
        seconds = run([*vlp, "download", *source, *params], cwd=ROOT)
        seconds += run([*vlp, "clean", "--raw", str(data / "raw"), "--clean", str(data / "clean"), *params], cwd=ROOT)
        kept = sum(batch.num_rows for batch in iter_batches(data / "clean", ["id"]))
        if kept != count:
            sys.exit(f"{kept} of {count} pictures came through")
        return seconds

    def theirs() -> float:
        shutil.rmtree(data / "theirs", ignore_errors=True)
        options = {
            "url_list": data / "urls.txt",
            "output_folder": data / "theirs",
            "output_format": "webdataset",
            "image_size": 224,
            "resize_mode": "keep_ratio_largest",
            "encode_quality": 90,
            "processes_count": os.cpu_count(),
            "thread_count": 32,
            "number_sample_per_shard": PER_SHARD,
            "enable_wandb": False,
        }
        command = [
            str((python or Path()).with_name("img2dataset")),
            *(f"--{name}={value}" for name, value in options.items()),
        ]
        seconds = run(command, env={**os.environ, "NO_ALBUMENTATIONS_UPDATE": "1"})
        got = sum(json.loads(path.read_text())["successes"] for path in (data / "theirs").glob("*_stats.json"))
        if got != count:
            sys.exit(f"img2dataset got {got} of {count} pictures")
        return seconds

    contenders = {"vlp: download, clean": ours} | ({"img2dataset": theirs} if python else {})
    try:
        compare("fetching and scaling", contenders, rounds, lambda seconds: count / seconds)
    finally:
        server.communicate("")


def reading(data: Path, count: int, rounds: int, python: Path | None) -> None:
    pictures = photographs(count, None)
    shards, entries, tars = data / "shards", [], []
    shards.mkdir()
    for start in range(0, count, PER_SHARD):
        with RecordWriter(shards / f"shard-{len(entries):05d}.arrow") as writer:
            writer.write([_record(number, pictures[number]) for number in range(start, min(start + PER_SHARD, count))])
        entries.append(writer.entry())
    write_manifest(shards, "shards", entries)
    for start in range(0, count, PER_SHARD):
        tars.append(data / f"{len(tars):05d}.tar")
        _write_tar(tars[-1], {n: pictures[n] for n in range(start, min(start + PER_SHARD, count))})
    epoch = iter(range(10**6))

    def bare() -> float:
        started = time.process_time()
        for image in pictures:
            np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
        return count / (time.process_time() - started)

    def ours() -> float:
        started = time.process_time()
        reader = ShardReader(shards)
        for row in epoch_order(reader.rows_per_shard, 1, next(epoch), window=4).tolist():
            np.asarray(open_picture(reader.image(row)))
        return count / (time.process_time() - started)

    def theirs() -> float:
        command = [str(python), "-c", textwrap.dedent(READ_TARS), *map(str, tars)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    contenders: dict[str, Callable[[], float]] = {"vlp: shards": ours, "decoding bytes in memory": bare}
    if python:
        contenders["webdataset: tars"] = theirs
    compare("reading 224-pixel pictures", contenders, rounds, lambda rate: rate)


def _record(number: int, image: bytes) -> dict[str, object]:
    texts = {"captions": [f"picture {number}"], "row_ids": [f"bench/{number:09d}"], "url": "", "sha256": "0" * 64}
    return {"id": f"bench/{number:09d}", "source": "bench", "image": image, "width": 224, "height": 224, **texts}


def _write_tar(path: Path, pictures: dict[int, bytes]) -> None:
    import tarfile

    with tarfile.open(path, "w") as tar:
        for number, image in pictures.items():
            for suffix, content in (("jpg", image), ("txt", f"picture {number}".encode())):
                entry = tarfile.TarInfo(f"{number:09d}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def compare(
    title: str, contenders: dict[str, Callable[[], float]], rounds: int, rate: Callable[[float], float]
) -> None:
    """Run all contenders in turns; print the median of each one's rates, and of the ratios within rounds."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            rates[name].append(rate(contender()))
    first = next(iter(rates))
    print(f"{title}, medians of {rounds}")
    for name, found in rates.items():
        ratio = statistics.median(ours / other for ours, other in zip(rates[first], found, strict=True))
        against = "" if name == first else f"   {first.split(':')[0]} is {ratio:.2f} times that"
        print(f"  {name:26}{statistics.median(found):9.0f} pictures/s{against}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--environment", type=Path, default=ROOT / "work" / "bench-environment")
    parser.add_argument("--only", choices=["fetching", "reading"])
    given = parser.parse_args()
    python = environment(given.environment)
    if python is None:
        print(f"{', '.join(PACKAGES[:2])} cannot be installed into {given.environment}: their rows are left out")
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}{' (others use this machine)' if load > 1 else ''}")
    for measure in (fetching, reading):
        if given.only in (None, measure.__name__):
            with tempfile.TemporaryDirectory() as folder:
                measure(Path(folder), given.pictures, given.rounds, python)


if __name__ == "__main__":
    main()
