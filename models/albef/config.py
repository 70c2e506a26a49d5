"""The sizes and constants of ALBEF, checked. No torch here, so that parameters can be validated quickly."""

import json
from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator


class AlbefConfig(BaseModel, frozen=True, extra="forbid"):
    """One ALBEF model. The defaults are the paper's (§3.1, §3.2, §3.5); its JSON is saved beside the weights."""

    image_size: int = Field(
        256, ge=1, description="Side of the square input picture, pixels (256 to pre-train, 384 to fine-tune)"
    )
    patch_size: int = Field(16, ge=1, description="Side of a square patch, pixels")
    vision_width: int = Field(768, ge=1, description="Width of an image token")
    vision_depth: int = Field(12, ge=1, description="Blocks of the image encoder")
    vision_heads: int = Field(12, ge=1, description="Attention heads of an image-encoder block")
    vision_mlp_ratio: float = Field(4.0, gt=0, description="Hidden width of an image-encoder MLP over vision_width")

    vocab_size: int = Field(30522, ge=1, description="Entries of the tokenizer")
    text_width: int = Field(768, ge=1, description="Width of a text token")
    text_layers: int = Field(12, ge=2, description="BERT layers, text-only and fusion layers together")
    fusion_layers: int = Field(6, ge=1, description="How many of them, at the end, attend to the image")
    text_heads: int = Field(12, ge=1, description="Attention heads of a BERT layer")
    text_intermediate: int = Field(3072, ge=1, description="Hidden width of a BERT layer's MLP")
    max_positions: int = Field(512, ge=2, description="Longest text, tokens")
    token_types: int = Field(2, ge=1, description="Rows of BERT's token-type embedding (only row 0 is used)")
    text_dropout: float = Field(
        0.1, ge=0, lt=1, description="Dropout of BERT: hidden states and attention probabilities"
    )

    init_std: float = Field(
        0.02,
        gt=0,
        le=1,
        description="Deviation of untrained weights: 0.02 suits width 768, about 1/sqrt(width) narrow models",
    )

    embed_dim: int = Field(256, ge=1, description="Width of the normalised features that ITC compares")
    queue_size: int = Field(65536, ge=0, description="Teacher features kept per modality; 0: the batch's own only")
    momentum: float = Field(0.995, ge=0, le=1, description="Weight of the old teacher in its moving average")
    temperature: float = Field(0.07, gt=0, description="Initial temperature of ITC (learned)")
    temperature_min: float = Field(0.001, gt=0, description="Lower bound that the temperature is clamped to")
    temperature_max: float = Field(0.5, gt=0, description="Upper bound that the temperature is clamped to")
    mlm_probability: float = Field(0.15, gt=0, lt=1, description="Share of text tokens chosen for MLM")
    negative_pool: Literal["local", "global"] = Field(
        "local",
        description="Whose rows ITC and ITM's hard negatives see beside the queue: this process's (the published code) "
        "or all processes', which then learn as one with the whole batch",
    )

    negative_hardness: float = Field(
        1.0,
        ge=0,
        le=10,
        description="How much alike ITM's negatives are: similarities are multiplied by it before the draw; 1 as "
        "published, 0 draws evenly, and less than 1 helps while the fusion layers know nothing yet",
    )

    pad_id: int = Field(0, ge=0, description="Token id of [PAD]")
    cls_id: int = Field(101, ge=0, description="Token id of [CLS]")
    sep_id: int = Field(102, ge=0, description="Token id of [SEP]")
    mask_id: int = Field(103, ge=0, description="Token id of [MASK]")

    @property
    def image_tokens(self) -> int:
        """Tokens of one picture: [CLS] and its patches."""
        return 1 + (self.image_size // self.patch_size) ** 2

    @property
    def text_only_layers(self) -> int:
        """BERT layers below the fusion layers."""
        return self.text_layers - self.fusion_layers

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        for whole, part in (
            ("image_size", "patch_size"),
            ("vision_width", "vision_heads"),
            ("text_width", "text_heads"),
        ):
            a, b = getattr(self, whole), getattr(self, part)
            if a % b:
                raise ValueError(f"{whole}={a} must be a multiple of {part}={b}")
        if self.fusion_layers >= self.text_layers:
            raise ValueError(
                f"fusion_layers={self.fusion_layers} must be below text_layers={self.text_layers}: "
                "at least one layer reads text alone"
            )
        if not self.temperature_min <= self.temperature <= self.temperature_max:
            raise ValueError(
                f"temperature={self.temperature} must lie between temperature_min={self.temperature_min} "
                f"and temperature_max={self.temperature_max}"
            )
        special = {"pad_id": self.pad_id, "cls_id": self.cls_id, "sep_id": self.sep_id, "mask_id": self.mask_id}
        if len(set(special.values())) < len(special):
            raise ValueError(f"special token ids must differ from each other, not {special}")
        for name, token in special.items():
            if token >= self.vocab_size:
                raise ValueError(f"{name}={token} must be below vocab_size={self.vocab_size}")
        return self


Sharing = Literal["all", "cross_attention", "key_value", "none"]
SHARING = (
    "What the two blocks of a fusion layer share (table 7): everything, the cross-attention layers (the paper), their "
    "keys and values alone (the published code), or nothing"
)


class EntailmentConfig(AlbefConfig, frozen=True, extra="forbid"):
    """ALBEF with a class head on [CLS]: visual entailment (§5)."""

    task: Literal["entailment"] = Field("entailment", description="What the model does")
    classes: int = Field(3, ge=2, description="Classes: contradiction, neutral, entailment")


class VqaConfig(AlbefConfig, frozen=True, extra="forbid"):
    """ALBEF with an answer decoder (§5)."""

    task: Literal["vqa"] = Field("vqa", description="What the model does")
    decoder_layers: int = Field(6, ge=1, description="Layers of the answer decoder")


class Nlvr2Config(AlbefConfig, frozen=True, extra="forbid"):
    """ALBEF over two pictures: each fusion layer is two blocks, one for each picture (§5)."""

    task: Literal["nlvr2"] = Field("nlvr2", description="What the model does")
    sharing: Sharing = Field("key_value", description=SHARING)


class TextAssignmentConfig(AlbefConfig, frozen=True, extra="forbid"):
    """The same while it learns to which of two pictures a text belongs (§5, appendix A)."""

    task: Literal["assign_text"] = Field("assign_text", description="What the model does")
    sharing: Sharing = Field("key_value", description=SHARING)


TASK_CONFIGS: dict[str, type[AlbefConfig]] = {
    "entailment": EntailmentConfig,
    "vqa": VqaConfig,
    "nlvr2": Nlvr2Config,
    "assign_text": TextAssignmentConfig,
}


def parse_config(text: str) -> AlbefConfig:
    """The config of a weights folder's ``config.json``; its `task` says of which class, none means ITC and ITM.

    Raises pydantic's ValidationError for anything else.
    """
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    task = content.get("task") if isinstance(content, dict) else None
    return TASK_CONFIGS.get(task if isinstance(task, str) else "", AlbefConfig).model_validate_json(text)
