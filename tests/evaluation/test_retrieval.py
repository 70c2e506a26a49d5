import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.evaluation.retrieval import (
    Ranks,
    best_ranks,
    chance_metrics,
    recall_at,
    recall_metrics,
    retrieval_ranks,
    top_indices,
)


def test_known_ranks_one_caption_per_picture():
    scores = np.array(
        [
            [9.0, 1.0, 2.0],  # first
            [3.0, 2.0, 1.0],  # second
            [5.0, 4.0, 3.0],  # third
        ]
    )
    ranks = retrieval_ranks(scores, scores.T, [0, 1, 2])
    assert ranks.text.tolist() == [1, 2, 3]
    assert ranks.image.tolist() == [1, 2, 1]  # columns: 9 of 9 3 5; 2 of 1 2 4; 3 of 2 1 3


def test_best_caption_counts_with_three_and_seven_captions():
    picture_of = [0] * 3 + [1] * 7
    scores = np.zeros((2, 10))
    scores[0] = [1, 8, 2, 9, 7, 0, 0, 0, 0, 0]  # best of picture 0: caption 1 with 8, one wrong above
    scores[1] = [9, 8, 7, 1, 1, 1, 1, 1, 6, 1]  # best of picture 1: caption 8 with 6, three wrong above
    assert retrieval_ranks(scores, scores.T, picture_of).text.tolist() == [2, 4]


def test_mixed_numbers_of_captions_in_any_order():
    picture_of = [2, 0, 1, 1, 2, 2]  # one, two and three captions
    scores = np.array([[5, 4, 3, 2, 1, 0], [5, 4, 0, 3, 2, 1], [0, 5, 4, 3, 2, 1]], dtype=float)
    ranks = retrieval_ranks(scores, scores.T, picture_of)
    assert ranks.text.tolist() == [2, 3, 4]
    # captions' scores by picture 0 1 2: c0 (5 5 0) of 2; c1 (4 4 5) of 0; c2 (3 0 4) of 1; c3 (2 3 3) of 1;
    # c4 (1 2 2) of 2; c5 (0 1 1) of 2: ties count against
    assert ranks.image.tolist() == [3, 3, 3, 2, 2, 2]


def test_ties_count_against_the_model():
    constant = np.ones((4, 12))
    ranks = retrieval_ranks(constant, constant.T, np.repeat(np.arange(4), 3))
    assert ranks.text.tolist() == [10] * 4  # nine wrong captions stand before
    assert ranks.image.tolist() == [4] * 12
    # two right answers that tie with each other are not held against it
    assert best_ranks([[3.0, 3.0, 1.0]], [0], [0, 0, 1]).tolist() == [1]
    assert best_ranks([[-np.inf, -np.inf, 1.0]], [0], [0, 1, 1]).tolist() == [3]


def test_k_above_the_set_counts_everything():
    metrics = recall_metrics(retrieval_ranks(np.ones((3, 3)), np.ones((3, 3)), [0, 1, 2]))
    assert metrics["txt_r1"] == 0
    assert metrics["txt_r5"] == metrics["txt_r10"] == metrics["img_r5"] == 100


def test_metric_keys_and_means():
    metrics = recall_metrics(Ranks(np.array([1, 6]), np.array([1, 2, 11, 11])))
    assert metrics == {
        "txt_r1": 50.0,
        "txt_r5": 50.0,
        "txt_r10": 100.0,
        "txt_r_mean": pytest.approx(200 / 3),
        "img_r1": 25.0,
        "img_r5": 50.0,
        "img_r10": 50.0,
        "img_r_mean": pytest.approx(125 / 3),
        "r_mean": pytest.approx(325 / 6),
    }


def test_chance_of_one_three_and_all():
    chance = chance_metrics(np.repeat(np.arange(200), 3), 200)
    assert chance["img_r1"] == pytest.approx(0.5)
    assert chance["txt_r1"] == pytest.approx(0.5)  # 3 of 600
    assert chance["txt_r5"] == pytest.approx(100 * (1 - np.prod([(597 - d) / (600 - d) for d in range(5)])))
    assert chance_metrics([0, 1], 2)["txt_r5"] == 100


def test_chance_equals_the_mean_of_random_orders():
    generator = np.random.default_rng(0)
    picture_of = np.array([0, 0, 0, 1, 2, 2, 3, 4, 5, 5, 5, 5])
    hits = []
    for _ in range(3000):
        scores = generator.random((6, 12))
        hits.append(recall_metrics(retrieval_ranks(scores, scores.T, picture_of)))
    chance = chance_metrics(picture_of, 6)
    for key, value in chance.items():
        assert np.mean([hit[key] for hit in hits]) == pytest.approx(value, abs=1.5), key


@pytest.mark.parametrize(
    ("scores", "queries", "candidates", "words"),
    [
        (np.zeros((2, 3)), [0, 1], [0, 1], "2 queries and 2 candidates"),
        ([[0.0, np.nan]], [0], [0, 1], "query 0 is not a number"),
        ([[0.0, 1.0], [0.0, 1.0]], [0, 7], [0, 0], "query 1 has no right answer"),
    ],
)
def test_bad_input_is_named(scores, queries, candidates, words):
    with pytest.raises(ValueError, match=words):
        best_ranks(scores, queries, candidates)


def test_shapes_that_are_not_each_others():
    with pytest.raises(ValueError, match=r"\(N, M\) and \(M, N\)"):
        retrieval_ranks(np.zeros((2, 3)), np.zeros((2, 3)), [0, 1, 1])
    with pytest.raises(ValueError, match="no query"):
        recall_at(np.array([], dtype=np.int64), 1)


@given(st.data())
def test_ranks_equal_a_loop(data):
    pictures = data.draw(st.integers(1, 5))
    picture_of = list(range(pictures)) + data.draw(st.lists(st.integers(0, pictures - 1), max_size=6))
    values = st.integers(-2, 2).map(float)
    scores = np.array([[data.draw(values) for _ in picture_of] for _ in range(pictures)])
    ranks = retrieval_ranks(scores, scores.T, picture_of)
    for picture in range(pictures):
        # worst order among equals: wrong answers first
        order = sorted(range(len(picture_of)), key=lambda c: (-scores[picture, c], picture_of[c] == picture))
        found = [place for place, caption in enumerate(order, 1) if picture_of[caption] == picture]
        wrong_before = sum(picture_of[c] != picture for c in order[: found[0]])
        assert ranks.text[picture] == wrong_before + 1
    for caption, owner in enumerate(picture_of):
        order = sorted(range(pictures), key=lambda p: (-scores[p, caption], p == owner))
        assert ranks.image[caption] == order.index(owner) + 1


def test_chunks_do_not_change_ranks(monkeypatch):
    generator = np.random.default_rng(1)
    scores = generator.random((9, 27))
    picture_of = np.repeat(np.arange(9), 3)
    whole = retrieval_ranks(scores, scores.T, picture_of)
    monkeypatch.setattr("components.evaluation.retrieval.CHUNK_SCORES", 40)
    pieces = retrieval_ranks(scores, scores.T, picture_of)
    assert whole.text.tolist() == pieces.text.tolist()
    assert whole.image.tolist() == pieces.image.tolist()


def test_top_indices_are_stable_and_clamped():
    assert top_indices([[1.0, 3.0, 3.0, 2.0]], 3).tolist() == [[1, 2, 3]]
    assert top_indices([[1.0, 3.0]], 5).tolist() == [[1, 0]]
