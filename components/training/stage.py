"""What the training stages share: work folder, launch, lineage, publishing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from components.io.code import code_digest
from components.io.runtime import Runtime
from components.io.work import input_digest, publish, stage_work
from components.training.loop import EXPORT, Worker
from components.training.ray_launch import launch
from components.training.settings import HOW, TrainingParams

LINEAGE_FILE = "lineage.json"
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
    defaults = {field: type(params).model_fields[field].default for field in HOW}
    storage = stage_work(runtime, name, params.model_copy(update=defaults), inputs).resolve()
    launch(prepare(storage), params, storage, runtime)
    lineage = {
        "stage": name,
        "params": params.model_dump(mode="json"),
        "inputs": {key: input_digest(path) for key, path in inputs.items()},
        "code": code_digest(type(params).__module__),
        "packages": {package: _version(package) for package in PACKAGES},
    }
    text = json.dumps(lineage, indent=1, sort_keys=True)
    (storage / EXPORT / LINEAGE_FILE).write_text(text + "\n", encoding="utf-8")
    publish(storage / EXPORT, weights)
    publish(storage / "curves", curves)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
