import pytest
import torch

from models.hat.config import HatHeadConfig
from models.hat.cross_attention import cross_attention_scores
from models.hat.loss import hardest_triplet_loss
from models.hat.model import HatHead, ensemble

IMAGE, TEXT = (4, 6, 10), (8, 8, 8)


def levels(pictures=3, captions=4, words=5):
    generator = torch.Generator().manual_seed(1)
    regions = [torch.randn(pictures, 9, width, generator=generator) for width in IMAGE]
    texts = [torch.randn(captions, words, width, generator=generator) for width in TEXT]
    mask = torch.arange(words)[None] < torch.tensor([1, 5, 2, 3])[:captions, None]
    return regions, texts, mask


def test_the_score_is_the_levels_sum_and_the_ensemble_the_mean():
    torch.manual_seed(0)
    head = HatHead(HatHeadConfig(width=12), IMAGE, TEXT).eval()
    scores = head(*levels())
    regions, words, mask = levels()
    assert list(scores) == ["i2t", "t2i"]
    for name, direction in head.directions.items():
        parts = [
            cross_attention_scores(project(norm(region)), text(word), mask, name)
            for project, norm, text, region, word in zip(
                direction.image, direction.norms, direction.text, regions, words, strict=True
            )
        ]
        torch.testing.assert_close(scores[name], sum(parts))
    torch.testing.assert_close(ensemble(list(scores.values())), (scores["i2t"] + scores["t2i"]) / 2)


def test_levels_that_are_not_named_do_not_matter():
    torch.manual_seed(0)
    head = HatHead(HatHeadConfig(width=12, levels=(3,), direction="t2i"), IMAGE, TEXT).eval()
    regions, words, mask = levels()
    scores = head(regions, words, mask)
    again = head([region * 0 for region in regions[:2]] + regions[2:], words, mask)
    assert list(scores) == ["t2i"]
    assert torch.equal(scores["t2i"], again["t2i"])


def test_each_direction_learns_for_itself():
    head = HatHead(HatHeadConfig(width=12), IMAGE, TEXT)
    head(*levels())["i2t"].sum().backward()
    grads = {name: weight.grad for name, weight in head.named_parameters()}
    assert all((grad is None) == ("t2i" in name) for name, grad in grads.items())


@pytest.mark.parametrize("length", [1, 5])
def test_equal_captions_give_a_finite_loss_and_finite_gradients(length):
    head = HatHead(HatHeadConfig(width=12), IMAGE, TEXT)
    regions, words, _ = levels()
    words = [level[:1, :length].expand(3, -1, -1) for level in words]
    scores = head(regions, words, torch.ones(3, length, dtype=torch.bool))
    loss = sum(hardest_triplet_loss(matrix, torch.arange(3)) for matrix in scores.values())
    loss.backward()
    # no caption can be told from another one: each of three pairs loses at least the margin, in both directions
    assert loss.item() >= 3 * 0.2 * 2
    assert all(weight.grad.isfinite().all() for weight in head.parameters())


@pytest.mark.parametrize(
    ("config", "text", "said"), [({}, (8, 8), "no pairs of levels"), ({"levels": (4,)}, TEXT, "the towers give 3")]
)
def test_towers_and_levels_must_fit(config, text, said):
    with pytest.raises(ValueError, match=said):
        HatHead(HatHeadConfig.model_validate(config), IMAGE, text)


def test_the_pooled_score_is_the_cosine_of_the_vectors_that_choose_candidates():
    torch.manual_seed(0)
    head = HatHead(HatHeadConfig(width=6, levels=(1, 2), pooled=True), IMAGE, TEXT)
    regions, words, mask = levels()
    scores = head(regions, words, mask)
    torch.testing.assert_close(
        scores.pop("similarity"), head.embed_images(regions) @ head.embed_texts(words, mask).T / 4
    )
    plain = HatHead(HatHeadConfig(width=6, levels=(1, 2)), IMAGE, TEXT)
    plain.load_state_dict(head.state_dict())
    for name, matrix in plain(regions, words, mask).items():
        assert torch.equal(matrix, scores[name])
