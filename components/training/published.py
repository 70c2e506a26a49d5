"""Published ALBEF checkpoints to weights folders and back: every tensor accounted for, nothing unpickled."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import processors
from torch import Tensor, nn

from components.data.tokenizer import CLS, TOKENIZER_FILE, load_tokenizer
from components.io.errors import UserError
from components.io.records import sha256_file
from components.training.albef_tasks import CONFIG_FILE, TRAINING_FILE, WEIGHTS_FILE
from models.albef.checkpoints import ImportReport, Kind, load_parts, official_config, recognise, student_state_dict
from models.albef.config import AlbefConfig, parse_config
from models.albef.published import MODELS, export_official, import_checkpoint

LINEAGE_FILE = "lineage.json"
SIZES = ("image_size", "vision_width", "vision_depth", "text_width", "text_layers", "fusion_layers", "vocab_size")


class Checkpoint(NamedTuple):
    """A checkpoint file: its tensors by published name, its epoch where it says, and the file's sha256."""

    state: dict[str, Tensor]
    epoch: int | None
    sha256: str


@contextmanager
def local_copy(source: str) -> Iterator[Path]:
    """The file `source`, a path or ``s3://bucket/key``, on this machine.

    Raises UserError when there is no such file, or it cannot be fetched.
    """
    if not source.startswith("s3://"):
        path = Path(source)
        if not path.is_file():
            raise UserError(f"{source} does not exist or is no file: give a checkpoint's path or s3://bucket/key")
        yield path
        return
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, key = source.removeprefix("s3://").partition("/")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(key).name
        try:
            boto3.client("s3").download_file(bucket, key, str(path))
        except (BotoCoreError, ClientError, ValueError) as error:
            raise UserError(f"{source} cannot be fetched ({error}): check bucket, key and credentials") from None
        yield path


def read_checkpoint(path: Path) -> Checkpoint:
    """Read ``{"model": tensors, ...}`` or bare tensors, as torch (``weights_only``) or safetensors file.

    Raises UserError when it is damaged, holds something else, or would have to run code to be read.
    """
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{path} is no file of tensors alone and is not read, since that could run code: {reason}"
        ) from None
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is damaged or no checkpoint ({reason}): fetch it again") from None
    inner = content.get("model", content) if isinstance(content, Mapping) else None
    if not isinstance(inner, Mapping) or not all(isinstance(value, Tensor) for value in inner.values()):
        raise UserError(f"{path} holds no state dict: a mapping of names to tensors, bare or under 'model', is wanted")
    epoch = content.get("epoch")
    return Checkpoint(dict(inner), epoch if isinstance(epoch, int) else None, sha256_file(path))


def describe(path: Path, **others: Any) -> list[str]:
    """What a checkpoint is, in lines: its kind, sizes, and what becomes of its tensors. `others` as in `import_to`.

    Raises UserError as `read_checkpoint`, and when the checkpoint is of no known kind or lacks an encoder.
    """
    checkpoint = read_checkpoint(path)
    kind, model, report = _import(path, checkpoint, others)
    config = model.config
    assert isinstance(config, AlbefConfig)
    of_kind = {name: value for name, value in config if name not in AlbefConfig.model_fields and name != "task"}
    sizes = [f"{name} {getattr(config, name)}" for name in SIZES] + [
        f"{name} {value}" for name, value in of_kind.items()
    ]
    lines = [f"{path}: ALBEF for {kind}", ", ".join(sizes)]
    if checkpoint.epoch is not None:
        lines.append(f"saved after epoch {checkpoint.epoch}")
    return lines + summary(report)


def summary(report: ImportReport) -> list[str]:
    """What matched, in lines."""
    lines = [f"{len(report.matched)} tensors matched"]
    if report.ignored:
        lines.append(f"{len(report.ignored)} left out, which hold nothing of their own: {_few(report.ignored)}")
    if report.missing:
        lines.append(f"{len(report.missing)} not in the checkpoint, set anew: {_few(report.missing)}")
    return lines


def import_to(
    folder: Path, path: Path, tokenizer: Path, *, separator: bool = False, **others: Any
) -> tuple[Kind, ImportReport]:
    """Make a weights folder of the checkpoint in `path` and BERT's vocabulary in `tokenizer`.

    The published models were trained on texts without [SEP] at the end (the authors' tokenizer leaves it out), so the
    folder's tokenizer does too, unless `separator`.
    `others` are fields of the config that shapes do not tell (`vision_heads`, `text_heads`) or another `image_size`.
    Writes model.safetensors, config.json, tokenizer.json and lineage.json, and training.safetensors where the
    checkpoint has a teacher or queue. The folder appears whole. Raises UserError as `describe`, when `folder` exists,
    and when the tokenizer has more words than the model.
    """
    if folder.exists():
        raise UserError(f"{folder} exists already: remove it, or choose another folder")
    words = load_tokenizer(tokenizer)
    if not separator:
        words.inner.post_processor = processors.TemplateProcessing(
            single=f"{CLS}:0 $A:0", special_tokens=[(CLS, words.cls_id)]
        )
    special = {name: getattr(words, name) for name in ("pad_id", "cls_id", "sep_id", "mask_id")}
    checkpoint = read_checkpoint(path)
    kind, model, report = _import(path, checkpoint, special | others)
    config = model.config
    assert isinstance(config, AlbefConfig)
    if words.vocab_size > config.vocab_size:
        raise UserError(
            f"{tokenizer} has {words.vocab_size} words, but {path} was trained with {config.vocab_size}: "
            "give the vocabulary of its training (bert-base-uncased's for the published ones)"
        )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(student_state_dict(model), partial / WEIGHTS_FILE)
    rest = {name: value for name, value in model.state_dict().items() if name.startswith(("teacher.", "queue."))}
    if rest:
        save_file(_unshared(rest), partial / TRAINING_FILE)
    (partial / CONFIG_FILE).write_text(config.model_dump_json(indent=1) + "\n", encoding="utf-8")
    words.save(partial / TOKENIZER_FILE)
    lineage = {
        "stage": "checkpoint import",
        "kind": kind,
        "file": path.name,
        "sha256": checkpoint.sha256,
        "epoch": checkpoint.epoch,
        **report._asdict(),
    }
    (partial / LINEAGE_FILE).write_text(json.dumps(lineage, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.rename(folder)
    return kind, report


def export_to(path: Path, folder: Path) -> int:
    """Write the weights in `folder` to `path` in the published layout, ``{"model": tensors}``; returns their number.

    Teacher and queue go along where the folder has them; else the student's tensors alone. Raises UserError when a file
    is missing or damaged.
    """
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} does not exist: give a folder such as data/models/retrieval")
    try:
        config = parse_config((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS_FILE)
        model: nn.Module = MODELS[_kind(config, weights)](config)
        load_parts(model, weights)
        rest = load_file(folder / TRAINING_FILE) if (folder / TRAINING_FILE).is_file() else {}
        model.load_state_dict(rest, strict=False)
    except (ValidationError, SafetensorError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder} holds no whole ALBEF model ({error}): train or import it again") from None
    state = export_official(model)
    if not rest:
        state = {name: value for name, value in state.items() if "_m." not in name and "queue" not in name}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    torch.save({"model": state}, partial)
    partial.rename(path)
    return len(state)


def _kind(config: AlbefConfig, weights: Mapping[str, Tensor]) -> Kind:
    task = getattr(config, "task", None)
    if task is not None:
        return task
    return "pretraining" if any(name.startswith("text_encoder.cls.") for name in weights) else "retrieval"


def _import(path: Path, checkpoint: Checkpoint, others: Mapping[str, Any]) -> tuple[Kind, nn.Module, ImportReport]:
    given = {name: value for name, value in others.items() if value is not None}
    try:
        recognise(checkpoint.state)
        own = official_config(checkpoint.state, **given)
        # special ids of BERT's vocabulary are beyond small ones, so defaults that do not fit are said by name
        return import_checkpoint(checkpoint.state, **dict(own))
    except ValidationError as error:
        reason = "; ".join(str(entry["msg"]).removeprefix("Value error, ") for entry in error.errors())
        raise UserError(f"{path}: {reason}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that share no memory, which safetensors wants."""
    return {name: value.clone().contiguous() for name, value in tensors.items()}


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
