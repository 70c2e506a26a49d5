"""Towers with a head: the model in its folder, and a split of a task as the towers see it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from components.data.tokenizer import load_tokenizer
from components.evaluation.inputs import RetrievalSplit
from components.evaluation.tower_scoring import Source
from components.io.errors import UserError
from components.training.augment import MEAN, STD
from models.dual.config import DualConfig
from models.dual.model import DualHead
from models.embedding.config import VseConfig, VsrnConfig
from models.embedding.vse import VseHead
from models.embedding.vsrn import VsrnHead
from models.hat.config import HatHeadConfig
from models.hat.model import HatHead
from models.towers.clip import ClipImageTower, ClipTextTower, check_sizes, read_towers
from models.towers.image import ImageTower
from models.towers.text import TextTower, UpperLayers
from models.vitr.head import VitrHead
from models.vitr.head_config import VitrHeadConfig

PICTURES, CAPTIONS = 32, 64  # that the towers read at once
WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
HEADS: dict[str, tuple[type[Any], type[Any]]] = {
    "linear": (DualConfig, DualHead),
    "hat": (HatHeadConfig, HatHead),
    "vitr": (VitrHeadConfig, VitrHead),
    "vse": (VseConfig, VseHead),
    "vsrn": (VsrnConfig, VsrnHead),
}


def make_head(kind: str, config: Any, image_widths: Sequence[int], text_widths: Sequence[int]) -> nn.Module:
    """The head of a kind over towers of these widths; raises ValueError when they do not fit."""
    head: nn.Module = HEADS[kind][1](config, image_widths, text_widths)
    return head


class TowerModel(nn.Module):
    """A head, and the towers where they are needed: not while their outputs are cached."""

    def __init__(
        self,
        head: nn.Module,
        image: ImageTower | ClipImageTower | None,
        text: TextTower | ClipTextTower | UpperLayers | None,
    ) -> None:
        super().__init__()
        self.head, self.image, self.text = head, image, text

    def forward(
        self,
        regions: list[Tensor],
        words: list[Tensor],
        mask: Tensor,
        images: Tensor | None = None,
        input_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Scores (P, C) by name, from levels or, in their place, from pictures (P, 3, S, S) in [0, 1] or ids (C, n)."""
        if images is not None:
            assert self.image is not None
            regions = self.image(images)
        if isinstance(self.text, UpperLayers):
            if next(self.text.parameters()).requires_grad:  # else it rests, and its outputs are cached
                words = [*words[: self.text.level], *self.text(words[self.text.level - 1], mask)]
        elif input_ids is not None:
            assert self.text is not None
            words = self.text(input_ids, mask)
        scores: dict[str, Tensor] = self.head(regions, words, mask.bool())
        return scores

    def train(self, mode: bool = True) -> TowerModel:
        """As usual, but running statistics of the towers stay: their batches are small."""
        super().train(mode)
        for module in self.image.modules() if self.image is not None else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self


def is_tower_model(weights: Path) -> bool:
    """Whether the folder holds such a model, rather than an ALBEF."""
    try:
        content = json.loads((weights / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # whoever reads it says what is wrong
    return isinstance(content, dict) and content.get("kind") in HEADS


def load_sizes(folder: Path) -> dict[str, Any]:
    """The configuration of the model in `folder`. Raises UserError when it is missing or damaged."""
    try:
        sizes: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        check_sizes(sizes)
        HEADS[sizes["kind"]][0].model_validate_json(json.dumps(sizes["head"]))
        return sizes | {"max_tokens": int(sizes["max_tokens"])}
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} does not exist: run the stage that trains these weights first") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from None


def load_tower_model(folder: Path, device: str | torch.device) -> tuple[TowerModel, dict[str, Any]]:
    """The model, in evaluation mode, and its configuration. Raises UserError when a file is missing or damaged."""
    sizes = load_sizes(folder)
    try:
        image, text = read_towers(sizes)
        config = HEADS[sizes["kind"]][0].model_validate_json(json.dumps(sizes["head"]))
        model = TowerModel(make_head(sizes["kind"], config, image.widths, text.widths), image, text)
        model.load_state_dict(load_file(folder / WEIGHTS_FILE))
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} does not exist: run the stage that trains these weights first") from None
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _damaged(folder, error) from None
    return model.eval().to(device), sizes


def _damaged(folder: Path, error: Exception) -> UserError:
    reason = str(error).partition("\n")[0]
    return UserError(f"{folder} is damaged or not of its {CONFIG_FILE} ({reason}): train it again")


def read_pictures(tower: ImageTower | ClipImageTower, images: Tensor, device: str | torch.device) -> list[Tensor]:
    """Regions (B, k, width) float16 on the CPU of each level, of images (B, 3, S, S) as `RetrievalSplit` gives them."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return [level.half().cpu() for level in tower((images * std + mean).clamp(0, 1).to(device))]


def read_captions(
    tower: TextTower | ClipTextTower, ids: Tensor, mask: Tensor, device: str | torch.device
) -> list[Tensor]:
    """Words (B, n, width) float16 on the CPU of each level, of ids and mask (B, L); n is the longest caption's."""
    longest = int(mask.sum(dim=1).max())
    return [level.half().cpu() for level in tower(ids[:, :longest].to(device), mask[:, :longest].to(device))]


class TowerSplit(RetrievalSplit):
    """A split with its captions as towers read them, by the tokenizer in `tokenizer`. Raises UserError as its base."""

    def __init__(self, folder: Path, sizes: dict[str, Any], tokenizer: Path) -> None:
        super().__init__(folder, int(sizes["image"]["image_size"]))
        reader = load_tokenizer(tokenizer, clip=True)
        self._ids, self._mask = reader.encode_batch(self.captions, int(sizes["max_tokens"]))
        self.lengths: NDArray[np.int64] = self._mask.sum(dim=1).numpy()

    @torch.inference_mode()
    def words_by(
        self, tower: TextTower | ClipTextTower, order: Sequence[int] | NDArray[np.int64], device: str | torch.device
    ) -> dict[int, list[Tensor]]:
        """Words (n, width) float16 of each level of the captions `order`, best by length, by their numbers."""
        found = {}
        for at in range(0, len(order), CAPTIONS):
            rows = torch.as_tensor(order[at : at + CAPTIONS])
            levels = read_captions(tower, self._ids[rows], self._mask[rows], device)
            for place, row in enumerate(rows.tolist()):
                found[row] = [level[place, : int(self.lengths[row])].clone() for level in levels]
        return found

    def padded(self, words: Iterable[list[Tensor]], captions: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Words (C, n, width) float32 of each level, padded with zeros, and their mask (C, n) bool."""
        lengths = torch.from_numpy(self.lengths[np.asarray(captions)])
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        levels = zip(*words, strict=True)
        return [nn.utils.rnn.pad_sequence(list(level), batch_first=True).float() for level in levels], mask


class OnDemandSplit(TowerSplit):
    """A split whose pictures and captions the towers read when they are asked for: what a search of candidates needs.

    Values are those of `EncodedSplit`. Raises UserError as `RetrievalSplit`.
    """

    def __init__(
        self, folder: Path, model: TowerModel, sizes: dict[str, Any], tokenizer: Path, device: str | torch.device
    ) -> None:
        super().__init__(folder, sizes, tokenizer)
        assert model.image is not None
        assert isinstance(model.text, TextTower | ClipTextTower)
        self._image, self._text, self._device = model.image, model.text, device

    @torch.inference_mode()
    def read(self, images: Tensor) -> list[Tensor]:
        """Regions (B, k, width) float32 of each level, of images (B, 3, S, S) that need not be of the split."""
        return [level.float() for level in read_pictures(self._image, images, self._device)]

    def regions(self, pictures: Sequence[int]) -> list[Tensor]:
        """Regions (P, k, width) float32 of each level."""
        blocks = [self.read(self.views(pictures[at : at + PICTURES])) for at in range(0, len(pictures), PICTURES)]
        return [torch.cat(level) for level in zip(*blocks, strict=True)]

    def words(self, captions: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Words (C, n, width) float32 of each level, padded with zeros, and their mask (C, n) bool."""
        found = self.words_by(self._text, captions, self._device)
        return self.padded((found[caption] for caption in captions), captions)


class EncodedSplit(TowerSplit):
    """A split as the towers see it; outputs that are read lie in memory as float16.

    Where nothing was read, outputs come from `cached`. Raises UserError as `RetrievalSplit`.
    """

    def __init__(self, folder: Path, sizes: dict[str, Any], tokenizer: Path, cached: Source | None = None) -> None:
        super().__init__(folder, sizes, tokenizer)
        self.cached = cached
        self._regions: dict[int, list[Tensor]] = {}
        self._words: dict[int, list[Tensor]] = {}

    @classmethod
    def read(
        cls,
        folder: Path,
        model: TowerModel,
        sizes: dict[str, Any],
        tokenizer: Path,
        device: str | torch.device,
        cached: Source | None = None,
    ) -> EncodedSplit:
        """The split with all that the model has a tower for read."""
        split = cls(folder, sizes, tokenizer, cached)
        if model.image is not None:
            split.read_pictures(model.image, range(len(split)), device)
        if isinstance(model.text, TextTower | ClipTextTower):
            split.read_captions(model.text, np.argsort(split.lengths, kind="stable"), device)
        return split

    @torch.inference_mode()
    def read_pictures(self, tower: ImageTower | ClipImageTower, part: range, device: str | torch.device) -> None:
        """Let the tower read the pictures of `part`; those read before are forgotten."""
        self._regions = {}
        for start in range(part.start, part.stop, PICTURES):
            some = range(start, min(start + PICTURES, part.stop))
            levels = read_pictures(tower, self[some.start : some.stop], device)
            self._regions.update(zip(some, (list(one) for one in zip(*levels, strict=True)), strict=True))

    def read_captions(
        self, tower: TextTower | ClipTextTower, order: NDArray[np.int64], device: str | torch.device
    ) -> None:
        """Let the tower read the captions `order`, best by length; those read before are forgotten."""
        self._words = self.words_by(tower, order, device)

    def words_of(self, caption: int) -> list[Tensor]:
        """Words (n, width) float16 of each level of one caption."""
        return self._words[caption]

    def regions(self, pictures: Sequence[int]) -> list[Tensor]:
        """Regions (P, k, width) float32 of each level."""
        if self.cached is not None and not self._regions:
            return self.cached.regions(pictures)
        return [torch.stack(level).float() for level in zip(*(self._regions[i] for i in pictures), strict=True)]

    def words(self, captions: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Words (C, n, width) float32 of each level, padded with zeros, and their mask (C, n) bool."""
        if self.cached is not None and not self._words:
            return self.cached.words(captions)
        return self.padded(map(self.words_of, captions), captions)
