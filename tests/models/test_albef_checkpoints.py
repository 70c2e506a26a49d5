from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.albef.checkpoints import import_official, load_student, official_config, student_state_dict
from models.albef.config import AlbefConfig
from models.albef.model import Albef
from models.albef.pretraining import AlbefPretraining
from models.albef.retrieval import AlbefRetrieval

CONFIG = AlbefConfig(
    image_size=16,
    patch_size=8,
    vision_width=64,
    vision_depth=2,
    vision_heads=1,
    vocab_size=110,
    text_width=128,
    text_layers=3,
    fusion_layers=1,
    text_heads=2,
    text_intermediate=32,
    max_positions=12,
    embed_dim=8,
    queue_size=6,
)


@pytest.fixture(scope="module")
def pretrained() -> AlbefPretraining:
    torch.manual_seed(1)
    model = AlbefPretraining(CONFIG)
    with torch.no_grad():
        for parameter in model.teacher.parameters():
            parameter.add_(1.0)
    return model


def published_layout(model: AlbefPretraining) -> dict[str, Tensor]:
    """The model's tensors under the names of a published pre-training checkpoint."""
    state = {}
    for name, value in model.state_dict().items():
        if name.startswith("teacher."):
            tower, rest = name.removeprefix("teacher.").split(".", 1)
            state[f"{tower}_m.{rest}"] = value
        elif not name.startswith("queue."):
            state[name] = value
    words, bias = "text_encoder.bert.embeddings.word_embeddings.weight", "text_encoder.cls.predictions.bias"
    return state | {
        "text_encoder.cls.predictions.decoder.weight": state[words],
        "text_encoder.cls.predictions.decoder.bias": state[bias],
        "text_encoder.bert.pooler.dense.weight": torch.zeros(128, 128),
        "image_queue": model.queue.images,
        "text_queue": model.queue.texts,
        "queue_ptr": torch.tensor([4]),
    }


def test_student_weights_survive_safetensors(pretrained: AlbefPretraining, tmp_path: Path) -> None:
    weights = student_state_dict(pretrained)
    assert not [name for name in weights if name.startswith(("teacher", "queue"))]
    save_file(weights, tmp_path / "model.safetensors")
    again = Albef(CONFIG, mlm_head=True)
    load_student(again, load_file(tmp_path / "model.safetensors"))
    for name, value in student_state_dict(again).items():
        assert torch.equal(value, weights[name]), name


def test_retrieval_starts_from_the_student_and_teaches_with_it(pretrained: AlbefPretraining) -> None:
    weights = student_state_dict(pretrained)
    model = AlbefRetrieval.from_pretraining(weights, CONFIG)
    assert model.text_encoder.cls is None
    for name, value in student_state_dict(model).items():
        assert torch.equal(value, weights[name]), name
    for name, value in model.teacher.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_fine_tuning_at_twice_the_resolution(pretrained: AlbefPretraining) -> None:
    model = AlbefRetrieval.from_pretraining(
        student_state_dict(pretrained), CONFIG.model_copy(update={"image_size": 32})
    )
    before, after = pretrained.visual_encoder.pos_embed, model.visual_encoder.pos_embed
    assert after.shape == (1, 17, 64)
    assert torch.equal(after[:, 0], before[:, 0])
    assert torch.equal(model.teacher.visual_encoder.pos_embed, after)
    assert model.encode_image(torch.zeros(2, 3, 32, 32)).tokens.shape == (2, 17, 64)


def test_weights_that_do_not_fit_are_named(pretrained: AlbefPretraining) -> None:
    weights = student_state_dict(pretrained)
    with pytest.raises(ValueError, match=r"1 missing \(temp\), 1 unknown \(tmp\)"):
        load_student(pretrained, {("tmp" if k == "temp" else k): v for k, v in weights.items()})
    with pytest.raises(ValueError, match=r"word_embeddings.weight \(110, 128\) instead of \(110, 64\)"):
        load_student(Albef(CONFIG.model_copy(update={"text_width": 64})), weights)


def test_published_layout_in_and_out(pretrained: AlbefPretraining) -> None:
    state = published_layout(pretrained)
    assert official_config(state) == CONFIG
    model = AlbefPretraining(CONFIG)
    report = import_official(model, state)
    assert report.missing == ("queue.ids",)
    assert {key.split(".")[2] for key in report.ignored} == {"predictions", "pooler"}
    assert len(report.matched) + len(report.ignored) == len(state)
    wanted = pretrained.state_dict() | {"queue.pointer": torch.tensor(4)}
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def test_checkpoint_without_teacher_or_with_another_queue(pretrained: AlbefPretraining) -> None:
    state = {k: v for k, v in published_layout(pretrained).items() if "_m." not in k}
    model = AlbefPretraining(CONFIG.model_copy(update={"queue_size": 9}))
    random = model.queue.images.clone()
    report = import_official(model, state)
    assert "image_queue" in report.ignored
    assert torch.equal(model.queue.images, random)
    assert torch.equal(model.teacher.text_proj.weight, pretrained.text_proj.weight)


@pytest.mark.parametrize("tower", ["visual_encoder", "text_encoder.bert"])
def test_checkpoint_without_a_tower_is_refused(pretrained: AlbefPretraining, tower: str) -> None:
    state = {k: v for k, v in published_layout(pretrained).items() if not k.startswith(tower)}
    model = AlbefRetrieval(CONFIG)
    before = model.itm_head.weight.clone()
    with pytest.raises(ValueError, match=f"lacks the tower {tower}"):
        import_official(model, state)
    with pytest.raises(ValueError, match="both towers"):
        official_config(state)
    assert torch.equal(model.itm_head.weight, before)


def test_untied_output_layer_is_refused(pretrained: AlbefPretraining) -> None:
    state = published_layout(pretrained)
    state["text_encoder.cls.predictions.decoder.weight"] = torch.zeros(110, 128)
    with pytest.raises(ValueError, match="ALBEF ties the two"):
        import_official(AlbefPretraining(CONFIG), state)
