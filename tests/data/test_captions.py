"""Caption rules: the published ones, the web's noise, and properties for any text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from components.data.cleaning.captions import CaptionParams, Cleaned, apply_rules, clean_caption
from components.io.outcomes import Reason

PUBLISHED = CaptionParams(web=False)


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("A man, in a red-and-blue shirt!", "a man in a red and blue shirt"),
        ('It\'s 5:30; (half past) #five ~ "late" * ?', "its 530 half past five late"),
        ("and/or   two\t\tspaces\n", "and or two spaces"),
        ("<PERSON> waves at <person>", "person waves at person"),
        ("None", "none"),
        ("NA", "na"),
        ("  ÉCOLE à Zürich  ", "école à zürich"),
        ("图片 - 一只猫", "图片 一只猫"),
    ],
)
def test_published_rules(raw, clean):
    assert clean_caption(raw, PUBLISHED) == (clean, Reason.OK)
    assert clean_caption(raw, CaptionParams()) == (clean, Reason.OK)


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("Tom &amp; Jerry &#39;n friends", "tom & jerry n friends"),
        ("a <b>bold</b> cat<br/>on a mat", "a bold cat on a mat"),
        ("see https://example.org/x?y=1 for a cat", "see for a cat"),
        ("mail bob@example.org a cat", "mail a cat"),
        ("a\x00cat\x07 on\u0085a mat", "a cat on a mat"),
        ("cafe\u0301", "caf\u00e9"),
        ("x < y and z > 3", "x < y and z > 3"),
        ("<PERSON> and <LOCATION_2> in <ORG>", "person and location in org"),
        ("<!-- an ad --><!DOCTYPE html>a cat<script>alert(1)</script><style type='x'>b {}</style>", "a cat"),
        ("a <video src=x controls> cat <figcaption>asleep</figcaption>", "a <video src=x controls> cat asleep"),
        ("soft\u00adhyphen zero\u200bwidth \ufeffmark \u202eturned", "softhyphen zerowidth mark turned"),
        ("\u0928\u200d\u092e", "\u0928\u200d\u092e"),  # a joiner that a script needs
        ("get it at ftp://example.org/cat now", "get it at now"),
        ("nan", "nan"),
    ],
)
def test_the_webs_noise(raw, clean):
    assert clean_caption(raw, CaptionParams()) == (clean, Reason.OK)


def test_words_past_the_cap_are_cut():
    text = " ".join(f"w{i}" for i in range(31))
    assert clean_caption(text, PUBLISHED) == (" ".join(f"w{i}" for i in range(30)), Reason.CAPTION_TRUNCATED)
    assert clean_caption(text, CaptionParams(max_words=31)) == (text, Reason.OK)


@pytest.mark.parametrize(
    "raw",
    ["", " ", "\n", "\t", "...!?", "- / -", "\x00", "https://example.org/a.jpg", "&nbsp;", "\u200b", "\u200d", "<br>"],
)
def test_nothing_left(raw):
    assert clean_caption(raw, CaptionParams()) == ("", Reason.CAPTION_EMPTY)


def test_no_caption_but_a_text():
    assert clean_caption("x" * 5000, CaptionParams()) == ("", Reason.CAPTION_TOO_LONG)
    assert clean_caption("x" * 5000, CaptionParams(max_characters=5000)) == ("x" * 5000, Reason.OK)


def test_each_rule_says_what_it_changed():
    raw = "<b>The</b> &amp; A-Cat, caf\u0065\u0301\x07 bob@example.org www.x.org <PERSON> " + "w " * 30
    cleaned = apply_rules(raw, CaptionParams())
    assert cleaned.changes == (
        "entities", "tags", "placeholders", "urls", "emails", "control", "unicode",
        "lower_case", "punctuation", "dashes", "spaces", "words",
    )  # fmt: skip
    assert cleaned.detail == "6 words cut"
    assert apply_rules("a plain caption", CaptionParams()) == Cleaned("a plain caption", Reason.OK)
    assert apply_rules("x" * 3000, CaptionParams()).detail == "3000 characters"


def test_ornate_letters():
    assert clean_caption("\U0001d400 \uff23\uff41\uff54", CaptionParams(unicode="NFKC")) == ("a cat", Reason.OK)
    assert clean_caption("\uff23\uff41\uff54", CaptionParams()) == ("\uff43\uff41\uff54", Reason.OK)


def test_a_token_cap_without_a_tokenizer_counts_words_and_marks():
    text = "one two & three & four"
    assert clean_caption(text, CaptionParams(max_tokens=8)) == (text, Reason.OK)
    assert clean_caption(text, CaptionParams(max_tokens=7)) == ("one two & three &", Reason.CAPTION_TRUNCATED)
    assert clean_caption("ab$cd ef", CaptionParams(max_tokens=5)) == ("ab$cd", Reason.CAPTION_TRUNCATED)
    assert clean_caption("one ab$cd", CaptionParams(max_tokens=4)) == ("one", Reason.CAPTION_TRUNCATED)
    assert clean_caption("ab$cd ef", CaptionParams(max_tokens=4)) == ("", Reason.CAPTION_TOO_LONG)
    with pytest.raises(ValidationError, match="max_tokens"):
        CaptionParams(tokenizer="tokenizer.json")


@given(st.text(st.characters()), st.integers(3, 6))
def test_any_text_under_a_token_cap(raw, max_tokens):
    free, capped = apply_rules(raw, CaptionParams()), apply_rules(raw, CaptionParams(max_tokens=max_tokens))
    assert free.text.startswith(capped.text)
    assert capped.text == capped.text.strip(" ")
    assert apply_rules(capped.text, CaptionParams(web=False, max_tokens=max_tokens)).text == capped.text


@given(st.text(st.characters()), st.booleans(), st.integers(1, 5))
def test_any_text(raw, web, max_words):
    params = CaptionParams(web=web, max_words=max_words)
    text, reason = clean_caption(raw, params)
    assert clean_caption(raw, params) == (text, reason)
    assert reason in (Reason.OK, Reason.CAPTION_TRUNCATED, Reason.CAPTION_EMPTY)
    assert bool(text.strip()) == (reason in (Reason.OK, Reason.CAPTION_TRUNCATED))
    assert len(text.split(" ")) <= max_words
    assert "  " not in text
    assert not set(text) & set(",.'!?\"()*#:;~-/")
    if web:
        text.encode("utf-8")


@given(st.text(st.characters(exclude_characters="<>&", exclude_categories=["Cs"])))
def test_cleaning_what_is_clean_changes_nothing(raw):
    """Markup aside (``&amp;lt;`` loses one layer a pass), the rules are a projection."""
    text, reason = clean_caption(raw, CaptionParams())
    if reason is Reason.OK:
        assert clean_caption(text, CaptionParams()) == (text, Reason.OK)


@pytest.mark.parametrize(
    "unit",
    [
        "<a ",
        "a@",
        "a.a@a.",
        "&amp",
        "www.",
        "<<",
        " \t",
        "http://",
        "<script>",
        "<!--",
        "<!doctype ",
        "<style></styl",
        "&lt;b",
    ],
)
def test_long_text_takes_linear_time(unit):
    text = unit * (100_000 // len(unit))
    clean_caption(text, CaptionParams(max_characters=100_000))  # the suite's timeout fails a pattern that backtracks
