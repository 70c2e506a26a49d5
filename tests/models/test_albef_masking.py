import pytest
import torch

from models.albef.config import AlbefConfig
from models.albef.masking import NO_LABEL, mask_tokens

CONFIG = AlbefConfig(vocab_size=1000)


def texts(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """[CLS], words, [SEP], two paddings."""
    ids = torch.randint(200, 1000, (rows, length), generator=torch.Generator().manual_seed(seed))
    ids[:, 0], ids[:, -3], ids[:, -2:] = CONFIG.cls_id, CONFIG.sep_id, CONFIG.pad_id
    return ids


def test_shares_of_chosen_masked_random_and_kept_tokens() -> None:
    ids = texts(4000, 30)
    masked, labels = mask_tokens(ids, CONFIG, torch.Generator().manual_seed(1))
    chosen = labels != NO_LABEL
    words = (ids != CONFIG.pad_id) & (ids != CONFIG.cls_id)
    assert chosen.sum() / words.sum() == pytest.approx(0.15, abs=0.005)
    to_mask = chosen & (masked == CONFIG.mask_id)
    kept = chosen & (masked == ids)
    random = chosen & ~to_mask & ~kept
    for share, wanted in ((to_mask, 0.8), (random, 0.1), (kept, 0.1)):
        assert share.sum() / chosen.sum() == pytest.approx(wanted, abs=0.01)
    assert masked[random].unique().numel() > 600  # the whole vocabulary, not a corner of it


def test_only_padding_and_cls_are_protected() -> None:
    ids = texts(2000, 12)
    masked, labels = mask_tokens(ids, CONFIG, torch.Generator().manual_seed(2))
    for token in (CONFIG.pad_id, CONFIG.cls_id):
        assert (labels[ids == token] == NO_LABEL).all()
        assert (masked[ids == token] == token).all()
    assert (labels[ids == CONFIG.sep_id] == CONFIG.sep_id).float().mean() == pytest.approx(0.15, abs=0.03)


def test_what_was_not_chosen_is_unchanged_and_labels_are_the_originals() -> None:
    ids = texts(50, 12)
    masked, labels = mask_tokens(ids, CONFIG, torch.Generator().manual_seed(3))
    chosen = labels != NO_LABEL
    assert torch.equal(masked[~chosen], ids[~chosen])
    assert torch.equal(labels[chosen], ids[chosen])


def test_the_generator_decides() -> None:
    ids = texts(20, 12)
    first, again, other = (mask_tokens(ids, CONFIG, torch.Generator().manual_seed(s))[0] for s in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
