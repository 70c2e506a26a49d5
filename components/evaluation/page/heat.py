"""Heat per word for a few right pictures of a run: ALBEF's figures 4 to 6, HAT's 3, VITR's 4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from components.evaluation.page.queries import Run
from components.evaluation.page.samples import record_folders
from components.evaluation.page.thumbnails import Thumbnail, shrink
from components.evaluation.results import IMAGE
from components.io.records import iter_batches

if TYPE_CHECKING:
    from PIL.Image import Image

    from components.evaluation.explain import Explanation

WEIGHTS_FILE = "model.safetensors"
MAX_WORDS = 16  # of a caption
LONG = 4  # letters of the words shown of models that give each word several maps


@dataclass(frozen=True)
class Heat:
    """One caption's right picture: (word, the picture with the word's heat) in order, and how well the two match."""

    caption: str
    match: float
    words: tuple[tuple[str, Thumbnail], ...]


def heat_examples(run: Run, model: Path, tasks: Path, limit: int) -> tuple[Heat, ...]:
    """At most `limit` captions of the run's best and worst queries, in turns, each with its right picture.

    Empty for models that have no such maps: other kinds, fewer than two layers that fuse, weights that are not here.
    """
    if not limit or not (model / WEIGHTS_FILE).is_file():
        return ()
    queries = [query.content for query in run.queries[IMAGE]]
    turns = [query for pair in zip(queries, reversed(queries), strict=True) for query in pair]
    chosen = list({query["caption_id"]: query for query in turns}.values())[:limit]
    split = tasks / str(run.metrics.get("task", "")) / str(run.metrics.get("split", ""))
    pictures = _pictures({query["picture"] for query in chosen}, split)
    from components.data.cleaning.pictures import open_picture
    from components.evaluation.explain import panels

    found = []
    with _one_thread():
        explain = _explainer(model)
        for query in chosen:
            if query["picture"] not in pictures:
                continue
            try:
                shown = explain(open_picture(pictures[query["picture"]]), query["caption"])
            except ValueError:
                return ()  # a dual encoder, or an ALBEF of one layer that fuses: their words have no maps
            parts = tuple((label, shrink(image)) for label, image in panels(shown)[1 : MAX_WORDS + 1])
            found.append(Heat(shown.text, shown.match, parts))
    return tuple(found)


def _explainer(model: Path) -> Callable[[Image, str], Explanation]:
    """How pictures and captions are explained by the model in a folder."""
    from components.data.tokenizer import load_tokenizer
    from components.evaluation.explain import explain_pair
    from components.evaluation.tower_explain import explain_towers
    from components.evaluation.tower_models import is_tower_model, load_tower_model
    from components.evaluation.weights import load_model

    words = load_tokenizer(model, clip=True)
    if not is_tower_model(model):
        network, _ = load_model(model)
        return lambda picture, caption: explain_pair(network, words, picture, caption)
    towers, sizes = load_tower_model(model, "cpu")

    def explain(picture: Image, caption: str) -> Explanation:
        shown = explain_towers(towers, sizes, words, picture, caption)
        telling = tuple(word for word in shown.words if len(word.text.partition(",")[0]) >= LONG)
        return replace(shown, words=telling or shown.words)

    return explain


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
