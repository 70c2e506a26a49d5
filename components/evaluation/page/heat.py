"""Grad-CAM per word for a few right pictures of an ALBEF run (figures 4 to 6)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from components.evaluation.page.queries import Run
from components.evaluation.page.samples import record_folders
from components.evaluation.page.thumbnails import Thumbnail, shrink
from components.evaluation.results import IMAGE
from components.io.records import iter_batches

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
MAX_WORDS = 16  # of a caption


@dataclass(frozen=True)
class Heat:
    """One caption's right picture: (word, the picture with the word's heat) in order, and ITM's probability."""

    caption: str
    match: float
    words: tuple[tuple[str, Thumbnail], ...]


def heat_examples(run: Run, model: Path, tasks: Path, limit: int) -> tuple[Heat, ...]:
    """At most `limit` captions of the run's best and worst queries, in turns, each with its right picture.

    Empty for models that have no such maps: other kinds, fewer than two layers that fuse, weights that are not here.
    """
    if not limit or not _is_albef(model):
        return ()
    queries = [query.content for query in run.queries[IMAGE]]
    turns = [query for pair in zip(queries, reversed(queries), strict=True) for query in pair]
    chosen = list({query["caption_id"]: query for query in turns}.values())[:limit]
    split = tasks / str(run.metrics.get("task", "")) / str(run.metrics.get("split", ""))
    pictures = _pictures({query["picture"] for query in chosen}, split)
    from components.data.cleaning.pictures import open_picture
    from components.data.tokenizer import load_tokenizer
    from components.evaluation.explain import explain_pair, panels
    from components.evaluation.weights import load_model

    found = []
    with _one_thread():
        network, _ = load_model(model)
        words = load_tokenizer(model)
        for query in chosen:
            if query["picture"] not in pictures:
                continue
            try:
                shown = explain_pair(network, words, open_picture(pictures[query["picture"]]), query["caption"])
            except ValueError:
                return ()  # a model of one layer that fuses: its words have no maps
            parts = tuple((label, shrink(image)) for label, image in panels(shown)[1 : MAX_WORDS + 1])
            found.append(Heat(shown.text, shown.match, parts))
    return tuple(found)


def _is_albef(model: Path) -> bool:
    try:
        config = json.loads((model / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "kind" not in config and (model / WEIGHTS_FILE).is_file()


def _pictures(names: set[str], split: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for folder in record_folders(split):
        for batch in iter_batches(folder, ["id", "image"], rows=4096):
            for index, name in enumerate(batch.column("id").to_pylist()):
                if name in names:
                    found[name] = batch.column("image")[index].as_py()
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums in one order, so that the page's bytes do not depend on the machine's cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
