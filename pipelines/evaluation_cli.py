"""The commands of ``vlp`` that look at results: two runs compared, a picture explained, a submission checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

report = typer.Typer(help="Results of runs beside each other.", no_args_is_help=True, rich_markup_mode=None)


def register_evaluation(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(report, name="report")
    app.command()(explain)


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
    file: Annotated[Path, typer.Argument(help="Answers to upload, such as data/evaluation/vqa/submission.json.")],
    questions: Annotated[Path, typer.Option(help="The published questions they must answer.")],
) -> None:
    """Check answers for VQA's server: every question answered once, no unknown one."""
    from components.evaluation.submission import check_file

    print(f"{file}: {check_file(file, questions):,} questions, each answered once")


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
