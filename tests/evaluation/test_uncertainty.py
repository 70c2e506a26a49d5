"""Bootstrap intervals and folds, against sums done the long way."""

import json

import numpy as np
import pytest

from components.evaluation.results import write_results
from components.evaluation.retrieval import Ranks, recall_metrics, retrieval_ranks
from components.evaluation.uncertainty import fold_recalls, recall_intervals
from tests.evaluation import made_stages as made

PICTURE_OF = np.array([0, 0, 1, 2, 2, 2, 3, 4, 4, 5])
RANKS = Ranks(np.array([1, 1, 7, 2, 12, 1]), np.array([1, 3, 1, 1, 6, 11, 2, 1, 30, 1]))


def test_intervals_are_percentiles_of_resampled_pictures_with_their_captions() -> None:
    """One resample at a time, each picture with its captions as often as it was drawn."""
    random = np.random.default_rng(5)
    found = []
    for counts in random.multinomial(6, np.full(6, 1 / 6), size=400):
        pictures = np.repeat(np.arange(6), counts)
        captions = np.concatenate([np.flatnonzero(picture == PICTURE_OF) for picture in pictures])
        found.append(recall_metrics(Ranks(RANKS.text[pictures], RANKS.image[captions])))
    intervals = recall_intervals(RANKS, PICTURE_OF, resamples=400, seed=5)
    assert list(intervals) == list(found[0])
    for name, (low, high) in intervals.items():
        values = [metrics[name] for metrics in found]
        assert (low, high) == pytest.approx(tuple(np.percentile(values, [2.5, 97.5]))), name
        assert low <= recall_metrics(RANKS)[name] <= high


def test_sure_results_have_no_spread_and_seeds_decide() -> None:
    perfect = Ranks(np.ones(6, np.int64), np.ones(10, np.int64))
    assert set(map(tuple, recall_intervals(perfect, PICTURE_OF).values())) == {(100.0, 100.0)}
    one, again, other = (recall_intervals(RANKS, PICTURE_OF, resamples=50, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_intervals_of_chunked_draws_are_the_same(monkeypatch) -> None:
    whole = recall_intervals(RANKS, PICTURE_OF, resamples=100)
    monkeypatch.setattr("components.evaluation.uncertainty.CHUNK", 42)
    parts = recall_intervals(RANKS, PICTURE_OF, resamples=100)
    assert np.array(list(parts.values())) == pytest.approx(np.array(list(whole.values())))


def test_more_pictures_are_surer() -> None:
    ranks = Ranks(np.tile(RANKS.text, 50), np.tile(RANKS.image, 50))
    many = np.concatenate([PICTURE_OF + 6 * copy for copy in range(50)])
    (low, high), (low_few, high_few) = (
        recall_intervals(ranks, many)["r_mean"],
        recall_intervals(RANKS, PICTURE_OF)["r_mean"],
    )
    assert high - low < (high_few - low_few) / 4


def test_folds_search_their_own_pictures_only() -> None:
    """Each fold's best wrong answer lies in the other fold: alone, every query is right."""
    picture_of = np.array([0, 0, 1, 2, 3, 3])
    scores = np.full((4, 6), 0.0)
    scores[np.arange(4)[:, None] == picture_of] = 1.0
    scores[0, 3] = scores[3, 0] = 2.0
    assert recall_metrics(retrieval_ranks(scores, scores.T, picture_of))["txt_r1"] == 50
    assert fold_recalls((scores, scores.T), picture_of, 2)["txt_r1"] == 100
    assert fold_recalls((scores, scores.T), picture_of, 1) == recall_metrics(
        retrieval_ranks(scores, scores.T, picture_of)
    )
    with pytest.raises(ValueError, match="4 pictures do not divide into 3"):
        fold_recalls((scores, scores.T), picture_of, 3)


def test_folds_are_means_of_their_recalls() -> None:
    random = np.random.default_rng(0)
    picture_of = np.repeat(np.arange(20), 5)
    texts, images = random.random((20, 100)), random.random((100, 20))
    parts = []
    for start in range(0, 20, 4):
        inside = slice(5 * start, 5 * start + 20)
        rows = slice(start, start + 4)
        parts.append(recall_metrics(retrieval_ranks(texts[rows, inside], images[inside, rows], picture_of[:20])))
    found = fold_recalls((texts, images), picture_of, 5)
    assert found == {name: pytest.approx(np.mean([part[name] for part in parts])) for name in found}


def test_results_hold_both(tmp_path) -> None:
    scores = np.random.default_rng(3).random((4, 8))
    write = {"itc": (scores, scores.T), "itm": (scores, scores.T), "examples": 0, "example_candidates": 1, "about": {}}
    write_results(tmp_path, made.SPLIT, **write, folds=2, resamples=20)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["folds"]["pictures"] == 2
    assert metrics["folds"]["itm"]["img_r5"] == 100, "at most two candidates in a fold: k is clamped"
    low, high = metrics["intervals"]["itm"]["r_mean"]
    assert low <= metrics["itm"]["r_mean"] <= high
    write_results(tmp_path, made.SPLIT, **write, resamples=0)
    assert not {"folds", "intervals"} & set(json.loads((tmp_path / "metrics.json").read_text()))
