import math

import pytest
import torch
from torch.nn import functional as F

from models.albef.losses import (
    contrastive_loss,
    distilled_targets,
    masked_language_loss,
    matching_loss,
    sample_negatives,
    sampling_weights,
    soft_cross_entropy,
)


def test_soft_cross_entropy_of_one_hot_targets_is_cross_entropy() -> None:
    logits, labels = torch.randn(6, 9), torch.randint(9, (6,))
    assert torch.allclose(soft_cross_entropy(logits, F.one_hot(labels, 9).float()), F.cross_entropy(logits, labels))


def test_distillation_is_equation_6_up_to_the_teachers_entropy() -> None:
    student, teacher, alpha = torch.randn(5, 8), torch.randn(5, 8), 0.4
    hard = torch.eye(5, 8)
    mixed = soft_cross_entropy(student, distilled_targets(hard, teacher, alpha))
    kl = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")
    entropy = -(teacher.softmax(1) * teacher.log_softmax(1)).sum(1).mean()
    printed = (1 - alpha) * soft_cross_entropy(student, hard) + alpha * kl
    assert torch.allclose(mixed, printed + alpha * entropy, atol=1e-6)


def test_contrastive_loss_of_uniform_similarities_is_log_of_the_choices() -> None:
    flat = torch.zeros(4, 10)
    loss = contrastive_loss((flat, flat), (flat, flat), torch.eye(4, 10), alpha=0.4)
    assert loss.item() == pytest.approx(math.log(10))


def test_masked_language_loss_mixes_label_and_teacher() -> None:
    logits, teacher, labels = torch.randn(7, 11), torch.randn(7, 11), torch.randint(11, (7,))
    hard, soft = F.cross_entropy(logits, labels), F.cross_entropy(logits, teacher.softmax(1))
    assert torch.allclose(masked_language_loss(logits, labels, teacher, 0.4), 0.6 * hard + 0.4 * soft)
    assert torch.allclose(masked_language_loss(logits, labels, None, 0.0), hard)


def test_nothing_masked_is_no_loss() -> None:
    logits = torch.zeros(0, 11, requires_grad=True)
    loss = masked_language_loss(logits, torch.zeros(0, dtype=torch.long), torch.zeros(0, 11), 0.4)
    loss.backward()
    assert loss.item() == 0


def test_negatives_are_drawn_in_proportion_to_the_softmax_of_others() -> None:
    similarity = torch.tensor([[5.0, 1.0, 0.0, 2.0]]).repeat(20_000, 1)
    same = torch.tensor([[True, False, False, False]]).repeat(20_000, 1)
    drawn = sample_negatives(similarity, -similarity, same, torch.Generator().manual_seed(0))
    for chosen, scores in ((drawn.text_per_image, [1.0, 0.0, 2.0]), (drawn.image_per_text, [-1.0, 0.0, -2.0])):
        shares = chosen.bincount(minlength=4) / 20_000
        assert shares[0] == 0
        assert torch.allclose(shares[1:], torch.tensor(scores).softmax(0), atol=0.015)


def test_hardness_sharpens_the_draw_of_negatives() -> None:
    similarity = torch.tensor([[5.0, 1.0, 0.0, 2.0]]).repeat(20_000, 1)
    same = torch.tensor([[True, False, False, False]]).repeat(20_000, 1)
    for hardness in (0.0, 0.3, 2.0):
        generator = torch.Generator().manual_seed(0)
        drawn = sample_negatives(similarity, similarity, same, generator, hardness=hardness)
        shares = drawn.text_per_image.bincount(minlength=4)[1:] / 20_000
        assert torch.allclose(shares, (torch.tensor([1.0, 0.0, 2.0]) * hardness).softmax(0), atol=0.015)


def test_weights_do_not_underflow_at_the_coldest_temperature() -> None:
    similarity = torch.tensor([[1.0, 0.1, 0.1001], [0.2, 1.0, 0.2], [-1.0, -1.0, 1.0]]) / 0.001
    same = torch.eye(3, dtype=torch.bool)
    assert similarity.softmax(1).masked_fill(same, 0).sum() == 0  # what the published form would draw from
    assert torch.allclose(sampling_weights(similarity, same).sum(1), torch.ones(3))


def test_same_picture_is_never_a_negative_and_lonely_rows_are_marked() -> None:
    ids = torch.tensor([3, 3, 8])
    pool = torch.tensor([3, 3, 8, 3])
    for seed in range(20):
        similarity = torch.randn(3, 4) * 30
        drawn = sample_negatives(similarity, similarity, ids[:, None] == pool, torch.Generator().manual_seed(seed))
        assert drawn.possible is not None
        assert drawn.possible.all()
        assert (pool[drawn.image_per_text] != ids).all()
        assert (pool[drawn.text_per_image] != ids).all()
    lonely = sample_negatives(torch.randn(3, 2), torch.randn(3, 2), ids[:, None] == torch.tensor([3, 3]))
    assert lonely.possible is not None
    assert lonely.possible.tolist() == [False, False, True]


def test_matching_loss_leaves_out_pairs_without_negatives() -> None:
    logits = torch.randn(9, 2, requires_grad=True)  # 3 pairs, 3 negative images, 3 negative texts
    labels = torch.tensor([1, 1, 1] + [0] * 6)
    assert torch.allclose(matching_loss(logits, torch.ones(3).bool()), F.cross_entropy(logits, labels))
    loss = matching_loss(logits, torch.tensor([True, False, True]))
    keep = [0, 2, 3, 5, 6, 8]
    assert torch.allclose(loss, F.cross_entropy(logits[keep], labels[keep]))
    none = matching_loss(logits, torch.zeros(3).bool())
    none.backward()
    assert none.item() == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()
