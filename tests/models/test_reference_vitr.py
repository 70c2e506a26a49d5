"""VITR against numbers worked out from the paper's equations, in float64 to 1e-9."""

import pytest
import torch

from models.vitr.config import VitrConfig
from models.vitr.lseh import lseh_loss, semantic_vectors
from models.vitr.model import Vitr, heat_map


@pytest.fixture(scope="module")
def expected(reference):
    return torch.load(reference / "vitr" / "expected.pt", weights_only=True)


def build(expected, fusion="self"):
    sizes = expected["config"]
    config = VitrConfig(
        regions=sizes["regions"],
        global_width=sizes["d1"],
        region_width=sizes["d2"],
        local_width=sizes["d3"],
        join_width=sizes["d4"],
        reasoning_steps=sizes["reasoning_steps"],
        fusion_steps=sizes["fusion_steps"],
        gamma=sizes["gamma"],
        fusion=fusion,
    )
    model = Vitr(config).double()
    model.load_state_dict(expected["weights"])
    lengths = torch.tensor(expected["lengths"])
    mask = torch.arange(expected["words"].shape[1])[None] < lengths[:, None]
    return model, mask


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("fusion", ["self", "neighbour"])
def test_scores_of_all_pairs(expected, fusion):
    model, mask = build(expected, fusion)
    scores = model(expected["regions"], expected["image_global"], expected["words"], mask, expected["text_global"])
    close(scores, expected["scores"][fusion])


def test_every_step_of_one_pair(expected):
    model, mask = build(expected)
    pair = expected["pair_0_0"]
    reasoned = model.region_projection(expected["regions"][:1])
    for step, want in zip(model.reasoning, pair["after_each_step"], strict=True):
        reasoned = step(reasoned)
        close(reasoned[0], want)
    close(model.reason(expected["regions"][:1])[0], pair["reasoned"])
    length = expected["lengths"][0]
    mask = mask[:1, :length]
    words = model.word_projection(expected["words"][:1, :length])
    alignment = model.align(reasoned, words, mask)
    close(alignment.attention[0, 0], pair["attention"])
    close(alignment.aligned[0, 0], pair["aligned"])
    nodes = model.join(alignment.aligned, words, expected["image_global"][:1], expected["text_global"][:1])
    close(nodes[0, 0], pair["joined"])
    fused = model.fuse(nodes, mask)
    close(fused[0, 0], pair["fused"])
    close(model.read(fused, mask)[0, 0], pair["score"])
    close(heat_map(alignment.attention, mask[None])[0, 0], pair["heat"])


def test_lseh_per_pair(expected):
    lseh = expected["lseh"]
    vectors = semantic_vectors(lseh["captions"], lseh["singular_values"])
    unit = torch.nn.functional.normalize(vectors, dim=1)
    close(unit @ unit.T, lseh["semantic_similarity"])
    loss = lseh_loss(
        lseh["scores"],
        vectors,
        torch.arange(len(lseh["captions"])),
        margin=lseh["margin"],
        temperature=lseh["temperature"],
    )
    close(loss, lseh["loss_per_pair"])
    close(loss.sum(), torch.tensor(lseh["loss_sum"], dtype=torch.float64))
