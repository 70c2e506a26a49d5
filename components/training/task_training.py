"""ALBEF's fine-tuning tasks beside retrieval, as tasks of the loop; and text assignment, which goes before NLVR2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from components.data.tokenizer import load_tokenizer
from components.io.errors import UserError
from components.io.shards import ShardReader
from components.training.albef_tasks import (
    WEIGHTS_FILE,
    RetrievalTask,
    cached,
    export,
    pair_data,
    read_training,
    read_weights,
    run_config,
)
from components.training.data import Batch
from components.training.loop import EXPORT, Worker, fit
from components.training.task_data import LabelledBatch, QuestionBatch, TaskData
from models.albef.config import AlbefConfig, EntailmentConfig, Nlvr2Config, TextAssignmentConfig, VqaConfig
from models.albef.entailment import AlbefEntailment
from models.albef.nlvr2 import AlbefNlvr2
from models.albef.text_assignment import AlbefTextAssignment
from models.albef.vqa import AlbefVqa

if TYPE_CHECKING:
    from components.training.finetune import EntailmentRun, GroundingRun, Nlvr2Run, Run, VqaRun
    from components.training.pretrain import AssignTextParams

ASSIGNED = "assign_text"  # folder within the pre-trained weights


class _TaskTraining:
    """What the tasks share: the model from pre-trained weights, the data, and keeping the most accurate epoch."""

    kind: str
    model: Any
    config: AlbefConfig

    def __init__(self, run: Any, name: str, train: Path, val: Path | None, pretrained: Path) -> None:
        self.label = f"finetune.runs.{name}"
        self.run, self.val, self.pretrained = run, val, pretrained
        self.weights: dict[str, float] = {}
        state, sizes = read_weights(pretrained)
        torch.manual_seed(run.seed)
        try:
            self.model, self.config = self.start(state, sizes)
        except ValueError as error:
            raise UserError(f"{self.label} and {pretrained / WEIGHTS_FILE}: {error}") from None
        self.data = TaskData(
            train,
            self.kind,
            load_tokenizer(pretrained),
            image_size=self.config.image_size,
            max_tokens=run.max_tokens,
            max_answer_tokens=getattr(run, "max_answer_tokens", 3),
            augment=run.augment,
            seed=run.seed,
            cache_bytes=cached(run),
        )

    def start(self, state: dict[str, Tensor], sizes: dict[str, Any]) -> tuple[nn.Module, AlbefConfig]:
        raise NotImplementedError

    def score(self, metrics: dict[str, float]) -> float | None:
        return metrics["accuracy"] if self.run.keep_weights == "best" else None


class _ClassTraining(_TaskTraining):
    def losses(
        self, model: nn.Module, images: Tensor, batch: LabelledBatch, alpha: float, generator: torch.Generator
    ) -> dict[str, Tensor]:
        return {"loss_class": model(images, batch.input_ids, batch.attention_mask, batch.targets, alpha)}

    def validate(self) -> dict[str, float]:
        """Accuracy on the validation split."""
        if self.val is None:
            return {}
        from components.evaluation.classes import CLASSES, class_logits, class_metrics
        from components.evaluation.task_inputs import TaskSplit

        split = TaskSplit(self.val, self.kind, self.config.image_size)
        texts = split.texts(self.pretrained, self.run.max_tokens)
        logits = class_logits(self.model.eval(), split, texts, device=_device(self.model))
        labels = np.array(split.items.column("label"), np.int64)
        return {"accuracy": class_metrics(logits, labels, CLASSES[self.kind])["accuracy"]}


class EntailmentTask(_ClassTraining):
    """Cross-entropy over three classes (section 5)."""

    kind = "entailment"
    run: EntailmentRun

    def start(self, state: dict[str, Tensor], sizes: dict[str, Any]) -> tuple[nn.Module, AlbefConfig]:
        config = run_config(EntailmentConfig, self.run, self.label, sizes, self.pretrained)
        return AlbefEntailment.from_pretraining(state, config, read_training(self.pretrained)), config


class Nlvr2Task(_ClassTraining):
    """Cross-entropy over false and true, two pictures a sentence (section 5)."""

    kind = "nlvr2"
    run: Nlvr2Run

    def start(self, state: dict[str, Tensor], sizes: dict[str, Any]) -> tuple[nn.Module, AlbefConfig]:
        config = run_config(Nlvr2Config, self.run, self.label, sizes, self.pretrained, sharing=self.run.sharing)
        return AlbefNlvr2.from_pretraining(state, config), config


class VqaTask(_TaskTraining):
    """The answer decoder's loss over weighted answers (section 5)."""

    kind = "vqa"
    run: VqaRun

    def start(self, state: dict[str, Tensor], sizes: dict[str, Any]) -> tuple[nn.Module, AlbefConfig]:
        layers = self.run.decoder_layers
        config = run_config(VqaConfig, self.run, self.label, sizes, self.pretrained, decoder_layers=layers)
        return AlbefVqa.from_pretraining(state, config, read_training(self.pretrained)), config

    def losses(
        self, model: nn.Module, images: Tensor, batch: QuestionBatch, alpha: float, generator: torch.Generator
    ) -> dict[str, Tensor]:
        return {"loss_answer": model(images, *batch[1:], alpha)}

    def validate(self) -> dict[str, float]:
        """Official accuracy on the validation split, answers ranked."""
        if self.val is None:
            return {}
        from components.data.tasks.annotations import read_answers
        from components.evaluation.answering import answer_metrics, rank_answers
        from components.evaluation.task_inputs import TaskSplit

        split = TaskSplit(self.val, self.kind, self.config.image_size)
        texts = split.texts(self.pretrained, self.run.max_tokens)
        candidates = read_answers(self.val.parent)
        answers = rank_answers(
            self.model.eval(),
            split,
            texts,
            self.pretrained,
            candidates,
            top_k=self.run.answer_top_k,
            max_answer_tokens=self.run.max_answer_tokens,
            device=_device(self.model),
        )
        said, people, types = [one.text for one in answers], split.items.column("answers"), split.items.column("type")
        return {"accuracy": answer_metrics(said, people, types, candidates[0], len(candidates))["accuracy"] or 0.0}


class GroundingTask(RetrievalTask):
    """As retrieval, on expressions; boxes are only looked at to keep the best epoch (appendix A)."""

    run: GroundingRun

    def validate(self) -> dict[str, float]:
        """Accuracy of the first proposal on the validation split."""
        if self.val is None:
            return {}
        from components.evaluation.grounding import grounding_metrics, point
        from components.evaluation.task_inputs import TaskSplit

        split = TaskSplit(self.val, "grounding", self.config.image_size)
        texts = split.texts(self.pretrained, self.run.max_tokens)
        pointed = point(self.model.eval(), split, texts, device=_device(self.model))
        columns = [split.items.column(name) for name in ("box", "candidates", "subset")]
        return {"accuracy": grounding_metrics(pointed, *columns)["accuracy"] or 0.0}

    def score(self, metrics: dict[str, float]) -> float | None:
        return metrics["accuracy"] if self.run.keep_weights == "best" else None


class TextAssignmentTask:
    """To which of two pictures a caption belongs, or to neither (section 5, appendix A)."""

    label = "pretrain.assign_text"

    def __init__(self, params: AssignTextParams, shards: Path, pretrained: Path) -> None:
        state, sizes = read_weights(pretrained)
        shared = {name: value for name, value in sizes.items() if name in AlbefConfig.model_fields}
        self.config = TextAssignmentConfig.model_validate(shared | {"sharing": params.sharing})
        torch.manual_seed(params.seed)
        self.model = AlbefTextAssignment.from_pretraining(state, self.config)
        self.data = pair_data(params, ShardReader(shards), shards, self.config, params.max_tokens)
        self.weights: dict[str, float] = {}

    def losses(
        self, model: nn.Module, images: Tensor, batch: Batch, alpha: float, generator: torch.Generator
    ) -> dict[str, Tensor]:
        return {"loss_assign": model(images, batch.input_ids, batch.attention_mask, generator)}

    def validate(self) -> dict[str, float]:
        return {}

    def score(self, metrics: dict[str, float]) -> float | None:
        return None


TASKS: dict[str, Callable[..., Any]] = {
    "retrieval": RetrievalTask,
    "grounding": GroundingTask,
    "entailment": EntailmentTask,
    "nlvr2": Nlvr2Task,
    "vqa": VqaTask,
}


def train_run(
    run: Run, name: str, train: Path, val: Path | None, pretrained: Path, storage: Path, worker: Worker
) -> None:
    """One worker's fine-tuning; the first leaves the weights folder in ``storage/export``."""
    task = TASKS[run.kind](run, name, train, val, pretrained)
    outcome = fit(task, run, storage, worker)
    if worker.rank == 0:
        export(task.model, task.config, pretrained, outcome, storage / EXPORT)


def train_text_assignment(
    params: AssignTextParams, shards: Path, pretrained: Path, storage: Path, worker: Worker
) -> None:
    """One worker's text assignment; the first leaves the weights folder in ``storage/export``."""
    task = TextAssignmentTask(params, shards, pretrained)
    outcome = fit(task, params, storage, worker)
    if worker.rank == 0:
        export(task.model, task.config, pretrained, outcome, storage / EXPORT)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
