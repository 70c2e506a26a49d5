import pytest
import torch
from torch.nn import functional as F

from models.hat.cross_attention import attention_weights, cross_attention_scores
from models.hat.loss import hardest_triplet_loss


def features(pictures=3, captions=4, regions=6, words=5, width=8):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 5, 2, 3])[:captions]
    return (
        torch.randn(pictures, regions, width, generator=generator),
        torch.randn(captions, words, width, generator=generator),
        torch.arange(words)[None] < lengths[:, None],
    )


def one_pair(regions, words, direction, smoothing, clip):
    """The score of one picture (k, d) and one caption (n, d), with the attended vectors built."""
    similarity = regions @ words.T  # (k, n)
    clipped = F.leaky_relu(similarity, 0.1) if clip == "leaky" else similarity.relu()
    asking, other, clipped = (words, regions, clipped.T) if direction == "t2i" else (regions, words, clipped)
    normed = clipped / (clipped.norm(dim=0, keepdim=True) + 1e-8)  # over the asking side
    attended = (smoothing * normed).softmax(dim=1) @ other
    return F.cosine_similarity(asking, attended, dim=1).mean()


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
@pytest.mark.parametrize("clip", ["leaky", "relu"])
@pytest.mark.parametrize("block_bytes", [1, 5000, 2**28])
def test_blocks_equal_a_loop_over_pairs(direction, clip, block_bytes):
    regions, words, mask = features()
    scores = cross_attention_scores(regions, words, mask, direction, smoothing=4.0, clip=clip, block_bytes=block_bytes)
    for picture in range(3):
        for caption in range(4):
            want = one_pair(regions[picture], words[caption][mask[caption]], direction, 4.0, clip)
            torch.testing.assert_close(scores[picture, caption], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_words_need_not_stand_together(direction):
    regions, words, _ = features()
    mask = torch.tensor([[0, 0, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 1], [0, 1, 1, 0, 0]], dtype=torch.bool)
    scores = cross_attention_scores(regions, words, mask, direction)
    for caption in range(4):
        want = one_pair(regions[0], words[caption][mask[caption]], direction, 9.0, "leaky")
        torch.testing.assert_close(scores[0, caption], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("direction", "dim"), [("i2t", 3), ("t2i", 2)])
def test_attention_sums_to_one_over_what_is_attended_to(direction, dim):
    regions, words, mask = features()
    weights = attention_weights(regions, words, mask, direction)
    torch.testing.assert_close(weights.sum(dim=dim), torch.ones_like(weights.sum(dim=dim)))


def test_gradients_are_finite_for_zero_vectors():
    regions, words, mask = features()
    regions, words = torch.zeros_like(regions).requires_grad_(), torch.zeros_like(words).requires_grad_()
    for direction in ("i2t", "t2i"):
        cross_attention_scores(regions, words, mask, direction).sum().backward()
    assert regions.grad.isfinite().all()
    assert words.grad.isfinite().all()


def test_what_cannot_be_scored_is_refused():
    regions, words, mask = features()
    with pytest.raises(ValueError, match="width"):
        cross_attention_scores(regions[..., :4], words, mask, "t2i")
    with pytest.raises(ValueError, match="no word"):
        cross_attention_scores(regions, words, torch.zeros_like(mask), "t2i")


def test_captions_of_one_picture_are_no_negatives_of_each_other():
    scores = torch.tensor([[0.5, 0.6, 0.0], [0.6, 0.5, 0.0], [0.0, 0.0, 0.5]])
    assert hardest_triplet_loss(scores, torch.tensor([1, 1, 2])).item() == 0
    assert hardest_triplet_loss(scores, torch.tensor([1, 2, 3])).item() == pytest.approx(4 * 0.3)
    with pytest.raises(ValueError, match="one picture only"):
        hardest_triplet_loss(scores, torch.tensor([1, 1, 1]))
