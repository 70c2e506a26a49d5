"""Towers with a head: the model in its folder, and a split of a task as the towers see it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from components.data.tokenizer import load_tokenizer
from components.evaluation.inputs import RetrievalSplit
from components.evaluation.tower_scoring import Source
from components.io.errors import UserError
from components.io.progress import silent
from components.training.augment import MEAN, STD
from models.dual.config import DualConfig
from models.dual.model import DualHead
from models.embedding.config import VseConfig, VsrnConfig
from models.embedding.vse import VseHead
from models.embedding.vsrn import VsrnHead
from models.hat.config import HatHeadConfig
from models.hat.model import HatHead
from models.towers.config import ImageTowerConfig, TextTowerConfig
from models.towers.image import ImageTower
from models.towers.text import TextTower, UpperLayers
from models.vitr.head import VitrHead
from models.vitr.head_config import VitrHeadConfig

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

    def __init__(self, head: nn.Module, image: ImageTower | None, text: TextTower | UpperLayers | None) -> None:
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


def load_tower_model(folder: Path, device: str | torch.device) -> tuple[TowerModel, dict[str, Any]]:
    """The model, in evaluation mode, and its configuration. Raises UserError when a file is missing or damaged."""
    try:
        sizes: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        image = ImageTower(ImageTowerConfig.model_validate_json(json.dumps(sizes["image"])))
        text = TextTower(TextTowerConfig.model_validate_json(json.dumps(sizes["text"])))
        config = HEADS[sizes["kind"]][0].model_validate_json(json.dumps(sizes["head"]))
        model = TowerModel(make_head(sizes["kind"], config, image.widths, text.widths), image, text)
        model.load_state_dict(load_file(folder / WEIGHTS_FILE))
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} does not exist: run the stage that trains these weights first") from None
    except (OSError, ValueError, KeyError, RuntimeError, ValidationError, SafetensorError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{folder} is damaged or not of its {CONFIG_FILE} ({reason}): train it again") from None
    return model.eval().to(device), sizes


class EncodedSplit(RetrievalSplit):
    """A split whose pictures and captions the towers read once; outputs are kept in memory as float16.

    Where the model lacks a tower, its outputs come from `cached`. `advance` hears of pictures and captions read.

    Raises UserError as `RetrievalSplit`.
    """

    def __init__(
        self,
        folder: Path,
        model: TowerModel,
        sizes: dict[str, Any],
        tokenizer: Path,
        device: str | torch.device,
        cached: Source | None = None,
        advance: Callable[[int], None] = silent,
    ) -> None:
        super().__init__(folder, int(sizes["image"]["image_size"]))
        self.cached, self._advance = cached, advance
        self._regions: list[list[Tensor]] = []
        self._words: list[list[Tensor]] = []
        with torch.inference_mode():
            if model.image is not None:
                self._read_pictures(model.image, device)
            ids, mask = load_tokenizer(tokenizer).encode_batch(self.captions, int(sizes["max_tokens"]))
            self.lengths: NDArray[np.int64] = mask.sum(dim=1).numpy()
            if isinstance(model.text, TextTower):
                self._read_captions(model.text, ids, mask, device)

    def _read_pictures(self, tower: ImageTower, device: str | torch.device) -> None:
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        for start in range(0, len(self), 32):
            images = (self[start : start + 32] * std + mean).clamp(0, 1).to(device)
            levels = [level.half().cpu() for level in tower(images)]
            self._regions += [list(one) for one in zip(*levels, strict=True)]
            self._advance(len(images))

    def _read_captions(self, tower: TextTower, ids: Tensor, mask: Tensor, device: str | torch.device) -> None:
        found: dict[int, list[Tensor]] = {}
        order = np.argsort(self.lengths, kind="stable")
        for at in range(0, len(order), 64):
            rows = torch.from_numpy(order[at : at + 64])
            longest = int(self.lengths[order[at : at + 64]].max())
            levels = tower(ids[rows, :longest].to(device), mask[rows, :longest].to(device))
            for place, row in enumerate(rows.tolist()):
                found[row] = [level[place, : int(self.lengths[row])].half().cpu() for level in levels]
            self._advance(len(rows))
        self._words = [found[row] for row in range(len(self.captions))]

    def regions(self, pictures: Sequence[int]) -> list[Tensor]:
        """Regions (P, k, width) float32 of each level."""
        if self.cached is not None and not self._regions:
            return self.cached.regions(pictures)
        return [torch.stack(level).float() for level in zip(*(self._regions[i] for i in pictures), strict=True)]

    def words(self, captions: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Words (C, n, width) float32 of each level, padded with zeros, and their mask (C, n) bool."""
        if self.cached is not None and not self._words:
            return self.cached.words(captions)
        lengths = torch.from_numpy(self.lengths[np.asarray(captions)])
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        levels = zip(*(self._words[i] for i in captions), strict=True)
        return [nn.utils.rnn.pad_sequence(list(level), batch_first=True).float() for level in levels], mask
