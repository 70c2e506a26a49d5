"""Pre-training from shards in a bucket: an order of few shards at a time, the same as from a folder."""

import io

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from components.data.tokenizer import train_tokenizer
from components.io.errors import UserError
from components.io.records import RecordWriter, write_manifest
from components.io.storage import S3Storage, open_storage
from components.training.albef_tasks import PretrainingTask
from components.training.data import Plan
from components.training.loop import fit

pytest_plugins = ["tests.buckets"]
SHARDS, ROWS = 5, 4


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many") / "shards"
    folder.mkdir()
    rng, entries = np.random.default_rng(0), []
    for shard in range(SHARDS):
        records = []
        for row in range(ROWS):
            data = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(data, "PNG")
            record = {"id": f"t/{shard}{row}", "source": "t", "url": "x", "image": data.getvalue(), "sha256": ""}
            records.append(record | {"width": 40, "height": 40, "captions": ["a red square"], "row_ids": [f"t/{row}"]})
        with RecordWriter(folder / f"{shard:05d}.arrow") as writer:
            writer.write(records)
        entries.append(writer.entry())
    write_manifest(folder, "shards", entries)
    train_tokenizer(lambda: iter(["a red square"] * 20), 80, 1).save(folder / "tokenizer.json")
    return folder


def test_an_epoch_asks_for_few_shards_at_a_time_and_for_each_sample_once():
    plan = Plan(SHARDS * ROWS, 4, 3, samples_per_shard=(ROWS,) * SHARDS, window=2)
    whole = [draw.samples for draw in plan.draws(0, 2 * plan.per_epoch)]
    for epoch in range(2):
        drawn = np.array(whole[epoch * plan.per_epoch : (epoch + 1) * plan.per_epoch]).reshape(-1)
        assert sorted(drawn) == list(range(SHARDS * ROWS))
        for first in range(0, len(drawn), 2 * ROWS):
            assert len(set(drawn[first : first + 2 * ROWS] // ROWS)) <= 2
    assert whole[:5] != whole[5:]
    assert [draw.samples for draw in plan.draws(3, 10)] == whole[3:]
    halves = [list(Plan(20, 4, 3, rank, 2, 1, (ROWS,) * SHARDS, 2).draws(0, 10)) for rank in range(2)]
    assert [one.samples + other.samples for one, other in zip(*halves, strict=True)] == whole


def test_shards_from_a_bucket_train_as_those_of_a_folder(many_shards, pretrain_params, bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = open_storage(f"s3://{bucket}/shards")
    for path in many_shards.iterdir():
        storage.upload(path, path.name)
    fetched, download = [], S3Storage.download

    def counted(self, name, path):
        fetched.append(name)
        download(self, name, path)

    monkeypatch.setattr(S3Storage, "download", counted)
    near = pretrain_params(shuffle_shards=2, epochs=1)
    expected = fit(PretrainingTask(near, many_shards), near, tmp_path / "near")
    assert fetched == []
    far = pretrain_params(shuffle_shards=2, epochs=1, shards_at=f"s3://{bucket}/shards", shards_cache_mb=1)
    task = PretrainingTask(far, many_shards)
    assert fetched == ["manifest.json"], "nothing is fetched before it is wanted"
    outcome = fit(task, far, tmp_path / "far")
    assert outcome.history == expected.history
    arrows = [name for name in fetched if name.endswith(".arrow")]
    assert sorted(arrows) == [f"{shard:05d}.arrow" for shard in range(SHARDS)], "each shard once"
    storage.write("manifest.json", storage.read("manifest.json") + b"\n")
    with pytest.raises(UserError, match=r"the shards at s3://.* are not those of"):
        PretrainingTask(far, many_shards)


def test_far_shards_need_an_order_that_suits_them(pretrain_params):
    with pytest.raises(ValidationError, match="shards_at needs shuffle_shards"):
        pretrain_params(shards_at="s3://bucket/shards")
