"""Hostile inputs through `download` and `clean`: each has the outcome that its maker foretold; none is lost."""

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import contextmanager
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.data.clean import CleanParams, clean
from components.data.download import DownloadParams, SourceParams, download
from components.data.sources import lists
from components.io.errors import UserError
from components.io.outcomes import check_conservation, read_outcomes
from components.io.records import row_name
from components.io.runtime import Runtime
from tests.conftest import ROOT
from tests.data import hostile
from tests.data.hostile import EACH, FILES, ROWS, Hostile, noise
from tests.data.making import encoded
from tests.data.web import Handler, serving

CLEAN = CleanParams(picture={"min_side": 32})
QUICK = {
    "retries": 1, "backoff_seconds": 0.01, "connect_seconds": 5.0, "total_seconds": 5.0, "row_seconds": 8.0,
    "max_bytes": hostile.MAX_BYTES, "per_host": 128, "records_per_file": 300, "placeholder_urls": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def same_code(monkeypatch):
    monkeypatch.setattr("components.io.work.code_digest", lambda *_: "fixed")


def through(folder, input, place=None, **changed):
    """Both stages; returns the outcomes of each by row."""
    params = DownloadParams(sources={"src": SourceParams(path=input, **(place or {}))}, **{**QUICK, **changed})
    runtime = Runtime(processes=1, work=folder / "work")
    download(params, source="src", input=input, raw=folder / "raw/src", runtime=runtime)
    clean(CLEAN, raw=folder / "raw", clean=folder / "clean", runtime=runtime)
    outcomes = [
        {row["row_id"]: row for row in read_outcomes(out).to_pylist()} for out in (folder / "raw/src", folder / "clean")
    ]
    kept = [name for name, row in outcomes[0].items() if row["status"] == "kept"]
    check_conservation(folder / "clean", kept)
    return outcomes


def compare(inputs: list[Hostile], folder, outcomes):
    """Fail with every input whose outcome is another than foretold."""
    downloaded, cleaned = outcomes
    check_conservation(folder / "raw/src", [row_name("src", number) for number in range(len(inputs))])
    wrong = defaultdict(list)
    seen = Counter()
    for number, one in enumerate(inputs):
        name = row_name("src", number)
        got = downloaded[name]["reason"]
        after = cleaned[name]["reason"] if name in cleaned else None
        detail = cleaned[name]["detail"] or "" if name in cleaned else ""
        fine = got in one.download.split("|") and (got != "ok" or after in (one.clean or "").split("|"))
        if not (fine and all(change in detail for change in one.changes)):
            wrong[one.kind].append((one.name, got, after, downloaded[name]["detail"], detail))
        seen[one.kind] += 1
    assert not wrong, {kind: found[:3] for kind, found in wrong.items()}
    assert set(seen.values()) == {EACH}


def test_hostile_files(tmp_path):
    inputs = list(hostile.files())
    (tmp_path / "src/images").mkdir(parents=True)
    for one in inputs:
        (tmp_path / "src/images" / one.name).write_bytes(one.data)
    items = [{"image": one.name, "caption": f"a {one.kind} picture"} for one in inputs]
    (tmp_path / "src/list.json").write_text(json.dumps(items))
    compare(inputs, tmp_path, through(tmp_path, tmp_path / "src", {"images": "images"}))
    assert len(FILES) * EACH == len(inputs) >= 1200


class Web(Handler):
    """What a path means is in its first part."""

    def answer(self):
        kind, _, rest = self.path.strip("/").partition("/")
        with self.lock:
            self.asked[self.path] += 1
        picture = encoded(noise(len(self.path), (40, 36)))
        first = rest.partition("/")[0]
        if kind == "ok":
            self.send(body=picture, Content_Type="text/html")  # which nobody believes
        elif kind == "status":
            self.send(int(first), Retry_After="0")
        elif kind == "flaky":
            self.send(int(first) if self.asked[self.path] == 1 else 200, picture, Retry_After="0")
        elif kind == "to":
            steps, _, target = rest.partition("/")
            more = int(steps) - 1
            self.send(301 + len(rest) % 2, Location=f"/to/{more}/{target}" if more > 0 else f"/{target}")
        elif kind == "loop":
            self.send(302, Location=f"/{kind}/{rest}")
        elif kind == "away":
            self.send(302, Location=unquote(rest))
        elif kind == "html":
            self.send(body=b"<html>" + b"picture " * 99, Content_Type="image/jpeg")
        elif kind == "nothing":
            self.send(Content_Type="image/jpeg")
        else:
            self.close_connection = True
            getattr(self, kind)(picture)

    def endless(self, picture):
        self.send(body=picture, Content_Length="99999999" if len(self.path) % 2 else "1000000000000")

    def short(self, picture):
        self.send(body=picture, Content_Length=str(len(picture) + 5))

    def dribble(self, picture):
        self.send(body=picture[:40], Content_Length="50000")
        while not self.release.wait(0.2):
            self.wfile.write(b"x")
            self.wfile.flush()


@pytest.mark.slow
def test_hostile_rows(tmp_path, monkeypatch):
    asked = {}

    @contextmanager
    def serve(_):
        with serving(Web) as server:
            asked["by path"] = server.RequestHandlerClass.asked
            yield server.server_port

    monkeypatch.setattr("components.data.corpus.server.serve", serve)
    monkeypatch.setattr(lists, "LINE_BYTES", 4900)
    inputs = list(hostile.rows())
    (tmp_path / "src/web").mkdir(parents=True)
    (tmp_path / "src/pairs.tsv").write_bytes(b"".join(one.data + b"\n" for one in inputs))
    outcomes = through(tmp_path, tmp_path / "src", {"serve": "web"})
    compare(inputs, tmp_path, outcomes)
    assert len(ROWS) * EACH == len(inputs) >= 1800
    times_asked = [times for path, times in asked["by path"].items() if path.startswith("/ok/")]
    assert max(times_asked) <= 1 + QUICK["retries"]  # no URL is asked once per caption
    assert times_asked.count(1) > 0.95 * len(times_asked)
    quarantine = pq.read_table(tmp_path / "raw/src/quarantine.parquet")
    lines = [int(location.rpartition(":")[2]) for location in quarantine["location"].to_pylist()]
    assert lines == [number + 1 for number, one in enumerate(inputs) if one.download == "malformed_row"]
    for path in (tmp_path / "raw/src").iterdir():
        assert b"pass-word" not in path.read_bytes(), path
    assert "pass-word" not in json.dumps(outcomes)


BAD_TEXTS = [7, 1.5, True, [], ["x"], {}, {"a": 1}, "\ud800", [None]]
BAD_NAMES = [7, [], {}, "../x.jpg", "/etc/passwd", "a\0.jpg", "..\\x.jpg", "\udcff.jpg", "a/../../b.jpg"]


@pytest.mark.parametrize("layout", ["albef", "karpathy", "coco", "visual_genome", "parquet"])
def test_hostile_rows_of_other_layouts(tmp_path, layout):
    """Good rows between bad ones keep their place; what is bad is said of its own row."""
    (tmp_path / "src/images").mkdir(parents=True)
    (tmp_path / "src/images/1.jpg").write_bytes(encoded(noise(1)))
    captions, malformed = [], set()
    for n in range(3 * EACH):
        bad = BAD_TEXTS[n // 3 % 9]
        captions.append((f"caption {n}", None, bad)[n % 3])
        malformed |= {n} if n % 3 == 2 else set()
    place = {"images": "images", "format": layout}
    if layout == "albef":
        content = [{"image": "1.jpg", "caption": [caption]} for caption in captions]
    elif layout == "karpathy":
        content = {"images": [{"filename": "1.jpg", "sentences": [{"raw": caption}]} for caption in captions]}
    elif layout == "coco":
        annotations = [{"image_id": 1, "caption": caption} for caption in captions]
        content = {"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": annotations}
    elif layout == "visual_genome":
        content = [{"id": 1, "regions": [{"phrase": caption} for caption in captions]}]
    if layout == "parquet":
        place = {"format": layout}
        texts = [(f"caption {n}", None, b"\xff")[n % 3] for n in range(3 * EACH)]
        columns = {
            "text": pa.array([text.encode() if isinstance(text, str) else text for text in texts], pa.binary()),
            "url": pa.array(["http://elsewhere.example/1"] * len(texts)),
        }
        pq.write_table(pa.table(columns), tmp_path / "src/l.parquet")
    else:
        (tmp_path / "src/l.json").write_text(json.dumps(content))
    downloaded, _ = through(tmp_path, tmp_path / "src", place, fetch=layout != "parquet")
    reasons = [row["reason"] for row in downloaded.values()]
    good = "not_fetched" if layout == "parquet" else "ok"
    assert reasons == [(good, "missing_caption", "malformed_row")[n % 3] for n in range(3 * EACH)]
    quarantined = pq.read_table(tmp_path / "raw/src/quarantine.parquet")["row_id"].to_pylist()
    assert quarantined == [row_name("src", n) for n in sorted(malformed)]


def test_hostile_names(tmp_path):
    items = [{"image": name, "caption": f"{n}"} for n in range(EACH) for name in BAD_NAMES]
    (tmp_path / "src").mkdir()
    (tmp_path / "src/l.json").write_text(json.dumps(items))
    downloaded, _ = through(tmp_path, tmp_path / "src")
    assert {row["reason"] for row in downloaded.values()} == {"malformed_row"}
    assert len(downloaded) == EACH * len(BAD_NAMES)


def test_names_on_the_disk_that_are_no_text(tmp_path):
    (tmp_path / "src").mkdir()
    for n in range(EACH):
        (tmp_path / "src" / os.fsdecode(b"\xff%d.jpg" % n)).write_bytes(encoded(noise(n)))
    (tmp_path / "src/good.jpg").write_bytes(encoded(noise(1)))
    (tmp_path / "src/good.txt").write_text("a cat")
    downloaded, cleaned = through(tmp_path, tmp_path / "src")
    assert Counter(row["reason"] for row in downloaded.values()) == {"malformed_row": EACH, "ok": 1}
    assert len(cleaned) == 1


def test_missing_is_not_a_word(tmp_path):
    texts = pa.array(["nan", None, "None", "NA", ""], pa.string())
    urls = [f"http://elsewhere.example/{n}" for n in range(5)]
    pq.write_table(pa.table({"text": texts, "url": urls}), tmp_path / "l.parquet")
    downloaded, _ = through(tmp_path, tmp_path / "l.parquet", fetch=False)
    assert [row["reason"] for row in downloaded.values()] == [
        "not_fetched", "missing_caption", "not_fetched", "not_fetched", "not_fetched",
    ]  # fmt: skip
    numbers = {"text": pa.array([float("nan"), 1.0]), "url": urls[:2]}
    pq.write_table(pa.table(numbers), tmp_path / "l.parquet")
    downloaded, _ = through(tmp_path, tmp_path / "l.parquet", fetch=False)
    assert [row["reason"] for row in downloaded.values()] == ["malformed_row", "malformed_row"]


@settings(max_examples=25, deadline=20_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [b"", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\x20\0\0\0WEBP", b"II*\0", b"BM"]
            ),
            st.binary(max_size=200),
            st.text(st.characters(), max_size=40),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_any_files_and_captions_are_conserved(tmp_path_factory, items):
    folder = tmp_path_factory.mktemp("any")
    (folder / "src").mkdir()
    listed = []
    for number, (magic, data, caption) in enumerate(items):
        (folder / f"src/{number}.jpg").write_bytes(magic + data)
        listed.append({"image": f"{number}.jpg", "caption": [caption, caption, f"{number}"]})
    (folder / "src/list.json").write_text(json.dumps(listed))
    through(folder, folder / "src")
    check_conservation(folder / "raw/src", [row_name("src", row) for row in range(3 * len(items))])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["1.jpg", "http://a.com/x"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["image", "caption", "images", "annotations", "sentences", "raw", "id", "image_id", "regions",
                         "phrase", "file_name", "filename", "split", "cocoid", "sha256"]), inner, max_size=4),
    max_leaves=15,
)  # fmt: skip


@settings(max_examples=60, deadline=20_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(json_values, st.sampled_from(["auto", "albef", "karpathy", "coco", "visual_genome"]))
def test_any_json_is_rows_or_one_sentence(tmp_path_factory, content, layout):
    folder = tmp_path_factory.mktemp("json")
    (folder / "l.json").write_text(json.dumps(content))
    try:
        downloaded, _ = through(folder, folder / "l.json", {"format": layout}, fetch=False)
    except UserError:
        return
    assert list(downloaded) == [row_name("src", row) for row in range(len(downloaded))]


def test_no_encoding_comes_from_the_locale(tmp_path):
    """Python warns of text files opened without one; here such a warning from our own code is an error."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/gr\u00f6\u00dfe.jpg").write_bytes(encoded(noise(1)))
    items = [{"image": "gr\u00f6\u00dfe.jpg", "caption": "eine \u732b"}, {"image": 3}]
    (tmp_path / "src/l.json").write_text(json.dumps(items, ensure_ascii=False), encoding="utf-8")
    code = "from tests.data.test_hostile import through; from pathlib import Path; import sys; f = Path(sys.argv[1]); "
    code += "print(ascii([[row['reason'] for row in rows.values()] for rows in through(f, f / 'src')]))"
    ours = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning:components"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = subprocess.run(
        [sys.executable, *ours, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True, env=environment
    )
    assert found.stdout.strip() == "[['ok', 'malformed_row'], ['ok']]", found.stderr
    assert "/components/" not in "".join(line for line in found.stderr.splitlines() if "EncodingWarning" in line)
