"""The stage `evaluate`: a fine-tuned model against one split of its task; retrieval by ITC and re-ranked by ITM."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from components.io.runtime import Runtime


class EvaluateParams(BaseModel, frozen=True, extra="forbid"):
    """How to evaluate; what belongs to one kind of task names it."""

    split: str = Field(
        default="test", pattern=r"^[A-Za-z0-9_-]+$", description="split of the task: a folder data/tasks/TASK/SPLIT"
    )
    top_k: int = Field(
        default=128,
        ge=1,
        le=100_000,
        description="candidates of each query that the fusion encoder re-ranks; the published code takes 128 for "
        "Flickr30K and 256 for COCO (the paper says nothing)",
    )
    max_tokens: int = Field(default=30, ge=3, le=512, description="tokens of a caption, [CLS] and [SEP] included")
    image_size: int | None = Field(
        default=None, ge=1, le=8192, description="side of the square pictures, pixels; null: the size of the training"
    )
    batch_size: int = Field(default=64, ge=1, le=65_536, description="pictures or captions per encoder pass")
    pair_batch_size: int = Field(
        default=64, ge=1, le=65_536, description="pairs per pass of the fusion encoder; a GPU likes more"
    )
    answers: Literal["rank", "generate"] = Field(
        default="rank", description="vqa: the best of the task's answers.json (published), or a free answer"
    )
    answer_top_k: int = Field(
        default=128, ge=1, le=1_000_000, description="vqa: candidates that are scored whole, by their first token"
    )
    max_answer_tokens: int = Field(default=12, ge=3, le=512, description="vqa: longest answer, tokens")
    gradcam: Literal["itm", "itc"] = Field(
        default="itm", description="grounding: by cross-attention and ITM, or by the image encoder and ITC (table 5)"
    )
    gradcam_layer: int | None = Field(
        default=None, ge=0, description="grounding: layer, from 0; null: the third that fuses, or the last image block"
    )
    gradcam_area_power: float = Field(
        default=0.5, ge=0, le=1, description="grounding: heat within a box is divided by its area to this power"
    )
    tower_candidates: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="HAT, VITR: candidates of each query, by the cosine of global vectors, that are scored (VITR's "
        "turbo, 200 in table 5); null: all",
    )
    tower_index: Literal["exact", "approximate"] = Field(
        default="exact",
        description="HAT, VITR: how candidates are found; exact: all cosines, under a "
        "millisecond at 10,000 vectors; approximate: an HNSW graph, for millions",
    )
    tower_index_depth: int = Field(
        default=4,
        ge=1,
        le=1000,
        description="approximate: the graph looks at this many times the candidates; more finds more of the nearest",
    )
    examples: int = Field(default=8, ge=0, le=1000, description="best and worst queries kept, each, per direction")
    example_candidates: int = Field(default=5, ge=1, le=100, description="first candidates kept with an example")
    folds: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="retrieval: equal parts of the split whose recalls are averaged too; 0: none; null: five where the "
        "split has 5,000 pictures, as COCO's 1K results",
    )
    bootstrap: int = Field(
        default=1000, ge=0, le=100_000, description="retrieval: resamples for confidence intervals over pictures"
    )
    tsne_pictures: int = Field(
        default=100,
        ge=0,
        le=5000,
        description="retrieval: pictures that the report's t-SNE shows, with their first captions; 0: none",
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="of the resamples and of the index")
    pictures_per_part: int = Field(
        default=64,
        ge=1,
        le=1_000_000,
        description="pictures, or items of a task, that a worker does at a time, rounded up to whole batches",
    )
    num_threads: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="torch threads of each process; more of them, and fewer processes, need less memory",
    )


def evaluate(
    params: EvaluateParams,
    *,
    run: str,
    task: Path,
    weights: Path,
    evaluation: Path,
    runtime: Runtime = Runtime(),
) -> None:
    """Evaluate the weights of `run` on ``task/SPLIT``; write metrics, ranks and examples into `evaluation`.

    ``metrics.json`` holds recalls in percent under ``itc``, ``itm`` (re-ranked) and ``chance``; ``ranks.parquet`` one
    row per query; ``examples.json`` the best and the worst queries with their first candidates. ``extra`` holds what
    some kinds have: ``embedding.json``, the points of a t-SNE; ``vectors.safetensors``; VQA's ``submission.json``.
    Ties count against the model (see `components.evaluation.retrieval`). Candidates outside the top k follow it in the
    order of similarity.
    Tasks of other kinds have accuracies in percent instead: ``accuracy``, and beside it ``majority`` (always the
    commonest answer) and ``chance``.
    The workers of `runtime` encode and score, each part once: any number of them gives the same bytes. What they
    computed is kept below ``runtime.work`` for the next evaluation of the same weights and split (see
    `components.evaluation.sharing`).
    Raises UserError when the split is missing or empty or has a picture without captions, when the weights do not fit
    their configuration, or when captions may be longer than the model reads.
    """
    from components.data.tasks.annotations import task_kind
    from components.evaluation.albef_parts import RetrievalEncoding, score_split
    from components.evaluation.embedding import embedding_map
    from components.evaluation.inputs import RetrievalSplit
    from components.evaluation.results import write_results
    from components.evaluation.scoring import with_tail
    from components.evaluation.sharing import encoding_of
    from components.evaluation.tower_models import is_tower_model
    from components.evaluation.weights import load_config
    from components.io.errors import UserError

    kind = task_kind(task / params.split)
    if kind != "retrieval":
        from components.evaluation.tasks import evaluate_task

        evaluate_task(params, kind=kind, run=run, task=task, weights=weights, evaluation=evaluation, runtime=runtime)
        return
    if is_tower_model(weights):
        from components.evaluation.tower_evaluation import evaluate_towers

        evaluate_towers(params, run=run, task=task, weights=weights, evaluation=evaluation, runtime=runtime)
        return
    config = load_config(weights, params.image_size)
    if params.max_tokens > config.max_positions:
        raise UserError(
            f"evaluate.max_tokens is {params.max_tokens}, but the model in {weights} reads at most "
            f"{config.max_positions} tokens: lower it"
        )
    split = RetrievalSplit(task / params.split, config.image_size)
    split.check_folds(params.folds)
    texts = split.texts(weights, params.max_tokens)
    if int(texts.input_ids.max()) >= config.vocab_size:
        raise UserError(
            f"{weights} holds a tokenizer of more than the model's {config.vocab_size} words: train it again"
        )

    scores = score_split(
        encoding_of(RetrievalEncoding, params, runtime),
        split,
        texts,
        weights,
        top_k=params.top_k,
        pair_batch_size=params.pair_batch_size,
        runtime=runtime,
        label=f"evaluate {run}",
    )

    similarity, itm = scores.similarity, scores.itm
    placed = embedding_map(
        scores.image_features.numpy(),
        scores.text_features.numpy(),
        split.picture_of,
        pictures=params.tsne_pictures,
    )
    write_results(
        evaluation,
        split,
        itc=(similarity.numpy(), similarity.T.numpy()),
        itm=(
            with_tail(itm.image_to_text, similarity).numpy(),
            with_tail(itm.text_to_image, similarity.T).numpy(),
        ),
        examples=params.examples,
        example_candidates=params.example_candidates,
        folds=params.folds,
        resamples=params.bootstrap,
        seed=params.seed,
        placed=placed,
        about={
            "run": run,
            "task": task.name,
            "split": params.split,
            "top_k": params.top_k,
            "image_size": config.image_size,
        },
    )
