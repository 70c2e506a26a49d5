"""Telling a picture from a web page by its first bytes, whatever its name and content type say."""

from __future__ import annotations

HEAD_BYTES = 32  # enough for every format below

_DIB_HEADERS = frozenset({12, 40, 52, 56, 64, 108, 124})  # sizes of the headers that a BMP's second part can have


def picture_format(head: bytes) -> str | None:
    """The format that begins with `head` (at least HEAD_BYTES, or the whole file); None when it is no picture."""
    if head.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "webp"
    if head.startswith((b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")):
        return "tiff"
    if head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in _DIB_HEADERS:
        return "bmp"
    if head[4:8] == b"ftyp" and any(brand in (b"avif", b"avis") for brand in _brands(head)):
        return "avif"
    return None


def _brands(head: bytes) -> list[bytes]:
    """The major and the first compatible brands of an ISO base media file (ISO/IEC 14496-12, 4.3)."""
    return [head[8:12], *(head[at : at + 4] for at in range(16, len(head), 4))]
