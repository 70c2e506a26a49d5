"""ALBEF against the numbers that the published code gave (../shared/reference/albef), in float32 to 1e-5."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.albef.checkpoints import import_official, official_config
from models.albef.config import AlbefConfig
from models.albef.distilled import DistilledAlbef
from models.albef.losses import Negatives, sampling_weights
from models.albef.model import Albef
from models.albef.pretraining import AlbefPretraining, PretrainingOutput
from models.albef.retrieval import AlbefRetrieval
from models.albef.vision import resize_position_embeddings

TOLERANCE = 1e-5  # absolute or relative, whichever is larger
ALPHAS = ["0.0", "0.4"]


def assert_close(actual: Tensor | float, expected: Tensor | float, what: str = "") -> None:
    a, b = torch.as_tensor(actual), torch.as_tensor(expected)
    assert a.shape == b.shape, what
    off = (a - b).abs() / b.abs().clamp(min=1)
    assert off.max() <= TOLERANCE, f"{what} is off by {off.max():.2e}"


@pytest.fixture(scope="module")
def expected(reference: Path) -> dict[str, Any]:
    return torch.load(reference / "albef" / "expected.pt", weights_only=True)


def weights(reference: Path, name: str) -> dict[str, Tensor]:
    return torch.load(reference / "albef" / f"{name}_checkpoint.pth", weights_only=True)["model"]


def config_of(state: dict[str, Tensor], expected: dict[str, Any]) -> AlbefConfig:
    sizes, bert = expected["config"], expected["config"]["bert"]
    return official_config(
        state,
        vision_heads=sizes["heads"],
        text_heads=bert["num_attention_heads"],
        text_dropout=bert["hidden_dropout_prob"],
        momentum=sizes["momentum"],
        temperature=sizes["temp"],
        mlm_probability=sizes["mlm_probability"],
        pad_id=bert["pad_token_id"],
    )


def pretraining_model(reference: Path, expected: dict[str, Any]) -> AlbefPretraining:
    state = weights(reference, "pretrain")
    model = AlbefPretraining(config_of(state, expected))
    import_official(model, state)
    return model.eval()


def retrieval_model(reference: Path, expected: dict[str, Any]) -> AlbefRetrieval:
    state = weights(reference, "retrieval")
    model = AlbefRetrieval(config_of(state, expected))
    import_official(model, state)
    return model.eval()


def drawn(numbers: dict[str, Any]) -> Negatives:
    return Negatives(
        torch.tensor(numbers["neg_image_index_per_text"]), torch.tensor(numbers["neg_text_index_per_image"])
    )


@pytest.fixture(scope="module", params=ALPHAS)
def step(
    request: pytest.FixtureRequest, reference: Path, expected: dict[str, Any]
) -> tuple[AlbefPretraining, PretrainingOutput, dict[str, Any]]:
    """One forward and backward pass at the published code's own draws."""
    model = pretraining_model(reference, expected)
    inputs, numbers = expected["pretrain"], expected["pretrain"][request.param]
    output = model(
        inputs["image"],
        inputs["input_ids"],
        inputs["attention_mask"],
        float(request.param),
        masked_ids=numbers["masked_input_ids"],
        mlm_labels=numbers["mlm_labels"],
        negatives=drawn(numbers),
    )
    output.loss.backward()
    return model, output, numbers


def test_config_from_shapes(reference: Path, expected: dict[str, Any]) -> None:
    config = config_of(weights(reference, "pretrain"), expected)
    sizes, bert = expected["config"], expected["config"]["bert"]
    assert config.model_dump(include={"image_size", "patch_size", "vision_width", "embed_dim"}) == {
        "image_size": sizes["image_res"],
        "patch_size": sizes["patch_size"],
        "vision_width": sizes["vision_width"],
        "embed_dim": sizes["embed_dim"],
    }
    assert config.vision_depth == sizes["depth"]
    assert (config.vocab_size, config.text_width) == (sizes["vocab"], sizes["hidden"])
    assert (config.text_layers, config.text_only_layers) == (sizes["layers"], sizes["fusion"])
    assert (config.text_intermediate, config.max_positions) == (sizes["inter"], bert["max_position_embeddings"])
    assert config.queue_size == sizes["queue"]


@pytest.mark.parametrize("name", ["pretrain", "retrieval"])
def test_every_tensor_has_its_place(reference: Path, expected: dict[str, Any], name: str) -> None:
    state = weights(reference, name)
    kind: type[DistilledAlbef] = AlbefPretraining if name == "pretrain" else AlbefRetrieval
    report = import_official(kind(config_of(state, expected)), state)
    assert set(report.missing) <= {"queue.ids"}  # pre-training has no image ids
    assert set(report.matched) | set(report.ignored) == state.keys()
    assert all("position_ids" in key or "decoder" in key for key in report.ignored)


def test_forward_of_the_student(reference: Path, expected: dict[str, Any]) -> None:
    inputs, numbers = expected["pretrain"], expected["pretrain"]["forward"]
    state = weights(reference, "pretrain")
    model = Albef(config_of(state, expected), mlm_head=True).eval()
    import_official(model, state)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        image, text = model.encode_image(inputs["image"]), model.encode_text(inputs["input_ids"], mask)
        fused = model.fuse(image.tokens, text.tokens, mask)
        assert_close(image.tokens, numbers["image_embeds"], "image tokens")
        assert_close(text.tokens, numbers["text_embeds"], "text tokens")
        assert_close(image.feature, numbers["image_feat"], "image features")
        assert_close(text.feature, numbers["text_feat"], "text features")
        assert_close(fused, numbers["fusion"], "fusion")
        assert_close(model.match(image.tokens, text.tokens, mask), numbers["itm_logits"], "ITM logits")
        assert_close(model.text_encoder.predict_tokens(fused), numbers["mlm_logits"], "MLM logits")


@pytest.mark.parametrize("loss", ["loss_itc", "loss_itm", "loss_mlm"])
def test_pretraining_losses(step: tuple[AlbefPretraining, PretrainingOutput, dict[str, Any]], loss: str) -> None:
    _, output, numbers = step
    assert_close(getattr(output, loss).detach(), numbers[loss], loss)


def test_pretraining_gradients(step: tuple[AlbefPretraining, PretrainingOutput, dict[str, Any]]) -> None:
    model, _, numbers = step
    norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}
    assert norms.keys() == numbers["grad_norm"].keys()
    for name, norm in numbers["grad_norm"].items():
        assert_close(norms[name], norm, name)


def test_pretraining_state_after_the_step(
    step: tuple[AlbefPretraining, PretrainingOutput, dict[str, Any]],
) -> None:
    model, _, numbers = step
    assert_close(model.queue.images, numbers["image_queue_after"], "image queue")
    assert_close(model.queue.texts, numbers["text_queue_after"], "text queue")
    assert int(model.queue.pointer) == numbers["queue_ptr_after"]
    state = model.state_dict()
    for key, value in numbers["teacher_after"].items():
        tower, rest = key.split("_m.", 1)
        assert_close(state[f"teacher.{tower}.{rest}"], value, key)


def test_sampling_weights(step: tuple[AlbefPretraining, PretrainingOutput, dict[str, Any]]) -> None:
    _, output, numbers = step
    same = torch.eye(output.similarity_i2t.shape[0], dtype=torch.bool)
    for similarity, key in ((output.similarity_i2t, "weights_i2t"), (output.similarity_t2i, "weights_t2i")):
        # The published weights aren't normalised; torch.multinomial normalises them.
        published = numbers[key] / numbers[key].sum(dim=1, keepdim=True)
        assert_close(sampling_weights(similarity, same), published, key)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_retrieval_losses(reference: Path, expected: dict[str, Any], alpha: str) -> None:
    inputs, numbers = expected["retrieval"], expected["retrieval"][alpha]
    model = retrieval_model(reference, expected)
    output = model(
        inputs["image"],
        inputs["input_ids"],
        inputs["attention_mask"],
        inputs["idx"],
        float(alpha),
        negatives=drawn(numbers),
    )
    assert_close(output.loss_itc.detach(), numbers["loss_itc"], "loss_itc")
    assert_close(output.loss_itm.detach(), numbers["loss_itm"], "loss_itm")
    assert torch.equal(model.queue.ids, numbers["idx_queue_after"].flatten())


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_reranked_scores(reference: Path, expected: dict[str, Any], direction: str) -> None:
    inputs = expected["retrieval"]["eval"]
    model = retrieval_model(reference, expected)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        image, text = model.encode_image(inputs["images"]), model.encode_text(inputs["input_ids"], mask)
        similarity = image.feature @ text.feature.T
        if direction == "t2i":
            similarity = similarity.T
        queries, top = similarity.shape[0], similarity.topk(inputs["k_test"], dim=1).indices  # (Q, k)
        rows, found = torch.arange(queries).repeat_interleave(top.shape[1]), top.flatten()
        images, texts = (rows, found) if direction == "i2t" else (found, rows)
        logits = model.match(image.tokens, text.tokens[texts], mask[texts], images)
    scores = torch.full_like(similarity, -100.0)
    scores[rows, found] = logits[:, 1]
    assert_close(scores, inputs[f"score_{direction}"], direction)


def test_position_embeddings_at_double_resolution(expected: dict[str, Any]) -> None:
    before, after = expected["pos_embed"]["before"], expected["pos_embed"]["after_double_resolution"]
    assert_close(resize_position_embeddings(before, after.shape[1]), after)
