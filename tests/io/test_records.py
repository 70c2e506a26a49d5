import pyarrow as pa
import pytest

from components.io.errors import UserError
from components.io.outcomes import (
    Reason,
    Status,
    check_conservation,
    count_reasons,
    kept_row_ids,
    outcome_schema,
    write_outcomes,
)
from components.io.records import (
    RecordWriter,
    iter_batches,
    manifest_digest,
    open_records,
    read_manifest,
    row_name,
    write_manifest,
)


def record(number, captions=("a cat",)):
    return {
        "id": row_name("web", number),
        "source": "web",
        "url": f"http://corpus.test/{number}.jpg",
        "image": bytes([number % 256]) * 10,
        "sha256": "0" * 64,
        "width": None,
        "height": None,
        "captions": list(captions),
        "row_ids": [row_name("web", number + i) for i in range(len(captions))],
    }


def write(folder, count=5):
    folder.mkdir()
    with RecordWriter(folder / "records-00000.arrow") as writer:
        writer.write([record(number, ("a cat", "a dog")) for number in range(count)])
    return write_manifest(folder, "raw", [writer.entry()], source="web")


def test_a_folder_of_records_reads_back_in_order(tmp_path):
    written = write(tmp_path / "raw")
    manifest = read_manifest(tmp_path / "raw")
    assert manifest == written
    assert (manifest.rows, manifest.captions, manifest.extra) == (5, 10, {"source": "web"})
    batches = list(iter_batches(tmp_path / "raw", ["id", "image"], rows=2))
    assert [batch.num_rows for batch in batches] == [2, 2, 1]
    assert batches[0]["id"].to_pylist() == ["web/000000000", "web/000000001"]
    assert batches[0]["image"].type == pa.large_binary()


def test_the_same_records_give_the_same_bytes(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    assert manifest_digest(tmp_path / "a") == manifest_digest(tmp_path / "b")


def test_an_empty_file_of_records_is_a_file(tmp_path):
    with RecordWriter(tmp_path / "records-00000.arrow") as writer:
        writer.write([])
    assert open_records(tmp_path / "records-00000.arrow").num_rows == 0


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError), RecordWriter(tmp_path / "records-00000.arrow") as writer:
        writer.write([record(0)])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "has not finished"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "records-00000.arrow").unlink(), "missing"),
        (lambda folder: (folder / "records-00000.arrow").write_bytes(b"ARROW1"), "damaged"),
    ],
)
def test_damage_is_told_in_a_sentence(tmp_path, damage, message):
    write(tmp_path / "raw")
    damage(tmp_path / "raw")
    with pytest.raises(UserError, match=message):
        list(iter_batches(tmp_path / "raw"))


def outcomes(rows):
    return pa.Table.from_pylist(
        [{"row_id": r, "status": s, "reason": why, "detail": None} for r, s, why in rows], schema=outcome_schema()
    )


def test_outcomes_count_and_conserve(tmp_path):
    rows = [("a", Status.KEPT, Reason.OK), ("b", Status.REJECTED, Reason.TIMEOUT), ("c", Status.KEPT, Reason.OK)]
    assert write_outcomes(tmp_path, [outcomes(rows[:2]), outcomes(rows[2:])]) == 3
    assert count_reasons(tmp_path) == {("kept", "ok"): 2, ("rejected", "timeout"): 1}
    assert kept_row_ids(tmp_path).to_pylist() == ["a", "c"]
    check_conservation(tmp_path, ["c", "b", "a"])


@pytest.mark.parametrize("rows_in", [["a"], ["a", "b", "b"], ["a", "b", "c"], ["a", "c"]])
def test_a_row_lost_or_doubled_is_an_error(tmp_path, rows_in):
    write_outcomes(tmp_path, [outcomes([("a", Status.KEPT, Reason.OK), ("b", Status.KEPT, Reason.OK)])])
    with pytest.raises(ValueError, match="not conserved"):
        check_conservation(tmp_path, rows_in)
