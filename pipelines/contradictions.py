"""Settings of different stages that cannot both be meant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.training.tower_runs import KINDS as TOWER_KINDS

CORPUS, TASKS, FEATURES, MODELS = (Path("data", name) for name in ("corpus", "tasks", "features", "models"))


def contradictions(params: Any) -> list[str]:
    """One sentence for each contradiction between sections, naming both keys; empty when there is none."""
    return [*_inputs(params), *_tasks(params), *_towers(params), *_sizes(params)]


def _inputs(params: Any) -> Iterator[str]:
    """What reads the built-in corpus needs it drawn."""
    if params.synthesize.enabled:
        return
    for section, items in (
        ("download.sources", params.download.sources),
        ("prepare_tasks.tasks", params.prepare_tasks.tasks),
    ):
        for name, item in items.items():
            if item.path == CORPUS or CORPUS in item.path.parents:
                yield (
                    f"{section}.{name}.path: {item.path} is the built-in corpus, which "
                    "synthesize.enabled: false leaves empty; set that to true, or another path"
                )


def _tasks(params: Any) -> Iterator[str]:
    """Each fine-tuning run reads a task that `prepare_tasks` writes, with the split that `evaluate` reads."""
    tasks = params.prepare_tasks.tasks
    for name, run in params.finetune.runs.items():
        task = tasks.get(run.task.name) if run.task.parent == TASKS else None
        if task is None:
            written = ", ".join(str(TASKS / task) for task in tasks) or "nothing"
            yield f"finetune.runs.{name}.task: {run.task} is written by none of prepare_tasks.tasks; allowed: {written}"
        elif task.kind != ("retrieval" if run.kind in TOWER_KINDS else run.kind):
            yield (
                f"finetune.runs.{name}.kind: {run.kind} cannot learn from prepare_tasks.tasks.{run.task.name} "
                f"of kind {task.kind}; allowed: {task.kind}, or another `task`"
            )
        elif not task.splits.get(params.evaluate.split):
            filled = ", ".join(split for split, names in task.splits.items() if names)
            yield (
                f"evaluate.split: {params.evaluate.split} is not filled by prepare_tasks.tasks.{run.task.name}.splits, "
                f"which finetune.runs.{name} is evaluated on; allowed: {filled}"
            )


def _towers(params: Any) -> Iterator[str]:
    """A run over two towers reads the features of its own task, and towers read a retrieval task."""
    towers = params.features.towers
    for name, run in params.finetune.runs.items():
        if run.kind not in TOWER_KINDS:
            continue
        chosen = towers.get(run.pretrained.name) if run.pretrained.parent == FEATURES else None
        if chosen is None:
            written = ", ".join(str(FEATURES / one) for one in towers) or "nothing"
            yield (
                f"finetune.runs.{name}.pretrained: {run.pretrained} is written by none of features.towers; "
                f"allowed: {written}"
            )
        elif chosen.task != run.task:
            yield (
                f"finetune.runs.{name}.task: {run.task} is not that of features.towers.{run.pretrained.name}; "
                f"allowed: {chosen.task}"
            )
    for name, chosen in towers.items():
        task = params.prepare_tasks.tasks.get(chosen.task.name) if chosen.task.parent == TASKS else None
        if task is None or task.kind != "retrieval":
            fitting = [str(TASKS / one) for one, it in params.prepare_tasks.tasks.items() if it.kind == "retrieval"]
            yield (
                f"features.towers.{name}.task: {chosen.task} is no retrieval task of prepare_tasks.tasks; "
                f"allowed: {', '.join(fitting) or 'nothing'}"
            )
        yield from _order(params, name, chosen)


def _order(params: Any, name: str, towers: Any) -> Iterator[str]:
    """Towers whose weights are a run's come after that run, which DVC knows by `after` alone."""
    named = (
        (key, Path(getattr(towers, key) or "").parent) for key in ("image_weights", "text_weights", "clip_weights")
    )
    of_runs = {key: folder for key, folder in named if folder.parent == MODELS}
    for key, folder in of_runs.items():
        at = f"features.towers.{name}.{key}: {folder}"
        if folder.name not in params.finetune.runs:
            runs = ", ".join(params.finetune.runs)
            yield f"{at} is written by none of finetune.runs; allowed: those of {runs}, or weights from elsewhere"
        elif params.finetune.runs[folder.name].pretrained == FEATURES / name:
            yield f"{at} itself comes from these towers; allowed: another run's"
    folders = sorted(set(of_runs.values()))
    first = folders[0] if folders else towers.task / "train"
    if len(folders) > 1:
        both = " and ".join(map(str, folders))
        yield f"features.towers.{name}: weights of {both}; allowed: one run's, since `after` names one"
    elif towers.after != first:
        yield f"features.towers.{name}.after: {towers.after or 'not there'}; allowed: {first}"


def _sizes(params: Any) -> Iterator[str]:
    """Pictures are whole numbers of patches, and captions fit the positions, in fine-tuning and evaluation too."""
    model = params.pretrain.model
    for name, run in params.finetune.runs.items():
        if run.kind == "vqa" and run.decoder_layers > model.fusion_layers:
            yield (
                f"finetune.runs.{name}.decoder_layers: {run.decoder_layers} is above pretrain.model.fusion_layers "
                f"{model.fusion_layers}, which the answer decoder starts from"
            )
        if run.kind == "nlvr2" and run.start == "assign_text" and params.pretrain.assign_text is None:
            yield f"finetune.runs.{name}.start: assign_text needs pretrain.assign_text, now null; allowed: pretrain"
    own = {name: run for name, run in params.finetune.runs.items() if run.kind not in TOWER_KINDS}
    users = [(f"finetune.runs.{name}", run) for name, run in own.items()]
    for key, section in [*users, ("evaluate", params.evaluate)]:
        if section.image_size is not None and section.image_size % model.patch_size:
            yield (
                f"{key}.image_size: {section.image_size} is no multiple of pretrain.model.patch_size {model.patch_size}"
            )
        if section.max_tokens > model.max_positions:
            yield (
                f"{key}.max_tokens: {section.max_tokens} is above pretrain.model.max_positions {model.max_positions}"
            )
