"""Answers as the official VQA evaluation reads them."""

import pytest

from components.data.tasks.answers import frequent_answers, normalise_answer, weigh_answers


@pytest.mark.parametrize(
    ("raw", "normalised"),
    [
        ("A red Bus.", "red bus"),
        ("two", "2"),
        ("none", "0"),
        ("10,000", "10000"),
        ("1.5", "1.5"),
        ("dont know", "don't know"),
        ("couldn'tve", "couldn't've"),
        ("couldnt've", "couldn't've"),
        ("somebody'd", "somebodyd"),
        ("its", "its"),
        ("black/white", "black white"),
        ("black / white", "black white"),
        ("yes!", "yes"),
        ("left-hand", "left hand"),
        ("left- hand", "left hand"),
        (" the\tdog\n", "dog"),
        ("mr. smith", "mr smith"),
        ("the", ""),
    ],
)
def test_normalisation(raw: str, normalised: str) -> None:
    assert normalise_answer(raw) == normalised


def test_weights_are_shares_of_people() -> None:
    answers, weights = weigh_answers(["Two", "2", "two dogs", "the", "2"])
    assert answers == ["2", "2 dogs"]
    assert weights == pytest.approx([0.6, 0.2])  # the empty answer keeps its share of the whole


def test_the_list_does_not_depend_on_order() -> None:
    given = ["b", "a", "c", "c", "a", "d"]
    assert frequent_answers(given, 3) == frequent_answers(reversed(given), 3) == ["a", "c", "b"]
