"""Evaluating HAT, VITR or a baseline of theirs on a split of a retrieval task: all pictures against all captions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.evaluation.embedding import embedding_map
from components.evaluation.global_vectors import made_from
from components.evaluation.results import write_results
from components.evaluation.scoring import with_tail
from components.evaluation.sharing import encoding_of
from components.evaluation.tower_models import EncodedSplit, load_sizes
from components.evaluation.tower_parts import AllScores, TowerEncoding, score_split
from components.evaluation.tower_scoring import ENSEMBLE, main_score, recalls
from components.evaluation.vector_index import IndexSettings
from components.io.runtime import Runtime

if TYPE_CHECKING:
    from components.evaluation.evaluate import EvaluateParams

LABELS = {
    "similarity": "dual encoder",
    "vitr": "VITR",
    "i2t": "HAT (i-t)",
    "t2i": "HAT (t-i)",
    ENSEMBLE: "HAT*, ensemble",
}
OWN = {
    "vse": "VSE∞",
    "vsrn": "VSRN++",
    "hat": "mean regions and words",
}  # what `similarity` is, where it is no dual encoder
FIRST = {ENSEMBLE: "t2i", "vitr": "similarity"}  # what stands beside the main score in every table and curve


def evaluate_towers(
    params: EvaluateParams, *, run: str, task: Path, weights: Path, evaluation: Path, runtime: Runtime
) -> None:
    """Evaluate `weights` on ``task/SPLIT``; write metrics, ranks and examples into `evaluation`.

    The files are those of every retrieval run. ``itm`` holds the model's own score (HAT's ensemble where it has both
    directions), ``itc`` a simpler one of the same model where there is one (one direction, VITR's dual encoder);
    ``labels`` says which, and ``scores`` has the recalls of all, each with ``r_sum``, the sum of six.
    ``extra/vectors.safetensors`` keeps the global vectors, for ``vlp search``.
    Raises UserError when the split or the weights are missing or damaged.
    """
    sizes = load_sizes(weights)
    split = EncodedSplit(task / params.split, sizes, weights)
    split.check_folds(params.folds)
    found = score_split(
        encoding_of(TowerEncoding, params, runtime),
        split,
        weights,
        top=params.tower_candidates,
        index=IndexSettings(params.tower_index, params.tower_index_depth, params.seed),
        runtime=runtime,
        label=f"evaluate {run}",
    )
    if isinstance(found, AllScores):
        both = {name: (matrix.numpy(), matrix.T.numpy()) for name, matrix in found.scores.items()}
    else:
        both = {
            name: (
                with_tail(matrix, found.first).numpy(),
                with_tail(found.text_to_image[name], found.first.T).numpy(),
            )
            for name, matrix in found.image_to_text.items()
        }
    vectors = found.images, found.texts
    images, texts = (side.numpy() for side in vectors)
    placed = embedding_map(images, texts, split.picture_of, pictures=params.tsne_pictures)
    chosen = main_score(list(both))
    beside = FIRST.get(chosen, chosen)
    own = "CLIP" if not sizes["head"].get("projection", True) else OWN.get(sizes["kind"], LABELS["similarity"])
    labels = LABELS | {"similarity": own}
    about: dict[str, Any] = {"run": run, "task": task.name, "split": params.split, "model": sizes["kind"]}
    about |= {
        "image_size": sizes["image"]["image_size"],
        "labels": {"itc": labels[beside], "itm": labels[chosen]},
        "candidates": params.tower_candidates,
        "index": params.tower_index if params.tower_candidates else None,
        "scores": recalls(both, split.picture_of),
    }
    evaluation.mkdir(parents=True, exist_ok=True)
    write_results(
        evaluation,
        split,
        itc=both[beside],
        itm=both[chosen],
        examples=params.examples,
        example_candidates=params.example_candidates,
        folds=params.folds,
        resamples=params.bootstrap,
        seed=params.seed,
        placed=placed,
        vectors=(*vectors, made_from(weights, task / params.split)),
        about=about,
    )
