"""The stage `report`: everything that a run has left, on one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field

from components.io.runtime import Runtime

PAGE_FILE = "index.html"


class ReportParams(BaseModel, frozen=True, extra="forbid"):
    """What the report shows, and how much of it."""

    title: str = Field(default="Vision-language retrieval", min_length=1, max_length=200, description="heading")
    max_samples: int = Field(
        default=12, ge=0, le=200, description="pictures shown of those kept, and of those rejected"
    )
    max_queries: int = Field(default=3, ge=0, le=50, description="best and worst queries shown, each, per direction")
    max_compared: int = Field(
        default=3,
        ge=0,
        le=50,
        description="queries shown, each way round and per direction, where a HAT or VITR and its baseline differ",
    )
    max_explained: int = Field(
        default=2, ge=0, le=20, description="captions of an ALBEF, HAT or VITR run shown with a heat map for each word"
    )


def report(
    params: ReportParams,
    *,
    corpus: Path,
    raw: Path,
    clean: Path,
    unique: Path,
    shards: Path,
    tasks: Path,
    validation: Path,
    models: Path,
    curves: Path,
    evaluation: Path,
    ablations: Path,
    report: Path,
    runtime: Runtime = Runtime(),
) -> None:
    """Write ``report/index.html``: one self-contained page, without scripts and without anything from a network.

    What is not there (a corpus, curves, an evaluation) is left out, and named where a reader would look for it.
    The bytes depend on the inputs alone. Raises UserError when an input is there but damaged.
    """
    from components.evaluation.page.gather import Folders, gather
    from components.evaluation.page.render import render

    folders = Folders(
        corpus=corpus,
        raw=raw,
        clean=clean,
        unique=unique,
        shards=shards,
        tasks=tasks,
        validation=validation,
        models=models,
        curves=curves,
        evaluation=evaluation,
        ablations=ablations,
        report=report,
    )
    page = gather(
        folders,
        title=params.title,
        samples=params.max_samples,
        queries=params.max_queries,
        explained=params.max_explained,
        compared=params.max_compared,
    )
    html = render(page)
    report.mkdir(parents=True, exist_ok=True)
    partial = report / f".{PAGE_FILE}.partial"
    partial.write_text(html, encoding="utf-8")
    partial.rename(report / PAGE_FILE)
