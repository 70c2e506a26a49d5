"""Running frozen towers over a part of a split, and the towers' own files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from components.io.errors import UserError
from components.io.shards import ShardReader
from components.training.feature_store import MIRRORED, REGIONS, TOWERS_FILE, TRAIN, WEIGHTS_FILE, Part
from components.training.tower_files import TIMM, TRANSFORMERS, locate, read_tensors
from models.towers.config import ImageTowerConfig, TextTowerConfig
from models.towers.image import ImageTower
from models.towers.published import load_image_tower, load_text_tower
from models.towers.text import TextTower

if TYPE_CHECKING:
    from components.training.features import TowersParams

CACHED_PICTURES = 4  # a pass on a processor: more leave its cache, and take half as long again


def read_sources(params: TowersParams) -> dict[str, Path]:
    """The files that the towers' weights are read from, by tower; those that are fetched by name have none."""
    named = {"image_weights": params.image_weights, "text_weights": params.text_weights}
    return {
        key: locate(source)
        for key, source in named.items()
        if source is not None and not source.startswith((TIMM, TRANSFORMERS))
    }


def write_towers(params: TowersParams, folder: Path) -> None:
    """Write towers.safetensors, towers.json and tokenizer.json, unless they are there.

    Raises UserError when weights or vocabulary do not fit the towers.
    """
    if (folder / TOWERS_FILE).is_file():
        return
    tokenizer = load_tokenizer(locate(params.vocabulary))
    if tokenizer.vocab_size > params.text.vocab_size:
        raise UserError(
            f"{params.vocabulary} has {tokenizer.vocab_size} words, the text tower reads {params.text.vocab_size}: "
            "set text.vocab_size"
        )
    torch.manual_seed(params.seed)
    try:
        image, text = ImageTower(params.image), TextTower(params.text)
    except ValueError as error:
        raise UserError(f"the towers cannot be made: {error}") from None
    loads: list[tuple[Callable[[dict[str, Tensor]], None], str | None]] = [
        (partial(load_image_tower, image), params.image_weights),
        (partial(load_text_tower, text), params.text_weights),
    ]
    for load, source in loads:
        if source is not None:
            try:
                load(read_tensors(source))
            except ValueError as error:
                raise UserError(f"{source} does not fit its tower: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"image.{name}": value for name, value in image.state_dict().items()}
    state |= {f"text.{name}": value for name, value in text.state_dict().items()}
    save_file({name: value.contiguous() for name, value in state.items()}, folder / WEIGHTS_FILE)
    tokenizer.save(folder / TOKENIZER_FILE)
    sizes = {
        "image": params.image.model_dump(mode="json"),
        "text": params.text.model_dump(mode="json"),
        "max_tokens": params.max_tokens,
    }
    (folder / TOWERS_FILE).write_text(json.dumps(sizes, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load_towers(folder: Path) -> tuple[ImageTower, TextTower]:
    """The towers that `write_towers` left, in evaluation mode. Raises UserError when they are missing or damaged."""
    try:
        sizes = json.loads((folder / TOWERS_FILE).read_text(encoding="utf-8"))
        image = ImageTower(ImageTowerConfig.model_validate_json(json.dumps(sizes["image"])))
        text = TextTower(TextTowerConfig.model_validate_json(json.dumps(sizes["text"])))
        state = load_file(folder / WEIGHTS_FILE)
        for tower, prefix in ((image, "image."), (text, "text.")):
            tower.load_state_dict(
                {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{folder} holds no towers ({error}): run the stage features again") from None
    return image.eval(), text.eval()


@lru_cache(maxsize=1)
def _towers(folder: Path) -> tuple[ImageTower, TextTower]:
    return load_towers(folder)


@torch.inference_mode()
def extract(params: TowersParams, towers: Path, task: Path, part: Part, folder: Path) -> dict[str, Any]:
    """Write the features of one part into `folder`; the partition function of the stage.

    One thread a process, so that the bytes do not depend on the machine's cores.
    """
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    image, text = (tower.to(device) for tower in _towers(towers))
    reader = ShardReader(task / part.split)
    tokenizer = load_tokenizer(towers)
    pictures = range(part.start, part.stop)
    captions = [caption for texts in reader.captions[part.start : part.stop] for caption in texts]

    tokens: list[list[NDArray[np.float16]]] = [[] for _ in captions]
    order = sorted(range(len(captions)), key=lambda index: (len(captions[index]), index))  # little padding
    for start in range(0, len(order), params.batch_size):
        chosen = order[start : start + params.batch_size]
        ids, mask = tokenizer.encode_batch([captions[index] for index in chosen], params.max_tokens)
        levels = [level.half().cpu().numpy() for level in text(ids.to(device), mask.to(device))]
        for row, index in enumerate(chosen):
            tokens[index] = [level[row, : int(mask[row].sum())] for level in levels]
    for level in range(len(params.text.take)):
        words = [caption[level] for caption in tokens] or [np.zeros((0, params.text.width), np.float16)]
        np.save(folder / f"words-{level}.npy", np.concatenate(words))
    lengths = np.array([len(caption[0]) for caption in tokens], np.int32)
    np.save(folder / "lengths.npy", lengths)

    size = params.image.image_size
    kinds = (REGIONS, MIRRORED) if params.mirrored and part.split == TRAIN else (REGIONS,)
    parts: dict[str, list[NDArray[np.float16]]] = {}
    step = params.batch_size if device == "cuda" else min(params.batch_size, CACHED_PICTURES)
    for start in range(0, len(pictures), step):
        batch = torch.stack([view(reader, index, size) for index in pictures[start : start + step]])
        for kind in kinds:
            seen = batch if kind == REGIONS else batch.flip(3)
            for number, level in enumerate(image(seen.to(device).float() / 255)):
                parts.setdefault(f"{kind}-{number}", []).append(level.half().cpu().numpy())
    for name, found in parts.items():
        np.save(folder / f"{name}.npy", np.concatenate(found))
    return {"tokens": int(lengths.sum()), "levels": len(params.text.take)}


def view(reader: ShardReader, index: int, size: int) -> Tensor:
    """A whole picture, squeezed to a square: (3, size, size) uint8. Raises UserError when it cannot be decoded."""
    try:
        picture = Image.open(io.BytesIO(reader.image(index))).convert("RGB")
        pixels = np.array(picture.resize((size, size), Image.Resampling.BICUBIC))
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"picture {index} of {reader.folder} cannot be decoded ({error}): run the stage that writes it again"
        ) from None
    return torch.from_numpy(pixels).permute(2, 0, 1)
