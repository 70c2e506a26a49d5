"""Pictures as they come, made what every reader expects: upright, opaque, 8-bit RGB, whole.

The header is judged before anything is decoded: a file of a few bytes can declare a picture of many gigabytes.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFile

from components.data.cleaning.rules import PictureParams
from components.data.fetching.signatures import HEAD_BYTES, picture_format
from components.io.outcomes import Reason

__all__ = ["FORMATS", "Picture", "PictureParams", "normalise", "open_picture", "why"]

# Formats that hold one raster picture. Others that Pillow knows start programs (EPS) or are documents.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF")

_UPRIGHT = {  # EXIF orientation (tag 274) -> what undoes it
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 274

# Pillow warns of damaged metadata, and above 89 million pixels; in bulk that is noise: metadata do not matter here and
# `max_pixels` is checked right after the header. Its error at twice that size stays on.
warnings.filterwarnings("ignore", module=r"PIL\.")
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
ImageFile.LOAD_TRUNCATED_IMAGES = False  # half a picture with a grey rest must not pass for a picture


@dataclass(frozen=True)
class Picture:
    """A picture that may be kept."""

    data: bytes  # JPEG or PNG, RGB, upright
    width: int
    height: int
    changes: tuple[str, ...] = ()  # what was done, in order; empty: the bytes are those that came in


def normalise(data: bytes, params: PictureParams) -> Picture | Reason:
    """The picture in `data` as upright RGB within the limits, or why it is rejected. Never raises on bad bytes.

    A JPEG that is RGB, upright and small enough already keeps its bytes, after a full decode has proven them.
    Anything else is encoded anew. Reasons: UNDECODABLE, TRUNCATED_IMAGE, IMAGE_TOO_LARGE (declared pixels, before
    any decode), IMAGE_TOO_SMALL, IMAGE_ASPECT.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        return Reason.IMAGE_TOO_LARGE
    except MemoryError:
        raise
    except Exception:  # Pillow's readers raise nearly anything on hostile headers
        return Reason.TRUNCATED_IMAGE if _cut_short(data) else Reason.UNDECODABLE
    with image:
        refused = _judge_size(image.size, params)
        if refused is not None:
            return refused
        size = image.size
        try:
            _decode_small(image, params)
            image.load()
            upright, changes = _to_rgb(image)
        except MemoryError:
            raise
        except Exception as error:  # as above, in the picture's body
            cut = _cut_short(data) or "truncated" in str(error).lower()
            return Reason.TRUNCATED_IMAGE if cut else Reason.UNDECODABLE
        upright, resized = _scale_down(upright, size, params)
        changes += resized
        if not changes and image.format == "JPEG":
            return Picture(data, *upright.size)
        if not changes:
            changes = (str(image.format).lower(),)
        return Picture(_encode(upright, params), *upright.size, changes)


def open_picture(data: bytes) -> Image.Image:
    """The pixels of a record's picture (normalised before): mode RGB. For hashing and other readers of records."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        return image.convert("RGB")


def _judge_size(size: tuple[int, int], params: PictureParams) -> Reason | None:
    width, height = size
    if width * height > params.max_pixels:
        return Reason.IMAGE_TOO_LARGE
    if min(width, height) < params.min_side:
        return Reason.IMAGE_TOO_SMALL
    if max(width, height) > params.max_aspect * min(width, height):
        return Reason.IMAGE_ASPECT
    return None


def _to_rgb(image: ImageFile.ImageFile) -> tuple[Image.Image, tuple[str, ...]]:
    """The loaded picture as upright RGB, with the names of what had to be done."""
    changes: list[str] = []
    rgb: Image.Image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        rgb = _from_deep(image)
        changes.append("deep")
    elif image.has_transparency_data:
        with_alpha = image.convert("RGBA")
        rgb = Image.new("RGB", image.size, "white")
        rgb.paste(with_alpha, mask=with_alpha.getchannel("A"))
        changes.append("transparency")
    elif image.mode != "RGB":
        rgb = image.convert("RGB")
        changes.append(image.mode.lower())
    else:
        rgb = image
    turn = _UPRIGHT.get(_orientation(image))
    if turn is not None:
        rgb = rgb.transpose(turn)
        changes.append("orientation")
    if image.format == "MPO" or _animated(image):  # last: looking for a second frame can spoil the first
        changes.append("first_frame")
    return rgb, tuple(changes)


def _from_deep(image: Image.Image) -> Image.Image:
    """Grey of 16 or 32 bits or floats to 8-bit RGB, white staying white; Pillow's own conversion clips at 255."""
    pixels = np.asarray(image)
    low, high = 0.0, 65535.0
    if pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 65535:  # no fixed white: use the whole range
        pixels = np.nan_to_num(pixels.astype(np.float32), posinf=0.0, neginf=0.0)
        low, high = float(pixels.min()), float(pixels.max())
    scale = 255.0 / max(high - low, 1e-12)
    eight = np.empty(pixels.shape, np.uint8)
    for row, values in enumerate(pixels):  # by rows: a float copy of the whole would weigh eight pictures
        eight[row] = np.rint((values.astype(np.float64) - low) * scale)
    return Image.fromarray(eight).convert("RGB")


def _animated(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # a second frame that is damaged is still a second frame
        return True


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation; 1 (upright) when there is none or the EXIF block is damaged, as other readers do."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # EXIF is a file format of its own, and as hostile
        return 1
    return value if isinstance(value, int) else 1


def _target(size: tuple[int, int], params: PictureParams) -> tuple[int, int] | None:
    """The size that a picture of `size` is scaled down to; None when it may stay."""
    longest = max(size)
    if params.max_side is None or longest <= params.max_side:
        return None
    return max(1, round(size[0] * params.max_side / longest)), max(1, round(size[1] * params.max_side / longest))


def _decode_small(image: ImageFile.ImageFile, params: PictureParams) -> None:
    """Let a JPEG decode at a half, quarter or eighth, while that leaves the filter twice the pixels it needs."""
    target = _target(image.size, params)
    if target is not None and image.format == "JPEG":
        image.draft(None, (2 * target[0], 2 * target[1]))  # type: ignore[arg-type]  # None keeps the mode


def _scale_down(
    image: Image.Image, size: tuple[int, int], params: PictureParams
) -> tuple[Image.Image, tuple[str, ...]]:
    """The upright picture scaled down, if need be; `size` is the declared one, perhaps of a picture that lay."""
    target = _target(size, params)
    if target is None:
        return image, ()
    if (size[0] >= size[1]) != (image.width >= image.height):
        target = target[1], target[0]
    return image.resize(target, Image.Resampling[params.resample.upper()]), ("scaled",)


def _encode(image: Image.Image, params: PictureParams) -> bytes:
    sink = io.BytesIO()
    plain = Image.new("RGB", image.size)  # a fresh picture: no EXIF, profile or comment travels along
    plain.paste(image)
    if params.encode == "png":
        plain.save(sink, "PNG")
    else:
        plain.save(sink, "JPEG", quality=params.quality)
    return sink.getvalue()


def _cut_short(data: bytes) -> bool:
    """Whether the bytes are the beginning of a known format without its end."""
    if data.startswith(b"\xff\xd8\xff"):
        return b"\xff\xd9" not in data[-64:]
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return b"IEND" not in data[-64:]
    if data.startswith((b"GIF87a", b"GIF89a")):
        return b"\x3b" not in data[-16:]
    if data.startswith(b"RIFF"):
        return len(data) < int.from_bytes(data[4:8], "little") + 8
    if data.startswith(b"BM"):
        return len(data) < int.from_bytes(data[2:6], "little")
    return False


def why(data: bytes, reason: Reason) -> str | None:
    """What a person may want to know of a rejected picture, from its first bytes; None when there is nothing to say."""
    if reason in (Reason.IMAGE_TOO_SMALL, Reason.IMAGE_TOO_LARGE, Reason.IMAGE_ASPECT):
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                return f"{image.width} x {image.height} pixels"
        except Exception:  # past Pillow's own limit
            return None
    if reason is Reason.UNDECODABLE:
        start = data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
        if not start:
            return "no bytes" if not data else "no picture"
        if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
            return "a web page"
        if start.startswith(b"<svg") or (start.startswith(b"<?xml") and b"<svg" in start):
            return "an SVG drawing"
        return "of no format that is read" if picture_format(data[:HEAD_BYTES]) is None else None
    return None
