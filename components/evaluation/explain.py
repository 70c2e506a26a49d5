"""Where in a picture each word of a text is: an ALBEF's Grad-CAM (§6.4, figures 4 to 6), HAT's or VITR's attention."""

from __future__ import annotations

import base64
import html
import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor
from torch.nn import functional as F

from components.data.cleaning.captions import clean_caption
from components.data.cleaning.pictures import Picture, normalise, open_picture
from components.data.cleaning.rules import CaptionParams, PictureParams
from components.data.tokenizer import Tokenizer, load_tokenizer
from components.evaluation.grounding import default_layer
from components.evaluation.weights import load_model
from components.io.errors import UserError
from components.training.augment import evaluation_view, to_batch
from components.training.augment import normalise as normalise_colours
from models.albef.gradcam import gradcam_itm
from models.albef.model import Albef

MAX_BYTES = 100_000_000  # of a picture's file
MAX_SIDE = 1024  # longest side of the picture that heat is drawn on, pixels
SIDE, COLUMNS, MARGIN, LINE = 240, 4, 12, 24  # of the sheet: a picture's longest side, and what is around it
STRENGTH = 0.6  # of the colour where a word is hottest
MATCH = 1  # ITM's class of pairs that belong together


@dataclass(frozen=True)
class Word:
    """A word and its `heat` (H, W) float32 in [0, 1] over the picture, 1 where it is hottest; all 0 without heat."""

    text: str
    heat: NDArray[np.float32]


@dataclass(frozen=True)
class Explanation:
    """One picture (RGB) and one text: where each word looks, and how well the two match.

    That is ITM's probability of an ALBEF, and the own score of other models.
    """

    picture: Image.Image
    text: str  # as the model read it
    words: tuple[Word, ...]
    match: float


def explain(image: Path, text: str, weights: Path, *, layer: int | None = None, max_tokens: int = 30) -> Explanation:
    """Explain a picture's file and a text by the model in the folder `weights`: an ALBEF for pairs, HAT or VITR.

    `layer` is the BERT layer of ALBEF whose cross-attention is read, from 0; None: the published choice, the third that
    fuses, or the last but one in models of fewer.
    The text is cleaned as captions are and cut to `max_tokens`. Raises UserError when the picture, the text or the
    weights cannot be used, or the layer does not attend to pictures.
    """
    from components.evaluation.tower_models import is_tower_model, load_tower_model

    if is_tower_model(weights):
        from components.evaluation.tower_explain import explain_towers

        if layer is not None:
            raise UserError(f"{weights} holds no ALBEF, so there is no layer to choose: leave --layer out")
        towers, sizes = load_tower_model(weights, "cpu")
        try:
            return explain_towers(
                towers, sizes, load_tokenizer(weights, clip=True), read_picture(image), read_caption(text)
            )
        except ValueError as error:
            raise UserError(f"nothing to explain with {weights}: {error}") from None
    model, config = load_model(weights)
    caption = read_caption(text)
    picture = read_picture(image)
    if max_tokens > config.max_positions:
        raise UserError(f"the model in {weights} reads at most {config.max_positions} tokens: lower --max-tokens")
    try:
        return explain_pair(model, load_tokenizer(weights), picture, caption, layer=layer, max_tokens=max_tokens)
    except ValueError as error:
        raise UserError(f"nothing to explain with {weights}: {error}") from None


def explain_pair(
    model: Albef,
    tokenizer: Tokenizer,
    picture: Image.Image,
    caption: str,
    *,
    layer: int | None = None,
    max_tokens: int = 30,
) -> Explanation:
    """Explain an RGB picture and a caption that are as training saw them.

    Raises ValueError as `gradcam_itm` does, and for the last layer, whose words ITM does not read.
    """
    device = next(model.parameters()).device
    ids, mask = (part.to(device) for part in tokenizer.encode_batch([caption], max_tokens))
    images = normalise_colours(to_batch([evaluation_view(picture, model.config.image_size)])).to(device)
    maps = gradcam_itm(model, images, ids, mask, _layer(model, layer))[0].cpu()  # (L, h, w)
    with torch.inference_mode():
        text_tokens = model.encode_text(ids, mask).tokens
        logits = model.match(model.encode_image(images).tokens, text_tokens, mask)[0]  # (2,)
    words = tuple(
        Word(word, heat_over(maps[places].mean(dim=0), picture.size))
        for word, places in tokenizer.words(ids[0].tolist())
    )
    return Explanation(picture, caption, words, float(logits.softmax(dim=0)[MATCH]))


def overlay(picture: Image.Image, heat: NDArray[np.float32]) -> Image.Image:
    """The picture with `heat` (H, W) of its size over it, clearer where nothing is."""
    import matplotlib as mpl

    colours = mpl.colormaps["turbo"](heat)[..., :3] * 255  # (H, W, 3)
    weight = STRENGTH * heat[..., None]
    mixed = np.asarray(picture, np.float32) * (1 - weight) + colours * weight
    return Image.fromarray(mixed.round().astype(np.uint8))


def write(explanation: Explanation, path: Path) -> None:
    """Write a sheet of all words as ``.png``, or a page that needs nothing else as ``.html``.

    Raises UserError for another ending or where nothing can be written.
    """
    writers = {".png": _png, ".html": _html}
    if path.suffix.lower() not in writers:
        raise UserError(f"{path} is neither .png nor .html: choose one of these endings")
    data = writers[path.suffix.lower()](explanation)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another place") from None


def panels(explanation: Explanation) -> list[tuple[str, Image.Image]]:
    """The picture by itself, then each word with its heat, by what stands under them."""
    small = ImageOps.contain(explanation.picture, (SIDE, SIDE), Image.Resampling.LANCZOS)
    found = [(f"match {explanation.match:.2f}", small)]
    for word in explanation.words:
        heat = Image.fromarray(word.heat).resize(small.size, Image.Resampling.BILINEAR)
        found.append((word.text, overlay(small, np.asarray(heat, np.float32).clip(0, 1))))
    return found


def _layer(model: Albef, layer: int | None) -> int:
    """The layer to read. ITM sees [CLS] alone, so in the last layer no other token has a gradient."""
    last = len(model.text_encoder.bert.layers) - 1
    chosen = default_layer(model, "itm") if layer is None else layer
    if chosen == last:
        raise ValueError(
            f"in the last layer, {last}, only [CLS] leads to the score of ITM, so words have no heat there"
        )
    return chosen


def read_caption(text: str) -> str:
    """A text cleaned as captions are. Raises UserError when nothing is left of it."""
    caption, reason = clean_caption(text, CaptionParams())
    if not caption:
        raise UserError(f"the text holds no word to read ({reason.value.replace('_', ' ')}): give a sentence")
    return caption


def read_picture(path: Path) -> Image.Image:
    """A picture's file as the stages make pictures. Raises UserError when it is none, or too large."""
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= MAX_BYTES else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): name a picture's file") from None
    if size > MAX_BYTES:
        raise UserError(f"{path} has {size:,} bytes, more than {MAX_BYTES:,}: scale the picture down")
    found = normalise(data, PictureParams(min_side=1, max_aspect=1000, max_side=MAX_SIDE))
    if not isinstance(found, Picture):
        raise UserError(f"{path} is no picture that can be used ({found.value.replace('_', ' ')}): name another file")
    return open_picture(found.data)


def heat_over(small: Tensor, size: tuple[int, int]) -> NDArray[np.float32]:
    """A map (h, w) at the picture's `size` (width, height), from 0 to 1 at its hottest."""
    if not bool(torch.isfinite(small).all()) or float(small.max()) <= 0:
        return np.zeros((size[1], size[0]), np.float32)
    large = F.interpolate(small[None, None].float(), size=(size[1], size[0]), mode="bicubic", align_corners=False)
    heat: NDArray[np.float32] = large[0, 0].clamp(min=0).numpy()
    peak = heat.max()
    return heat / peak if peak > 0 else heat


def _png(explanation: Explanation) -> bytes:
    shown = panels(explanation)
    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    width, height = shown[0][1].size
    cell = max(width, SIDE // 2) + MARGIN, height + LINE + MARGIN
    sheet = Image.new("RGB", (MARGIN + columns * cell[0], MARGIN + rows * cell[1]), "white")
    draw = ImageDraw.Draw(sheet)
    for place, (label, picture) in enumerate(shown):
        left, top = MARGIN + place % columns * cell[0], MARGIN + place // columns * cell[1]
        sheet.paste(picture, (left, top))
        draw.text((left, top + height + 3), _fitting(label, cell[0] - MARGIN), fill="black", font=_font())
    return _as_png(sheet)


def _html(explanation: Explanation) -> bytes:
    figures = []
    for label, picture in panels(explanation):
        uri = f"data:image/png;base64,{base64.b64encode(_as_png(picture)).decode()}"
        said = html.escape(label)
        figures.append(f'<figure><img src="{uri}" alt="{said}"><figcaption>{said}</figcaption></figure>')
    title = html.escape(explanation.text)
    return PAGE.format(title=title, figures="\n".join(figures)).encode()


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 24px; }}
h1 {{ font-size: 20px; overflow-wrap: anywhere; }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); gap: 18px; }}
figure {{ margin: 0; overflow-wrap: anywhere; }} img {{ max-width: 100%; }}
</style></head><body><h1>{title}</h1><main>
{figures}
</main></body></html>
"""


def _as_png(image: Image.Image) -> bytes:
    sink = io.BytesIO()
    image.save(sink, "PNG", optimize=True)
    return sink.getvalue()


def _fitting(label: str, width: int) -> str:
    """The label, cut where it would run into its neighbour."""
    if _font().getlength(label) <= width:
        return label
    return next(cut for end in range(len(label), -1, -1) if _font().getlength(cut := label[:end] + "…") <= width)


@cache
def _font() -> ImageFont.FreeTypeFont:
    import matplotlib as mpl

    return ImageFont.truetype(Path(mpl.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), 14)
