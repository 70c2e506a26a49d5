"""Turbo: candidates by cosine, re-ranked; tables 5 and 6 of a run; `vlp search` over an evaluated split."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from components.evaluation.evaluate import EvaluateParams, evaluate
from components.evaluation.retrieval import best_ranks
from components.evaluation.search import RunSearch
from components.evaluation.tower_models import EncodedSplit, OnDemandSplit, load_tower_model
from components.evaluation.tower_scoring import as_if_candidates, embed_all, recalls, score_all, score_candidates
from components.evaluation.tower_search import TowerSearch
from components.evaluation.turbo import HEADINGS, turbo_tables
from components.evaluation.vector_index import IndexSettings, VectorIndex
from components.io.errors import UserError
from components.io.runtime import Runtime
from components.training.feature_store import FeatureReader
from components.training.features import FeaturesParams, features
from components.training.finetune import FinetuneParams, finetune
from pipelines.cli import app
from pipelines.recipe import RECIPES

TEXT = {"layers": 1, "take": [1], "width": 16, "heads": 2, "intermediate": 32, "vocab_size": 80, "max_positions": 16}
TOWERS = {
    "image": {"model": "tf_efficientnet_lite0", "image_size": 64, "stages": [6], "grid": 2},
    "text": TEXT | {"dropout": 0},
    "max_tokens": 16,
    "semantic_values": 3,
    "seed": 3,
}
HEAD = {"regions": 4, "local_width": 8, "join_width": 8, "reasoning_steps": 1, "fusion_steps": 1}


@pytest.fixture(scope="module")
def run(task, shards, tmp_path_factory):
    """A VITR of tiny random towers: its folders `features`, `weights` and `evaluation`, trained and evaluated."""
    folder = tmp_path_factory.mktemp("run")
    runtime = Runtime(work=folder / "work", processes=1)
    chosen = TOWERS | {"task": str(task), "vocabulary": str(shards / "tokenizer.json")}
    params = FeaturesParams.model_validate({"towers": {"tiny": chosen}})
    features(params, towers="tiny", task=task, features=folder / "features", runtime=runtime)
    settings = {"kind": "vitr", "task": str(task), "pretrained": str(folder / "features"), "head": HEAD}
    settings |= {"epochs": 3, "batch_size": 6, "log_every": 1, "num_threads": 1}
    finetune(
        FinetuneParams.model_validate_json(json.dumps({"runs": {"tiny": settings}})),
        run="tiny",
        task=task,
        pretrained=folder / "features",
        weights=folder / "weights",
        curves=folder / "curves",
        runtime=runtime,
    )
    evaluate_run(folder, task)
    return folder


def evaluate_run(folder, task):
    params = EvaluateParams(split="val", examples=1, bootstrap=0)
    runtime = Runtime(work=folder / "work")
    options = {"run": "tiny", "task": task, "weights": folder / "weights", "evaluation": folder / "evaluation"}
    evaluate(params, **options, runtime=runtime)


@pytest.fixture(scope="module")
def loaded(run, task):
    """The model's head, the split as the towers read it, scores of all pairs, and global vectors."""
    model, sizes = load_tower_model(run / "weights", "cpu")
    split = EncodedSplit.read(task / "val", model, sizes, run / "weights", "cpu")
    return model.head, split, score_all(model.head, split)["vitr"], embed_all(model.head, split)


def opened(run, task, **changes):
    folders = {"weights": run / "weights", "task": task, "evaluation": run / "evaluation"}
    return RunSearch("tiny", **folders | changes)


@pytest.mark.parametrize("kind", ["exact", "approximate"])
def test_with_all_as_candidates_a_query_ranks_as_without_turbo(kind, loaded):
    head, split, scores, vectors = loaded
    search = TowerSearch(head, split, *vectors, index=IndexSettings(kind))
    pictures, captions = range(len(split)), range(len(split.captions))
    for count in (None, 1000, len(captions)):
        for found, row in zip(search.captions_for(split.regions(pictures), count), scores, strict=True):
            assert sorted(found.places) == list(captions)
            np.testing.assert_allclose(found.scores, row[found.places], atol=1e-6)
            assert (np.diff(found.scores) <= 0).all()
        for found, row in zip(search.pictures_for(*split.words(captions), count), scores.T, strict=True):
            assert sorted(found.places) == list(pictures)
            np.testing.assert_allclose(found.scores, row[found.places], atol=1e-6)


def test_candidates_are_the_nearest_by_cosine_and_ranked_by_score(loaded):
    head, split, scores, (images, texts) = loaded
    search = TowerSearch(head, split, images, texts)
    asked = []
    plain = split.regions
    split.regions = lambda pictures: asked.append(list(pictures)) or plain(pictures)
    try:
        found = search.pictures_for(*split.words([4]), 2)[0]
    finally:
        del split.regions
    nearest = (texts[4] @ images.T).argsort(descending=True)[:2].tolist()
    assert asked == [nearest], "regions are read of candidates alone"
    assert found.places.tolist() == sorted(nearest, key=lambda place: -float(scores[place, 4]))
    np.testing.assert_allclose(found.cosines, (texts[4] @ images.T)[found.places], atol=1e-6)


def test_right_answers_outside_the_candidates_stand_after_them():
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.2]])  # the right answer, 0, has the best score
    cosines = torch.tensor([[0.1, 0.9, 0.8, 0.0]])  # and the third cosine
    ranks = {}
    for count in (1, 2, 3, 4):
        ruled = as_if_candidates(scores, cosines, VectorIndex(torch.eye(4)).search(cosines, count))
        ranks[count] = int(best_ranks(ruled, [0], [0, 1, 2, 3])[0])
    assert ranks == {1: 3, 2: 3, 3: 1, 4: 1}


def test_tables_5_and_6_of_a_run(run, task, loaded, tmp_path):
    head, split, scores, _ = loaded
    folders = {"weights": run / "weights", "task": task, "evaluation": run / "evaluation"}
    out, timings = tmp_path / "turbo" / "tiny.json", tmp_path / "timings" / "tiny.json"
    options = {"candidates": [1, 3, 500], "queries": 2, "out": out, "timings": timings}
    tables = turbo_tables("tiny", **folders, **options)
    first = out.read_bytes()
    written = json.loads(first)
    whole = recalls({"vitr": scores}, split.picture_of)["vitr"]
    assert written["recalls"]["none"] == written["recalls"]["500"] == pytest.approx(whole)
    for count in (1, 3):
        few = score_candidates(head, split, count)
        want = recalls(
            {
                "x": (
                    as_if_candidates(scores, few.first, VectorIndex(few.texts).search(few.images, count)).numpy(),
                    as_if_candidates(scores.T, few.first.T, VectorIndex(few.images).search(few.texts, count)).numpy(),
                )
            },
            split.picture_of,
        )["x"]
        assert written["recalls"][str(count)] == want
    assert b"milliseconds" not in first
    times = json.loads(timings.read_text())["milliseconds"]
    assert list(times) == ["none", "1", "3", "500"]
    assert all(spent > 0 for way in times.values() for spent in way.values())
    turbo_tables("tiny", **folders, **options)
    assert out.read_bytes() == first
    assert [row[0] for row in tables.rows()] == ["none", "1", "3", "500"]
    assert all(len(row) == len(HEADINGS) for row in tables.rows())


def test_what_is_read_on_demand_is_what_was_read_at_once(run, task, loaded):
    model, sizes = load_tower_model(run / "weights", "cpu")
    lazy, whole = OnDemandSplit(task / "val", model, sizes, run / "weights", "cpu"), loaded[1]
    for level, want in zip(lazy.regions([3, 0]), whole.regions([3, 0]), strict=True):
        torch.testing.assert_close(level, want, atol=2e-3, rtol=2e-3)
    words, mask = lazy.words([5, 1, 2])
    wanted, own = whole.words([5, 1, 2])
    assert torch.equal(mask, own)
    for level, want in zip(words, wanted, strict=True):
        torch.testing.assert_close(level, want, atol=2e-3, rtol=2e-3)


def test_a_run_is_searched_with_words_and_with_a_picture(run, task, loaded, tmp_path):
    _, split, scores, _ = loaded
    searched = opened(run, task)
    for place in (0, 3):
        (hits,) = searched.pictures([split.captions[place]], 3)
        order = scores[:, place].argsort(descending=True)[:3].tolist()
        assert [hit.picture for hit in hits] == [split.picture_ids[picture] for picture in order]
        assert hits[0].score == pytest.approx(float(scores[order[0], place]), abs=2e-3)
        first = int(np.flatnonzero(split.picture_of == order[0])[0])
        assert (hits[0].caption, hits[0].caption_id) == (split.captions[first], split.caption_ids[first])
    (tmp_path / "p.png").write_bytes(split.reader[2]["image"])
    (hits,) = searched.captions([tmp_path / "p.png"], 4)
    order = scores[2].argsort(descending=True)[:4].tolist()
    assert [hit.caption_id for hit in hits] == [split.caption_ids[caption] for caption in order]
    from_features = opened(run, task, features=run / "features")
    assert isinstance(from_features.search.source, FeatureReader)
    (again,) = from_features.captions([tmp_path / "p.png"], 4)
    assert [hit.caption_id for hit in again] == [hit.caption_id for hit in hits]
    assert [len(found) for found in searched.pictures(["a red square", "squares"], 99, candidates=2)] == [2, 2]


def test_what_cannot_be_searched_is_said(run, task, tmp_path):
    with pytest.raises(UserError, match=r"evaluate the run first \(vlp run evaluate@tiny\)"):
        opened(run, task, evaluation=tmp_path)
    with pytest.raises(UserError, match="holds no HAT, VITR or dual encoder"):
        opened(run, task, weights=tmp_path)
    with pytest.raises(UserError, match="holds no features"):
        opened(run, task, features=tmp_path)
    other = shutil.copytree(run / "features", tmp_path / "other")
    shutil.rmtree(other / "val")
    shutil.copytree(other / "train", other / "val")
    with pytest.raises(UserError, match="of other pictures or captions"):
        opened(run, task, features=other)
    searched = opened(run, task)
    with pytest.raises(UserError, match="the text holds no word to read"):
        searched.pictures(["..."], 3)
    (tmp_path / "no.png").write_bytes(b"<html>")
    with pytest.raises(UserError, match="is no picture that can be used"):
        searched.captions([tmp_path / "no.png"], 3)
    Image.new("RGB", (50, 50)).save(tmp_path / "black.png")
    assert np.isfinite([hit.score for hit in searched.captions([tmp_path / "black.png"], 3)[0]]).all()


def test_vectors_that_are_stale_damaged_or_gone_are_not_searched(run, task, tmp_path):
    weights = shutil.copytree(run / "weights", tmp_path / "weights")
    model, _ = load_tower_model(weights, "cpu")
    state = model.state_dict()
    state["head.dual.image.bias"] += 1
    save_file({name: value.contiguous() for name, value in state.items()}, weights / "model.safetensors")
    with pytest.raises(UserError, match="is of other weights or another split than there are now"):
        opened(run, task, weights=weights)
    evaluation = shutil.copytree(run / "evaluation", tmp_path / "evaluation")
    (evaluation / "extra" / "vectors.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match=r"vectors.safetensors is damaged .*evaluate the run again"):
        opened(run, task, evaluation=evaluation)
    (evaluation / "extra" / "vectors.safetensors").unlink()
    with pytest.raises(UserError, match=r"vectors.safetensors does not exist"):
        opened(run, task, evaluation=evaluation)


def test_an_evaluation_again_leaves_the_same_vectors(run, task):
    before = (run / "evaluation" / "extra" / "vectors.safetensors").read_bytes()
    evaluate_run(run, task)
    assert (run / "evaluation" / "extra" / "vectors.safetensors").read_bytes() == before


def test_the_commands_show_tables(run, task, tmp_path, monkeypatch):
    (tmp_path / "data" / "models").mkdir(parents=True)
    (tmp_path / "data" / "evaluation").mkdir()
    (tmp_path / "data" / "tasks").mkdir()
    for name, folder in (("models", run / "weights"), ("evaluation", run / "evaluation")):
        (tmp_path / "data" / name / "vitr").symlink_to(folder)
    (tmp_path / "data" / "tasks" / "retrieval").symlink_to(task)
    shutil.copyfile(RECIPES / "vitr_flickr8k_small.yaml", tmp_path / "params.yaml")
    shutil.copyfile(RECIPES.parents[1] / "dvc.yaml", tmp_path / "dvc.yaml")
    monkeypatch.chdir(tmp_path)
    call = CliRunner(env={"COLUMNS": "200"}).invoke
    shown = call(app, ["search", "vitr", "--text", "red squares", "--top", "2"])
    assert shown.exit_code == 0, shown.output
    assert "first caption" in shown.output
    assert shown.output.count("test/00000000") == 2
    shown = call(app, ["report", "turbo", "vitr", "--candidates", "1,3", "--queries", "1"])
    assert shown.exit_code == 0, shown.output
    assert all(heading in shown.output for heading in HEADINGS)
    assert json.loads(Path("work/turbo/vitr.json").read_text())["recalls"].keys() == {"none", "1", "3"}
    assert Path("work/timings/turbo-vitr.json").is_file()
    for arguments, said in (
        (["search", "vitr"], "give either --text or --image"),
        (["search", "vitr", "--text", "a", "--image", "b.png"], "give either --text or --image"),
        (["search", "vitre", "--text", "a"], "evaluate@vitre is no stage"),
        (["search", "vitr", "--image", "nowhere.png"], "nowhere.png cannot be read"),
        (["report", "turbo", "vitr", "--candidates", "0,5"], "--candidates is 0,5: give whole numbers from 1"),
        (["report", "turbo", "vitr", "--candidates", "x"], "--candidates is x: give whole numbers from 1"),
    ):
        found = call(app, arguments)
        assert isinstance(found.exception, UserError), found.output
        assert said in str(found.exception)
