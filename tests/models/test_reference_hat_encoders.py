"""Swin stages and recalls against numbers made by HAT's published code."""

import pytest
import torch

from components.evaluation.retrieval import recall_at, retrieval_ranks
from models.hat.config import HatHeadConfig
from models.hat.model import HatDirection
from models.hat.published import load_published
from models.towers.config import ImageTowerConfig, TextTowerConfig
from models.towers.image import ImageTower
from models.towers.published import load_image_tower
from models.towers.text import TextTower


@pytest.fixture(scope="module")
def expected(reference):
    return torch.load(reference / "hat" / "expected.pt", weights_only=True)


@pytest.fixture(scope="module")
def checkpoint(reference):
    return torch.load(reference / "hat" / "swin_checkpoint.pth", weights_only=True)


def swin(expected, stages):
    sizes = expected["swin"]["config"]
    keys = ("patch_size", "embed_dim", "depths", "num_heads", "window_size")
    config = ImageTowerConfig(
        model="swin_tiny_patch4_window7_224",
        image_size=sizes["img_size"],
        stages=stages,
        options={key: tuple(sizes[key]) if isinstance(sizes[key], list) else sizes[key] for key in keys},
    )
    return ImageTower(config)


def published_pixels(tower, images):
    """The reference pictures are normalised already; the tower would do it again."""
    return images * tower.std + tower.mean


def test_swin_stages_from_the_old_layout(expected, checkpoint):
    tower = swin(expected, (1, 2, 3, 4)).eval()
    plain = {name: value for name, value in checkpoint.items() if not name.startswith("norm_")}
    load_image_tower(tower, plain)
    with torch.inference_mode():
        stages = tower(published_pixels(tower, expected["swin"]["image"]))
    names = ["norm_0", "norm_1", "norm_2", "norm"]
    for found, name, want in zip(stages, names, expected["swin"]["stages"], strict=True):
        weight, bias = checkpoint[f"{name}.weight"], checkpoint[f"{name}.bias"]
        normed = torch.nn.functional.layer_norm(found, weight.shape, weight, bias)
        torch.testing.assert_close(normed, want, atol=1e-5, rtol=1e-5)


def test_a_lightning_state_dict_sets_towers_and_head(expected, checkpoint):
    image = swin(expected, (2, 3, 4)).eval()
    text = TextTower(
        TextTowerConfig(layers=3, take=(1, 2, 3), width=8, heads=2, intermediate=16, vocab_size=40, max_positions=16)
    )
    head = HatDirection(HatHeadConfig(width=12), "t2i", image.widths, text.widths).eval()
    state = {f"vit_model.{name}": value for name, value in checkpoint.items()}
    state |= {f"text_transformer.{name}": value + 1 for name, value in text.net.state_dict().items()}
    for side, widths in (("image", image.widths), ("text", text.widths)):
        for suffix, width in zip(("_1", "_2", ""), widths, strict=True):
            state[f"cross_modal_{side}_transform{suffix}.weight"] = torch.randn(12, width)
            state[f"cross_modal_{side}_transform{suffix}.bias"] = torch.randn(12)
    load_published(state, image, text, head)
    with torch.inference_mode():
        regions = head.project_images(image(published_pixels(image, expected["swin"]["image"])))
    for level, suffix in enumerate(("_1", "_2", "")):
        weight, bias = (state[f"cross_modal_image_transform{suffix}.{part}"] for part in ("weight", "bias"))
        want = expected["swin"]["stages"][level + 1] @ weight.T + bias
        torch.testing.assert_close(regions[level], want, atol=1e-4, rtol=1e-5)
    with pytest.raises(ValueError, match="extra is no tensor of a published HAT"):
        load_published(state | {"extra": torch.zeros(1)}, image, text, head)
    del state["cross_modal_text_transform.bias"]
    with pytest.raises(ValueError, match=r"text\.2\.bias"):
        load_published(state, image, text, head)


def test_recalls(expected):
    recall = expected["recall"]
    scores, per_picture = recall["sims"].numpy(), recall["captions_per_image"]
    picture_of = torch.arange(len(scores)).repeat_interleave(per_picture).numpy()
    ranks = retrieval_ranks(scores, scores.T, picture_of)
    names = recall["names"]
    for found, want in ((ranks.text, recall["i2t"]), (ranks.image, recall["t2i"])):
        for k in (1, 5, 10):
            assert recall_at(found, k) == pytest.approx(want[names.index(f"r{k}")])
        assert found.mean() == pytest.approx(want[names.index("mean_rank")])
