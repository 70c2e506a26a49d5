"""HAT against numbers made by the published functions."""

import pytest
import torch

from models.hat.cross_attention import cross_attention_scores
from models.hat.loss import hardest_triplet_loss


@pytest.fixture(scope="module")
def expected(reference):
    return torch.load(reference / "hat" / "expected.pt", weights_only=True)


def score(expected, level, direction, **options):
    features = expected["levels"][level]
    lengths = torch.tensor(expected["lengths"])
    mask = torch.arange(features["text"].shape[1])[None] < lengths[:, None]
    return cross_attention_scores(
        features["image"], features["text"], mask, direction, smoothing=expected["lambda_softmax"], **options
    )


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
@pytest.mark.parametrize("block_bytes", [1, 2**28])
def test_scores_per_level_and_their_sum(expected, direction, block_bytes):
    levels = expected["levels"]
    scores = {level: score(expected, level, direction, block_bytes=block_bytes) for level in levels}
    for level, want in expected[direction]["scores"].items():
        torch.testing.assert_close(scores[level], want, atol=1e-5, rtol=1e-5)
    total = torch.stack([scores[level] for level in levels]).sum(dim=0)
    torch.testing.assert_close(total, expected[direction]["total"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_triplet_loss(expected, direction):
    total = expected[direction]["total"]
    loss = hardest_triplet_loss(total, torch.arange(len(total)), margin=expected["margin"])
    assert loss.item() == pytest.approx(expected[direction]["triplet_loss"], abs=1e-5)
