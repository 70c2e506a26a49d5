import pytest
import torch

from models.vitr.config import VitrConfig
from models.vitr.lseh import Pool, lseh_loss, semantic_vectors
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


@pytest.mark.parametrize("relations", [True, False])
@pytest.mark.parametrize("fusion", ["self", "neighbour"])
@pytest.mark.parametrize(
    "degenerate", ["equal regions", "zero regions", "zero words", "zero globals", "one word", "all zero"]
)
def test_degenerate_inputs_give_finite_scores_and_gradients(degenerate, fusion, relations):
    torch.manual_seed(0)
    model = Vitr(VitrConfig(**SMALL, fusion=fusion, relations=relations))
    regions, image_global, words, mask, text_global = inputs()
    if degenerate == "equal regions":
        regions = regions[:, :1].expand(-1, 5, -1).clone()
    if degenerate in ("zero regions", "all zero"):
        regions = torch.zeros_like(regions)
        torch.nn.init.zeros_(model.region_projection.bias)
    if degenerate in ("zero words", "all zero"):
        words = torch.zeros_like(words)
        torch.nn.init.zeros_(model.word_projection.bias)
    if degenerate in ("zero globals", "all zero"):
        image_global, text_global = torch.zeros_like(image_global), torch.zeros_like(text_global)
    if degenerate == "one word":
        words, mask = words[:, :1], mask[:, :1]
    given = [regions, image_global, words, text_global]
    for one in given:
        one.requires_grad_()
    scores = model(regions, image_global, words, mask, text_global)
    loss = lseh_loss(scores[:, :2], torch.zeros(2, 3), torch.arange(2)).sum() + scores.sum()
    loss.backward()
    assert scores.isfinite().all()
    for weight in [*model.parameters(), *given]:
        if weight.grad is not None:
            assert weight.grad.isfinite().all()
            assert weight.grad.abs().max() < 1e4
    assert any(weight.grad is not None for weight in model.parameters())


def test_words_beyond_the_cap_play_no_part():
    """A caption that is cut scores as the words that are left."""
    torch.manual_seed(0)
    model = Vitr(VitrConfig(**SMALL))
    regions, image_global, words, mask, text_global = inputs()
    whole = model(regions, image_global, words, mask, text_global)
    cut = model(regions, image_global, words[:, :3], mask[:, :3], text_global)
    torch.testing.assert_close(cut[:, [0, 2]], whole[:, [0, 2]])  # one word, and two
    assert not torch.allclose(cut[:, 1], whole[:, 1])
    words[1, 3] = 99
    torch.testing.assert_close(model(regions, image_global, words[:, :3], mask[:, :3], text_global), cut)


def test_the_last_state_is_the_gru_s_last_over_real_nodes():
    torch.manual_seed(0)
    model = Vitr(VitrConfig(**SMALL, read_state="last"))
    nodes, mask = torch.randn(2, 3, 5, 4), inputs()[3]
    scores = model.read(nodes, mask)
    for caption, length in enumerate(mask.sum(dim=1).tolist()):
        last = model.gru(nodes[:, caption, : length + 1])[1][0]  # the global node and the words
        torch.testing.assert_close(scores[:, caption], model.score(last)[:, 0].sigmoid())
    first = Vitr(VitrConfig(**SMALL))
    first.load_state_dict(model.state_dict())
    assert not torch.allclose(first.read(nodes, mask), scores)


def test_shared_repetitions_are_separate_ones_of_equal_weights():
    torch.manual_seed(0)
    shared = Vitr(VitrConfig(**SMALL, share_steps=True))
    separate = Vitr(VitrConfig(**SMALL))
    assert (len(shared.reasoning), len(shared.fusion)) == (1, 1)
    assert (len(separate.reasoning), len(separate.fusion)) == (4, 2)
    weights = shared.state_dict()
    for name in separate.state_dict():
        part, _, rest = name.partition(".")
        if part in ("reasoning", "fusion"):
            weights[name] = weights[f"{part}.0.{rest.partition('.')[2]}"]
    given = inputs()
    separate.load_state_dict(weights)
    torch.testing.assert_close(shared(*given), separate(*given))


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


def test_the_hardest_negative_is_looked_for_in_the_pool_too():
    generator = torch.Generator().manual_seed(0)
    whole, semantic = torch.rand(6, 6, generator=generator), torch.randn(6, 4, generator=generator)
    ids = torch.tensor([0, 1, 2, 3, 1, 5])  # the fifth pair is of a picture that the batch has as well
    pool = Pool(whole[:3, 3:], whole[3:, :3].T, semantic[3:], ids[3:])
    found = lseh_loss(whole[:3, :3], semantic[:3], ids[:3], pool)
    torch.testing.assert_close(found, lseh_loss(whole, semantic, ids)[:3])
    assert (found >= lseh_loss(whole[:3, :3], semantic[:3], ids[:3])).all()
    own = Pool(whole[:3, 4:5], whole[4:5, :3].T, semantic[4:5], ids[4:5])
    torch.testing.assert_close(
        lseh_loss(whole[:3, :3], semantic[:3], ids[:3], own)[1], lseh_loss(whole[:3, :3], semantic[:3], ids[:3])[1]
    )


def test_too_many_singular_values_are_refused():
    with pytest.raises(ValueError, match="choose at most 1"):
        semantic_vectors(["a cat", "a dog"], 2)
