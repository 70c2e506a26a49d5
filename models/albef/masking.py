"""BERT's masking of text (ALBEF §3.2, footnote)."""

import torch
from torch import Tensor

from models.albef.config import AlbefConfig

NO_LABEL = -100  # a position that the MLM loss leaves out


def mask_tokens(
    input_ids: Tensor, config: AlbefConfig, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Token ids (B, L) after masking, and labels (B, L): the original id where a token was chosen, else -100.

    Each token is chosen with probability `mlm_probability`; of those 80% become [MASK], 10% a random token of the
    vocabulary, 10% stay. Only padding and [CLS] are protected, so [SEP] may be chosen, as in the published code.
    `generator` must live on the device of `input_ids`.
    """

    def uniform() -> Tensor:
        return torch.rand(input_ids.shape, generator=generator, device=input_ids.device)

    special = (input_ids == config.pad_id) | (input_ids == config.cls_id)
    chosen = (uniform() < config.mlm_probability) & ~special
    fate = uniform()
    words = torch.randint(config.vocab_size, input_ids.shape, generator=generator, device=input_ids.device)
    masked = torch.where(chosen & (fate < 0.8), config.mask_id, input_ids)
    masked = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), words, masked)
    return masked, torch.where(chosen, input_ids, NO_LABEL)
