"""Stage `synthesize`: the built-in corpus of drawn scenes, with texts, tasks and a web with ills in known numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, model_validator

from components.data.corpus.params import WebParams
from components.io.runtime import Runtime

if TYPE_CHECKING:
    from components.data.corpus.scenes import Fact, Scene

SCENES_PER_PART = 100
REDRAWS = 100  # of the scenes of a split whose captions are true of others too
SPLITS = ("train", "val", "test")
IMAGES_FOLDER, SCENES_FILE = "images", "scenes.json"


class SynthesizeParams(BaseModel, frozen=True, extra="forbid"):
    """Size and content of the built-in corpus."""

    enabled: bool = Field(default=True, description="false: draw nothing (for recipes on other data)")
    seed: int = Field(default=1, ge=0, le=2**31 - 1, description="other seeds draw other scenes")
    train: int = Field(default=3000, ge=1, le=1_000_000, description="training scenes")
    val: int = Field(default=200, ge=1, le=5000, description="validation scenes")
    test: int = Field(default=200, ge=1, le=5000, description="test scenes")
    image_size: int = Field(default=112, ge=80, le=1024, description="side of the square pictures, pixels")
    min_objects: int = Field(default=2, ge=2, le=6, description="least number of things in a scene")
    max_objects: int = Field(default=6, ge=2, le=6, description="greatest number of things in a scene")
    quality: int = Field(default=92, ge=1, le=100, description="JPEG quality")
    captions: int = Field(default=3, ge=1, le=4, description="captions per scene")
    relations: int = Field(default=1, ge=1, le=2, description="most relations that a caption states of its subject")
    web: WebParams = Field(default=WebParams(), description="the web's ills in the source list")

    @model_validator(mode="after")
    def _enough(self) -> SynthesizeParams:
        if self.min_objects > self.max_objects:
            raise ValueError(f"min_objects ({self.min_objects}) is greater than max_objects ({self.max_objects})")
        if self.enabled and self.web.train_scenes > self.train:
            raise ValueError(
                f"train ({self.train}) is less than the scenes that web's ills need ({self.web.train_scenes})"
            )
        free = (self.train - self.web.train_scenes) * self.captions
        if self.enabled and self.web.wrong_captions > free:
            raise ValueError(
                f"web.wrong_captions ({self.web.wrong_captions}) is more than the {free} captions of training scenes "
                "that have no other ill"
            )
        if self.enabled and self.web.evaluation_scenes > self.val + self.test:
            need = self.web.evaluation_scenes
            raise ValueError(f"val + test ({self.val + self.test}) is less than the pictures that web leaks ({need})")
        return self


def synthesize(params: SynthesizeParams, *, corpus: Path, runtime: Runtime = Runtime()) -> None:
    """Draw the corpus into the folder `corpus`.

    Writes ``images/`` (all pictures), ``scenes.json`` (what is in them), ``retrieval.json`` (Karpathy's layout),
    ``vqa.json``, ``nlvr2.json``, ``entailment.json``, ``grounding.json``, and for `download` the source list
    ``pairs.tsv`` with its ``web/``, whose ills ``ills.json`` counts. With ``enabled: false`` only ``ills.json``,
    which says so.

    Raises UserError when the parameters leave too little room for captions that are true of one scene only.
    """
    import shutil

    from components.io.work import discard, map_partitions, publish, stage_work

    work = stage_work(runtime, "synthesize", params, {})
    built = work / "built"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir()
    if params.enabled:
        counts = {"train": params.train, "val": params.val, "test": params.test}
        ranges = [
            (split, start, min(start + SCENES_PER_PART, counts[split]))
            for split in SPLITS
            for start in range(0, counts[split], SCENES_PER_PART)
        ]
        parts = map_partitions(partial(draw_part, params), ranges, work=work, runtime=runtime, label="synthesize")
        _write_corpus(params, [folder for folder, _ in parts], built)
    else:
        _write_json(built / "ills.json", {"enabled": False})
    publish(built, corpus)
    discard(work)


def draw_part(params: SynthesizeParams, item: tuple[str, int, int], folder: Path) -> dict[str, Any]:
    """Draw scenes ``start`` to ``stop`` of a split: their pictures and ``scenes.json``.

    Training scenes get their captions here; those of evaluation splits depend on the whole split.
    """
    split, start, stop = item
    scenes = []
    for index in range(start, stop):
        scene, picture = draw_scene(params, split, index)
        spare = None
        if split == "train":
            scene, spare = caption_scene(params, scene, index, None)
        (folder / scene.file).write_bytes(picture)
        scenes.append({"scene": scene.to_json(), "spare": spare})
    _write_json(folder / SCENES_FILE, scenes)
    return {"scenes": len(scenes)}


def draw_scene(params: SynthesizeParams, split: str, index: int, attempt: int = 0) -> tuple[Scene, bytes]:
    """One scene without captions, and its JPEG. Depends on seed, split, index and attempt alone."""
    import numpy as np

    from components.data.corpus.render import draw, jpeg

    scene, picture = draw(
        f"{split}-{index:05d}",
        split,
        np.random.default_rng([params.seed, 1, SPLITS.index(split), index, attempt]),
        size=params.image_size,
        objects=(params.min_objects, params.max_objects),
        captions=params.captions,
    )
    return scene, jpeg(picture, params.quality)


def _write_corpus(params: SynthesizeParams, parts: list[Path], built: Path) -> None:
    import json
    import shutil

    from components.data.corpus.ills import write_web
    from components.data.corpus.scenes import Scene
    from components.data.corpus.tasks import write_tasks

    images = built / IMAGES_FOLDER
    images.mkdir()
    splits: dict[str, list[Scene]] = {split: [] for split in SPLITS}
    spare: dict[str, str] = {}
    for folder in parts:
        for content in json.loads((folder / SCENES_FILE).read_text(encoding="utf-8")):
            scene = Scene.from_json(content["scene"])
            shutil.copyfile(folder / scene.file, images / scene.file)
            splits[scene.split].append(scene)
            if content["spare"] is not None:
                spare[scene.name] = content["spare"]
    for split in ("val", "test"):
        splits[split] = caption_split(params, splits[split], images)
    scenes = [scene for split in SPLITS for scene in splits[split]]
    _write_json(built / SCENES_FILE, [scene.to_json() for scene in scenes])
    _write_json(built / "retrieval.json", karpathy(scenes))
    for task, content in write_tasks(scenes, params.seed).items():
        _write_json(built / f"{task}.json", content)
    ills = write_web(
        built,
        params.web,
        train=splits["train"],
        evaluation=[*splits["val"], *splits["test"]],
        pictures=images,
        spare=spare,
        seed=params.seed,
    )
    _write_json(built / "ills.json", ills)


def caption_scene(
    params: SynthesizeParams, scene: Scene, index: int, held: Mapping[Fact, int] | None
) -> tuple[Scene, str | None]:
    """The scene with captions, or with none when there are too few, and one more true caption if there is one.

    `held` counts how many scenes of an evaluation split might be said to show a fact: more than one, and it is no
    caption.
    """
    import numpy as np

    from components.data.corpus.scenes import choose_facts, facts, say

    clear = facts(scene, clear=True)
    rng = np.random.default_rng([params.seed, 2, SPLITS.index(scene.split), index])
    clear = [clear[place] for place in rng.permutation(len(clear))]
    candidates = [fact for fact in clear if held is None or held[fact] == 1]
    chosen = [say(fact, clear, params.relations) for fact in choose_facts(candidates, params.captions + 1)]
    if len(chosen) < params.captions:
        return scene, None
    spare = chosen[params.captions] if len(chosen) > params.captions else None
    return replace(scene, captions=tuple(chosen[: params.captions])), spare


def caption_split(params: SynthesizeParams, scenes: list[Scene], images: Path) -> list[Scene]:
    """The scenes of one evaluation split with their captions.

    No caption is true, or might be taken for true, of another scene of the split: a scene that has not enough such
    captions is drawn again (into `images` too). Raises UserError when that does not help.
    """
    from collections import Counter

    from components.data.corpus.scenes import facts
    from components.io.errors import UserError

    scenes = list(scenes)
    held = Counter(fact for scene in scenes for fact in facts(scene, clear=False))
    for attempt in range(1, REDRAWS):
        captioned = [caption_scene(params, scene, index, held)[0] for index, scene in enumerate(scenes)]
        again = [index for index, scene in enumerate(captioned) if not scene.captions]
        if not again:
            return captioned
        for index in again:
            held.subtract(facts(scenes[index], clear=False))
            scenes[index], picture = draw_scene(params, scenes[index].split, index, attempt)
            held.update(facts(scenes[index], clear=False))
            (images / scenes[index].file).write_bytes(picture)
    raise UserError(
        f"synthesize: {len(scenes)} scenes are too many for captions that are true of one scene only: "
        f"lower `synthesize.{scenes[0].split}` or `synthesize.captions`"
    )


def karpathy(scenes: list[Scene]) -> dict[str, Any]:
    """The retrieval task in Karpathy's layout."""
    images: list[dict[str, Any]] = []
    sentence = 0
    for number, scene in enumerate(scenes):
        sentences = []
        for caption in scene.captions:
            sentences.append({"raw": caption, "tokens": caption.split(), "imgid": number, "sentid": sentence})
            sentence += 1
        ids = [entry["sentid"] for entry in sentences]
        images.append(
            {"filename": scene.file, "imgid": number, "split": scene.split, "sentids": ids, "sentences": sentences}
        )
    return {"dataset": "corpus", "images": images}


def _write_json(path: Path, content: Any) -> None:
    """Sorted keys, one item a line at the top level for lists, so that bytes are the same and people can read them."""
    import json

    if isinstance(content, list):
        text = "[\n" + ",\n".join(json.dumps(item, sort_keys=True) for item in content) + "\n]\n"
    else:
        text = json.dumps(content, sort_keys=True, indent=None) + "\n"
    path.write_text(text, encoding="utf-8")
