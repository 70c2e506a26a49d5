"""Parameters that every training shares. Light to import: no torch here."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator


class ScheduleParams(BaseModel, frozen=True, extra="forbid"):
    """Learning rate over a training; defaults are ALBEF's pre-training as its code runs it (see `schedule.py`)."""

    kind: Literal["cosine_by_epoch", "cosine_by_iteration", "step", "late_decay"] = Field(
        default="cosine_by_epoch",
        description="cosine_by_epoch: as published, one rate per epoch after the first, stepwise warm-up in the first; "
        "cosine_by_iteration: linear warm-up, then a cosine that moves at every iteration; step: lr, times `decay` "
        "after every `decay_epochs` (HAT); late_decay: lr for `decay_epochs`, then times `decay` once (VITR)",
    )
    lr: float = Field(default=1e-4, gt=0, le=10, description="highest learning rate, reached at the end of the warm-up")
    min_lr: float = Field(default=1e-5, ge=0, le=10, description="rate that the cosine falls towards")
    warmup_lr: float = Field(default=1e-5, ge=0, le=10, description="rate of the first iteration")
    warmup_iterations: int = Field(
        default=2000, ge=0, description="iterations until `lr`; ALBEF: 1000 in the paper (3.5), 2000 in its code"
    )
    warmup_step_size: int = Field(
        default=100, ge=1, description="cosine_by_epoch: the warm-up rises once per so many iterations"
    )
    decay: float = Field(default=0.1, gt=0, le=1, description="step, late_decay: factor of the rate")
    decay_epochs: int = Field(
        default=10,
        ge=1,
        le=100_000,
        description="step: epochs between two decays (HAT: 10); late_decay: before the one",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.kind.startswith("cosine") and self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}: the rate must fall towards min_lr")
        if self.warmup_lr > self.lr:
            raise ValueError(f"warmup_lr {self.warmup_lr} is above lr {self.lr}: a warm-up rises to lr")
        if self.kind == "cosine_by_epoch" and self.warmup_iterations % self.warmup_step_size:
            raise ValueError(
                f"warmup_iterations {self.warmup_iterations} is no multiple of warmup_step_size "
                f"{self.warmup_step_size}, in whose steps cosine_by_epoch warms up"
            )
        return self


class AugmentParams(BaseModel, frozen=True, extra="forbid"):
    """What happens to a training picture before it is normalised."""

    crop_scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = Field(
        default=(0.2, 1.0), description="smallest and largest share of the area that a random crop keeps; 1, 1: no crop"
    )
    crop_ratio: tuple[Annotated[float, Field(gt=0.1, le=10)], Annotated[float, Field(gt=0.1, le=10)]] = Field(
        default=(3 / 4, 4 / 3), description="narrowest and widest width/height of a random crop"
    )
    flip: bool = Field(default=True, description="mirror half of the pictures")
    flip_with_sides: bool = Field(
        default=False,
        description="mirror also pictures whose caption says left or right; false leaves those as they are",
    )
    randaugment_operations: int = Field(default=2, ge=0, le=10, description="RandAugment's N; 0 turns it off")
    randaugment_magnitude: int = Field(default=7, ge=0, le=10, description="RandAugment's M")
    randaugment_colour: bool = Field(
        default=False,
        description="let RandAugment change colours and contrast: false in the paper (captions name colours), "
        "true in the published code",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for name in ("crop_scale", "crop_ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} is [{low}, {high}]: the smaller number comes first")
        return self


class CheckpointParams(BaseModel, frozen=True, extra="forbid"):
    """When and where to save what a stopped training needs to go on."""

    minutes: float = Field(default=10.0, gt=0, le=10_000, description="save after so many minutes")
    steps: int | None = Field(default=None, ge=1, description="save also whenever a multiple of so many steps is done")
    keep: int = Field(default=2, ge=1, le=1000, description="newest checkpoints that stay, beside the best weights")
    storage_path: str | None = Field(
        default=None,
        min_length=1,
        description="folder or s3://BUCKET/PREFIX that checkpoints are copied to in the background, and from which a "
        "training goes on where its own folder is lost; null: only under runtime.work",
    )
    extend: bool = Field(
        default=False,
        description="with more epochs than before, go on from the shorter training's checkpoint, whose rates were "
        "those of fewer epochs; false: other epochs are another training",
    )


class TrainingParams(BaseModel, frozen=True, extra="forbid"):
    """What the loop needs to know of any training."""

    epochs: int = Field(default=30, ge=1, le=100_000, description="passes over the data")
    max_steps: int | None = Field(default=None, ge=1, description="stop after so many steps, whatever `epochs` says")
    batch_size: int = Field(default=512, ge=2, le=1_000_000, description="pairs a step, over all workers together")
    seed: int = Field(default=0, ge=0, lt=2**32, description="all randomness comes from it")
    schedule: ScheduleParams = Field(default=ScheduleParams(), description="learning rate")
    optimizer: Literal["adamw", "adam"] = Field(
        default="adamw", description="adamw: decay apart from the gradient (ALBEF); adam: HAT, VITR"
    )
    weight_decay: float = Field(default=0.02, ge=0, le=10, description="not for biases and one-dimensional weights")
    clip_norm: float | None = Field(default=None, gt=0, description="largest norm of all gradients; null: no clipping")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="bfloat16, float16: autocast, weights stay float32; float16 scales its gradients"
    )
    accumulate: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="go through a step's batch in so many parts, each contrasted within itself, for less memory",
    )
    activation_checkpointing: bool = Field(
        default=False, description="compute the blocks' activations anew in the backward pass, for less memory"
    )
    compile: bool = Field(default=False, description="torch.compile the transformer blocks; the first steps take long")
    channels_last: bool = Field(
        default=False, description="pictures and convolutions with channels last; pays on GPUs with many convolutions"
    )
    freeze_epochs: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="epochs in which pre-trained towers stay as they are, where a task has such (HAT: 10)",
    )
    alpha: float = Field(default=0.4, ge=0, le=1, description="weight of the teacher's soft targets (ALBEF eq. 6, 7)")
    alpha_ramp: bool = Field(default=True, description="alpha rises from 0 over the first epoch (ALBEF 3.5)")
    augment: AugmentParams = Field(default=AugmentParams(), description="augmentation of training pictures")
    itm_weight: float = Field(
        default=1.0,
        ge=0,
        le=100,
        description="weight of ITM in the sum, 1 in the paper (eq. 5); a small one lets alignment lead in short runs, "
        "and the fusion layers learn as fast, since AdamW is blind to the scale of gradients",
    )
    num_workers: int = Field(default=0, ge=0, le=100_000, description="training processes; 0: this process, no cluster")
    min_workers: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="go on with as few training processes when the cluster has lost some; null: wait for all. A batch "
        "that they cannot share equally is cut to what they can",
    )
    loader_workers: int = Field(
        default=0, ge=0, le=1024, description="processes that read pictures, per training process"
    )
    num_threads: int = Field(
        default=0, ge=0, le=1024, description="threads per training process; 0: its share of the cores"
    )
    cache_mb: int = Field(
        default=1024,
        ge=0,
        description="keep decoded pictures in memory if all fit in so many MiB (without loader_workers)",
    )
    max_failures: int = Field(
        default=2, ge=0, le=1000, description="restarts from the last checkpoint, with num_workers > 0"
    )
    shuffle_shards: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="mix the samples of so many shards at a time, in a random order of shards, for shards that are far "
        "away; 0: any sample may follow any other",
    )
    log_every: int = Field(default=10, ge=1, le=100_000, description="steps between two points of the curves")
    tensorboard: bool = Field(
        default=False,
        description="write the curves for TensorBoard too, into work/STAGE/DIGEST/tensorboard; needs its package",
    )
    checkpoint: CheckpointParams = Field(default=CheckpointParams(), description="when to save")

    @model_validator(mode="after")
    def _batches_agree(self) -> Self:
        workers = max(1, self.num_workers)
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ValueError(f"min_workers {self.min_workers} is above num_workers {self.num_workers}")
        if self.batch_size % workers:
            raise ValueError(f"batch_size {self.batch_size} cannot be shared equally by num_workers {self.num_workers}")
        if self.batch_size % (workers * self.accumulate):
            raise ValueError(
                f"batch_size {self.batch_size} over {workers} workers cannot be cut into accumulate {self.accumulate} "
                "equal parts"
            )
        if self.batch_size // (workers * self.accumulate) < 2:
            parts = f" in accumulate {self.accumulate} parts" if self.accumulate > 1 else ""
            raise ValueError(
                f"batch_size {self.batch_size} over num_workers {self.num_workers}{parts} leaves one pair per worker, "
                "which has no negative in its batch"
            )
        return self


# settings that change how a training runs but not what it is: they may change between a stop and the resumption
HOW = (
    "num_workers",
    "min_workers",
    "loader_workers",
    "num_threads",
    "cache_mb",
    "max_failures",
    "activation_checkpointing",
    "tensorboard",
    "checkpoint",
    "shards_at",
    "shards_cache_mb",
)
