"""The commands of ``vlp`` that look at results: compared, timed, searched, explained, checked for upload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from components.io.errors import UserError

RunArgument = Annotated[str, typer.Argument(help="A run of finetune.runs that is evaluated.")]
ParamsOption = Annotated[Path, typer.Option("--params", help="The parameter file.")]

report = typer.Typer(help="Results of runs beside each other.", no_args_is_help=True, rich_markup_mode=None)


def register_evaluation(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(report, name="report")
    app.command()(explain)
    app.command()(search)


@report.callback()
def _report() -> None:
    """Results of runs beside each other."""


@report.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A run: its data folder, or the folder of its project.")],
    second: Annotated[Path, typer.Argument(help="Another run.")],
) -> None:
    """Set two runs side by side: parameters that differ, data counts, results with their differences."""
    from components.evaluation.side_by_side import as_text, side_by_side

    print(as_text(side_by_side(first, second), (str(first), str(second))))


@report.command()
def submission(
    file: Annotated[Path, typer.Argument(help="Answers to upload, such as data/evaluation/vqa/extra/submission.json.")],
    questions: Annotated[Path, typer.Option(help="The published questions they must answer.")],
) -> None:
    """Check answers for VQA's server: every question answered once, no unknown one."""
    from components.evaluation.submission import check_file

    print(f"{file}: {check_file(file, questions):,} questions, each answered once")


@report.command()
def turbo(
    run: RunArgument,
    candidates: Annotated[str, typer.Option(help="How many candidates to try, with commas.")] = "100,200,500",
    queries: Annotated[int, typer.Option(min=1, help="Queries that are timed, each way.")] = 5,
    out: Annotated[Path | None, typer.Option(help="A JSON file; left out: work/turbo/RUN.json.")] = None,
    params: ParamsOption = Path("params.yaml"),
) -> None:
    """Recall and time per query by the number of candidates, and without turbo (VITR, tables 5 and 6)."""
    try:
        counts = sorted({int(count) for count in candidates.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise UserError(f"--candidates is {candidates}: give whole numbers from 1 with commas, such as 100,200,500")
    folders, index, work = _evaluated(run, params)
    from components.evaluation.turbo import HEADINGS, turbo_tables

    out = out or work / "turbo" / f"{run}.json"
    timings = work / "timings" / f"turbo-{run}.json"
    found = turbo_tables(run, **folders, index=index, out=out, timings=timings, candidates=counts, queries=queries)
    _table(f"{run}: turbo", HEADINGS, found.rows())
    print(f"{out}: recalls; {timings}: times (encoders not counted)")


def search(
    run: RunArgument,
    text: Annotated[str | None, typer.Option(help="What the pictures should show.")] = None,
    image: Annotated[Path | None, typer.Option(help="A picture, to find captions for.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many to show.")] = 5,
    candidates: Annotated[int, typer.Option(min=1, help="How many the model scores, by cosine the nearest.")] = 200,
    features: Annotated[
        Path | None, typer.Option(help="Outputs of the run's towers, data/features/NAME; left out: pictures are read.")
    ] = None,
    params: ParamsOption = Path("params.yaml"),
) -> None:
    """Search an evaluated run's split: pictures for a text, or captions for a picture."""
    if (text is None) == (image is None):
        raise UserError("give either --text or --image")
    folders, index, _ = _evaluated(run, params)
    from components.evaluation.search import RunSearch

    searched = RunSearch(run, **folders, features=features, index=index)
    count = max(candidates, top)
    if text is not None:
        (hits,) = searched.pictures([text], top, count)
    else:
        assert image is not None
        (hits,) = searched.captions([image], top, count)
    what = "first caption" if text is not None else "caption"
    rows = [
        (str(place), f"{hit.score:.4f}", f"{hit.cosine:.4f}", hit.picture, _printable(hit.caption))
        for place, hit in enumerate(hits, start=1)
    ]
    _table(text or str(image), ("", "score", "cosine", "picture", what), rows)


def _evaluated(run: str, params: Path) -> tuple[dict[str, Path], Any, Path]:
    """An evaluated run's folders `weights`, `task` and `evaluation`, its index, and the folder of unfinished work.

    Raises UserError for wrong parameters, or a run that they do not have.
    """
    from pipelines.dvcfile import find_entry, read_entries
    from pipelines.environment import read_params

    content, checked = read_params(params)
    options = find_entry(read_entries(content), f"evaluate@{run}").options()
    from components.evaluation.vector_index import IndexSettings

    evaluate = checked.evaluate  # type: ignore[attr-defined]
    index = IndexSettings(evaluate.tower_index, evaluate.tower_index_depth, evaluate.seed)
    folders = {name: Path(options[name]) for name in ("weights", "task", "evaluation")}
    return folders, index, Path(checked.runtime.work)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(_printable(title)))
    for heading in headings:
        table.add_column(heading, justify="right" if heading not in ("picture", "caption", "first caption") else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: captions may hold what rich reads as markup
    Console().print(table)


def _printable(text: str) -> str:
    """The text without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def explain(
    image: Annotated[Path, typer.Option(help="A picture.")],
    text: Annotated[str, typer.Option(help="What to look for in it.")],
    weights: Annotated[Path, typer.Option(help="The weights folder of an ALBEF, such as data/models/retrieval.")],
    out: Annotated[Path, typer.Option(help="Where to draw: a .png or .html file.")] = Path("heat.png"),
    layer: Annotated[
        int | None, typer.Option(min=0, help="Fusion layer to read, from 0; left out: the third, as published.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=3, max=512, help="Tokens of the text that are read.")] = 30,
) -> None:
    """Draw where in a picture each word of a text is, by a trained ALBEF."""
    from components.evaluation.explain import explain as explain_file
    from components.evaluation.explain import write

    found = explain_file(image, text, weights, layer=layer, max_tokens=max_tokens)
    write(found, out)
    print(f"{out}: {len(found.words)} words; picture and text match with probability {found.match:.2f}")
