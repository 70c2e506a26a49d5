"""What the training stages share: work folder, launch, lineage, publishing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from components.io.code import code_digest
from components.io.errors import UserError
from components.io.runtime import Runtime
from components.io.work import input_digest, publish, stage_work
from components.training.loop import CHECKPOINTS, EXPORT, Worker
from components.training.ray_launch import launch
from components.training.sameness import LENGTH
from components.training.settings import HOW, TrainingParams

LINEAGE_FILE = "lineage.json"
ABOUT_FILE = "about.json"  # what a work folder trains, for a longer training that may go on from it
PACKAGES = ("numpy", "pillow", "ray", "safetensors", "timm", "tokenizers", "torch", "transformers")


def train_stage(
    name: str,
    params: TrainingParams,
    inputs: Mapping[str, Path],
    prepare: Callable[[Path], Callable[[Worker], Any]],
    *,
    weights: Path,
    curves: Path,
    runtime: Runtime,
) -> None:
    """Train, resuming what an earlier call with the same parameters, inputs and code left, and publish the outs.

    `prepare(storage)` gives the function that each worker runs; the first worker leaves ``storage/export`` and
    ``storage/curves``. Checkpoints stay in `storage`, so that an unchanged stage that runs again need not train again.
    """
    defaults = {field: info.default for field, info in type(params).model_fields.items() if field in HOW}
    storage = stage_work(runtime, name, params.model_copy(update=defaults), inputs).resolve()
    digests = {key: input_digest(path) for key, path in inputs.items()}
    code = code_digest(type(params).__module__)
    about = {"params": params.model_dump(mode="json", exclude={*HOW, *LENGTH}), "inputs": digests, "code": code}
    (storage / ABOUT_FILE).write_text(json.dumps({"epochs": params.epochs} | about, sort_keys=True), encoding="utf-8")
    if params.checkpoint.extend:
        _adopt(storage, about, params.epochs)
    launch(prepare(storage), params, storage, runtime)
    lineage = {
        "stage": name,
        "params": params.model_dump(mode="json"),
        "inputs": digests,
        "code": code,
        "packages": {package: _version(package) for package in PACKAGES},
    }
    if not (storage / EXPORT).is_dir():
        raise UserError(
            f"{storage / EXPORT} is not there: the first worker has trained on a machine with another {runtime.work}; "
            "let runtime.work be a folder that all nodes share"
        )
    text = json.dumps(lineage, indent=1, sort_keys=True)
    (storage / EXPORT / LINEAGE_FILE).write_text(text + "\n", encoding="utf-8")
    publish(storage / EXPORT, weights)
    publish(storage / "curves", curves)


def _adopt(storage: Path, about: Mapping[str, Any], epochs: int) -> None:
    """Copy the checkpoints of the longest training beside `storage` that is the same but for fewer epochs."""
    if (storage / CHECKPOINTS).is_dir():
        return
    shorter: dict[int, Path] = {}
    for path in sorted(storage.parent.glob(f"*/{ABOUT_FILE}")):
        other = json.loads(path.read_text(encoding="utf-8"))
        length = other.pop("epochs")
        if length < epochs and other == about and (path.parent / CHECKPOINTS).is_dir():
            shorter[length] = path.parent
    if shorter:
        arriving = storage / f".{CHECKPOINTS}.partial"
        shutil.rmtree(arriving, ignore_errors=True)
        shutil.copytree(shorter[max(shorter)] / CHECKPOINTS, arriving)
        arriving.rename(storage / CHECKPOINTS)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
