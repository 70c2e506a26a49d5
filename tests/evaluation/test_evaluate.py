import json

import pyarrow.parquet as pq
import pytest

from components.evaluation.evaluate import EvaluateParams, evaluate
from components.evaluation.summary import COLUMNS, HEADINGS, metrics_table
from components.io.errors import UserError
from tests.evaluation.tiny_albef import jpeg, save_weights, write_split

CAPTIONS = [["a red cube", "the cube that is red"], ["a blue sphere"], ["green", "a green ball", "something green"]]
COLOURS = ["red", "blue", "green"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    save_weights(folder, CAPTIONS)
    return folder


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Evaluations keep what they computed below ``work``."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def task(tmp_path):
    write_split(tmp_path / "task" / "test", [jpeg(colour) for colour in COLOURS], CAPTIONS)
    return tmp_path / "task"


def test_results_of_a_split(task, weights, tmp_path):
    evaluate(EvaluateParams(top_k=2), run="retrieval", task=task, weights=weights, evaluation=tmp_path / "e" / "run")
    metrics = json.loads((tmp_path / "e" / "run" / "metrics.json").read_text())
    assert (metrics["pictures"], metrics["captions"], metrics["top_k"]) == (3, 6, 2)
    assert (metrics["run"], metrics["task"], metrics["split"]) == ("retrieval", "task", "test")
    ranks = pq.read_table(tmp_path / "e" / "run" / "ranks.parquet").to_pylist()
    assert [row["direction"] for row in ranks] == ["txt"] * 3 + ["img"] * 6
    assert ranks[4]["query"] == "retrieval/000000001"
    assert ranks[4]["picture"] == "retrieval/000000000"
    for kind in ("itc", "itm"):
        for direction in ("txt", "img"):
            found = [row[f"rank_{kind}"] for row in ranks if row["direction"] == direction]
            assert metrics[kind][f"{direction}_r1"] == pytest.approx(100 * sum(r == 1 for r in found) / len(found))
    examples = json.loads((tmp_path / "e" / "run" / "examples.json").read_text())
    best, worst = examples["img"]["best"], examples["img"]["worst"]
    assert len(best) == len(worst) == 3  # no query stands in both
    assert best[0]["rank_itm"] <= worst[0]["rank_itm"]
    assert sum(hit["right"] for hit in best[0]["top"]) == 1
    assert {hit["caption"] for hit in examples["txt"]["best"][0]["top"]} <= {t for texts in CAPTIONS for t in texts}
    first = best[0]["top"]
    assert [hit["score"] for hit in first] == sorted((hit["score"] for hit in first), reverse=True)

    rows = metrics_table(tmp_path / "e")
    assert [row[:2] for row in rows] == [("run", "chance"), ("run", "ITC"), ("run", "ITC + ITM")]
    assert rows[2][2:] == tuple(f"{metrics['itm'][key]:.1f}" for key in COLUMNS)
    assert all(len(row) == len(HEADINGS) for row in rows)


def test_batches_and_repetition_do_not_change_a_byte(task, weights, tmp_path):
    for name, sizes in (("a", {}), ("b", {}), ("c", {"batch_size": 1, "pair_batch_size": 1})):
        evaluate(EvaluateParams(**sizes), run="run", task=task, weights=weights, evaluation=tmp_path / name)
    for file in ("metrics.json", "ranks.parquet", "examples.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / "metrics.json").read_bytes() == (tmp_path / "c" / "metrics.json").read_bytes()


def test_another_picture_size(task, weights, tmp_path):
    evaluate(EvaluateParams(image_size=64), run="run", task=task, weights=weights, evaluation=tmp_path / "e")
    assert json.loads((tmp_path / "e" / "metrics.json").read_text())["image_size"] == 64


def test_unfit_settings_are_named(task, weights, tmp_path):
    def run(folder=weights, **params):
        evaluate(EvaluateParams(**params), run="run", task=task, weights=folder, evaluation=tmp_path / "e")

    with pytest.raises(UserError, match=r"no split 'dev': set evaluate\.split to one of test"):
        run(split="dev")
    with pytest.raises(UserError, match=r"max_tokens is 41, .* at most 40"):
        run(max_tokens=41)
    with pytest.raises(UserError, match="patches of 16"):
        run(image_size=40)
    with pytest.raises(UserError, match=r"model\.safetensors does not exist"):
        run(tmp_path / "nowhere")


def test_damaged_inputs_are_named(task, weights, tmp_path):
    def run(**folders):
        paths = {"task": task, "weights": weights, **folders}
        evaluate(EvaluateParams(), run="run", evaluation=tmp_path / "e", **paths)

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in weights.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="is damaged or not of its"):
        run(weights=broken)
    (broken / "model.safetensors").write_bytes((weights / "model.safetensors").read_bytes())
    config = json.loads((weights / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "text_layers": 3}))
    with pytest.raises(UserError, match="missing"):
        run(weights=broken)
    (broken / "config.json").write_text(json.dumps({**config, "text_layers": "many"}))
    with pytest.raises(UserError, match="no ALBEF configuration"):
        run(weights=broken)

    (broken / "config.json").write_text(json.dumps({**config, "task": "entailment"}))
    with pytest.raises(UserError, match="broken holds a model for entailment, which does not say how well"):
        run(weights=broken)

    write_split(tmp_path / "bare" / "test", [jpeg("red"), jpeg("blue")], [["a"], []])
    with pytest.raises(UserError, match=r"retrieval/000000999 .* has no caption"):
        run(task=tmp_path / "bare")
    write_split(tmp_path / "cut" / "test", [jpeg("red")[:300]], [["a"]])
    with pytest.raises(UserError, match=r"retrieval/000000000 .* cannot be decoded"):
        run(task=tmp_path / "cut")
    write_split(tmp_path / "none" / "test", [], [])
    with pytest.raises(UserError, match="no picture"):
        run(task=tmp_path / "none")


def test_metrics_that_evaluate_did_not_write(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.json").write_text('{"itc": {}}')
    with pytest.raises(UserError, match="not what evaluate writes"):
        metrics_table(tmp_path)
    assert metrics_table(tmp_path / "nothing") == []


def test_folds_and_resamples_by_parameter(weights, tmp_path):
    write_split(tmp_path / "task" / "test", [jpeg(colour) for colour in COLOURS], CAPTIONS)
    given = {"run": "r", "task": tmp_path / "task", "weights": weights, "evaluation": tmp_path / "out"}
    evaluate(EvaluateParams(top_k=2, folds=3, bootstrap=20), **given)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["folds"]["folds"] == 3
    assert metrics["folds"]["itc"]["txt_r1"] == 100.0  # of one picture
    assert "intervals" in metrics
    evaluate(EvaluateParams(top_k=2, bootstrap=0), **given)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert "folds" not in metrics
    assert "intervals" not in metrics
    with pytest.raises(UserError, match=r"evaluate.folds is 2, which does not divide the 3 pictures"):
        evaluate(EvaluateParams(folds=2), **given)
