"""A split of drawn pictures and an untrained ALBEF of a few thousand weights."""

import io

import torch
from PIL import Image
from safetensors.torch import save_file

from components.data.tokenizer import train_tokenizer
from components.io.records import RecordWriter, row_name, write_manifest
from models.albef.checkpoints import student_state_dict
from models.albef.config import AlbefConfig
from models.albef.model import Albef


def jpeg(picture, size=(40, 30)):
    """JPEG bytes of a picture, or of a colour."""
    sink = io.BytesIO()
    (Image.new("RGB", size, picture) if isinstance(picture, str) else picture).save(sink, "JPEG")
    return sink.getvalue()


def write_split(folder, pictures, captions):
    folder.mkdir(parents=True)
    rows = iter(range(1000))
    with RecordWriter(folder / "records.arrow") as writer:
        for picture, texts in zip(pictures, captions, strict=True):
            row_ids = [row_name("retrieval", next(rows)) for _ in texts]
            writer.write(
                [
                    {
                        "id": row_ids[0] if row_ids else row_name("retrieval", 999),
                        "source": "retrieval",
                        "url": "x.jpg",
                        "image": picture,
                        "sha256": "0" * 64,
                        "width": 40,
                        "height": 30,
                        "captions": texts,
                        "row_ids": row_ids,
                    }
                ]
            )
    write_manifest(folder, "records", [writer.entry()])


def save_weights(folder, captions, seed=0):
    """Write weights, configuration and a tokenizer of `captions` (a list for each picture) into `folder`."""
    save_albef(folder, train_tokenizer(lambda: (text for texts in captions for text in texts), 100, 1), seed=seed)


def save_albef(folder, tokenizer, *, seed=0, **changes):
    """Write weights, configuration and the tokenizer into `folder`; `changes` are to the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer.json")
    sizes = {
        "image_size": 32,
        "patch_size": 16,
        "vision_width": 16,
        "vision_depth": 1,
        "vision_heads": 2,
        "vocab_size": tokenizer.vocab_size,
        "text_width": 16,
        "text_layers": 2,
        "fusion_layers": 1,
        "text_heads": 2,
        "text_intermediate": 32,
        "max_positions": 40,
        "embed_dim": 8,
        "queue_size": 8,
    }
    special = {name: getattr(tokenizer, name) for name in ("pad_id", "cls_id", "sep_id", "mask_id")}
    config = AlbefConfig(**(sizes | special | changes))
    torch.manual_seed(seed)
    save_file(student_state_dict(Albef(config)), folder / "model.safetensors")
    (folder / "config.json").write_text(config.model_dump_json())
