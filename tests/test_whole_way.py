"""The whole way once, small: every stage in its order on a tiny corpus, without DVC and without Prefect.

What is held here is what no stage can promise alone: rows are conserved from list to shards, the reasons in the
outcomes are the ills that `synthesize` planted, no evaluation picture reaches the shards, and the numbers come out.
"""

import json
from pathlib import Path

import pyarrow.compute as pc
import pytest

from components.data.corpus.params import WebParams
from components.io.outcomes import check_conservation, count_reasons, kept_row_ids, read_outcomes
from components.io.records import iter_batches, read_manifest
from pipelines.params import load_params
from pipelines.stages import STAGES

ROOT = Path(__file__).resolve().parents[1]
TINY_MODEL = {
    "image_size": 32,
    "patch_size": 16,
    "vision_width": 32,
    "vision_depth": 1,
    "vision_heads": 2,
    "text_width": 32,
    "text_layers": 2,
    "fusion_layers": 1,
    "text_heads": 2,
    "text_intermediate": 64,
    "max_positions": 40,
    "embed_dim": 16,
    "queue_size": 48,
}


def tiny(**sections):
    """Overrides that make the demo's parameters small."""
    flat = {f"synthesize.web.{ill}": 3 for ill in WebParams.model_fields}
    flat |= {"synthesize.train": 90, "synthesize.val": 12, "synthesize.test": 12}
    flat |= {f"pretrain.model.{name}": value for name, value in TINY_MODEL.items()}
    flat |= {"pretrain.epochs": 1, "pretrain.batch_size": 16, "pretrain.schedule.warmup_iterations": 0}
    for name, value in {"epochs": 1, "batch_size": 16, "queue_size": 48, "schedule.warmup_iterations": 0}.items():
        flat[f"finetune.runs.retrieval.{name}"] = value
    flat |= {"evaluate.top_k": 6, "shard.pictures_per_shard": 20, "runtime.processes": 1} | sections
    return [f"{key}={value}" for key, value in flat.items()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The data folder after all stages."""
    data = tmp_path_factory.mktemp("whole")
    params = load_params(ROOT / "params.yaml", tiny(**{"runtime.work": data / "work"}))
    task, models, curves = data / "tasks" / "retrieval", data / "models", data / "curves"

    def run(stage, **options):
        STAGES[stage].run(params, **options)

    run("synthesize", corpus=data / "corpus")
    run("download", source="corpus", input=data / "corpus", raw=data / "raw" / "corpus")
    run("prepare_tasks", task="retrieval", input=data / "corpus", tasks=task)
    run("clean", raw=data / "raw", clean=data / "clean")
    run("deduplicate", clean=data / "clean", tasks=data / "tasks", unique=data / "unique")
    run("shard", unique=data / "unique", shards=data / "shards")
    records = {name: data / name for name in ("raw", "clean", "unique", "shards", "tasks")}
    run("validate", **records, validation=data / "validation")
    run("pretrain", shards=data / "shards", weights=models / "pretrain", curves=curves / "pretrain")
    weights = models / "retrieval"
    run(
        "finetune",
        run="retrieval",
        task=task,
        pretrained=models / "pretrain",
        weights=weights,
        curves=curves / "retrieval",
    )
    run("evaluate", run="retrieval", task=task, weights=weights, evaluation=data / "evaluation" / "retrieval")
    run(
        "report",
        **records,
        corpus=data / "corpus",
        validation=data / "validation",
        models=models,
        curves=curves,
        evaluation=data / "evaluation",
        ablations=data / "ablations",
        report=data / "report",
    )
    return data


def test_rows_are_conserved_from_the_list_to_the_shards(whole):
    ills = json.loads((whole / "corpus" / "ills.json").read_text())
    raw = whole / "raw" / "corpus"
    assert read_outcomes(raw).num_rows == ills["rows_in"]
    for before, after in ((raw, "clean"), (whole / "clean", "unique"), (whole / "unique", "shards")):
        check_conservation(whole / after, kept_row_ids(before))
    for folder in (raw, *(whole / name for name in ("clean", "unique", "shards"))):
        assert sorted(kept_row_ids(folder).to_pylist()) == sorted(rows_in_records(folder)), folder


def rows_in_records(folder):
    return [row for batch in iter_batches(folder, ["row_ids"]) for rows in batch["row_ids"].to_pylist() for row in rows]


@pytest.mark.parametrize(
    ("stage", "folder"), [("download", "raw/corpus"), ("clean", "clean"), ("deduplicate", "unique")]
)
def test_the_reasons_are_the_planted_ills(whole, stage, folder):
    planted = json.loads((whole / "corpus" / "ills.json").read_text())[stage]["counts"]
    found = {reason: count for (_, reason), count in count_reasons(whole / folder).items() if reason != "ok"}
    assert found == {reason: count for reason, count in planted.items() if count and reason != "ok"}


def test_no_evaluation_picture_reaches_the_shards(whole):
    held_out = {
        digest
        for split in ("val", "test")
        for batch in iter_batches(whole / "tasks" / "retrieval" / split, ["sha256"])
        for digest in batch["sha256"].to_pylist()
    }
    assert held_out
    for batch in iter_batches(whole / "shards", ["sha256"]):
        assert not held_out & set(batch["sha256"].to_pylist())
    evidence = read_outcomes(whole / "unique")
    leaks = evidence.filter(pc.match_substring(evidence["reason"], "leak_"))
    assert leaks.num_rows > 0


def test_the_numbers_come_out(whole):
    test = read_manifest(whole / "tasks" / "retrieval" / "test")
    metrics = json.loads((whole / "evaluation" / "retrieval" / "metrics.json").read_text())
    assert (metrics["pictures"], metrics["captions"]) == (test.rows, test.captions)
    for way in ("itc", "itm"):
        for key in ("txt_r1", "txt_r5", "txt_r10", "img_r1", "img_r5", "img_r10", "r_mean"):
            assert 0 <= metrics[way][key] <= 100
    page = (whole / "report" / "index.html").read_text()
    assert f"{metrics['itm']['txt_r1']:.1f}" in page
