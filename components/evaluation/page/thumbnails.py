"""Small pictures as data URIs, from bytes that may be anything."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from PIL import Image

from components.data.cleaning.pictures import PictureParams, normalise, open_picture
from components.io.outcomes import Reason

SIDE = 240  # pixels of the longer side: twice what the page shows, for screens of double density
QUALITY = 72
ANY_PICTURE = PictureParams(min_side=1, max_aspect=1000.0)


@dataclass(frozen=True)
class Thumbnail:
    """A JPEG for an ``img`` element: `uri`, and its `width` and `height` in pixels."""

    uri: str
    width: int
    height: int


def thumbnail(data: bytes) -> Thumbnail | None:
    """A small JPEG of the picture in `data`, or None when that is no whole picture. Never raises on bad bytes."""
    picture = normalise(data, ANY_PICTURE)
    if isinstance(picture, Reason):
        return None
    return shrink(open_picture(picture.data))


def shrink(image: Image.Image) -> Thumbnail:
    """A small JPEG of an RGB picture; `image` itself is made small."""
    image.thumbnail((SIDE, SIDE))
    sink = io.BytesIO()
    image.save(sink, "JPEG", quality=QUALITY)
    uri = f"data:image/jpeg;base64,{base64.b64encode(sink.getvalue()).decode()}"
    return Thumbnail(uri, *image.size)
