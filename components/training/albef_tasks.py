"""ALBEF's pre-training and retrieval as tasks of the loop, and the weights folder that all its trainings leave."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from components.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from components.io.errors import UserError
from components.io.shards import ShardReader
from components.training.data import Batch, PairData, open_shards
from components.training.loop import EXPORT, Outcome, Worker, fit
from components.training.settings import TrainingParams
from models.albef.checkpoints import student_state_dict
from models.albef.config import AlbefConfig, parse_config
from models.albef.pretraining import AlbefPretraining
from models.albef.retrieval import AlbefRetrieval

if TYPE_CHECKING:
    from components.training.finetune import FinetuneRun, GroundingRun, RetrievalRun
    from components.training.pretrain import PretrainParams

Config = TypeVar("Config", bound=AlbefConfig)
TRAINING_FILE = "training.safetensors"  # teacher and queue
WEIGHTS_FILE, CONFIG_FILE, METRICS_FILE = "model.safetensors", "config.json", "metrics.json"


class PretrainingTask:
    """ITC + ITM + MLM (eq. 5) on pictures with one of their captions."""

    label = "pretrain"

    def __init__(self, params: PretrainParams, shards: Path) -> None:
        tokenizer = load_tokenizer(shards)
        special = {name: getattr(tokenizer, name) for name in ("pad_id", "cls_id", "sep_id", "mask_id")}
        sizes = params.model.model_dump() | special | {"vocab_size": tokenizer.vocab_size}
        self.config = AlbefConfig.model_validate(sizes)
        torch.manual_seed(params.seed)
        self.model = AlbefPretraining(self.config)
        if params.start_vision is not None or params.start_text is not None:
            from components.training.starting_points import start

            start(self.model, params.start_vision, params.start_text)
        reader = open_shards(shards, params.shards_at, params.shards_cache_mb)
        self.data = pair_data(params, reader, shards, self.config, params.max_tokens)
        self.weights = {
            "loss_itc": params.itc_weight,
            "loss_itm": params.itm_weight,
            "loss_mlm": params.mlm_weight,
        }
        self.distill = params.distill
        self.shared_draws = self.config.negative_pool == "global"

    def losses(
        self, model: nn.Module, images: torch.Tensor, batch: Batch, alpha: float, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        itc, mlm = (alpha if loss in self.distill else 0.0 for loss in ("itc", "mlm"))
        out = model(images, batch.input_ids, batch.attention_mask, itc, generator, mlm_alpha=mlm)
        return {"loss_itc": out.loss_itc, "loss_itm": out.loss_itm, "loss_mlm": out.loss_mlm}

    def validate(self) -> dict[str, float]:
        return {}

    def score(self, metrics: dict[str, float]) -> float | None:
        return None


class RetrievalTask:
    """ITC with several positives + ITM on every (picture, caption) pair of a task, from pre-trained weights."""

    def __init__(
        self, run: RetrievalRun | GroundingRun, name: str, train: Path, val: Path | None, pretrained: Path
    ) -> None:
        self.label = f"finetune.runs.{name}"
        self.run, self.val, self.pretrained = run, val, pretrained
        self.weights = {"loss_itm": run.itm_weight}
        state, sizes = read_weights(pretrained)
        own = {name: getattr(run, name) for name in ("queue_size", "negative_pool", "negative_hardness")}
        self.config = run_config(AlbefConfig, run, self.label, sizes, pretrained, **own)
        self.shared_draws = self.config.negative_pool == "global"
        torch.manual_seed(run.seed)
        try:
            self.model = AlbefRetrieval.from_pretraining(state, self.config, read_training(pretrained))
        except ValueError as error:
            raise UserError(f"{pretrained / WEIGHTS_FILE}: {error}; run pretrain again") from None
        self.data = pair_data(run, ShardReader(train), pretrained, self.config, run.max_tokens, every_caption=True)

    def losses(
        self, model: nn.Module, images: torch.Tensor, batch: Batch, alpha: float, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        out = model(images, batch.input_ids, batch.attention_mask, batch.image_ids, alpha, generator)
        return {"loss_itc": out.loss_itc, "loss_itm": out.loss_itm}

    def validate(self) -> dict[str, float]:
        """Recalls by ITC alone on the validation split; the fusion encoder would take many times as long."""
        if self.val is None:
            return {}
        from components.evaluation.inputs import RetrievalSplit
        from components.evaluation.retrieval import recall_metrics, retrieval_ranks
        from components.evaluation.scoring import score_itc

        split = RetrievalSplit(self.val, self.config.image_size)
        device = self.model.temp.device
        texts = split.texts(self.pretrained, self.run.max_tokens)
        similarity = score_itc(self.model.eval(), split, texts, device=device).similarity.numpy()
        return recall_metrics(retrieval_ranks(similarity, similarity.T, split.picture_of))

    def score(self, metrics: dict[str, float]) -> float | None:
        return metrics["r_mean"] if self.run.keep_weights == "best" else None


def train_pretraining(params: PretrainParams, shards: Path, storage: Path, worker: Worker) -> None:
    """One worker's pre-training; the first leaves the weights folder in ``storage/export``."""
    task = PretrainingTask(params, shards)
    outcome = fit(task, params, storage, worker)
    if worker.rank == 0:
        export(task.model, task.config, shards, outcome, storage / EXPORT)


def read_weights(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and configuration of a weights folder. Raises UserError when it is missing or damaged."""
    for name in (WEIGHTS_FILE, CONFIG_FILE, TOKENIZER_FILE):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} does not exist: run pretrain first")
    try:
        config = parse_config((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        return load_file(folder / WEIGHTS_FILE), config.model_dump()
    except (SafetensorError, ValidationError, UnicodeDecodeError) as error:
        raise UserError(f"{folder} holds no ALBEF weights ({error}): run pretrain again") from None


def cached(params: TrainingParams) -> int:
    """Bytes of decoded pictures that the data may keep in this process."""
    far = getattr(params, "shards_at", None) is not None  # whose sizes nobody should have to fetch
    return 0 if params.loader_workers or far else params.cache_mb << 20


def pair_data(
    params: TrainingParams,
    reader: ShardReader,
    tokenizer: Path,
    config: AlbefConfig,
    max_tokens: int,
    *,
    every_caption: bool = False,
) -> PairData:
    """Pictures with captions from record folders; the tokenizer is in the folder `tokenizer`."""
    return PairData(
        reader,
        load_tokenizer(tokenizer),
        image_size=config.image_size,
        max_tokens=max_tokens,
        augment=params.augment,
        seed=params.seed,
        every_caption=every_caption,
        cache_bytes=cached(params),
    )


def read_training(folder: Path) -> dict[str, torch.Tensor]:
    """Teacher and queue of a weights folder that has them: imported ones do. Raises UserError when damaged."""
    path = folder / TRAINING_FILE
    if not path.is_file():
        return {}
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}): import the checkpoint again") from None


def run_config(
    config_class: type[Config], run: FinetuneRun, label: str, sizes: dict[str, Any], pretrained: Path, **own: Any
) -> Config:
    """The config of a fine-tuned model: the pre-trained sizes, changed as the run says; `own` fields of its class.

    Raises UserError where run and weights do not fit.
    """
    shared = {name: value for name, value in sizes.items() if name in AlbefConfig.model_fields}
    changed = {"momentum": run.momentum, "text_dropout": run.text_dropout}
    changed["image_size"] = run.image_size or sizes["image_size"]
    try:
        config = config_class.model_validate(shared | changed | own)
    except ValidationError as error:
        raise UserError(f"{label} does not fit the weights in {pretrained}: {sentence(error)}") from None
    if run.max_tokens > config.max_positions:
        raise UserError(
            f"{label}.max_tokens is {run.max_tokens}, but the pre-trained model reads at most "
            f"{config.max_positions} tokens: lower it"
        )
    return config


def export(model: nn.Module, config: AlbefConfig, tokenizer: Path, outcome: Outcome, folder: Path) -> None:
    """Write the weights folder: the student, its config, the tokenizer, the first and last points of the curves."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    state = {name: value.detach().cpu().contiguous() for name, value in student_state_dict(model).items()}
    save_file(state, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(config.model_dump_json(indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(tokenizer / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    metrics = {"steps": outcome.steps, "first": _nested(outcome.history[0]), "last": _nested(outcome.history[-1])}
    if outcome.best is not None:
        metrics["best"] = outcome.best
    text = json.dumps(metrics, indent=1, sort_keys=True)
    (folder / METRICS_FILE).write_text(text + "\n", encoding="utf-8")


def _nested(point: dict[str, float]) -> dict[str, float]:
    return {name.rpartition("/")[2]: value for name, value in point.items()}


def sentence(error: ValidationError) -> str:
    """What pydantic found wrong, in one sentence."""
    return "; ".join(str(entry["msg"]).removeprefix("Value error, ") for entry in error.errors())
