"""Global vectors of an evaluated split, kept beside its results with what they were made from."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from components.evaluation.tower_models import WEIGHTS_FILE
from components.io.errors import UserError
from components.io.records import MANIFEST_FILE, sha256_file

VECTORS_FILE = "vectors.safetensors"
MADE_FROM = "made_from"  # one key: safetensors writes several in any order


def made_from(weights: Path, split: Path) -> str:
    """The digests of what global vectors depend on: a model's weights and a split of its task."""
    digests = {"weights": sha256_file(weights / WEIGHTS_FILE), "split": sha256_file(split / MANIFEST_FILE)}
    return json.dumps(digests, sort_keys=True)


def write_vectors(folder: Path, images: Tensor, texts: Tensor, source: str) -> None:
    """Keep the global vectors (P, D) and (C, D) in ``extra`` of an evaluation, with what they were `made_from`."""
    tensors = {"images": images.contiguous(), "texts": texts.contiguous()}
    save_file(tensors, folder / VECTORS_FILE, metadata={MADE_FROM: source})


def read_vectors(folder: Path, run: str, wanted: str) -> tuple[Tensor, Tensor]:
    """The vectors (P, D) and (C, D) that `write_vectors` kept.

    Raises UserError when they are missing, damaged or made from anything else than `wanted`.
    """
    path = folder / VECTORS_FILE
    again = f"evaluate the run again (vlp run evaluate@{run})"
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get(MADE_FROM)
            vectors = file.get_tensor("images"), file.get_tensor("texts")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: {again}") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged ({error}): {again}") from None
    if found != wanted:
        raise UserError(f"{path} is of other weights or another split than there are now: {again}")
    return vectors
