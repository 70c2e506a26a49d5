"""ALBEF's fine-tuned models against the published code's numbers (../shared/reference/albef), in float32 to 1e-5."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.albef.checkpoints import ImportReport
from models.albef.entailment import AlbefEntailment
from models.albef.gradcam import gradcam_itc, gradcam_itm
from models.albef.nlvr2 import AlbefNlvr2
from models.albef.published import export_official, import_checkpoint
from models.albef.retrieval import AlbefRetrieval
from models.albef.vqa import AlbefVqa

TOLERANCE = 1e-5  # absolute or relative, whichever is larger
ALPHAS = ["0.0", "0.4"]
KINDS = {"pretrain": "pretraining", "retrieval": "retrieval", "ve": "entailment", "vqa": "vqa", "nlvr": "nlvr2"}


def assert_close(actual: Tensor | float, expected: Tensor | float, what: str = "") -> None:
    a, b = torch.as_tensor(actual).detach(), torch.as_tensor(expected)
    assert a.shape == b.shape, what
    off = (a - b).abs() / b.abs().clamp(min=1)
    assert off.max() <= TOLERANCE, f"{what} is off by {off.max():.2e}"


@pytest.fixture(scope="module")
def expected(reference: Path) -> dict[str, Any]:
    return torch.load(reference / "albef" / "expected.pt", weights_only=True)


@pytest.fixture
def load(reference: Path, expected: dict[str, Any]):
    sizes, bert = expected["config"], expected["config"]["bert"]

    def loaded(name: str) -> tuple[dict[str, Tensor], str, nn.Module, ImportReport]:
        state = torch.load(reference / "albef" / f"{name}_checkpoint.pth", weights_only=True)["model"]
        kind, model, report = import_checkpoint(
            state,
            vision_heads=sizes["heads"],
            text_heads=bert["num_attention_heads"],
            text_dropout=bert["hidden_dropout_prob"],
            momentum=sizes["momentum"],
            pad_id=bert["pad_token_id"],
        )
        return state, kind, model.eval(), report

    return loaded


@pytest.mark.parametrize("name", KINDS)
def test_checkpoints_are_recognised_and_go_back_tensor_by_tensor(load, name: str) -> None:
    state, kind, model, report = load(name)
    assert kind == KINDS[name]
    assert set(report.missing) <= {"queue.ids"}  # pre-training has no picture ids
    assert set(report.matched) | set(report.ignored) == state.keys()
    back = export_official(model)
    assert back.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(back[key], value), key
    again = import_checkpoint(back, **dict(model.config))[1]
    for (key, value), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        if not (name == "pretrain" and key == "queue.ids"):
            assert torch.equal(value, other), key


@pytest.mark.parametrize("alpha", ALPHAS)
def test_entailment(load, expected: dict[str, Any], alpha: str) -> None:
    numbers, (_, _, model, _) = expected["ve"], load("ve")
    assert isinstance(model, AlbefEntailment)
    batch = numbers["image"], numbers["input_ids"], numbers["attention_mask"]
    assert_close(model.classify(*batch), numbers["prediction"], "logits")
    assert_close(model(*batch, numbers["targets"], float(alpha)), numbers[alpha]["loss"], "loss")


@pytest.mark.parametrize("alpha", ALPHAS)
def test_nlvr2(load, expected: dict[str, Any], alpha: str) -> None:
    numbers, (_, _, model, _) = expected["nlvr"], load("nlvr")
    assert isinstance(model, AlbefNlvr2)
    assert model.config.sharing == "key_value"
    batch = numbers["images"], numbers["input_ids"], numbers["attention_mask"]
    assert_close(model.classify(*batch), numbers["prediction"], "logits")
    assert_close(model(*batch, numbers["targets"], float(alpha)), numbers[alpha]["loss"], "loss")


@pytest.mark.parametrize("alpha", ALPHAS)
def test_vqa_loss(load, expected: dict[str, Any], alpha: str) -> None:
    numbers, (_, _, model, _) = expected["vqa"], load("vqa")
    assert isinstance(model, AlbefVqa)
    rows = torch.arange(len(numbers["n_answers"])).repeat_interleave(torch.tensor(numbers["n_answers"]))
    loss = model(
        numbers["image"],
        numbers["question_ids"],
        numbers["question_mask"],
        numbers["answer_ids"],
        numbers["answer_mask"],
        rows,
        numbers["weights"],
        float(alpha),
    )
    assert_close(loss, numbers[alpha]["loss"], "loss")


@pytest.mark.parametrize("rows_at_once", [1000, 5])
def test_vqa_ranking(load, expected: dict[str, Any], rows_at_once: int) -> None:
    numbers, (_, _, model, _) = expected["vqa"], load("vqa")
    rank = numbers["rank"]
    ranking = model.rank(
        numbers["image"],
        numbers["question_ids"],
        numbers["question_mask"],
        rank["candidate_ids"],
        rank["candidate_mask"],
        rank["k"],
        rows_at_once,
    )
    assert_close(ranking.probabilities, rank["topk_probs"], "probabilities")
    # candidates of equal probability may come in any order
    theirs = torch.zeros(len(rank["topk_ids"]), len(rank["candidate_ids"])).scatter(
        1, rank["topk_ids"], rank["topk_probs"]
    )
    assert_close(theirs.gather(1, ranking.candidates), rank["topk_probs"], "candidates")


def test_gradcams(load, expected: dict[str, Any]) -> None:
    numbers, (_, _, model, _) = expected["grounding"], load("retrieval")
    assert isinstance(model, AlbefRetrieval)
    batch = numbers["image"], numbers["input_ids"], numbers["attention_mask"]
    per_token = gradcam_itm(model, *batch, numbers["itm_layer"])
    assert_close(per_token, numbers["gradcam_itm_per_token"], "ITM per token")
    assert_close(per_token.mean(dim=1), numbers["gradcam_itm"], "ITM")
    assert_close(gradcam_itc(model, *batch, numbers["itc_block"]), numbers["gradcam_itc"], "ITC")
    # small numbers: compare in relation to the largest of them, too
    scale = numbers["gradcam_itm_per_token"].abs().max()
    assert_close(per_token / scale, numbers["gradcam_itm_per_token"] / scale, "ITM per token, scaled")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.visual_encoder.blocks[numbers["itc_block"]].attn.fused_attn
