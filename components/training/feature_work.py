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
from components.training.tower_files import BY_NAME, locate, read_tensors
from models.towers.clip import ClipImageTower, Towers, make_towers, read_towers
from models.towers.published import load_clip, load_image_tower, load_text_tower
from models.towers.text import TextTower

if TYPE_CHECKING:
    from components.training.features import TowersParams

CACHED_PICTURES = 4  # a pass on a processor: more leave its cache, and take half as long again


def read_sources(params: TowersParams) -> dict[str, Path]:
    """The files that the towers' weights are read from, by tower; those that are fetched by name have none."""
    named = {name: getattr(params, name) for name in ("image_weights", "text_weights", "clip_weights")}
    return {
        key: locate(source) for key, source in named.items() if source is not None and not source.startswith(BY_NAME)
    }


def write_towers(params: TowersParams, folder: Path) -> None:
    """Write towers.safetensors, towers.json and tokenizer.json, unless they are there.

    Raises UserError when weights or vocabulary do not fit the towers.
    """
    if (folder / TOWERS_FILE).is_file():
        return
    tokenizer = load_tokenizer(locate(params.vocabulary), clip=params.clip is not None)
    own = "clip" if params.clip is not None else "text"
    if params.clip is not None and not tokenizer.is_clip:
        raise UserError(f"{params.vocabulary} is no tokenizer of a CLIP: give the tokenizer.json of its weights")
    if tokenizer.vocab_size > params.words_read:
        raise UserError(
            f"{params.vocabulary} has {tokenizer.vocab_size} words, the text tower reads {params.words_read}: "
            f"set {own}.vocab_size"
        )
    torch.manual_seed(params.seed)
    try:
        image, text = make_towers(params.image, params.text, params.clip)
    except ValueError as error:
        raise UserError(f"the towers cannot be made: {error}") from None
    loads: list[tuple[Callable[[dict[str, Tensor]], None], str | None]] = []
    local = image.local if isinstance(image, ClipImageTower) else image
    if local is not None:
        loads.append((partial(load_image_tower, local), params.image_weights))
    if isinstance(text, TextTower):
        loads.append((partial(load_text_tower, text), params.text_weights))
    elif isinstance(image, ClipImageTower):
        loads.append((partial(load_clip, image, text), params.clip_weights))
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
    if params.clip is not None:
        sizes = sizes | {"clip": params.clip.model_dump(mode="json"), "text": None}
    (folder / TOWERS_FILE).write_text(json.dumps(sizes, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load_towers(folder: Path) -> Towers:
    """The towers that `write_towers` left, in evaluation mode. Raises UserError when they are missing or damaged."""
    try:
        sizes = json.loads((folder / TOWERS_FILE).read_text(encoding="utf-8"))
        image, text = read_towers(sizes)
        state = load_file(folder / WEIGHTS_FILE)
        for tower, prefix in ((image, "image."), (text, "text.")):
            tower.load_state_dict(
                {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{folder} holds no towers ({error}): run the stage features again") from None
    return image.eval(), text.eval()


@lru_cache(maxsize=1)
def _towers(folder: Path) -> Towers:
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
    tokenizer = load_tokenizer(towers, clip=True)
    pictures = range(part.start, part.stop)
    captions = [caption for texts in reader.captions[part.start : part.stop] for caption in texts]

    tokens: list[list[NDArray[np.float16]]] = [[] for _ in captions]
    lengths = np.zeros(len(captions), np.int32)
    order = sorted(range(len(captions)), key=lambda index: (len(captions[index]), index))  # little padding
    for start in range(0, len(order), params.batch_size):
        chosen = order[start : start + params.batch_size]
        ids, mask = tokenizer.encode_batch([captions[index] for index in chosen], params.max_tokens)
        levels = [level.half().cpu().numpy() for level in text(ids.to(device), mask.to(device))]
        for row, index in enumerate(chosen):
            lengths[index] = int(mask[row].sum())
            tokens[index] = [level[row, : lengths[index]] for level in levels]  # of a caption's own vector one row
    for level, width in enumerate(text.widths):
        words = [caption[level] for caption in tokens] or [np.zeros((0, width), np.float16)]
        np.save(folder / f"words-{level}.npy", np.concatenate(words))
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
    return {"tokens": int(lengths.sum()), "levels": len(text.widths)}


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
