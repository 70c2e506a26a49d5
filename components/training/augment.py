"""Training pictures: random crop, mirror, RandAugment, resize. All draws come from the generator passed in."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from components.training.settings import AugmentParams

MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's, which ALBEF uses
STD = (0.26862954, 0.26130258, 0.27577711)
SIDES = re.compile(r"\b(left|right)", re.IGNORECASE)

_MAGNITUDES = 10  # RandAugment's magnitude runs from 0 to this
_APPLY = 0.5  # ALBEF's code applies each drawn operation with this probability
_FILL = (128, 128, 128)

Operation = Callable[[Image.Image, float, float], Image.Image]  # picture, strength in [0, 1], sign


def augment(
    image: Image.Image, captions: Sequence[str], size: int, params: AugmentParams, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """One training view of an RGB picture: (size, size, 3) uint8. `captions` decide whether it may be mirrored."""
    box = random_box(image.width, image.height, params, rng)
    image = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
    mirrored = params.flip and rng.random() < 0.5
    if mirrored and (params.flip_with_sides or not any(SIDES.search(caption) for caption in captions)):
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(randaugment(image, params, rng))


def evaluation_view(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """The whole picture, squeezed to a square, as the published evaluation does: (size, size, 3) uint8."""
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC))


def evaluation_transform(size: int) -> Callable[[Image.Image], torch.Tensor]:
    """From an RGB picture to what the model reads: (3, size, size) float32, `evaluation_view` normalised."""

    def transform(image: Image.Image) -> torch.Tensor:
        return normalise(to_batch([evaluation_view(image, size)]))[0]

    return transform


def normalise(pictures: torch.Tensor) -> torch.Tensor:
    """Colours around 0 with spread 1: (B, 3, H, W) uint8 in, float32 on the same device out."""
    mean = torch.tensor(MEAN, device=pictures.device).mul(255).view(3, 1, 1)
    std = torch.tensor(STD, device=pictures.device).mul(255).view(3, 1, 1)
    return pictures.float().sub_(mean).div_(std)


def to_batch(views: Sequence[NDArray[np.uint8]]) -> torch.Tensor:
    """Views (S, S, 3) uint8 as one (B, 3, S, S) uint8 tensor."""
    return torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2).contiguous()


def random_box(
    width: int, height: int, params: AugmentParams, rng: np.random.Generator
) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a random part of a picture, as torchvision's RandomResizedCrop draws it."""
    low, high = params.crop_scale
    if low == high == 1.0:
        return 0.0, 0.0, float(width), float(height)
    narrow, wide = params.crop_ratio
    for _ in range(10):
        area = width * height * rng.uniform(low, high)
        ratio = math.exp(rng.uniform(math.log(narrow), math.log(wide)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
            return float(left), float(top), float(left + w), float(top + h)
    # nothing fits in a very long picture: its centre, as near to the wanted ratios as it allows
    ratio = min(max(width / height, narrow), wide)
    w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
    x, y = (width - w) // 2, (height - h) // 2
    return float(x), float(y), float(x + w), float(y + h)


def randaugment(image: Image.Image, params: AugmentParams, rng: np.random.Generator) -> Image.Image:
    """RandAugment with ALBEF's operations: N draws with replacement, each applied with probability one half."""
    operations = GEOMETRY + COLOUR if params.randaugment_colour else GEOMETRY
    strength = params.randaugment_magnitude / _MAGNITUDES
    for _ in range(params.randaugment_operations):
        chosen, applied, sign = rng.integers(len(operations)), rng.random() < _APPLY, rng.choice((-1.0, 1.0))
        if applied:
            image = operations[chosen](image, strength, float(sign))
    return image


def _affine(image: Image.Image, matrix: tuple[float, float, float, float, float, float]) -> Image.Image:
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR, fillcolor=_FILL
    )


def _identity(image: Image.Image, strength: float, sign: float) -> Image.Image:
    return image


def _shear_x(image: Image.Image, strength: float, sign: float) -> Image.Image:
    return _affine(image, (1, sign * 0.3 * strength, 0, 0, 1, 0))


def _shear_y(image: Image.Image, strength: float, sign: float) -> Image.Image:
    return _affine(image, (1, 0, 0, sign * 0.3 * strength, 1, 0))


def _translate_x(image: Image.Image, strength: float, sign: float) -> Image.Image:
    return _affine(image, (1, 0, sign * strength * image.width * 10 / 256, 0, 1, 0))  # ALBEF: 10 of 256 pixels


def _translate_y(image: Image.Image, strength: float, sign: float) -> Image.Image:
    return _affine(image, (1, 0, 0, 0, 1, sign * strength * image.height * 10 / 256))


def _rotate(image: Image.Image, strength: float, sign: float) -> Image.Image:
    return image.rotate(sign * 30 * strength, resample=Image.Resampling.BILINEAR, fillcolor=_FILL)


def _autocontrast(image: Image.Image, strength: float, sign: float) -> Image.Image:
    return ImageOps.autocontrast(image)


def _equalize(image: Image.Image, strength: float, sign: float) -> Image.Image:
    return ImageOps.equalize(image)


def _brightness(image: Image.Image, strength: float, sign: float) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(0.1 + 1.8 * strength)


def _sharpness(image: Image.Image, strength: float, sign: float) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(0.1 + 1.8 * strength)


GEOMETRY: tuple[Operation, ...] = (_identity, _shear_x, _shear_y, _translate_x, _translate_y, _rotate)
COLOUR: tuple[Operation, ...] = (_autocontrast, _equalize, _brightness, _sharpness)
