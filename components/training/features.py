"""Stage `features`: outputs of two frozen towers for a task, kept, so that frozen epochs cost minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, Field, StringConstraints, model_validator

from components.io.runtime import Runtime
from models.towers.config import ClipConfig, ImageTowerConfig, TextTowerConfig

TowersName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_-]+$")]
SplitName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$")]


class TowersParams(BaseModel, frozen=True, extra="forbid"):
    """A pair of towers and the task that they look at."""

    task: Path = Field(description="folder of a retrieval task: data/tasks/TASK")
    after: Path | None = Field(
        default=None,
        description="what has to be there first: data/models/RUN where weights are that run's, else "
        "data/tasks/TASK/train; dvc.yaml reads it, so write it out",
    )
    splits: tuple[SplitName, ...] = Field(
        default=("train", "val"), min_length=1, description="splits to keep; `evaluate` asks the towers themselves"
    )
    image: ImageTowerConfig = Field(default=ImageTowerConfig(), description="the image tower and what is taken of it")
    text: TextTowerConfig = Field(default=TextTowerConfig(), description="the text tower and what is taken of it")
    clip: ClipConfig | None = Field(
        default=None,
        description="a CLIP in place of the text tower, whose vectors of whole pictures are the first level beside the "
        "image tower's regions; null: none",
    )
    image_weights: str | None = Field(
        default=None,
        min_length=1,
        description="a file (also a run's data/models/RUN/model.safetensors), package:NAME/PATH in an installed "
        "package, or timm:NAME; null: random",
    )
    text_weights: str | None = Field(
        default=None,
        min_length=1,
        description="a file (also a run's data/models/RUN/model.safetensors), package:NAME/PATH in an installed "
        "package, or transformers:NAME; null: random",
    )
    clip_weights: str | None = Field(
        default=None,
        min_length=1,
        description="of both encoders of `clip`, in transformers', open_clip's or OpenAI's layout, or a run's of this "
        "project: a file, package:NAME/PATH, transformers:NAME or open_clip:MODEL/TAG; null: random",
    )
    vocabulary: str = Field(
        min_length=1,
        description="tokenizer.json (CLIP's for `clip`) or BERT's vocab.txt: a path, or package:NAME/PATH",
    )
    max_tokens: int = Field(
        default=32, ge=3, le=512, description="tokens of a caption, [CLS] and [SEP] included; 32 in HAT"
    )
    semantic_values: int = Field(
        default=0, ge=0, le=100_000, description="d5 of VITR's LSEH (eq. 22), fitted on all captions of train; 0: none"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="of random weights")
    mirrored: bool = Field(
        default=False,
        description="keep train's pictures mirrored too: runs with augment.flip then see either",
    )
    batch_size: int = Field(
        default=32, ge=1, le=65_536, description="captions a pass, and pictures; on a processor 4 of those at most"
    )
    pictures_per_part: int = Field(
        default=500, ge=1, le=1_000_000, description="pictures that are finished once and for all at a time"
    )

    @model_validator(mode="after")
    def _clip_agrees(self) -> Self:
        if self.clip is None:
            if self.clip_weights is not None:
                raise ValueError("clip_weights without `clip`: say its sizes there, or leave the weights out")
            return self
        beside = sorted({"text", "text_weights"} & self.model_fields_set)
        if beside:
            raise ValueError(f"{beside[0]} plays no part beside `clip`, which reads the captions: leave it out")
        if self.clip.alone and self.image_weights is not None:
            raise ValueError("image_weights plays no part where `clip` is alone: leave it out")
        if not self.clip.alone and len(self.image.stages) != 1:
            raise ValueError(
                f"image.stages names {len(self.image.stages)} levels: beside `clip`, which has one of words, name one"
            )
        if self.max_tokens > self.clip.max_positions:
            raise ValueError(f"max_tokens {self.max_tokens} is above clip.max_positions {self.clip.max_positions}")
        return self

    @property
    def words_read(self) -> int:
        """Rows of the text encoder's embedding."""
        return self.clip.vocab_size if self.clip is not None else self.text.vocab_size

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.clip is not None:
            return self
        if len(self.image.stages) != len(self.text.take):
            raise ValueError(
                f"image.stages names {len(self.image.stages)} levels, text.take {len(self.text.take)}: they go in pairs"
            )
        if self.text.kind == "bert" and self.max_tokens > self.text.max_positions:
            raise ValueError(f"max_tokens {self.max_tokens} is above text.max_positions {self.text.max_positions}")
        return self


class FeaturesParams(BaseModel, frozen=True, extra="forbid"):
    """The pairs of towers by name; each gives data/features/NAME."""

    towers: dict[TowersName, TowersParams] = Field(default={}, description="pairs of towers by name; {}: none")


def features(params: FeaturesParams, *, towers: str, task: Path, features: Path, runtime: Runtime = Runtime()) -> None:
    """Run the towers named `towers` over the splits of `task`; write their outputs and weights into `features`.

    ``features``: towers.safetensors, towers.json, tokenizer.json and per split a folder that
    `components.training.feature_store` reads: float16 regions and words of each level. Finished parts are kept when
    the stage is stopped. Raises UserError when weights or splits are missing, do not fit, or a picture is damaged.
    """
    from functools import partial

    from components.io.errors import UserError
    from components.io.work import discard, map_partitions, publish, stage_work
    from components.training.feature_store import assemble_features, split_parts
    from components.training.feature_work import extract, read_sources, write_towers
    from components.training.tower_files import locate

    if towers not in params.towers:
        raise UserError(f"features.towers has no {towers!r}: it has {', '.join(sorted(params.towers)) or 'none'}")
    chosen = params.towers[towers]
    for split in chosen.splits:
        if not (task / split).is_dir():
            raise UserError(f"{task / split} does not exist: run prepare_tasks, or take it out of features.towers")
    inputs = {split: task / split for split in chosen.splits} | {"vocabulary": locate(chosen.vocabulary)}
    inputs |= read_sources(chosen)
    work = stage_work(runtime, f"features-{towers}", chosen, inputs).resolve()
    write_towers(chosen, work / "towers")
    parts = split_parts(task, chosen)
    done = map_partitions(
        partial(extract, chosen, work / "towers", task.resolve()),
        parts,
        work=work,
        runtime=runtime,
        label=f"features {towers}",
    )
    publish(assemble_features(chosen, work, task, parts, done), features)
    discard(work)
