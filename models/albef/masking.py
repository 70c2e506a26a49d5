"""BERT's masking of text (ALBEF §3.2, footnote)."""

import torch
from torch import Tensor

from models.albef.config import AlbefConfig
from models.albef.distributed import longest_of_all, own_rows, process_count

NO_LABEL = -100  # a position that the MLM loss leaves out


def mask_tokens(
    input_ids: Tensor, config: AlbefConfig, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Token ids (B, L) after masking, and labels (B, L): the original id where a token was chosen, else -100.

    Each token is chosen with probability `mlm_probability`; of those 80% become [MASK], 10% a random token of the
    vocabulary, 10% stay. Only padding and [CLS] are protected, so [SEP] may be chosen, as in the published code.
    `generator` must live on the device of `input_ids`. With the global pool of negatives it must be in the same state
    in all processes, which then mask as one that has all rows would.
    """
    everyone = config.negative_pool == "global"
    rows, length, device = *input_ids.shape, input_ids.device
    shape = (process_count() * rows, longest_of_all(length, device)) if everyone else (rows, length)

    def own(drawn: Tensor) -> Tensor:
        return own_rows(drawn)[:, :length] if everyone else drawn

    def uniform() -> Tensor:
        return own(torch.rand(shape, generator=generator, device=device))

    special = (input_ids == config.pad_id) | (input_ids == config.cls_id)
    chosen = (uniform() < config.mlm_probability) & ~special
    fate = uniform()
    words = own(torch.randint(config.vocab_size, shape, generator=generator, device=device))
    masked = torch.where(chosen & (fate < 0.8), config.mask_id, input_ids)
    masked = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), words, masked)
    return masked, torch.where(chosen, input_ids, NO_LABEL)
