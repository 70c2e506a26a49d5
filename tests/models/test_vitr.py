import pytest
import torch

from models.vitr.config import VitrConfig
from models.vitr.lseh import lseh_loss, semantic_vectors
from models.vitr.model import Vitr, heat_map

SMALL = {"regions": 5, "global_width": 6, "region_width": 7, "local_width": 8, "join_width": 4}


def inputs(pictures=2, captions=3, words=4):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    mask = torch.arange(words)[None] < torch.tensor([1, words, 2][:captions])[:, None]
    return [draw(pictures, 5, 7), draw(pictures, 6), draw(captions, words, 6), mask, draw(captions, 6)]


@pytest.mark.parametrize("fusion", ["self", "neighbour"])
@pytest.mark.parametrize("read_state", ["first", "last"])
@pytest.mark.parametrize("share_steps", [False, True])
@pytest.mark.parametrize("relations", [True, False])
def test_padding_changes_nothing(fusion, read_state, share_steps, relations):
    torch.manual_seed(0)
    readings = {"fusion": fusion, "read_state": read_state, "share_steps": share_steps, "relations": relations}
    model = Vitr(VitrConfig(**SMALL, **readings))
    regions, image_global, words, mask, text_global = inputs()
    scores = model(regions, image_global, words, mask, text_global)
    assert scores.shape == (2, 3)
    longer = torch.cat([words, torch.full((3, 2, 6), 9.0)], dim=1)
    longer_mask = torch.cat([mask, torch.zeros(3, 2, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(model(regions, image_global, longer, longer_mask, text_global), scores)
    alone = model(regions[1:], image_global[1:], words[2:, :2], mask[2:, :2], text_global[2:])
    torch.testing.assert_close(alone, scores[1:, 2:])


@pytest.mark.parametrize("degenerate", ["equal regions", "zero regions", "zero words", "zero globals"])
def test_degenerate_inputs_give_finite_scores_and_gradients(degenerate):
    torch.manual_seed(0)
    model = Vitr(VitrConfig(**SMALL))
    regions, image_global, words, mask, text_global = inputs()
    if degenerate == "equal regions":
        regions = regions[:, :1].expand(-1, 5, -1).clone()
    elif degenerate == "zero regions":
        regions = torch.zeros_like(regions)
        torch.nn.init.zeros_(model.region_projection.bias)
    elif degenerate == "zero words":
        words = torch.zeros_like(words)
        torch.nn.init.zeros_(model.word_projection.bias)
    else:
        image_global, text_global = torch.zeros_like(image_global), torch.zeros_like(text_global)
    scores = model(regions, image_global, words, mask, text_global)
    scores.sum().backward()
    assert scores.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)


def test_wrong_sizes_and_empty_captions_are_refused():
    model = Vitr(VitrConfig(**SMALL))
    regions, image_global, words, mask, text_global = inputs()
    with pytest.raises(ValueError, match="regions are"):
        model(regions[:, :4], image_global, words, mask, text_global)
    with pytest.raises(ValueError, match="no word"):
        model(regions, image_global, words, torch.zeros_like(mask), text_global)
    with pytest.raises(ValueError, match="no word"):
        Vitr(VitrConfig(**SMALL, relations=False))(regions, image_global, words, torch.zeros_like(mask), text_global)


def test_the_heat_of_equal_regions_is_zero():
    assert heat_map(torch.full((5, 3), 0.2), torch.ones(3)).tolist() == [0.0] * 5


def test_lseh_leaves_captions_of_one_picture_alone():
    scores = torch.tensor([[0.5, 0.9, 0.1], [0.9, 0.5, 0.1], [0.1, 0.1, 0.5]])
    semantic = torch.eye(3)
    loss = lseh_loss(scores, semantic, torch.tensor([7, 7, 8]), margin=0.2, temperature=0.0)
    torch.testing.assert_close(loss, torch.zeros(3))
    apart = lseh_loss(scores, semantic, torch.tensor([1, 2, 3]), margin=0.2, temperature=0.0)
    torch.testing.assert_close(apart, torch.tensor([1.2, 1.2, 0.0]))
    with pytest.raises(ValueError, match="one picture only"):
        lseh_loss(scores, semantic, torch.tensor([1, 1, 1]))


def test_too_many_singular_values_are_refused():
    with pytest.raises(ValueError, match="choose at most 1"):
        semantic_vectors(["a cat", "a dog"], 2)
