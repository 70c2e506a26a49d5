"""A model beside its baseline in the report: the queries that only one of them answers, both ways round."""

import numpy as np
import pytest

from components.evaluation.page.queries import read_runs
from components.evaluation.page.versus import read_versus
from components.evaluation.results import write_results
from tests.evaluation import made_stages as made
from tests.evaluation.test_report import Page


def evaluate(data, name, kind, both, split=made.SPLIT, of="test"):
    """A run of scores (4, 8) and (8, 4); write_results is what `evaluate` calls."""
    about = {"run": name, "task": "task", "split": of, "model": kind, "image_size": 32}
    about["labels"] = {"itm": kind, "itc": kind}
    options = {"examples": 1, "example_candidates": 3, "resamples": 0, "about": about}
    write_results(data / "evaluation" / name, split, itc=both, itm=both, **options)


def scores(wrong_pictures=(), wrong_captions=()):
    """Right but for some queries, which the next picture's captions, or the next picture, answer."""
    text = np.full((4, 8), 0.1) + np.arange(32).reshape(4, 8) / 1000
    text[made.SPLIT.picture_of, np.arange(8)] = 0.9
    image = text.T.copy()
    for picture in wrong_pictures:
        text[picture, made.SPLIT.picture_of == picture] = 0.01
        text[picture, made.SPLIT.picture_of == (picture + 1) % 4] = 0.95
    for caption in wrong_captions:
        image[caption, (made.SPLIT.picture_of[caption] + 1) % 4] = 0.95
    return text, image


@pytest.fixture
def data(tmp_path):
    made.make_data(tmp_path)
    records = [made.make_record("task", 2 * n, made.SPLIT.captions[2 * n : 2 * n + 2]) for n in range(4)]
    made.make_folder(tmp_path / "tasks" / "task" / "test", records)
    return tmp_path


def versus(data, limit=3):
    runs = read_runs(data / "evaluation", data / "tasks", 1)
    return read_versus(runs, data / "evaluation", data / "tasks", limit)


def test_each_way_round_with_what_each_run_answered(data):
    evaluate(data, "vitr", "vitr", scores(wrong_pictures=[2]))
    evaluate(data, "clip", "linear", scores(wrong_pictures=[0, 1], wrong_captions=[5]))
    (found,) = versus(data)
    assert (found.model, found.baseline) == ("vitr", "clip")
    text, image = found.sides
    assert (text.both, text.model_alone, text.baseline_alone, text.neither) == (1, 2, 1, 0)
    ids, names = made.SPLIT.picture_ids, made.SPLIT.captions
    assert {case.picture for case in text.won} == {ids[0], ids[1]}
    (lost,) = text.lost
    assert lost.picture == ids[2]
    assert (lost.model.right, lost.baseline.right, lost.baseline.rank) == (False, True, 1)
    assert lost.model.caption in names[6:8]
    assert lost.baseline.caption in names[4:6]
    won = next(case for case in text.won if case.picture == ids[0])
    assert won.model.caption in names[:2]
    assert won.baseline.caption in names[2:4]
    assert won.baseline.rank > 2
    assert (image.both, image.model_alone, image.baseline_alone, image.neither) == (7, 1, 0, 0)
    (case,) = image.won
    assert case.caption == names[5]
    assert (case.picture, case.model.picture, case.baseline.picture) == (ids[2], ids[2], ids[3])
    for side in found.sides:
        total = side.both + side.model_alone + side.baseline_alone + side.neither
        assert total == (4 if side.direction == "txt" else 8)
    assert {ids[0], ids[3]} <= set(found.pictures)


def test_the_worst_of_the_loser_come_first_and_no_more_than_asked(data):
    evaluate(data, "vitr", "vitr", scores())
    text, image = scores(wrong_pictures=[1, 3])
    text[1, 2] = 0.93  # its right caption is third; the other picture's are last
    evaluate(data, "clip", "linear", (text, image))
    (found,) = versus(data, limit=1)
    assert [case.picture for case in found.sides[0].won] == [made.SPLIT.picture_ids[3]]
    assert found.sides[0].model_alone == 2
    assert versus(data, limit=0) == []


def test_the_best_run_of_each_kind_and_its_baseline_of_the_same_split(data):
    evaluate(data, "vitr_a", "vitr", scores(wrong_pictures=[0, 1]))
    evaluate(data, "vitr_b", "vitr", scores(wrong_pictures=[0]))
    evaluate(data, "hat", "hat", scores())
    evaluate(data, "floor", "linear", scores(wrong_pictures=[0, 1, 2]))
    evaluate(data, "clip", "linear", scores(wrong_pictures=[0, 1]))
    evaluate(data, "vse", "vse", scores())
    evaluate(data, "elsewhere", "linear", scores(), of="val")
    assert [(one.model, one.baseline) for one in versus(data)] == [("vitr_b", "clip"), ("hat", "clip")]


def test_runs_that_cannot_be_compared_are_left_out(data):
    evaluate(data, "vitr", "vitr", scores(wrong_pictures=[2]))
    assert versus(data) == []
    names = [f"other/{number}" for number in range(8)]
    other = made.Split(made.SPLIT.picture_ids, names, made.SPLIT.captions, made.SPLIT.picture_of)
    evaluate(data, "clip", "linear", scores(), split=other)
    assert versus(data) == []
    evaluate(data, "clip", "linear", scores())
    assert len(versus(data)) == 1
    import pyarrow.parquet as pq

    path = data / "evaluation" / "clip" / "ranks.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["top_itm"]), path)  # as of an earlier version
    assert versus(data) == []


def test_the_page_shows_both_ways_with_captions_escaped(data):
    evaluate(data, "vitr", "vitr", scores(wrong_pictures=[2], wrong_captions=[3]))
    evaluate(data, "clip", "linear", scores(wrong_pictures=[0], wrong_captions=[0]))
    text = made.build_report(data)
    page = Page(text)
    assert not page.all("script")
    assert made.HOSTILE in page.visible
    assert "From a picture to its captions: vitr alone is right" in page.visible
    assert "From a picture to its captions: clip alone is right" in page.visible
    assert "From a caption to its picture: vitr alone is right" in page.visible
    assert "From a caption to its picture: clip alone is right" in page.visible
    assert any(attrs.get("href") == "#versus" for attrs in page.all("a"))
    section = text[text.index('id="versus"') : text.index('id="training"')]
    assert section.count('<article class="query">') == 4
    assert section.count("data:image/") >= 6
    without = Page(made.build_report(data, max_compared=0))
    assert not any(attrs.get("href") == "#versus" for attrs in without.all("a"))
