"""Submission files, consistency per sentence, and grounding without proposals, on cases worked out by hand."""

import json

import numpy as np
import pytest
import torch

from components.evaluation.classes import sentence_consistency
from components.evaluation.grounding import Pointed, grounding_metrics, hottest_box, rank_proposals, right_ranks
from components.evaluation.submission import check_file, problems, write_submission
from components.io.errors import UserError


def test_consistency_needs_every_pair_of_a_sentence() -> None:
    right = [True, True, True, False, True]
    assert sentence_consistency(right, ["a", "b", "a", "b", "c"]) == {"sentences": 3, "consistency": 200 / 3}
    assert sentence_consistency([], [])["consistency"] is None


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([(1, "yes"), (1, "no"), (2, "two")], "1 questions are answered more than once (1)"),
        ([(1, "yes")], "1 questions are not answered (2)"),
        ([(1, "yes"), (2, "two"), (9, "x")], "1 answered questions are not among the asked ones (9)"),
        ([(1, None), (2, "two")], "entry 0 has no question_id with an answer that is a text"),
    ],
)
def test_what_the_server_would_refuse(entries, problem) -> None:
    assert problems([{"question_id": one, "answer": said} for one, said in entries], [1, 2]) == [problem]


def test_a_submission_is_written_as_the_server_wants_it(tmp_path) -> None:
    write_submission(tmp_path / "s.json", ["262148000", "7"], ["yes", "schön"])
    assert json.loads((tmp_path / "s.json").read_text()) == [
        {"question_id": 262148000, "answer": "yes"},
        {"question_id": 7, "answer": "schön"},
    ]
    with pytest.raises(UserError, match="stand twice in the question list"):
        write_submission(tmp_path / "twice.json", ["7", "7"], ["yes", "no"])
    assert not (tmp_path / "twice.json").exists()


def test_a_submission_beside_the_published_questions(tmp_path) -> None:
    write_submission(tmp_path / "s.json", ["1", "2"], ["yes", "no"])
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps({"questions": [{"question_id": 2}, {"question_id": 1}]}))
    assert check_file(tmp_path / "s.json", questions) == 2
    questions.write_text(json.dumps({"questions": [{"question_id": n} for n in range(1, 9)]}))
    with pytest.raises(UserError, match=r"must not be uploaded: 6 questions are not answered \(3, 4, 5, …\)"):
        check_file(tmp_path / "s.json", questions)
    for content, message in (("{}", "no question file"), ("]", "is no JSON")):
        questions.write_text(content)
        with pytest.raises(UserError, match=message):
            check_file(tmp_path / "s.json", questions)
    with pytest.raises(UserError, match="does not exist"):
        check_file(tmp_path / "none.json", tmp_path / "none.json")
    assert problems({"question_id": 1}, [1]) == ["it is not a list of objects"]


def test_the_hottest_region_alone_makes_the_box() -> None:
    heat = np.zeros((10, 12))
    heat[2:5, 3:7] = 0.6
    heat[3, 4] = 1.0
    heat[8, 11] = 0.9  # another spot, and one that only touches at a corner
    heat[5, 7] = 0.9
    assert hottest_box(heat) == (3, 2, 4, 3)
    assert hottest_box(heat, 0.95) == (4, 3, 1, 1)


@pytest.mark.parametrize("heat", [torch.zeros(4, 4), torch.full((4, 4), float("nan"))])
def test_a_map_without_heat_is_a_miss(heat) -> None:
    box, candidates = [0.0, 0, 40, 40], [[0.0, 0, 40, 40]]
    pointed = rank_proposals(heat, (40, 40), candidates)
    assert pointed == Pointed((), ())
    metrics = grounding_metrics([pointed], [box], [candidates], ["val"])
    assert metrics["accuracy"] == 0
    assert metrics["without_proposals"] == {"pointing": 0, "box": 0}
    assert metrics["ceiling"] == 100
    assert right_ranks([pointed], [box], [candidates]) == [2]


def test_pointing_and_the_box_from_the_map() -> None:
    heat = torch.zeros(4, 4)
    heat[1, 2] = 1.0
    boxes = [[40.0, 20, 20, 20], [0.0, 0, 20, 20], [0.0, 0, 80, 80]]
    pointed = [rank_proposals(heat, (80, 80), []) for _ in boxes]
    x, y = pointed[0].peak
    assert 40 <= x < 60
    assert 20 <= y < 40
    metrics = grounding_metrics(pointed, boxes, [[]] * 3, ["val"] * 3)
    assert metrics["accuracy"] == 0, "no proposal: a miss"
    assert metrics["without_proposals"] == {"pointing": pytest.approx(200 / 3), "box": pytest.approx(100 / 3)}


def test_an_empty_split_is_not_available() -> None:
    metrics = grounding_metrics([Pointed((0,), (1.0,))], [None], [[[0, 0, 1, 1]]], ["testB"])
    assert metrics["by_subset"] == {"testB": None}
    assert metrics["accuracy"] is metrics["without_proposals"]["box"] is None
    assert grounding_metrics([], [], [], [])["accuracy"] is None
