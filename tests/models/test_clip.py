"""CLIP among the towers: its vectors are transformers' own, whatever layout its weights come in."""

import pytest
import timm
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPConfig, CLIPModel

from models.dual.config import DualConfig
from models.dual.model import DualHead
from models.towers.clip import MEAN, STD, ClipImageTower, ClipTextTower
from models.towers.config import ClipConfig, ImageTowerConfig
from models.towers.image import ImageTower
from models.towers.published import load_clip, load_image_tower
from models.vitr.head import VitrHead
from models.vitr.head_config import VitrHeadConfig

SIZES = {"patch_size": 16, "image_layers": 2, "image_width": 16, "image_heads": 2, "text_layers": 3, "text_width": 12}
SIZES |= {"text_heads": 3, "joint_width": 8, "vocab_size": 40, "max_positions": 12}
CLIP = ClipConfig(**SIZES)
IMAGE = ImageTowerConfig(model="resnet18", image_size=32, stages=(5,))


@pytest.fixture
def published(tmp_path):
    """A random CLIP of transformers, and its safetensors file."""
    torch.manual_seed(1)
    vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 16, "projection_dim": 8}
    text = {"hidden_size": 12, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3}
    text |= {"vocab_size": 40, "max_position_embeddings": 12, "projection_dim": 8, "eos_token_id": 39}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()
    for weight in model.parameters():  # biases and norms too, which start at 0 and 1
        nn.init.normal_(weight, std=0.3)
    save_file(model.state_dict(), tmp_path / "clip.safetensors")
    return model, load_file(tmp_path / "clip.safetensors")


def towers(**changes):
    torch.manual_seed(0)
    config = ClipConfig(**SIZES | changes)
    return ClipImageTower(IMAGE, config).eval(), ClipTextTower(config).eval()


def texts():
    ids = torch.tensor([[38, 5, 9, 39, 0, 0], [38, 7, 39, 0, 0, 0], [38, 5, 6, 7, 8, 39]])
    return ids, torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0], [1] * 6])


def as_open_clip(state):
    """The same weights in open_clip's layout, written out from its published names."""
    found = {"logit_scale": state["logit_scale"]}
    outer = {
        "visual.class_embedding": "vision_model.embeddings.class_embedding",
        "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
        "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
        "positional_embedding": "text_model.embeddings.position_embedding.weight",
        "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    }
    for side, prefix, norms in (
        ("vision", "visual.", {"ln_pre": "pre_layrnorm", "ln_post": "post_layernorm"}),
        ("text", "", {"ln_final": "final_layer_norm"}),
    ):
        for own, theirs in norms.items():
            outer |= {f"{prefix}{own}.{part}": f"{side}_model.{theirs}.{part}" for part in ("weight", "bias")}
        layers = 1 + max(int(name.split(".")[3]) for name in state if name.startswith(f"{side}_model.encoder"))
        for number in range(layers):
            theirs, own = f"{side}_model.encoder.layers.{number}", f"{prefix}transformer.resblocks.{number}"
            for part in ("weight", "bias"):
                thirds = [state[f"{theirs}.self_attn.{one}_proj.{part}"] for one in "qkv"]
                found[f"{own}.attn.in_proj_{part}"] = torch.cat(thirds)
                for a, b in (
                    ("attn.out_proj", "self_attn.out_proj"),
                    ("ln_1", "layer_norm1"),
                    ("ln_2", "layer_norm2"),
                    ("mlp.c_fc", "mlp.fc1"),
                    ("mlp.c_proj", "mlp.fc2"),
                ):
                    outer[f"{own}.{a}.{part}"] = f"{theirs}.{b}.{part}"
    found |= {own: state[theirs] for own, theirs in outer.items()}
    found["visual.proj"] = state["visual_projection.weight"].T
    found["text_projection"] = state["text_projection.weight"].T
    return found


@pytest.mark.parametrize("layout", ["transformers", "open_clip", "a run of this project"])
def test_the_vectors_are_the_published_model_s_own(layout, published):
    model, state = published
    image, text = towers()
    if layout == "open_clip":
        state = as_open_clip(state)
    elif layout != "transformers":
        load_clip(image, text, state)
        own = {f"image.{name}": value for name, value in image.state_dict().items()}
        state = own | {f"text.{name}": value for name, value in text.state_dict().items()} | {"head.x": torch.ones(1)}
        image, text = towers()
    load_clip(image, text, state)
    images, (ids, mask) = torch.rand(2, 3, 32, 32), texts()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    want = model(input_ids=ids, attention_mask=mask, pixel_values=(images - mean) / std)
    vectors, regions = image(images)
    captions, words = text(ids, mask)
    assert (vectors.shape, regions.shape) == ((2, 1, 8), (2, 1, 512))
    assert (captions.shape, words.shape) == ((3, 1, 8), (3, 6, 8))
    head = DualHead(DualConfig(projection=False), image.widths, text.widths)
    torch.testing.assert_close(head.embed_images([vectors, regions]), want.image_embeds)
    torch.testing.assert_close(head.embed_texts([captions, words], mask), want.text_embeds)
    torch.testing.assert_close(words[0, 3], captions[0, 0])


def test_open_clip_s_image_encoder_is_timm_s(published):
    """timm reads the same file with code of its own."""
    _, state = published
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 8}
    net = timm.create_model("vit_base_patch16_clip_quickgelu_224", pretrained=False, **sizes).eval()
    from timm.models.vision_transformer import checkpoint_filter_fn

    visual = {name: value for name, value in as_open_clip(state).items() if name.startswith("visual.")}
    net.load_state_dict(checkpoint_filter_fn(visual, net))
    image, text = towers()
    load_clip(image, text, as_open_clip(state))
    images = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    torch.testing.assert_close(image(images)[0][:, 0], net((images - mean) / std), atol=1e-5, rtol=1e-5)


def test_states_are_the_words_where_they_are_as_wide(published):
    _, text = towers(words="states", joint_width=12)
    assert text.widths == [12, 12]
    ids, mask = texts()
    captions, words = text(ids, mask)
    torch.testing.assert_close(text.net.text_projection(words[1, 2]), captions[1, 0])
    with pytest.raises(ValidationError, match="use projected"):
        ClipConfig(**SIZES, words="states")
    alone = ClipConfig(**SIZES, alone=True)
    assert (ClipImageTower(IMAGE, alone).widths, ClipTextTower(alone).widths) == ([8], [8])


def test_padding_changes_no_word(published):
    _, text = towers()
    ids, mask = texts()
    for own, both in zip(text(ids[:1, :4], mask[:1, :4]), text(ids, mask), strict=True):
        torch.testing.assert_close(both[:1, : own.shape[1]], own, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: {n: v for n, v in s.items() if not n.startswith("text")}, "hold no text encoder of a CLIP"),
        (lambda s: {n: v for n, v in s.items() if not n.startswith("vis")}, "hold no image encoder of a CLIP"),
        (lambda s: {n: v for n, v in s.items() if n != "text_projection.weight"}, "lack text_projection.weight"),
        (lambda s: s | {"more.weight": torch.ones(1)}, "hold the unknown more.weight"),
        (lambda s: s | {"visual_projection.weight": torch.ones(8, 3)}, r"is \(8, 3\) in the weights, \(8, 16\) here"),
        (lambda s: {"visual.layer1.0.conv1.weight": torch.ones(1)}, "no weight of a CLIP whose image encoder is a ViT"),
        (lambda s: {"image.net.conv1.weight": torch.ones(1)}, "hold no image encoder of a CLIP"),
    ],
)
def test_weights_that_are_not_the_whole_clip_are_refused(change, said, published):
    with pytest.raises(ValueError, match=said):
        load_clip(*towers(), change(published[1]))


def test_a_clip_without_its_own_file_s_sizes_is_refused():
    with pytest.raises(ValidationError, match="image_width 16 is no multiple of image_heads 3"):
        ClipConfig(**SIZES | {"image_heads": 3})
    with pytest.raises(ValueError, match=r"image_size 40 is no multiple of clip.patch_size 16"):
        ClipImageTower(ImageTowerConfig(model="resnet18", image_size=40, stages=(5,)), CLIP)
    with pytest.raises(ValueError, match="set learn_above to 0"):
        towers()[1].above(1)


def test_clip_s_rn101_gives_49_regions_of_2048():
    """VITR's local encoder, without the pooling that its maps do not need."""
    with torch.device("meta"):  # shapes and names alone
        tower = ImageTower(ImageTowerConfig(model="resnet101_clip", image_size=224, stages=(5,))).eval()
        assert tower.widths == [2048]
        assert tower(torch.rand(1, 3, 224, 224))[0].shape == (1, 49, 2048)
    state = timm.create_model("resnet50_clip", pretrained=False).state_dict()
    assert any(name.startswith("head.") for name in state)
    small = ImageTower(ImageTowerConfig(model="resnet50_clip", image_size=64, stages=(5,))).eval()
    load_image_tower(small, state)
    torch.testing.assert_close(small.net.state_dict()["stem.conv1.conv.weight"], state["stem.conv1.conv.weight"])


def test_convnext_loads_without_its_head():
    tower = ImageTower(ImageTowerConfig(model="convnext_atto", image_size=64, stages=(4,)))
    load_image_tower(tower, timm.create_model("convnext_atto", pretrained=False).state_dict())


def test_vitr_reads_clip_s_own_vectors(published):
    image, text = towers()
    load_clip(image, text, published[1])
    config = VitrHeadConfig(regions=1, local_width=8, join_width=4, projection=False, temperature=0.01)
    head = VitrHead(config, image.widths, text.widths).eval()
    assert not {name for name in head.state_dict() if name.startswith("dual.")} - {"dual.log_scale"}
    ids, mask = texts()
    regions, words = image(torch.rand(2, 3, 32, 32)), text(ids, mask)
    found = head(regions, words, mask.bool())
    assert found["vitr"].shape == found["similarity"].shape == (2, 3)
    want = torch.cosine_similarity(regions[0], words[0][:, 0][None], dim=2)
    torch.testing.assert_close(found["similarity"], want)
    assert head.dual.scale.item() == pytest.approx(100, rel=1e-4)
    assert found["vitr"].isfinite().all()
    with pytest.raises(ValueError, match="takes towers with `clip`"):
        VitrHead(config, [512, 8], [8, 8])
    with pytest.raises(ValueError, match="VITR has one d1"):
        VitrHead(config, [8, 512], [8, 9])
