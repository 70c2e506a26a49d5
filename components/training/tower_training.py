"""HAT, VITR and their baselines as tasks of the loop, and the weights folder that they leave."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from components.data.tokenizer import TOKENIZER_FILE
from components.evaluation.tower_models import CONFIG_FILE, WEIGHTS_FILE, TowerModel, make_head
from components.evaluation.tower_scoring import main_score, recalls, score_all
from components.io.errors import UserError
from components.training.augment import MEAN, STD
from components.training.feature_data import FeatureData, TowerBatch
from components.training.feature_store import SEMANTIC_FILE, TOWERS_FILE, FeatureReader
from components.training.feature_work import load_towers
from components.training.loop import EXPORT, Outcome, Worker, fit
from models.dual.model import DualHead, info_nce
from models.hat.loss import hardest_triplet_loss
from models.towers.clip import ClipTextTower
from models.towers.text import TextTower, UpperLayers
from models.vitr.head import VitrHead
from models.vitr.lseh import Pool, lseh_loss

if TYPE_CHECKING:
    from components.training.tower_runs import HatRun, LinearRun, TowerRun, VitrRun, VseRun, VsrnRun

METRICS_FILE = "metrics.json"


class TowerTask:
    """A head learns on cached features; after `freeze_epochs` the towers learn with it."""

    frozen = ("image.", "text.")  # by the loop, for the first `freeze_epochs`
    run: Any
    pooled = False  # whether the head reads no more than mean regions and words

    def __init__(self, run: Any, name: str, train: Path, val: Path | None, features: Path) -> None:
        self.label = f"finetune.runs.{name}"
        self.run = run
        self.sizes: dict[str, Any] = json.loads((features / TOWERS_FILE).read_text(encoding="utf-8"))
        _check_levels(self.label, run, self.sizes.get("clip"), features)
        torch.manual_seed(run.seed)
        image, text = load_towers(features)
        try:
            head = make_head(self.run.kind, self.run.head, image.widths, text.widths)
        except ValueError as error:
            raise UserError(f"{self.label}.head does not fit {features}: {error}") from None
        self.towers = (image, text)
        learn = run.learn if run.epochs > run.freeze_epochs else ()
        learner: TextTower | ClipTextTower | UpperLayers | None = text if "text" in learn else None
        if learner is not None and run.learn_above:
            try:
                learner = text.above(run.learn_above)
            except ValueError as error:
                raise UserError(f"{self.label}.learn_above does not fit {features}: {error}") from None
        self.model = TowerModel(head, image if "image" in learn else None, learner)
        self.rates = dict.fromkeys(self.frozen, run.tower_rate)
        self.val = FeatureReader(features / "val") if val is not None else None
        self.val_records = val
        self.weights: dict[str, float] = {}
        self.data: Any = FeatureData(
            features,
            train,
            freeze_epochs=run.freeze_epochs,
            learn=[tower for tower in run.learn if tower != "text" or not run.learn_above],
            pooled=self.pooled and not run.learn_above,
            image_size=self.sizes["image"]["image_size"],
            max_tokens=self.sizes["max_tokens"],
            augment=run.augment,
            seed=run.seed,
        )

    def losses(
        self, model: nn.Module, images: Tensor, batch: TowerBatch, alpha: float, generator: torch.Generator
    ) -> dict[str, Tensor]:
        mean, std = (images.new_tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        colours = images * std + mean if len(images) else None  # the loop has put them around CLIP's mean
        ids = batch.input_ids if batch.input_ids.shape[1] else None
        return self.judge(model(batch.regions, batch.words, batch.mask, colours, ids), batch)

    def judge(self, scores: dict[str, Tensor], batch: TowerBatch) -> dict[str, Tensor]:
        """The parts of the loss from scores (B, B) by name."""
        raise NotImplementedError

    def validate(self) -> dict[str, float]:
        """Recalls on (the first pictures of) the validation split, from cached features while the towers rest."""
        if self.val is None or self.val_records is None:
            return {}
        source: Any = self.val
        device = next(self.model.parameters()).device
        towers = [tower for tower in (self.model.image, self.model.text) if tower is not None]
        if any(weight.requires_grad for tower in towers for weight in tower.parameters()):
            from components.evaluation.tower_models import EncodedSplit

            whole = TowerModel(self.model.head, self.model.image, self.towers[1] if self.model.text else None).eval()
            source = EncodedSplit.read(
                self.val_records, whole, self.sizes, self.val.folder.parent, device, cached=self.val
            )
        count = self.run.validate_pictures
        scores = score_all(self.model.head, source, pictures=count, device=device)
        chosen = self.val.picture_of[self.val.picture_of < (count or len(self.val))]
        found = recalls(scores, chosen)
        single = {f"{name}_r_sum": metrics["r_sum"] for name, metrics in found.items() if len(found) > 1}
        return found[main_score(list(found))] | single

    def score(self, metrics: dict[str, float]) -> float | None:
        return metrics["r_mean"] if self.run.keep_weights == "best" else None


def _check_levels(label: str, run: Any, clip: Any, features: Path) -> None:
    """Raise UserError where a run cannot read what towers with, or without, a CLIP give."""
    if clip is None:
        if not getattr(run.head, "projection", True):
            raise UserError(f"{label}.head.projection is false, but {features} holds no CLIP: give its towers a `clip`")
    elif clip["alone"] and run.kind != "linear":
        raise UserError(
            f"{label} reads regions and words, which {features} lacks: set clip.alone of its towers to false"
        )
    elif run.kind == "hat" and run.head.levels != (2,):
        raise UserError(f"{label}.head.levels must be [2]: of {features}, whose towers are a CLIP, these are the words")


class LinearTask(TowerTask):
    """The contrastive loss of both directions; of a CLIP's own vectors, once its towers learn, its fine-tuning."""

    run: LinearRun
    pooled = True

    def judge(self, scores: dict[str, Tensor], batch: TowerBatch) -> dict[str, Tensor]:
        assert isinstance(self.model.head, DualHead)
        return {"loss_contrast": info_nce(scores["similarity"], batch.image_ids, self.model.head.scale)}


class HatTask(TowerTask):
    """The triplet loss with hardest negatives of each direction (section 4.1), or what a run asks for in its place."""

    run: HatRun

    def __init__(self, run: HatRun, name: str, train: Path, val: Path | None, features: Path) -> None:
        super().__init__(run, name, train, val, features)
        self.weights = {"loss_similarity": run.pooled_weight}

    def judge(self, scores: dict[str, Tensor], batch: TowerBatch) -> dict[str, Tensor]:
        losses, ids = {}, batch.image_ids
        levels = len(self.run.head.levels)
        for name, matrix in scores.items():
            if name == "similarity":
                loss = info_nce(matrix, ids, 1 / self.run.pooled_temperature)
            elif self.run.loss == "contrastive":
                loss = info_nce(matrix / levels, ids, 1 / self.run.temperature)
            else:
                loss = hardest_triplet_loss(matrix, ids, self.run.margin)
            losses[f"loss_{name}"] = loss
        return losses


class TripletTask(TowerTask):
    """The triplet loss with hardest negatives, of VSE∞ and of VSRN++."""

    run: VseRun | VsrnRun

    def judge(self, scores: dict[str, Tensor], batch: TowerBatch) -> dict[str, Tensor]:
        return {
            f"loss_{name}": hardest_triplet_loss(matrix, batch.image_ids, self.run.margin)
            for name, matrix in scores.items()
        }


class VitrTask(TowerTask):
    """LSEH (eq. 20, 21), and the contrastive loss of the dual encoder that the paper trains before."""

    run: VitrRun

    def __init__(self, run: VitrRun, name: str, train: Path, val: Path | None, features: Path) -> None:
        super().__init__(run, name, train, val, features)
        path = features / "train" / SEMANTIC_FILE
        if not path.is_file():
            raise UserError(f"{path} does not exist, which LSEH needs: set semantic_values of {features.name}'s towers")
        self.semantic = torch.from_numpy(np.load(path))
        self.pool: Pool | None = None  # of this step
        self.weights = {"loss_contrast": run.contrast_weight}

    def losses(
        self, model: nn.Module, images: Tensor, batch: TowerBatch, alpha: float, generator: torch.Generator
    ) -> dict[str, Tensor]:
        self.pool = self._draw_pool(model, batch, generator) if self.run.negative_pool else None
        return super().losses(model, images, batch, alpha, generator)

    def _draw_pool(self, model: nn.Module, batch: TowerBatch, generator: torch.Generator) -> Pool:
        """Other pairs of train, drawn evenly, with the scores of the batch against them."""
        features: FeatureReader = self.data.features
        order = torch.randperm(len(features.picture_of), generator=generator, device=generator.device)
        drawn = order[: self.run.negative_pool].sort().values.cpu().numpy()
        pictures, device = features.picture_of[drawn], batch.mask.device
        words, mask = features.words(drawn)
        words = [level.to(device) for level in words]
        regions = [level.to(device) for level in features.regions(pictures)]
        return Pool(
            to_captions=model(batch.regions, words, mask.to(device))["vitr"],
            to_pictures=model(regions, batch.words, batch.mask)["vitr"].T,
            semantic=self.semantic[drawn].to(device),
            image_ids=torch.from_numpy(pictures).to(device),
        )

    def judge(self, scores: dict[str, Tensor], batch: TowerBatch) -> dict[str, Tensor]:
        assert isinstance(self.model.head, VitrHead)
        semantic = self.semantic[batch.caption_ids.cpu()].to(scores["vitr"].device)
        options = {"margin": self.run.margin, "temperature": self.run.temperature}
        loss = lseh_loss(scores["vitr"], semantic, batch.image_ids, self.pool, **options)
        contrast = info_nce(scores["similarity"], batch.image_ids, self.model.head.dual.scale)
        return {"loss_lseh": loss.mean(), "loss_contrast": contrast}


TASKS: dict[str, Any] = {
    "linear": LinearTask,
    "hat": HatTask,
    "vitr": VitrTask,
    "vse": TripletTask,
    "vsrn": TripletTask,
}


def train_tower_run(
    run: TowerRun, name: str, train: Path, val: Path | None, features: Path, storage: Path, worker: Worker
) -> None:
    """One worker's training; the first leaves the weights folder in ``storage/export``."""
    task: TowerTask = TASKS[run.kind](run, name, train, val, features)  # type: ignore[attr-defined]
    if task.model.image is None and task.model.text is None:  # nothing that could rest: the towers are not there
        run = run.model_copy(update={"freeze_epochs": 0})
    outcome = fit(task, run, storage, worker)
    if worker.rank == 0:
        export(task, features, outcome, storage / EXPORT)


def export(task: TowerTask, features: Path, outcome: Outcome, folder: Path) -> None:
    """Write the weights folder: towers and head, their configuration, the tokenizer, points of the curves."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    whole = TowerModel(task.model.head, *task.towers)
    state = {name: value.detach().cpu().contiguous() for name, value in whole.state_dict().items()}
    save_file(state, folder / WEIGHTS_FILE)
    config = {"kind": task.run.kind, **task.sizes, "head": task.run.head.model_dump(mode="json")}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(features / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    metrics: dict[str, Any] = {"steps": outcome.steps}
    metrics |= {"first": _nested(outcome.history[0]), "last": _nested(outcome.history[-1])}
    if outcome.best is not None:
        metrics["best"] = outcome.best
    (folder / METRICS_FILE).write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _nested(point: dict[str, float]) -> dict[str, float]:
    return {name.rpartition("/")[2]: value for name, value in point.items()}


def check_features(features: Path, splits: Sequence[str]) -> None:
    """Raise UserError unless the folder holds towers and the features of these splits."""
    for path in (features / TOWERS_FILE, *(features / split / "manifest.json" for split in splits)):
        if not path.is_file():
            raise UserError(f"{path} does not exist: run the stage features, with {', '.join(splits)} among its splits")
