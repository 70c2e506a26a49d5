"""Everything that the page shows, read from the stages' outs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from components.evaluation.ablations import read_ablations
from components.evaluation.page import plots
from components.evaluation.page.funnel import Step, funnel_warnings, read_funnel
from components.evaluation.page.heat import Heat, heat_examples
from components.evaluation.page.queries import Run, read_runs, run_warnings
from components.evaluation.page.samples import (
    Rejected,
    Sample,
    kept_samples,
    record_folders,
    refused_samples,
    rejected_samples,
)
from components.evaluation.page.statistics import SourceStatistics, read_statistics
from components.evaluation.page.tables import (
    AblationTable,
    RuleCount,
    TaskDetail,
    ablation_table,
    clean_rules,
    task_details,
)
from components.evaluation.page.training import Training, read_trainings
from components.evaluation.page.validation import Validation, read_validation
from components.evaluation.page.versus import Versus, read_versus
from components.evaluation.papers.compare import Comparison, compare
from components.evaluation.results import IMAGE, TEXT
from components.evaluation.retrieval import chance_recall
from components.evaluation.summary import TASK_HEADINGS, task_table
from components.io.code import code_digest
from components.io.records import manifest_digest, read_manifest

RECALL_LIMIT = 100  # the largest K of the recall curves
CURVE_TITLES = {
    "loss": "Loss",
    "loss_itc": "ITC loss",
    "loss_itm": "ITM loss",
    "loss_mlm": "MLM loss",
    "lr": "Learning rate",
    "alpha": "Weight of the teacher, alpha",
    "r_mean": "Mean recall",
}


@dataclass(frozen=True)
class Folders:
    """The outs that are read, and `report`, where the page will stand."""

    corpus: Path
    raw: Path
    clean: Path
    unique: Path
    shards: Path
    tasks: Path
    validation: Path
    models: Path
    curves: Path
    evaluation: Path
    ablations: Path
    report: Path


@dataclass(frozen=True)
class DataVersion:
    """A folder of records: its `name` under data, the digest of its manifest, what it holds."""

    name: str
    digest: str
    pictures: int
    captions: int


@dataclass(frozen=True)
class TrainingPlots:
    """One training with its plots."""

    training: Training
    plots: tuple[plots.Plot, ...]


@dataclass(frozen=True)
class RunPlots:
    """One evaluated run with its recall curves, text retrieval first."""

    run: Run
    plots: tuple[plots.Plot, ...]
    comparison: Comparison
    heat: tuple[Heat, ...]


@dataclass(frozen=True)
class Page:
    """What the template reads."""

    title: str
    warnings: tuple[str, ...]
    runs: tuple[RunPlots, ...]
    versus: tuple[Versus, ...]
    task_headings: tuple[str, ...]
    task_rows: tuple[tuple[str, ...], ...]
    task_details: tuple[TaskDetail, ...]
    rules: Mapping[str, tuple[RuleCount, ...]]
    ablations: tuple[AblationTable, ...]
    trainings: tuple[TrainingPlots, ...]
    steps: tuple[Step, ...]
    tasks: tuple[Step, ...]
    kept: tuple[Sample, ...]
    rejected: tuple[Rejected, ...]
    refused: tuple[Rejected, ...]
    sources: tuple[SourceStatistics, ...]
    source_plots: tuple[plots.Plot, ...]
    validation: Validation | None
    versions: tuple[DataVersion, ...]
    code: str


def gather(folders: Folders, *, title: str, samples: int, queries: int, explained: int = 0, compared: int = 0) -> Page:
    """Read it all. At most `samples` pictures kept and rejected, each, and `queries` best and worst per direction.

    `compared` queries each way round are shown of a model beside its baseline; `explained` captions of each ALBEF, HAT
    or VITR run are drawn with heat maps.
    """
    stages = {
        "download": folders.raw,
        "clean": folders.clean,
        "deduplicate": folders.unique,
        "shard": folders.shards,
    }
    steps = read_funnel(stages, folders.corpus)
    tasks = [step for folder in _folders(folders.tasks) for step in read_funnel({folder.name: folder}, Path("-"))]
    runs = read_runs(folders.evaluation, folders.tasks, queries)
    sources = read_statistics(folders.raw, folders.unique)
    validation = read_validation(folders.validation, folders.report)
    warnings = [
        *funnel_warnings(steps),
        *(warning for run in runs for warning in run_warnings(run)),
        *(() if validation is None else validation.warnings),
    ]
    rejects = [
        ("shard", folders.shards, folders.unique),
        ("deduplicate", folders.unique, folders.clean),
        ("clean", folders.clean, folders.raw),
    ]
    return Page(
        title=title,
        warnings=tuple(warnings),
        runs=tuple(
            RunPlots(
                run,
                (*_recall_plots(run), *_embedding_plots(run)),
                compare(run.metrics, folders.models / run.name, folders.shards),
                heat_examples(run, folders.models / run.name, folders.tasks, explained),
            )
            for run in runs
        ),
        versus=tuple(read_versus(runs, folders.evaluation, folders.tasks, compared)),
        task_headings=TASK_HEADINGS,
        task_rows=tuple(task_table(folders.evaluation)),
        task_details=tuple(task_details(folders.evaluation, folders.models, folders.shards)),
        rules=clean_rules(folders.clean),
        ablations=tuple(map(ablation_table, read_ablations(folders.ablations))),
        trainings=tuple(
            TrainingPlots(training, _curve_plots(training))
            for training in read_trainings(folders.curves, folders.models)
        ),
        steps=tuple(steps),
        tasks=tuple(tasks),
        kept=tuple(kept_samples(folders.unique, samples)),
        rejected=tuple(rejected_samples(rejects, samples)),
        refused=tuple(refused_samples("download", folders.raw)),
        sources=tuple(sources),
        source_plots=_source_plots(sources),
        validation=validation,
        versions=tuple(_versions(folders)),
        code=code_digest("components.evaluation.report"),
    )


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("*") if path.is_dir())


def _recall_plots(run: Run) -> tuple[plots.Plot, ...]:
    pictures, captions = len(run.ranks[TEXT, "itm"]), len(run.ranks[IMAGE, "itm"])
    made = []
    for direction, title, right, candidates in (
        (TEXT, "Text retrieval: recall at K", run.captions, captions),
        (IMAGE, "Image retrieval: recall at K", np.ones(captions, dtype=np.int64), pictures),
    ):
        limit = min(RECALL_LIMIT, candidates)
        chance = {k: chance_recall(right, candidates, k) for k in plots.cutoffs(limit)}
        name = f"recall {run.name} {direction}"
        made.append(plots.recall_plot(name, title, run.ranks[direction, "itc"], run.ranks[direction, "itm"], chance))
    return tuple(made)


def _embedding_plots(run: Run) -> tuple[plots.Plot, ...]:
    if run.embedding is None:
        return ()
    title = "Pictures (dots) and captions (rings), t-SNE"
    return (plots.embedding_plot(f"tsne {run.name}", title, run.embedding["pictures"], run.embedding["captions"]),)


def _curve_plots(training: Training) -> tuple[plots.Plot, ...]:
    return tuple(
        plots.curve_plot(f"curve {training.name} {curve.name}", _curve_title(curve.name), curve.steps, curve.values)
        for curve in training.curves
    )


def _curve_title(name: str) -> str:
    group, _, leaf = name.rpartition("/")
    title = CURVE_TITLES.get(leaf, leaf.replace("_", " ").replace("txt r", "text R@").replace("img r", "image R@"))
    title = title.replace("R@ mean", "mean recall")
    return f"{title}, {group.replace('/', ' ')}" if group and group != "train" else title


def _source_plots(sources: Sequence[SourceStatistics]) -> tuple[plots.Plot, ...]:
    words = sum((source.words for source in sources), Counter[int]())
    sides = sum((source.sides for source in sources), Counter[int]())
    made = []
    if words:
        made.append(plots.histogram_plot("words", "Captions by length", "words", words))
    if sides:
        made.append(plots.histogram_plot("sides", "Pictures by shorter side", "pixels", sides))
    return tuple(made)


def _versions(folders: Folders) -> list[DataVersion]:
    places = [("raw", folders.raw), ("clean", folders.clean), ("unique", folders.unique), ("shards", folders.shards)]
    places += [(f"tasks/{folder.name}", folder) for folder in _folders(folders.tasks)]
    versions = []
    for name, root in places:
        for folder in record_folders(root):
            manifest = read_manifest(folder)
            label = name if folder == root else f"{name}/{folder.name}"
            versions.append(DataVersion(label, manifest_digest(folder), manifest.rows, manifest.captions))
    return versions
