"""Pre-training that starts from a ViT and a BERT, as timm and transformers write them."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel

from components.io.errors import UserError
from components.training.starting_points import start
from models.albef.config import AlbefConfig
from models.albef.pretraining import AlbefPretraining

CONFIG = AlbefConfig(
    image_size=32,
    patch_size=8,
    vision_width=32,
    vision_depth=2,
    vision_heads=2,
    vocab_size=110,
    text_width=32,
    text_layers=3,
    fusion_layers=1,
    text_heads=2,
    text_intermediate=48,
    max_positions=16,
    embed_dim=8,
    queue_size=4,
    text_dropout=0.0,
)
VIT = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 5,
    "norm_layer": partial(nn.LayerNorm, eps=1e-6),
}


def bert_config(layers: int = 4) -> BertConfig:
    return BertConfig(
        vocab_size=110,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
    )


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str, dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    vit, bert = VisionTransformer(**VIT), BertForMaskedLM(bert_config())
    torch.save({"model": vit.state_dict()}, tmp_path / "deit.pth")
    state = {name: value.clone().contiguous() for name, value in bert.state_dict().items()}
    save_file(state, tmp_path / "bert.safetensors")
    return str(tmp_path / "deit.pth"), str(tmp_path / "bert.safetensors"), state


def test_both_encoders_start_and_the_teacher_with_them(sources) -> None:
    vision, text, state = sources
    torch.manual_seed(1)
    model = AlbefPretraining(CONFIG)
    cross = model.text_encoder.bert.layers[2].crossattention.self.key.weight.clone()
    start(model, vision, text)
    own = model.state_dict()
    for name in ("bert.embeddings.word_embeddings.weight", "bert.encoder.layer.2.output.dense.weight"):
        assert torch.equal(own[f"text_encoder.{name}"], state[name])
    assert torch.equal(own["text_encoder.cls.predictions.bias"], state["cls.predictions.bias"])
    assert own["visual_encoder.pos_embed"].shape == (1, 17, 32), "resized from 2 by 2 patches"
    assert torch.equal(own["text_encoder.bert.encoder.layer.2.crossattention.self.key.weight"], cross)
    for name, value in model.teacher.state_dict().items():
        assert torch.equal(value, own[name]), name


def test_text_features_are_berts(sources) -> None:
    """The text-only layers give what transformers' own BERT gives after as many layers."""
    _, text, state = sources
    model = AlbefPretraining(CONFIG).eval()
    start(model, None, text)
    bert = BertModel(bert_config(), add_pooling_layer=False).eval()
    bert.load_state_dict({k.removeprefix("bert."): v for k, v in state.items() if k.startswith("bert.")})
    ids = torch.tensor([[101, 5, 6, 102], [101, 9, 102, 0]])
    mask = (ids != 0).long()
    with torch.no_grad():
        theirs = bert(ids, attention_mask=mask, output_hidden_states=True).hidden_states[2]
        ours = model.encode_text(ids, mask).tokens
    assert torch.allclose(ours[mask.bool()], theirs[mask.bool()], atol=1e-5)


def test_the_distillation_token_is_left_out(tmp_path: Path) -> None:
    deit = VisionTransformerDistilled(**VIT | {"img_size": 32})
    save_file(deit.state_dict(), tmp_path / "deit.safetensors")
    model = AlbefPretraining(CONFIG)
    start(model, str(tmp_path / "deit.safetensors"), None)
    positions = model.visual_encoder.pos_embed
    assert torch.equal(positions[:, 0], deit.pos_embed[:, 0])
    assert torch.equal(positions[:, 1:], deit.pos_embed[:, 2:])


def test_old_names_and_a_bert_without_head(sources, tmp_path: Path) -> None:
    _, _, state = sources
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in state.items()
        if name.startswith("bert.")
    }
    torch.save({k.removeprefix("bert."): v for k, v in old.items()}, tmp_path / "old.bin")
    model = AlbefPretraining(CONFIG)
    start(model, None, str(tmp_path / "old.bin"))
    norm = model.text_encoder.bert.layers[1].output.LayerNorm.weight
    assert torch.equal(norm, state["bert.encoder.layer.1.output.LayerNorm.weight"])


def test_what_does_not_fit_is_said(sources, tmp_path: Path, monkeypatch) -> None:
    vision, text, _ = sources
    with pytest.raises(UserError, match=r"pretrain.model does not fit .*bert.safetensors: .* missing"):
        start(AlbefPretraining(CONFIG.model_copy(update={"text_layers": 6})), None, text)
    with pytest.raises(UserError, match=r"does not fit .*deit.pth"):
        start(AlbefPretraining(CONFIG.model_copy(update={"vision_width": 64})), vision, None)
    with pytest.raises(UserError, match="does not exist or is no file"):
        start(AlbefPretraining(CONFIG), str(tmp_path / "none.pth"), None)
    with pytest.raises(UserError, match=r"timm:no_such_model cannot be had"):
        start(AlbefPretraining(CONFIG), "timm:no_such_model", None)
    monkeypatch.setattr("timm.create_model", lambda name, pretrained: VisionTransformer(**VIT))
    start(AlbefPretraining(CONFIG), "timm:vit", None)
