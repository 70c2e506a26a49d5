"""Checkpoints on their way to a bucket that refuses, stalls, or loses the connection half-way."""

from types import SimpleNamespace

import boto3
import pytest
import torch

from components.io.errors import UserError
from components.io.storage import open_storage
from components.training.albef_tasks import PretrainingTask
from components.training.checkpoints import Checkpoints
from components.training.loop import fit
from components.training.uploads import Uploads, complete, fetch, patiently
from tests.faults import faults_before

pytest_plugins = ["tests.buckets"]
PARTS = 9 * 2**20 // 4  # numbers of a checkpoint that boto3 sends in two parts


@pytest.fixture
def faults(s3_server, bucket, monkeypatch):
    """A proxy that all of boto3 goes through; tries follow each other at once."""
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr("components.training.uploads.FIRST_WAIT", 0.01)
    monkeypatch.setattr("components.training.uploads.LONGEST_WAIT", 0.02)
    with faults_before(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def place(bucket):
    return open_storage(f"s3://{bucket}/run")


def objects(bucket, endpoint):
    client = boto3.client("s3", endpoint_url=endpoint)
    return {item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", ())}


def save(folder, storage, step, numbers=4):
    uploads = Uploads(storage, 9, patience=60)
    Checkpoints(folder, 9, uploads).save(step, {"training": {}, "value": torch.arange(numbers, dtype=torch.float32)})
    return uploads


@pytest.mark.parametrize("kind", ["refuse", "unavailable"])
def test_a_training_whose_bucket_is_away_for_a_while_ends_as_ever_and_all_is_there(
    kind, faults, bucket, shards, pretrain_params, tmp_path, capsys
):
    params = pretrain_params(checkpoint={"steps": 1, "storage_path": f"s3://{bucket}/trainings"}, max_steps=4)
    task = PretrainingTask(params, shards)
    losses, steps, away = task.losses, [], faults.add(kind, "^PUT ")

    def watched(*arguments):
        steps.append(1)
        if len(steps) == 4:  # the steps before did not wait for the bucket, and met it refusing more than boto3 tries
            away.wait(8)
            away.end()
        return losses(*arguments)

    task.losses = watched
    fit(task, params, tmp_path / "pretrain/run")
    storage = open_storage(f"s3://{bucket}/trainings/pretrain-run")
    assert "step-0000000004.pt" in complete(storage)
    fetch(storage, "step-0000000004.pt", tmp_path / "copy.pt")
    original = tmp_path / "pretrain/run/checkpoints/step-0000000004.pt"
    assert (tmp_path / "copy.pt").read_bytes() == original.read_bytes()
    said = capsys.readouterr().err
    assert said.count("is not copied yet") == 1
    assert "could not be copied" not in said


@pytest.mark.parametrize(
    ("kind", "pattern", "numbers"),
    [
        ("cut", r"^PUT .*step-0000000002\.pt(\?|$)", 4),  # in the middle of the file
        ("cut", r"^PUT .*step-0000000002\.pt\?.*partNumber=2", PARTS),  # in the middle of its second part
        ("refuse", r"^POST .*step-0000000002\.pt\?uploadId", PARTS),  # all parts there, not put together
        ("refuse", r"^PUT .*step-0000000002\.pt\.json", 4),  # all there, but for the note that says so
    ],
)
def test_what_is_half_uploaded_is_not_taken_for_whole(
    kind, pattern, numbers, faults, place, s3_server, bucket, tmp_path, capsys
):
    save(tmp_path / "here", place, 1).close()
    away = faults.add(kind, pattern)
    uploads = save(tmp_path / "here", place, 2, numbers)
    away.wait(6)  # boto3 has given up once, and another try has begun: now the machine is lost
    assert "run/step-0000000002.pt.json" not in objects(bucket, s3_server)
    there = Uploads(place, 9)
    assert Checkpoints(tmp_path / "there", 9, there).latest()["step"] == 1
    there.close()
    away.end()
    uploads.close()
    assert complete(place) == {"step-0000000001.pt", "step-0000000002.pt"}
    again = Uploads(place, 9)
    state = Checkpoints(tmp_path / "again", 9, again).latest()
    again.close()
    assert state["step"] == 2
    assert torch.equal(state["value"], torch.arange(numbers, dtype=torch.float32))
    assert capsys.readouterr().err.count("is not copied yet") == 1


def test_a_copy_that_breaks_off_on_its_way_back_is_fetched_again(faults, place, tmp_path):
    save(tmp_path / "here", place, 1, PARTS).close()
    broken = faults.add("cut", r"^GET .*step-0000000001\.pt$", times=2)
    fetch(place, "step-0000000001.pt", tmp_path / "copy.pt")
    assert broken.hits == 2
    assert (tmp_path / "copy.pt").read_bytes() == (tmp_path / "here/step-0000000001.pt").read_bytes()
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_copy_that_is_gone_although_its_note_is_there_leads_to_the_one_before(faults, place, tmp_path, capsys):
    for step in (1, 2):
        save(tmp_path / "here", place, step).close()
    faults.add("missing", r"^(GET|HEAD) .*step-0000000002\.pt$")
    uploads = Uploads(place, 9)
    assert Checkpoints(tmp_path / "there", 9, uploads).latest()["step"] == 1
    uploads.close()
    assert "step-0000000002.pt is damaged (FileNotFoundError)" in capsys.readouterr().err


def test_a_bucket_that_never_answers_is_said_at_the_end_and_local_checkpoints_stay(faults, place, tmp_path, capsys):
    away = faults.add("refuse", "^PUT ")
    uploads = Uploads(place, 9, patience=0.1)
    path = Checkpoints(tmp_path / "here", 9, uploads).save(1, {"training": {}})
    away.wait(6)
    uploads.close()
    assert "step-0000000001.pt could not be copied to s3://" in capsys.readouterr().err
    assert path.is_file()


def test_a_start_waits_for_its_bucket_and_then_gives_up_in_a_sentence(faults, place, tmp_path):
    save(tmp_path / "here", place, 1).close()
    faults.add("unavailable", "^GET .*list-type", times=12)
    assert complete(place) == {"step-0000000001.pt"}
    faults.add("refuse")
    with pytest.raises(UserError, match=r"cannot be reached \(.*: check credentials and AWS_ENDPOINT_URL"):
        patiently(lambda: list(place.list()), patience=0.05)
