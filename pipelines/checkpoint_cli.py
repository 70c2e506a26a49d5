"""The commands ``vlp checkpoint``: published ALBEF checkpoints shown, imported, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

checkpoint = typer.Typer(
    help="Published ALBEF checkpoints: look into them, make weights folders of them, write their layout.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
FileArgument = Annotated[str, typer.Argument(help="A checkpoint (.pth or .safetensors), or s3://bucket/key.")]
HeadsOption = Annotated[int | None, typer.Option(min=1, help="Attention heads; left out: 64 wide each, as published.")]
SizeOption = Annotated[int | None, typer.Option(min=1, help="Side of the pictures to read; left out: as trained.")]


@checkpoint.command()
def show(file: FileArgument, vision_heads: HeadsOption = None, text_heads: HeadsOption = None) -> None:
    """Say what a checkpoint is and what becomes of its tensors; nothing is written."""
    from components.training.published import describe, local_copy

    with local_copy(file) as path:
        print("\n".join(describe(path, vision_heads=vision_heads, text_heads=text_heads)))


@checkpoint.command(name="import")
def import_(
    file: FileArgument,
    out: Annotated[Path, typer.Option(help="The weights folder to make, such as data/models/albef_14m.")],
    tokenizer: Annotated[
        Path, typer.Option(help="The vocabulary of its training: BERT's vocab.txt or tokenizer.json.")
    ],
    vision_heads: HeadsOption = None,
    text_heads: HeadsOption = None,
    image_size: SizeOption = None,
    separator: Annotated[
        bool, typer.Option(help="End texts with [SEP]; the published models never saw it there.")
    ] = False,
) -> None:
    """Make a weights folder that `vlp run finetune --pretrained` and `vlp run evaluate --weights` read."""
    from components.training.published import import_to, local_copy, summary

    with local_copy(file) as path:
        sizes = {"vision_heads": vision_heads, "text_heads": text_heads, "image_size": image_size}
        kind, report = import_to(out, path, tokenizer, separator=separator, **sizes)
    print("\n".join([f"{out}: ALBEF for {kind}", *summary(report)]))


@checkpoint.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A weights folder, such as data/models/retrieval.")],
    file: Annotated[Path, typer.Argument(help="The checkpoint to write.")],
) -> None:
    """Write a weights folder's model in the layout of the published checkpoints."""
    from components.training.published import export_to

    print(f"{file}: {export_to(file, folder)} tensors")
