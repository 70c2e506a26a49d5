import pytest
import torch
from pydantic import ValidationError

from models.towers.config import ImageTowerConfig, TextTowerConfig
from models.towers.image import ImageTower
from models.towers.published import efficientnet_lite, load_image_tower, load_text_tower
from models.towers.text import TextTower

TINY_TEXT = {"width": 8, "heads": 2, "intermediate": 16, "vocab_size": 30, "max_positions": 16, "layers": 3}


@pytest.mark.parametrize(
    ("model", "stages", "sides"),
    [
        ("resnet18", (3, 4, 5), [4, 4, 2]),
        ("tf_efficientnet_lite0", (4, 5, 6), [4, 2, 2]),
        ("swin_tiny_patch4_window7_224", (2, 3, 4), [4, 4, 2]),
    ],
)
def test_any_timm_model_gives_regions_of_its_stages(model, stages, sides):
    tower = ImageTower(ImageTowerConfig(model=model, image_size=64, stages=stages, grid=4)).eval()
    regions = tower(torch.rand(2, 3, 64, 64))
    assert [tuple(level.shape) for level in regions] == [
        (2, side * side, width) for side, width in zip(sides, tower.widths, strict=True)
    ]


def test_regions_are_in_rows_of_the_picture():
    tower = ImageTower(ImageTowerConfig(model="resnet18", image_size=64, stages=(2,))).eval()
    images = torch.rand(1, 3, 64, 64)
    changed = images.clone()
    changed[:, :, :4, -4:] = 0  # the upper right corner
    difference = (tower(images)[0] - tower(changed)[0]).norm(dim=2)[0].reshape(16, 16)
    assert difference.argmax().item() == 15
    assert difference[-1].max() == 0


def test_a_stage_past_the_last_is_what_the_classifier_pools():
    config = {"model": "tf_efficientnet_lite0", "image_size": 64, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    tower = ImageTower(ImageTowerConfig(**config, stages=(6,))).eval()
    images = torch.rand(2, 3, 64, 64)
    want = tower.net.forward_head(tower.net.forward_features(images * 2 - 1))
    torch.testing.assert_close(tower(images)[0].mean(dim=1), want)
    with pytest.raises(ValueError, match="there is no stage 7"):
        ImageTower(ImageTowerConfig(**config, stages=(7,)))
    with pytest.raises(ValueError, match="timm cannot make no_such_model"):
        ImageTower(ImageTowerConfig(model="no_such_model"))


@pytest.mark.parametrize("kind", ["bert", "gru"])
def test_words_do_not_depend_on_padding(kind):
    torch.manual_seed(0)
    tower = TextTower(TextTowerConfig.model_validate(TINY_TEXT | {"kind": kind, "take": (1, 3)})).eval()
    ids = torch.tensor([[2, 7, 9, 3, 0, 0], [2, 5, 8, 11, 6, 3]])
    mask = (ids != 0).long()
    both = tower(ids, mask)
    alone = tower(ids[:1, :4], mask[:1, :4])
    assert [tuple(level.shape) for level in both] == [(2, 6, 8)] * 2
    for level, one in zip(both, alone, strict=True):
        torch.testing.assert_close(level[:1, :4], one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("level", [1, 2])
def test_upper_layers_go_on_where_the_lower_ones_stopped(level):
    torch.manual_seed(0)
    tower = TextTower(TextTowerConfig.model_validate(TINY_TEXT | {"take": (1, 2, 3)})).eval()
    ids = torch.tensor([[2, 7, 9, 3, 0, 0], [2, 5, 8, 11, 6, 3]])
    mask = (ids != 0).long()
    whole = tower(ids, mask)
    upper = tower.above(level)(whole[level - 1], mask)
    assert len(upper) == 3 - level
    for own, want in zip(upper, whole[level:], strict=True):
        torch.testing.assert_close(own[mask.bool()], want[mask.bool()])


def test_levels_that_nothing_lies_above():
    tower = TextTower(TextTowerConfig.model_validate(TINY_TEXT | {"take": (1, 3)}))
    with pytest.raises(ValueError, match="above level 2 of 2 there is none"):
        tower.above(2)
    with pytest.raises(ValueError, match="only a Transformer learns from a level on"):
        TextTower(TextTowerConfig.model_validate(TINY_TEXT | {"kind": "gru", "take": (1, 3)})).above(1)


def test_lite_names_become_timms():
    tower = ImageTower(ImageTowerConfig(model="tf_efficientnet_lite0", image_size=64, stages=(6,)))
    state = tower.net.state_dict()
    back = {}
    number = 0
    names = [name for name in state if not name.startswith("blocks.")]
    outer = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1"}
    for name in names:
        part, _, rest = name.partition(".")
        back[f"{outer[part]}.{rest}"] = torch.randn(()).expand(state[name].shape).to(state[name].dtype)
    first = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
    later = {"conv_pw": "_expand_conv", "bn1": "_bn0", "conv_dw": "_depthwise_conv", "bn2": "_bn1"}
    later |= {"conv_pwl": "_project_conv", "bn3": "_bn2"}
    for stage, blocks in enumerate(tower.net.blocks):
        for block in range(len(blocks)):
            prefix = f"blocks.{stage}.{block}."
            for name in [one for one in state if one.startswith(prefix)]:
                part, _, rest = name.removeprefix(prefix).partition(".")
                there = (later if stage else first)[part]
                back[f"_blocks.{number}.{there}.{rest}"] = (
                    torch.randn(()).expand(state[name].shape).to(state[name].dtype)
                )
            number += 1
    load_image_tower(tower, back | {"_fc.weight": torch.zeros(1000, 1280)})
    assert torch.equal(tower.net.state_dict()["conv_stem.weight"], back["_conv_stem.weight"])
    assert torch.equal(
        tower.net.state_dict()["blocks.6.0.bn3.running_mean"], back[f"_blocks.{number - 1}._bn2.running_mean"]
    )
    with pytest.raises(ValueError, match=r"lack bn2\.weight"):
        load_image_tower(tower, {name: value for name, value in back.items() if name != "_bn1.weight"})
    with pytest.raises(ValueError, match="no weight of an EfficientNet-Lite"):
        efficientnet_lite(back | {"_blocks.99._bn1.bias": torch.zeros(1)}, [1])


def test_bert_may_be_cut_short_but_not_lack_anything():
    whole = TextTower(TextTowerConfig.model_validate(TINY_TEXT | {"take": (3,)}))
    short = TextTower(TextTowerConfig.model_validate(TINY_TEXT | {"layers": 2, "take": (2,)})).eval()
    state = {f"bert.{name}": value for name, value in whole.net.state_dict().items()}
    load_text_tower(short, state | {"cls.x": torch.zeros(1), "bert.embeddings.position_ids": torch.zeros(1)})
    name = "encoder.layer.1.output.dense.weight"
    assert torch.equal(short.net.state_dict()[name], whole.net.state_dict()[name])
    del state["bert.embeddings.LayerNorm.bias"]
    with pytest.raises(ValueError, match=r"lack embeddings\.LayerNorm\.bias"):
        load_text_tower(short, state)
    state["bert.embeddings.LayerNorm.beta"] = torch.zeros(9)
    with pytest.raises(ValueError, match=r"embeddings\.LayerNorm\.bias is \(9,\)"):
        load_text_tower(short, state)


def test_towers_come_from_a_run_of_this_project_too():
    texts = [TextTower(TextTowerConfig.model_validate(TINY_TEXT | {"take": (3,)})) for _ in range(2)]
    images = [ImageTower(ImageTowerConfig(model="resnet18", image_size=64, stages=(4,))) for _ in range(2)]
    run = {f"text.{name}": value for name, value in texts[0].state_dict().items()}
    run |= {f"image.{name}": value for name, value in images[0].state_dict().items()}
    run["head.scale"] = torch.zeros(())
    load_text_tower(texts[1], run)
    load_image_tower(images[1], run)
    for own, other in (texts, images):
        want = other.state_dict()
        assert all(torch.equal(value, want[name]) for name, value in own.state_dict().items())
    del run["text.net.embeddings.LayerNorm.bias"]
    with pytest.raises(ValueError, match=r"lack embeddings\.LayerNorm\.bias"):
        load_text_tower(texts[1], run)


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        (ImageTowerConfig, {"stages": (3, 2)}, "the lowest first"),
        (TextTowerConfig, {"take": (4, 13)}, "12 layers"),
        (TextTowerConfig, {"width": 100}, "no multiple of heads"),
        (TextTowerConfig, {"kind": "gru", "width": 9}, "is odd"),
    ],
)
def test_sizes_must_agree(model, changes, said):
    with pytest.raises(ValidationError, match=said):
        model.model_validate(changes)
