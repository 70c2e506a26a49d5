"""Metrics of the tasks beside retrieval, on cases worked out by hand."""

import json

import numpy as np
import pytest
import torch

from components.evaluation.answering import answer_metrics, vqa_accuracy
from components.evaluation.classes import class_metrics, label_ranks
from components.evaluation.grounding import Pointed, grounding_metrics, overlap, rank_proposals, right_ranks
from components.evaluation.summary import COLUMNS, metrics_table, task_table

PEOPLE = ["2", "2", "Two", "3", "3", "3", "4", "4", "4", "4"]


@pytest.mark.parametrize(
    ("answer", "accuracy"),
    [
        ("2", (3 * 2 / 3 + 7 * 1) / 10),  # three gave it, one of them in words: who is left out counts not
        ("4", 1.0),
        ("3", (3 * 2 / 3 + 7 * 1) / 10),
        ("5", 0.0),
        ("the two", (3 * 2 / 3 + 7 * 1) / 10),
    ],
)
def test_official_accuracy(answer: str, accuracy: float) -> None:
    assert vqa_accuracy(answer, PEOPLE) == pytest.approx(accuracy)


def test_one_and_two_of_ten_people() -> None:
    assert vqa_accuracy("a b", ["a b"] + ["x"] * 9) == pytest.approx((0 + 9 * 1 / 3) / 10)
    assert vqa_accuracy("b", ["b", "b"] + ["x"] * 8) == pytest.approx((2 * 1 / 3 + 8 * 2 / 3) / 10)


def test_where_all_agree_nothing_is_normalised() -> None:
    assert vqa_accuracy("Two.", ["Two."] * 10) == 1.0
    assert vqa_accuracy("2", ["Two."] * 10) == 0.0


def test_a_single_answer_is_right_or_not() -> None:
    assert vqa_accuracy("A red bus", ["red bus."]) == 1.0
    assert vqa_accuracy("bus", ["red bus."]) == 0.0


def test_answers_by_type_and_beside_the_commonest() -> None:
    metrics = answer_metrics(["yes", "3", "no"], [["yes"], ["2"], []], ["yes/no", "number", "x"], "yes", 4)
    assert metrics["accuracy"] == metrics["majority"] == 50
    assert metrics["by_type"] == {"number": 0, "yes/no": 100}
    assert (metrics["questions"], metrics["questions_with_answers"], metrics["chance"]) == (3, 2, 25)
    assert answer_metrics(["yes"], [[]], [""], "yes", 1)["accuracy"] is None


def test_classes() -> None:
    logits, labels = np.array([[2.0, 1, 0], [0, 1, 1], [0, 3, 1], [5, 5, 5]]), np.array([0, 2, 2, 1])
    metrics = class_metrics(logits, labels, ("a", "b", "c"))
    assert metrics["accuracy"] == 25
    assert metrics["by_class"] == {"a": 100, "b": 0, "c": 0}
    assert (metrics["majority"], metrics["chance"]) == (50, pytest.approx(100 / 3))
    assert label_ranks(logits, labels).tolist() == [1, 2, 2, 3], "ties count against the model"


def test_overlap_counts_pixels_inclusively() -> None:
    assert overlap([0, 0, 10, 10], [0, 0, 10, 10]) == 1
    assert overlap([0, 0, 10, 10], [5, 0, 10, 10]) == pytest.approx(50 / 150)
    assert overlap([0, 0, 10, 10], [10, 0, 10, 10]) == 0
    assert overlap([0, 0, 10, 10], [9, 0, 10, 10]) == 0, "one common column counts as none, as published"


def test_the_hottest_box_comes_first() -> None:
    heat = torch.zeros(4, 4)
    heat[1, 2] = 1.0
    boxes = [[0, 0, 20, 20], [40, 20, 20, 20], [0, 0, 80, 80], [60, 60, 20, 20]]
    pointed = rank_proposals(heat, (80, 80), boxes)
    assert pointed.order[0] == 1
    assert pointed.scores == tuple(sorted(pointed.scores, reverse=True))
    # area to the power of 0 prefers what holds all the heat
    assert rank_proposals(heat.clamp(min=0.05), (80, 80), boxes, power=0.0).order[0] == 2
    assert rank_proposals(heat, (80, 80), []).order == ()


def test_grounding_numbers() -> None:
    boxes = [[0, 0, 10, 10], [0, 0, 10, 10], None, [0, 0, 10, 10]]
    candidates = [
        [[0, 0, 10, 10], [50, 50, 20, 20]],
        [[0, 0, 10, 10], [50, 50, 9, 9]],
        [[0, 0, 1, 1]],
        [[90, 90, 5, 5]],
    ]
    pointed = [Pointed((0, 1), (2, 1)), Pointed((1, 0), (2, 1)), Pointed((0,), (1,)), Pointed((0,), (1,))]
    metrics = grounding_metrics(pointed, boxes, candidates, ["testA", "testB", "testB", "testB"])
    assert metrics["accuracy"] == pytest.approx(100 / 3)
    assert metrics["by_subset"] == {"testA": 100, "testB": 0}
    assert metrics["majority"] == pytest.approx(100 / 3)
    assert metrics["chance"] == pytest.approx(100 * (0.5 + 0.5 + 0) / 3)
    assert metrics["ceiling"] == pytest.approx(200 / 3)
    assert right_ranks(pointed, boxes, candidates) == [1, 2, None, 2]


def test_runs_of_both_kinds_side_by_side(tmp_path) -> None:
    """Tables of recalls and of accuracies each take their own runs."""
    recalls = {name: dict.fromkeys(COLUMNS, 50.0) for name in ("chance", "itc", "itm")}
    for name, metrics in (
        ("retrieval", recalls),
        ("vqa", {"kind": "vqa", "items": 7, "accuracy": 61.25, "majority": None, "chance": 2.0}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.json").write_text(json.dumps(metrics))
    assert task_table(tmp_path) == [("vqa", "vqa", "7", "61.2", "–", "2.0")]
    assert {row[0] for row in metrics_table(tmp_path)} == {"retrieval"}
