import pytest
import torch

from models.dual.config import DualConfig
from models.dual.model import DualHead
from models.embedding.config import VseConfig, VsrnConfig
from models.embedding.vse import GeneralisedPooling, VseHead
from models.embedding.vsrn import RegionGraph, VsrnHead

HEADS = {
    "dual": lambda: DualHead(DualConfig(width=6), [5, 7], [5, 3]),
    "dual of levels": lambda: DualHead(DualConfig(width=6, levels=(1, 2), dropout=0.5), [5, 7], [5, 3]),
    "vse": lambda: VseHead(VseConfig(width=6, position_width=4), [5, 7], [5, 3]),
    "vsrn": lambda: VsrnHead(VsrnConfig(width=6, reasoning_steps=2), [5, 7], [5, 3]),
}


def members(*lengths, width=5):
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    return torch.randn(len(lengths), max(lengths), width, generator=torch.Generator().manual_seed(0)), mask


def test_equal_weights_are_the_mean_and_all_on_the_first_the_maximum(monkeypatch):
    pooling = GeneralisedPooling(4)
    torch.nn.init.zeros_(pooling.score.weight)
    values, mask = members(1, 4, 3)
    means = torch.stack([row[own].mean(dim=0) for row, own in zip(values, mask, strict=True)])
    torch.testing.assert_close(pooling(values, mask), means)
    monkeypatch.setattr(pooling, "weights", lambda counts: torch.eye(int(counts.max()))[:1].expand(len(counts), -1))
    highest = torch.stack([row[own].amax(dim=0) for row, own in zip(values, mask, strict=True)])
    assert torch.equal(pooling(values, mask), highest)


def test_weights_are_shares_of_the_members_there_are():
    torch.manual_seed(0)
    weights = GeneralisedPooling(4).weights(torch.tensor([3, 1, 5, 3]))
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(4))
    assert torch.equal(weights[0], weights[3])
    assert torch.equal(weights > 0, torch.arange(5)[None] < torch.tensor([3, 1, 5, 3])[:, None])
    assert weights[2].unique().numel() == 5, "each rank has its own"


def test_pooling_does_not_see_the_order_of_its_members():
    torch.manual_seed(0)
    pooling = GeneralisedPooling(4)
    values, mask = members(4)
    torch.testing.assert_close(pooling(values[:, [2, 0, 3, 1]], mask), pooling(values, mask))


def test_a_graph_of_no_weight_passes_its_regions():
    regions = torch.randn(2, 3, 6)
    assert torch.equal(RegionGraph(6)(regions), regions)


def test_a_graph_is_its_equation():
    torch.manual_seed(0)
    graph = RegionGraph(6).double()
    torch.nn.init.normal_(graph.out.weight)
    regions = torch.randn(1, 3, 6, dtype=torch.double)
    want = []
    for i in range(3):
        seen = sum(
            (graph.query(regions[0, i]) @ graph.key(regions[0, j])) / 3 * graph.value(regions[0, j]) for j in range(3)
        )
        want.append(graph.out(seen) + regions[0, i])
    torch.testing.assert_close(graph(regions)[0], torch.stack(want))


@pytest.mark.parametrize("name", HEADS)
def test_padding_and_company_change_no_score(name):
    torch.manual_seed(0)
    head = HEADS[name]().eval()
    regions = torch.randn(2, 4, 7)
    words, mask = members(1, 4, 2, width=3)
    scores = head([torch.zeros(2, 1, 5), regions], [torch.zeros(3, 1, 5), words], mask)["similarity"]
    assert scores.shape == (2, 3)
    assert scores.abs().max() <= 1 + 1e-6
    alone = head([torch.zeros(1, 1, 5), regions[1:]], [torch.zeros(1, 1, 5), words[2:, :2]], mask[2:, :2])
    torch.testing.assert_close(alone["similarity"], scores[1:, 2:])


@pytest.mark.parametrize("name", HEADS)
def test_equal_and_zero_regions_give_finite_gradients(name):
    torch.manual_seed(0)
    head = HEADS[name]().train()
    words, mask = members(1, 2, width=3)
    for regions in (torch.ones(2, 4, 7), torch.zeros(2, 4, 7)):
        head.zero_grad()
        head([regions[..., :5], regions], [torch.ones(2, 2, 5), words], mask)["similarity"].sum().backward()
        assert all(weight.grad.isfinite().all() for weight in head.parameters() if weight.grad is not None)


def test_a_training_step_leaves_some_out_and_never_all():
    torch.manual_seed(0)
    head = VseHead(VseConfig(width=6, position_width=4, drop=0.9), [7], [3])
    mask = torch.arange(5)[None] < torch.tensor([1, 5] * 50)[:, None]
    some = head.train()._some(mask)
    assert not (some & ~mask).any()
    assert some.any(dim=1).all()
    assert some.sum() < 0.6 * mask.sum()
    assert torch.equal(head.eval()._some(mask), mask)


def test_levels_are_read_side_by_side_each_normalised():
    torch.manual_seed(0)
    head = DualHead(DualConfig(width=6, levels=(1, 3)), [5, 7, 4], [5, 3, 2])
    regions = [torch.randn(2, 3, width) for width in (5, 7, 4)]
    vectors = head.embed_images(regions)
    assert torch.equal(vectors, head.embed_images([regions[0], torch.zeros(2, 3, 7), regions[2]])), "the second is not"
    torch.testing.assert_close(vectors, head.embed_images([9 * regions[0], *regions[1:]]), atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="levels names 3, the towers give 2 levels"):
        DualHead(DualConfig(width=6, levels=(1, 3)), [5, 7, 4], [5, 3])
