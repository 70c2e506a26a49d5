"""The fine-tuned models where the reference numbers say nothing: starting points, sharing, draws, shapes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.albef.checkpoints import load_parts, official_config, recognise, student_state_dict
from models.albef.config import (
    AlbefConfig,
    EntailmentConfig,
    Nlvr2Config,
    TextAssignmentConfig,
    VqaConfig,
    parse_config,
)
from models.albef.entailment import AlbefEntailment
from models.albef.gradcam import gradcam_itc, gradcam_itm
from models.albef.model import Albef
from models.albef.nlvr2 import AlbefNlvr2
from models.albef.pretraining import AlbefPretraining
from models.albef.published import export_official, import_checkpoint
from models.albef.queues import NO_IMAGE
from models.albef.retrieval import AlbefRetrieval
from models.albef.text_assignment import FIRST, NEITHER, SECOND, AlbefTextAssignment, draw_assignment
from models.albef.vision import resize_position_embeddings
from models.albef.vqa import AlbefVqa

SIZES = {
    "image_size": 16,
    "patch_size": 8,
    "vision_width": 64,
    "vision_depth": 2,
    "vision_heads": 1,
    "vocab_size": 110,
    "text_width": 64,
    "text_layers": 4,
    "fusion_layers": 2,
    "text_heads": 1,
    "text_intermediate": 32,
    "max_positions": 12,
    "embed_dim": 8,
    "queue_size": 6,
    "text_dropout": 0.0,
}
IDS = torch.tensor([[101, 5, 6, 102], [101, 7, 102, 0], [101, 8, 9, 102]])
MASK = (IDS != 0).long()


@pytest.fixture(scope="module")
def pretrained() -> AlbefPretraining:
    torch.manual_seed(1)
    return AlbefPretraining(AlbefConfig(**SIZES)).eval()


@pytest.fixture(scope="module")
def weights(pretrained):
    return student_state_dict(pretrained)


def pictures(count: int, size: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(3))


def layer(model, index: int):
    return model.text_encoder.bert.layers[index]


def test_entailment_starts_as_pretrained_at_another_resolution(weights, pretrained) -> None:
    model = AlbefEntailment.from_pretraining(weights, EntailmentConfig(**SIZES | {"image_size": 32})).eval()
    assert model.classify(pictures(3, 32), IDS, MASK).shape == (3, 3)
    assert torch.equal(layer(model, 3).output.dense.weight, layer(pretrained, 3).output.dense.weight)
    for name, value in model.teacher.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_the_teacher_moves_and_alpha_without_it_costs_nothing(weights) -> None:
    model = AlbefEntailment.from_pretraining(weights, EntailmentConfig(**SIZES | {"momentum": 0.5})).eval()
    with torch.no_grad():
        model.cls_head[2].bias.add_(1.0)
    before = model.teacher.cls_head[2].bias.clone()
    model(pictures(3), IDS, MASK, torch.tensor([0, 1, 2]), 0.0)
    assert torch.allclose(model.teacher.cls_head[2].bias, before + 0.5)
    with pytest.raises(ValueError, match=r"alpha=1.5 must lie in \[0, 1\]"):
        model(pictures(3), IDS, MASK, torch.tensor([0, 1, 2]), 1.5)
    with pytest.raises(ValueError, match=r"a batch of 3 does not go with targets \(2,\)"):
        model(pictures(3), IDS, MASK, torch.tensor([0, 1]), 0.0)


def test_the_teacher_goes_on_where_pretraining_left_it(pretrained, weights) -> None:
    training = {f"teacher.{k}": v + 1 for k, v in pretrained.teacher.state_dict().items()}
    training |= {f"queue.{k}": v for k, v in pretrained.queue.state_dict().items()}
    word, layer_3 = "text_encoder.bert.embeddings.word_embeddings.weight", "text_encoder.bert.encoder.layer.3"
    retrieval = AlbefRetrieval.from_pretraining(weights, AlbefConfig(**SIZES), training)
    assert torch.equal(retrieval.teacher.state_dict()[word], weights[word] + 1)
    assert torch.equal(retrieval.text_encoder.bert.embeddings.word_embeddings.weight, weights[word])
    assert torch.equal(retrieval.queue.images, pretrained.queue.images)
    assert (retrieval.queue.ids == NO_IMAGE).all(), "pre-training knows no picture ids"
    other = AlbefRetrieval.from_pretraining(weights, AlbefConfig(**SIZES | {"queue_size": 3}), training)
    assert other.queue.images.shape == (8, 3)
    entailment = AlbefEntailment.from_pretraining(weights, EntailmentConfig(**SIZES), training)
    assert torch.equal(entailment.teacher.state_dict()[word], weights[word] + 1)
    assert torch.equal(entailment.teacher.cls_head[0].weight, entailment.cls_head[0].weight), "a head of its own"
    vqa = AlbefVqa.from_pretraining(weights, VqaConfig(**SIZES, decoder_layers=1), training)
    decoder = vqa.teacher.state_dict()["text_decoder.bert.encoder.layer.0.output.dense.weight"]
    assert torch.equal(decoder, weights[f"{layer_3}.output.dense.weight"] + 1)
    with pytest.raises(ValueError, match="do not fit this ALBEF"):
        AlbefRetrieval.from_pretraining(weights, AlbefConfig(**SIZES), {"teacher.temp": torch.zeros(())})


SHARED = {"all": (True, True, True), "cross_attention": (False, True, True), "key_value": (False, False, True)}


@pytest.mark.parametrize("sharing", ["all", "cross_attention", "key_value", "none"])
def test_blocks_share_what_they_should(weights, sharing: str, tmp_path) -> None:
    model = AlbefNlvr2.from_pretraining(weights, Nlvr2Config(**SIZES, sharing=sharing)).eval()
    first, second = layer(model, 2), layer(model, 3)
    everything, cross, key_value = SHARED.get(sharing, (False, False, False))
    assert (first.attention is second.attention) == everything
    assert (first.crossattention.output is second.crossattention.output) == cross
    assert (first.crossattention.self.key is second.crossattention.self.key) == key_value
    assert torch.equal(first.attention.self.query.weight, second.attention.self.query.weight), "from the same layer"

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    save_file(student_state_dict(model), tmp_path / "model.safetensors")  # refuses tensors that share memory
    again = AlbefNlvr2(model.config).eval()
    load_parts(again, load_file(tmp_path / "model.safetensors"))
    images = pictures(6)
    assert torch.equal(model.classify(images, IDS, MASK), again.classify(images, IDS, MASK))

    published = export_official(model)
    assert official_config(published).sharing in (sharing, "all")  # equal draws above make blocks of "none" equal
    kind, imported, report = import_checkpoint(published, sharing=sharing, text_dropout=0.0)
    assert (kind, report.missing) == ("nlvr2", ())
    assert torch.equal(imported.eval().classify(images, IDS, MASK), model.classify(images, IDS, MASK))


def test_shared_tensors_that_differ_are_refused(weights) -> None:
    model = AlbefNlvr2.from_pretraining(weights, Nlvr2Config(**SIZES, sharing="none"))
    with torch.no_grad():
        layer(model, 2).crossattention.self.key.weight.add_(1.0)
    published = export_official(model)
    assert official_config(published).sharing == "none"
    with pytest.raises(ValueError, match="which this model shares: choose another `sharing`"):
        import_checkpoint(published, sharing="key_value")


def test_two_pictures_are_told_apart(weights) -> None:
    model = AlbefNlvr2.from_pretraining(weights, Nlvr2Config(**SIZES)).eval()
    images = pictures(6)
    swapped = torch.cat([images[3:], images[:3]])
    assert not torch.allclose(model.classify(images, IDS, MASK), model.classify(swapped, IDS, MASK))
    with pytest.raises(ValueError, match="a batch of 6 does not go with images"):
        model(images[:5], IDS, MASK, torch.tensor([0, 1, 1]), 0.0)


def test_nlvr2_starts_from_text_assignment(weights) -> None:
    assigning = AlbefTextAssignment.from_pretraining(weights, TextAssignmentConfig(**SIZES)).eval()
    with torch.no_grad():
        layer(assigning, 2).attention.self.query.weight.add_(1.0)
    model = AlbefNlvr2.from_pretraining(student_state_dict(assigning), Nlvr2Config(**SIZES))
    assert torch.equal(layer(model, 2).attention.self.query.weight, layer(assigning, 2).attention.self.query.weight)
    assert recognise(export_official(assigning)) == "assign_text"
    imported = import_checkpoint(export_official(assigning), text_dropout=0.0)[1]
    for name, value in assigning.state_dict().items():
        assert torch.equal(imported.state_dict()[name], value), name


def test_text_assignment_learns_encoders_and_head_alone(weights) -> None:
    model = AlbefTextAssignment.from_pretraining(weights, TextAssignmentConfig(**SIZES))
    model(pictures(3), IDS, MASK, torch.Generator().manual_seed(0)).backward()
    still = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert still == {"vision_proj.weight", "vision_proj.bias", "text_proj.weight", "text_proj.bias", "temp"}
    with pytest.raises(ValueError, match="above 1"):
        model(pictures(1), IDS[:1], MASK[:1])


def test_assignments_are_thirds_of_hard_negatives() -> None:
    similarity = torch.zeros(5, 5)
    similarity[:, 2] = 6.0  # everybody's hardest negative is picture 2
    generator = torch.Generator().manual_seed(0)
    counts, hard = torch.zeros(3), 0
    for _ in range(300):
        first, second, labels = draw_assignment(similarity, generator)
        own = torch.arange(5)
        counts += labels.bincount(minlength=3)
        assert torch.equal(first == own, labels == FIRST)
        assert torch.equal(second == own, labels == SECOND)
        assert not (first == second).any()
        assert ((first != own) & (second != own))[labels == NEITHER].all()
        hard += int((second[labels == FIRST] == 2).sum())
    assert (counts / counts.sum() - 1 / 3).abs().max() < 0.04
    assert hard / counts[FIRST] > 0.7, "0.8 of the texts have another picture than 2, and take it nearly always"
    assert not (draw_assignment(similarity[:2, :2], generator).labels == NEITHER).any()


def test_the_decoder_starts_as_the_fusion_layers(weights, pretrained) -> None:
    model = AlbefVqa.from_pretraining(weights, VqaConfig(**SIZES, decoder_layers=1))
    decoder = model.text_decoder.bert
    assert torch.equal(decoder.layers[0].intermediate.dense.weight, layer(pretrained, 3).intermediate.dense.weight)
    assert torch.equal(
        decoder.layers[0].crossattention.self.key.weight, layer(pretrained, 3).crossattention.self.key.weight
    )
    assert torch.equal(model.text_decoder.cls["predictions"].bias, pretrained.text_encoder.cls["predictions"].bias)
    with pytest.raises(ValueError, match="decoder_layers=3 is more than the 2 fusion layers"):
        AlbefVqa.from_pretraining(weights, VqaConfig(**SIZES, decoder_layers=3))
    headless = {name: value for name, value in weights.items() if ".cls." not in name}
    with pytest.raises(ValueError, match="no vocabulary head"):
        AlbefVqa.from_pretraining(headless, VqaConfig(**SIZES, decoder_layers=1))


def test_the_decoder_of_other_widths_has_new_keys_and_values() -> None:
    torch.manual_seed(2)
    sizes = SIZES | {"vision_width": 128, "vision_heads": 2}
    weights = student_state_dict(AlbefPretraining(AlbefConfig(**sizes)))
    model = AlbefVqa.from_pretraining(weights, VqaConfig(**sizes, decoder_layers=2)).eval()
    assert model.text_decoder.bert.layers[0].crossattention.self.key.weight.shape == (64, 64)
    assert torch.isfinite(model.generate(pictures(3), IDS, MASK).float()).all()


def vqa_model(weights) -> AlbefVqa:
    return AlbefVqa.from_pretraining(weights, VqaConfig(**SIZES, decoder_layers=2)).eval()


ANSWERS = torch.tensor([[101, 20, 21, 102], [101, 22, 102, 0], [101, 23, 24, 102], [101, 25, 102, 0]])


def test_weights_and_padding_of_answers(weights) -> None:
    model, rows = vqa_model(weights), torch.tensor([0, 0, 1, 2])
    batch = pictures(3), IDS, MASK

    def loss(answers: torch.Tensor, weight: list[float]) -> torch.Tensor:
        return model(*batch, answers, (answers != 0).long(), rows, torch.tensor(weight), 0.0)

    whole = loss(ANSWERS, [1.0, 1.0, 1.0, 1.0])
    parts = [loss(ANSWERS, [float(i == j) for j in range(4)]) for i in range(4)]
    assert torch.allclose(whole, sum(parts))
    assert torch.allclose(loss(ANSWERS, [0.0, 0.5, 0.0, 0.0]), 0.5 * parts[1])
    wider = torch.cat([ANSWERS, torch.zeros(4, 2, dtype=torch.long)], dim=1)
    assert torch.allclose(loss(wider, [1.0] * 4), whole, atol=1e-5)


def test_generation_is_the_first_of_all_rankings_step_by_step(weights) -> None:
    """Among all one-token answers the ranking's first is what generation says first."""
    model = vqa_model(weights)
    batch = pictures(3), IDS, MASK
    said = model.generate(*batch, max_tokens=1)
    every = torch.stack([torch.tensor([101, token, 102]) for token in range(1, 110)])
    hidden = model.text_decoder.decode(said[:, :1], torch.ones(3, 1).long(), model.read(*batch), MASK, None)
    assert torch.equal(model.text_decoder.predict_tokens(hidden[:, 0]).argmax(1), said[:, 1])
    ranking = model.rank(*batch, every, torch.ones_like(every), k=200)
    assert ranking.candidates.shape == (3, 109), "k is cut to the candidates there are"
    assert torch.allclose(ranking.probabilities.sum(dim=1), torch.ones(3))
    assert (ranking.probabilities.diff(dim=1) <= 0).all()


def test_generation_stops_at_the_end_token(weights) -> None:
    model = vqa_model(weights)
    with torch.no_grad():
        model.text_decoder.cls["predictions"].bias[102] = 1e4
    assert model.generate(pictures(3), IDS, MASK).tolist() == [[101, 102]] * 3


def test_gradcam_of_an_unfused_layer_is_refused(weights) -> None:
    model = Albef(AlbefConfig(**SIZES)).eval()
    with pytest.raises(ValueError, match="layer 1 does not attend to the image: choose one of 2 to 3"):
        gradcam_itm(model, pictures(3), IDS, MASK, 1)
    with pytest.raises(ValueError, match="no block 2"):
        gradcam_itc(model, pictures(3), IDS, MASK, 2)
    with torch.no_grad():  # evaluation runs without gradients, Grad-CAM makes its own
        maps = gradcam_itm(model, pictures(3), IDS, MASK, 2)
    assert maps.shape == (3, 4, 2, 2)
    assert (maps[1, 3] == 0).all(), "padding points nowhere"


def test_explicit_attention_is_the_fused_one(weights) -> None:
    model = AlbefEntailment.from_pretraining(weights, EntailmentConfig(**SIZES)).eval()
    fused = model.classify(pictures(3), IDS, MASK)
    for one in model.text_encoder.bert.layers:
        one.attention.self.fused_attn = False
    assert torch.allclose(model.classify(pictures(3), IDS, MASK), fused, atol=1e-5)


def test_unknown_checkpoints_are_named() -> None:
    with pytest.raises(ValueError, match=r"no published ALBEF checkpoint.*but fc, layer1"):
        recognise({"fc.weight": torch.zeros(1), "layer1.0.bias": torch.zeros(1)})


@pytest.mark.parametrize("tower", ["text_decoder.bert.encoder.layer.1", "visual_encoder."])
def test_a_task_checkpoint_without_a_tower_is_refused(weights, tower: str) -> None:
    state = {k: v for k, v in export_official(vqa_model(weights)).items() if not k.startswith(tower)}
    with pytest.raises(ValueError, match=r"lacks the tower|both towers") as caught:
        import_checkpoint(state, decoder_layers=2)
    assert tower.split(".")[0] in str(caught.value)


def test_config_files_say_their_task() -> None:
    for config in (AlbefConfig(**SIZES), VqaConfig(**SIZES), Nlvr2Config(**SIZES, sharing="none")):
        assert parse_config(config.model_dump_json()) == config
    with pytest.raises(ValueError, match="JSON"):
        parse_config("{")


def test_position_embeddings_with_two_prefix_tokens_and_other_shapes() -> None:
    old = torch.randn(1, 2 + 4 * 6, 5, generator=torch.Generator().manual_seed(0))
    new = resize_position_embeddings(old, grid=(8, 3), old_grid=(4, 6), prefix_tokens=2)
    assert new.shape == (1, 2 + 24, 5)
    assert torch.equal(new[:, :2], old[:, :2])
    assert torch.equal(resize_position_embeddings(old, grid=(4, 6), old_grid=(4, 6), prefix_tokens=2), old)
    rows = resize_position_embeddings(old, grid=(8, 6), old_grid=(4, 6), prefix_tokens=2)[:, 2:].view(8, 6, 5)
    assert torch.allclose(rows.mean(dim=(0, 1)), old[:, 2:].mean(dim=1)[0], atol=0.15)
    with pytest.raises(ValueError, match="not 1 and a square grid"):
        resize_position_embeddings(old[:, :24], 17)
    with pytest.raises(ValueError, match=r"26 positions are not 2 and a grid of \(5, 5\)"):
        resize_position_embeddings(old, grid=(2, 2), old_grid=(5, 5), prefix_tokens=2)
