"""Answers to visual questions, normalised as the official VQA evaluation does, weighted, and listed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

# Words that the evaluation writes with their apostrophes when one of them is missing.
_CONTRACTIONS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd
he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't
needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've
somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll
that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've
weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've
why'll why're why's won't would've wouldn't wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're
you've
"""
_WHOLE = {
    word[:place] + word[place + 1 :]: word
    for word in re.findall(r"\S+", _CONTRACTIONS)
    for place, character in enumerate(word)
    if character == "'"
} | {"somebody'd": "somebodyd"}  # an oddity of the evaluation
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {word: str(number) for number, word in enumerate(_DIGITS)} | {"none": "0"}
_ARTICLES = {"a", "an", "the"}
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
_PERIODS = 32  # the evaluation strips at most so many

VISUAL_GENOME_WEIGHT = 0.5  # of an answer that nobody else confirmed, in the published training


def strip_space(answer: str) -> str:
    """Line breaks and tabs as blanks, none at the ends: what the evaluation does even where all answers agree."""
    return answer.replace("\n", " ").replace("\t", " ").strip()


def normalise_answer(answer: str) -> str:
    """An answer as the official evaluation compares it: punctuation, number words, articles, contractions."""
    text = strip_space(answer)
    number = _COMMA_IN_NUMBER.search(text) is not None
    result = text
    for mark in _PUNCTUATION:
        vanishes = number or f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if vanishes else " ")
    result = _PERIOD.sub("", result, count=_PERIODS)
    words = (_NUMBERS.get(word, word) for word in result.lower().split())
    return " ".join(_WHOLE.get(word, word) for word in words if word not in _ARTICLES)


def weigh_answers(answers: Sequence[str]) -> tuple[list[str], list[float]]:
    """The different normalised answers of several people in order of appearance, and the share that gave each."""
    counts = Counter(normalised for answer in answers if (normalised := normalise_answer(answer)))
    return list(counts), [count / len(answers) for count in counts.values()]


def frequent_answers(answers: Iterable[str], count: int) -> list[str]:
    """The `count` most frequent answers, the most frequent first, equal ones by alphabet: no order of hashing."""
    counts = Counter(answers)
    return sorted(counts, key=lambda answer: (-counts[answer], answer))[:count]
