"""Captions: the published rules (the ALBEF code's ``pre_caption``), after an optional pass for the web's own noise."""

from __future__ import annotations

import html
import re
import unicodedata

from components.data.cleaning.rules import CaptionParams
from components.io.outcomes import Reason

__all__ = ["CaptionParams", "clean_caption", "strip_web"]

_PUNCTUATION = str.maketrans("", "", ",.'!?\"()*#:;~")  # the published set: these vanish
_RUNS = re.compile(r"\s{2,}")

# Only names of HTML: `<person>` and other placeholders of published sets are not tags.
_TAG = re.compile(
    r"</?(?:a|abbr|b|big|blockquote|br|center|code|div|em|font|h[1-6]|hr|i|img|li|ol|p|pre|s|small|span|strike|strong"
    r"|sub|sup|table|tbody|td|th|tr|tt|u|ul)(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)
_URL = re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE)
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}")


def strip_web(text: str) -> str:
    """Remove HTML entities, tags, URLs, e-mail addresses and control characters; compose Unicode (NFC)."""
    text = html.unescape(text)
    text = _TAG.sub(" ", text)
    text = _EMAIL.sub(" ", _URL.sub(" ", text))
    # Cc: control, Cs: lone surrogates (no UTF-8 form); Cf (zero-width joiners and such) binds letters in some scripts
    text = "".join(" " if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)
    return unicodedata.normalize("NFC", text)


def clean_caption(text: str, params: CaptionParams) -> tuple[str, Reason]:
    """Apply the rules; returns the cleaned caption and why it is kept (OK, CAPTION_TRUNCATED) or not.

    Rejected captions come back empty, with CAPTION_TOO_LONG (over the character cap as it came in) or CAPTION_EMPTY
    (nothing but white space is left). "None" and "NA" are words.
    """
    if len(text) > params.max_characters:
        return "", Reason.CAPTION_TOO_LONG
    if params.web:
        text = strip_web(text)
    text = text.lower().translate(_PUNCTUATION).replace("-", " ").replace("/", " ").replace("<person>", "person")
    text = _RUNS.sub(" ", text).rstrip("\n").strip(" ")
    if not text.strip():
        return "", Reason.CAPTION_EMPTY
    words = text.split(" ")
    if len(words) > params.max_words:
        return " ".join(words[: params.max_words]), Reason.CAPTION_TRUNCATED
    return text, Reason.OK
