"""Stage `validate`: good data pass with the same bytes every time, each planted fault fails by name and in words."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from components.data.validate import ValidateParams, validate
from components.io.errors import UserError
from components.io.outcomes import outcome_schema, write_outcomes
from components.io.records import RECORD_SCHEMA, RecordWriter, row_name, write_manifest
from components.io.runtime import Runtime

Edit = Callable[[list[dict]], None]


def record(source: str, index: int, *, decoded: bool = True, words: int = 5) -> dict:
    return {
        "id": row_name(source, 2 * index),
        "source": source,
        "url": f"http://x.test/{index}.jpg",
        "image": b"j" * (50 + index),
        "sha256": hashlib.sha256(f"{source}{index}".encode()).hexdigest(),
        "width": 120 if decoded else None,
        "height": 90 if decoded else None,
        "captions": [" ".join(["word"] * words), " ".join(["other"] * (words + 1))],
        "row_ids": [row_name(source, 2 * index), row_name(source, 2 * index + 1)],
    }


def write_folder(folder: Path, records: list[dict], rejected: list[tuple] = (), kind: str = "records") -> None:
    """A folder of records whose outcomes keep all their rows and reject `rejected` rows (name, reason)."""
    folder.mkdir(parents=True)
    with RecordWriter(folder / "records-00000.arrow") as writer:
        writer.write(records)
    write_manifest(folder, kind, [writer.entry()])
    rows = [(name, "kept", "ok", None) for item in records for name in item["row_ids"]]
    rows += [(name, "rejected", reason, None) for name, reason in rejected]
    names = outcome_schema().names
    write_outcomes(
        folder, [pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], outcome_schema())]
    )


def write_task(folder: Path, splits: dict[str, list[dict]]) -> None:
    rows = []
    for split, records in splits.items():
        write_folder(folder / split, records)
        (folder / split / "outcomes.parquet").unlink()
        rows += [(name, "kept", "ok", None, split) for item in records for name in item["row_ids"]]
    schema = outcome_schema(("split", pa.string()))
    table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
    write_outcomes(folder, [table])


def build(data: Path, *, edit: dict[str, Edit] | None = None, rejected: dict[str, list[tuple]] | None = None) -> None:
    """Ten pictures through all stages and a task; `edit` changes a stage's records before they are written."""
    edit, rejected = edit or {}, rejected or {}

    def write(name: str, folder: Path, records: list[dict]) -> None:
        edit.get(name, lambda _: None)(records)
        write_folder(folder, records, rejected.get(name, []))

    write("raw", data / "raw" / "web", [record("web", index, decoded=False) for index in range(10)])
    for name in ("clean", "unique", "shards"):
        write(name, data / name, [record("web", index) for index in range(10)])
    splits = {split: [record(f"task_{split}", index) for index in range(3)] for split in ("train", "val", "test")}
    edit.get("task", lambda _: None)(splits)  # type: ignore[arg-type]
    write_task(data / "tasks" / "demo", splits)


def run(data: Path, out: str = "validation", **params) -> Path:
    validate(
        ValidateParams(**params),
        raw=data / "raw",
        clean=data / "clean",
        unique=data / "unique",
        shards=data / "shards",
        tasks=data / "tasks",
        validation=data / out,
        runtime=Runtime(work=data / "work", processes=1),
    )
    return data / out


def failures(data: Path) -> dict[tuple[str, str | None], dict]:
    """The failed expectations of the last run by suite and column."""
    results = json.loads((data / "validation" / "results.json").read_text())
    assert results["success"] is not True
    return {
        (suite["suite"], item["column"]): item
        for suite in results["suites"]
        for item in suite["expectations"]
        if not item["success"]
    }


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("good")
    build(data)
    run(data)
    return data


def test_good_data_pass_and_are_documented(good: Path) -> None:
    results = json.loads((good / "validation" / "results.json").read_text())
    assert results["success"] is True
    suites = {suite["suite"]: suite for suite in results["suites"]}
    assert set(suites) == {
        *("raw", "raw-rows", "clean", "clean-rows", "unique", "unique-rows"),
        *("shards", "shards-rows", "shards-files", "schemas", "task-demo", "task-demo-rows"),
    }
    assert suites["task-demo"]["lines"] == 9
    assert {item["description"] for item in suites["unique-rows"]["expectations"]} >= {
        "Every row that the stage before handed on has one outcome",
        "The records hold one caption for every row that was kept",
    }
    docs = good / "validation" / "docs"
    for suite in suites:
        for kind in ("validations", "expectations"):
            assert (docs / kind / f"{suite}.html").is_file()
            assert f'href="{kind}/{suite}.html"' in (docs / "index.html").read_text()
    assert "expectations hold" in (docs / "index.html").read_text()


def test_pages_need_no_network_and_their_links_lead_somewhere(good: Path) -> None:
    docs = good / "validation" / "docs"
    pages = sorted(docs.rglob("*.html"))
    assert len(pages) == 25
    for page in pages:
        text = page.read_text()
        assert "://" not in text, page
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if not link.startswith("#"):
                assert (page.parent / link).resolve().is_file(), (page, link)
            else:
                assert f'id="{link[1:]}"' in text or f"id={link[1:]} " in text, (page, link)


def test_same_bytes_again_and_elsewhere(good: Path, tmp_path: Path) -> None:
    """Nothing of the clock, the folder's place or a random identifier is in what DVC hashes."""
    shutil.copytree(good, tmp_path / "copy", ignore=shutil.ignore_patterns("validation", "work"))
    assert content(run(tmp_path / "copy")) == content(good / "validation")


def test_statistics_by_stage_and_source(good: Path) -> None:
    statistics = json.loads((good / "validation" / "statistics.json").read_text())
    web = statistics["clean"]["web"]
    assert (web["pictures"], web["captions"]) == (10, 20)
    assert web["words_per_caption"]["mean"] == 5.5
    assert (web["words_per_caption"]["histogram"][5], web["words_per_caption"]["histogram"][6]) == (10, 10)
    assert web["width"] == {"min": 120, "median": 120, "mean": 120, "max": 120}
    assert web["bytes"]["sum"] == sum(50 + index for index in range(10))
    assert statistics["raw"]["web"]["width"]["min"] is None
    assert set(statistics["tasks/demo"]) == {"train", "val", "test"}


def test_every_planted_fault_is_found_with_its_offender(tmp_path: Path) -> None:
    """One run, many faults: each fails the expectation that is meant for it, and the message says so."""

    def clean(records: list[dict]) -> None:
        records[1]["captions"][0] = "word " * 31
        records[2]["captions"][1] = ""
        records[3]["width"] = 5
        records[4]["id"] = records[5]["id"]

    def unique(records: list[dict]) -> None:
        records[6]["sha256"] = record("task_test", 1)["sha256"]
        records[7]["sha256"] = records[8]["sha256"]

    def shards(records: list[dict]) -> None:
        del records[9]

    def task(splits: dict) -> None:
        splits["train"][0]["sha256"] = splits["val"][2]["sha256"]

    lost = [("web/000000099", "undecodable")]
    build(
        tmp_path,
        edit={"clean": clean, "unique": unique, "shards": shards, "task": task},
        rejected={"raw": lost * 20, "unique": [("web/000000098", "duplicate_exact")] * 4},
    )
    with pytest.raises(UserError) as error:
        run(tmp_path, min_side=32, max_reject_share={"download": 0.4}, max_duplicate_share=0.1, examples=2)
    message = str(error.value)
    assert "\n" not in message
    assert "clean: every caption has at most 30 words" in message
    assert "1 of 10 break it in `words_max` (such as web/000000002: 31)" in message
    assert f"see {tmp_path / 'validation' / 'docs' / 'index.html'}" in message
    assert re.search(r"and \d+ more", message)

    found = failures(tmp_path)
    assert found["raw-rows", "reject_share"]["examples"] == [{"part": "web", "reject_share": 0.5}]
    assert found["clean", "words_min"]["examples"] == [{"id": "web/000000004", "words_min": 0}]
    assert found["clean", "short_side"]["examples"] == [{"id": "web/000000006", "short_side": 5}]
    assert found["clean", "id"]["observed"] == {"lines": 10, "unexpected": 2}
    assert found["unique", "leak"]["examples"] == [{"id": "web/000000012", "leak": 1}]
    assert [line["id"] for line in found["unique", "sha256"]["examples"]] == ["web/000000014", "web/000000016"]
    assert found["unique-rows", "duplicate_share"]["observed"]["unexpected"] == 1
    assert found["shards", None]["observed"] == 9
    assert found["task-demo", "leak"]["examples"] == [{"id": "task_train/000000000", "leak": 1}]
    assert found["unique-rows", None]["sentence"].startswith("every row that the stage before handed on")
    index = (tmp_path / "validation" / "docs" / "index.html").read_text()
    assert f"{len(found)} of" in index


def test_offenders_and_further_faults(tmp_path: Path) -> None:
    """Schema, nulls, row names, doubled outcomes, unknown reasons, protected names: each by its own sentence."""

    def clean(records: list[dict]) -> None:
        records[1]["captions"][0] = None
        records[2]["row_ids"].append("web/000000777")
        records[3]["sha256"] = "XYZ"

    def unique(records: list[dict]) -> None:
        records[4]["url"] = "http://images.cocodataset.org/train2017/000000000077.jpg"
        records[5]["coco_id"] = 77

    build(
        tmp_path,
        edit={"clean": clean, "unique": unique},
        rejected={"unique": [("web/000000000", "duplicate_exact"), ("web/000000099", "no_such_reason")]},
    )
    names = {"name": ["coco:77"], "task": ["refs"], "split": ["val"], "picture": ["coco:77"]}
    pq.write_table(pa.table(names), tmp_path / "unique" / "protected.parquet")
    with RecordWriter(
        tmp_path / "raw/web/records-00000.arrow", RECORD_SCHEMA.append(pa.field("more", pa.int8()))
    ) as writer:
        for item in [record("web", index, decoded=False) for index in range(10)]:
            writer.write(pa.Table.from_pylist([{**item, "more": 1, "coco_id": None}], writer._schema))
    write_manifest(tmp_path / "raw/web", "raw", [writer.entry()])
    with pytest.raises(UserError):
        run(tmp_path)
    found = failures(tmp_path)
    assert found["clean", "null_captions"]["examples"] == [{"id": "web/000000002", "null_captions": 1}]
    assert "every caption names the row" in found["clean", None]["sentence"]
    assert found["clean", "sha256"]["examples"] == [{"id": "web/000000006", "sha256": "XYZ"}]
    assert [line["id"] for line in found["unique", "protected"]["examples"]] == ["web/000000008", "web/000000010"]
    assert found["unique-rows", "repeated"]["examples"] == [{"part": "all", "repeated": 1}]
    assert found["unique-rows", "unknown"]["examples"] == [{"part": "all", "unknown": 1}]
    assert "(raw/web/records-00000.arrow: more)" in found["schemas", None]["sentence"]
    offenders = pq.read_table(tmp_path / "validation" / "offenders.parquet").to_pylist()
    assert ("unique", "protected", "web/000000008", "1") in {
        tuple(line[key] for key in ("suite", "column", "line", "value")) for line in offenders
    }
    assert {line["line"] for line in offenders if line["suite"] == "schemas"} == {"raw/web/records-00000.arrow: more"}


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    build(tmp_path)
    table = pa.ipc.open_file(tmp_path / "clean/records-00000.arrow").read_all().drop_columns("sha256")
    with (
        pa.OSFile(str(tmp_path / "clean/records-00000.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as file,
    ):
        file.write_table(table)
    with pytest.raises(UserError, match=r"clean/records-00000\.arrow has no column 'sha256'"):
        run(tmp_path)


def test_drift_from_a_baseline(good: Path, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    shutil.copyfile(good / "validation" / "statistics.json", baseline)
    build(tmp_path / "same")
    run(tmp_path / "same", baseline=baseline)

    def longer(records: list[dict]) -> None:
        for item in records[:3]:
            item["captions"][0] += " and more words than before"
        for item in records[:4]:
            item["width"] = item["height"] = 200

    build(tmp_path, edit=dict.fromkeys(("clean", "unique", "shards"), longer))
    run(tmp_path, baseline=baseline, max_words_drift=0.15, max_size_drift=0.4)
    with pytest.raises(UserError, match=r"drift: at most 14\.0% of each source's captions differ in length") as error:
        run(tmp_path, baseline=baseline, max_words_drift=0.14, max_size_drift=0.39)
    assert "(such as clean/web: 0.15)" in str(error.value)
    assert failures(tmp_path)["drift", "size_drift"]["examples"][0] == {"part": "clean/web", "size_drift": 0.4}

    content = json.loads(baseline.read_text())
    content["clean"]["sbu"] = content["clean"]["web"]
    baseline.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"clean/sbu: 1"):  # a source that has gone
        run(tmp_path / "same", baseline=baseline)
    for wrong in ("[]", "{", '{"clean": {"web": 3}}'):
        baseline.write_text(wrong)
        with pytest.raises(UserError, match=r"is no statistics\.json"):
            run(tmp_path, baseline=baseline)
    with pytest.raises(UserError, match="where no file is"):
        run(tmp_path, baseline=tmp_path / "gone.json")


def test_the_first_page_counts_sources_as_papers_do(good: Path) -> None:
    index = (good / "validation" / "docs" / "index.html").read_text()
    numbers = "".join(f'<td class="number">{value}</td>' for value in ("10", "20", "2.00", "5.5", "0.0"))
    assert f"<tr><td>web</td>{numbers}</tr>" in index
    assert f"<tr><td>all</td>{numbers}</tr>" in index


def test_damaged_shard_fails_the_gate_by_name(tmp_path: Path) -> None:
    build(tmp_path)
    path = tmp_path / "shards" / "records-00000.arrow"
    path.write_bytes(path.read_bytes().replace(b"jjj", b"jkj", 1))
    with pytest.raises(UserError, match=r"shards-files: .*but there are 1 \(records-00000\.arrow was altered"):
        run(tmp_path)


def test_nothing_downloaded_fails_in_words(tmp_path: Path) -> None:
    """`fetch: false` on a list of URLs: every row is there, no picture is."""
    build(tmp_path)
    for name in ("raw/web", "clean", "unique", "shards"):
        shutil.rmtree(tmp_path / name)
        write_folder(tmp_path / name, [], [("web/000000000", "not_fetched")] if name == "raw/web" else [])
    with pytest.raises(UserError, match=r"at most 80\.0% of the rows are rejected, but 1 of 1 break it") as error:
        run(tmp_path)
    assert "unique: there are at least 1 pictures, but there are 0" in str(error.value)


def test_without_tasks_and_with_relaxed_splits(tmp_path: Path) -> None:
    def unique(records: list[dict]) -> None:
        records[0]["sha256"] = record("task_val", 0)["sha256"]

    build(tmp_path, edit={"unique": unique})
    run(tmp_path, evaluation_splits=["test"])
    shutil.rmtree(tmp_path / "tasks")
    run(tmp_path)


def test_unfinished_stage_is_named(tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / "unique" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"unique.*has not finished"):
        run(tmp_path)


def test_contradicting_limits_are_refused() -> None:
    with pytest.raises(ValidationError, match="`min_words` is 31, above `max_words`, 30"):
        ValidateParams(min_words=31)


def test_many_bad_rows_leave_small_results_and_pages(tmp_path: Path) -> None:
    import pandas as pd

    from components.data.validation.expect import run_suites
    from components.data.validation.suites import picture_suite

    size = 100_000
    frame = pd.DataFrame(
        {
            "id": [f"web/{index // 2:09d}" for index in range(size)],  # every name twice
            "source": "web",
            "sha256": "0",
            "bytes": 0,
            "captions": 0,
            "rows": 0,
            "null_captions": 0,
        }
    )
    results = run_suites([picture_suite("raw", frame, ValidateParams(), decoded=False)], tmp_path / "docs", examples=5)
    assert len(json.dumps(results)) < 10_000
    assert sum(path.stat().st_size for path in (tmp_path / "docs").rglob("*.html")) < 100_000
    unique = next(item for item in results["suites"][0]["expectations"] if "unique" in item["expectation"])
    assert unique["observed"] == {"lines": size, "unexpected": size}
    assert len(unique["examples"]) == 5
    offenders = pq.read_table(tmp_path / "offenders.parquet")  # all of them, in little room
    broken = [item for item in results["suites"][0]["expectations"] if not item["success"]]
    assert len(offenders) == sum(item["observed"]["unexpected"] for item in broken) == size * len(broken)
    lines = offenders.filter(pc.equal(offenders["description"], unique["description"]))
    assert set(lines["line"].to_pylist()) == set(frame["id"])
    assert (tmp_path / "offenders.parquet").stat().st_size < 2_000_000


def test_an_expectation_that_cannot_be_computed_fails_and_says_so(tmp_path: Path) -> None:
    import pandas as pd

    from components.data.validation.expect import run_suites
    from components.data.validation.suites import picture_suite

    columns = {"id": "a", "source": "web", "captions": 1, "rows": 1, "null_captions": 0, "sha256": "0" * 64}
    frame = pd.DataFrame({name: [value] for name, value in columns.items()})
    results = run_suites([picture_suite("raw", frame, ValidateParams(), decoded=False)], tmp_path / "docs", examples=5)
    (failed,) = [item for item in results["suites"][0]["expectations"] if not item["success"]]
    assert failed["column"] == "bytes"
    assert "could not be checked" in failed["sentence"]
