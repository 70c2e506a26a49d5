"""Captions: the published rules (the ALBEF code's ``pre_caption``), after an optional pass for the web's own noise."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from components.data.cleaning.rules import CaptionParams
from components.io.outcomes import Reason

__all__ = ["CaptionParams", "Cleaned", "apply_rules", "clean_caption", "strip_web"]

_PUNCTUATION = str.maketrans("", "", ",.'!?\"()*#:;~")  # the published set: these vanish
_RUNS = re.compile(r"\s{2,}")

# No pattern below looks further than the next angle bracket or blank, so that hostile texts cost no more than others.
# Only names of HTML: placeholders of published sets (<PERSON>) are not tags.
_TAG = re.compile(
    r"<(script|style)(?:\s[^<>]*)?>[^<]*</\1\s*>"  # with what is in them
    r"|<!(?:--|doctype\b)[^<>]*>"
    r"|</?(?:a|abbr|article|aside|audio|b|big|blockquote|body|br|button|canvas|center|cite|code|col|dd|del|div|dl|dt|em"
    r"|embed|figcaption|figure|font|footer|form|h[1-6]|head|hr|html|i|iframe|img|input|ins|kbd|li|link|mark|meta|nav"
    r"|noscript|ol|option|p|param|pre|q|samp|script|section|select|small|span|strike|strong|style|sub|sup|svg|table"
    r"|tbody|td|textarea|tfoot|th|thead|tr|tt|u|ul|var|wbr)(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)
_URL = re.compile(r"(?:(?:https?|ftp)://|www\.)\S+", re.IGNORECASE)
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}")
_PLACEHOLDER = re.compile(r"<([a-z]{2,20})(?:[_-]?[0-9]{1,3})?>", re.IGNORECASE)
# soft hyphen, zero-width space, marks and overrides of direction, word joiner, byte order mark; not the joiners that
# bind letters in some scripts
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A caption after the rules."""

    text: str  # empty when it is rejected
    reason: Reason  # OK, CAPTION_TRUNCATED; CAPTION_EMPTY, CAPTION_TOO_LONG
    changes: tuple[str, ...] = ()  # the rules that changed something, in their order
    detail: str | None = None  # for a person: how much was cut or is too much


def strip_web(text: str, form: str = "NFC") -> str:
    """Remove HTML entities, tags, URLs, e-mail addresses and control characters; compose Unicode."""
    for _, rule in _web_rules(form):
        text = rule(text)
    return text


def _web_rules(form: str) -> list[tuple[str, Callable[[str], str]]]:
    return [
        ("entities", html.unescape),
        ("tags", lambda text: _TAG.sub(" ", text)),
        ("placeholders", lambda text: _PLACEHOLDER.sub(r" \1 ", text)),
        ("urls", lambda text: _URL.sub(" ", text)),
        ("emails", lambda text: _EMAIL.sub(" ", text)),
        ("control", _without_control),
        ("unicode", lambda text: unicodedata.normalize(form, text)),  # type: ignore[arg-type]
    ]


def _without_control(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    text = _INVISIBLE.sub("", text)
    # Cc: control, Cs: lone surrogates (no UTF-8 form)
    return "".join(" " if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)


# the published rules, in the published order
_PUBLISHED: list[tuple[str, Callable[[str], str]]] = [
    ("lower_case", str.lower),
    ("punctuation", lambda text: text.translate(_PUNCTUATION)),
    ("dashes", lambda text: text.replace("-", " ").replace("/", " ")),
    ("placeholders", lambda text: text.replace("<person>", "person")),
    ("spaces", lambda text: _RUNS.sub(" ", text).rstrip("\n").strip(" ")),
]


def apply_rules(text: str, params: CaptionParams) -> Cleaned:
    """Apply the rules to one caption.

    Rejected are those over the character cap as they come in, or whose first word is over the token cap
    (CAPTION_TOO_LONG), and those of which nothing visible is left (CAPTION_EMPTY). "None" and "NA" are words.
    """
    if len(text) > params.max_characters:
        return Cleaned("", Reason.CAPTION_TOO_LONG, detail=f"{len(text)} characters")
    changes: dict[str, None] = {}
    for name, rule in [*(_web_rules(params.unicode) if params.web else ()), *_PUBLISHED]:
        changed = rule(text)
        if changed != text:
            changes[name] = None
        text = changed
    if not _visible(text):
        return Cleaned("", Reason.CAPTION_EMPTY, tuple(changes))
    count = len(words := text.split(" "))
    if count > params.max_words:
        changes["words"] = None
        text = " ".join(words[: params.max_words])
    if params.max_tokens is not None:
        cut = _within_tokens(text, params.max_tokens, params.tokenizer)
        if not cut:
            detail = f"its first word is of more than {params.max_tokens} tokens"
            return Cleaned("", Reason.CAPTION_TOO_LONG, tuple(changes), detail)
        if cut != text:
            changes["tokens"] = None
        text = cut
    lost = count - len(text.split(" "))
    if not lost:
        return Cleaned(text, Reason.OK, tuple(changes))
    return Cleaned(text, Reason.CAPTION_TRUNCATED, tuple(changes), f"{lost} word{'s' * (lost > 1)} cut")


def clean_caption(text: str, params: CaptionParams) -> tuple[str, Reason]:
    """`apply_rules` in short: the cleaned caption, empty when it is rejected, and why it is kept or not."""
    cleaned = apply_rules(text, params)
    return cleaned.text, cleaned.reason


def _visible(text: str) -> bool:
    """Whether a reader would see anything."""
    return any(not c.isspace() and unicodedata.category(c) != "Cf" for c in text)


def _within_tokens(text: str, max_tokens: int, tokenizer: Path | None) -> str:
    """The whole words of `text` that fit into `max_tokens` with [CLS] and [SEP]; empty when not even one does."""
    starts = _token_starts(tokenizer)(text)
    if len(starts) <= max_tokens - 2:
        return text
    kept = text[: starts[max_tokens - 2]]
    return kept.rstrip(" ") if kept.endswith(" ") else kept.rpartition(" ")[0]


@lru_cache(maxsize=4)
def _token_starts(tokenizer: Path | None) -> Callable[[str], list[int]]:
    """A function from a text to the positions where its tokens begin."""
    if tokenizer is None:
        from tokenizers import pre_tokenizers

        split = pre_tokenizers.BertPreTokenizer()
        return lambda text: [start for _, (start, _) in split.pre_tokenize_str(text)]
    from components.data.tokenizer import load_tokenizer

    inner = load_tokenizer(tokenizer).inner
    return lambda text: [start for start, _ in inner.encode(text, add_special_tokens=False).offsets]
