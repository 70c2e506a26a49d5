"""The published recipes against what the paper and its code say (ALBEF sections 3 and 5, appendix A, its configs)."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.params import check_params, parse_yaml
from pipelines.recipe import RECIPES

ROOT = Path(__file__).resolve().parents[2]


def content(name: str) -> dict[str, Any]:
    return parse_yaml((RECIPES / f"{name}.yaml").read_text(), name)


def params(name: str) -> Any:
    return check_params(content(name), name)


PUBLISHED = ["albef_4m", "albef_14m", "retrieval_coco", "retrieval_flickr30k", "vqa", "ve", "nlvr2", "refcoco_plus"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_pretraining(name: str) -> None:
    pretrain = params(name).pretrain
    model = pretrain.model
    assert (pretrain.epochs, pretrain.batch_size, pretrain.alpha, pretrain.alpha_ramp) == (30, 512, 0.4, True)
    assert (pretrain.weight_decay, pretrain.max_tokens) == (0.02, 25)
    assert (pretrain.itm_weight, pretrain.mlm_weight) == (1, 1)  # equation 5
    assert (model.image_size, model.patch_size) == (256, 16)
    assert (model.vision_width, model.vision_depth, model.vision_heads) == (768, 12, 12)  # ViT-B/16
    assert (model.text_width, model.text_layers, model.fusion_layers, model.text_heads) == (768, 12, 6, 12)  # BERT-base
    assert (model.text_intermediate, model.max_positions, model.text_dropout) == (3072, 512, 0.1)
    assert (model.embed_dim, model.queue_size, model.momentum, model.mlm_probability) == (256, 65536, 0.995, 0.15)
    assert (model.temperature, model.temperature_min, model.temperature_max) == (0.07, 0.001, 0.5)
    assert pretrain.start_vision == "timm:deit_base_patch16_224.fb_in1k"
    assert pretrain.start_text == "transformers:bert-base-uncased"
    schedule = pretrain.schedule
    assert (schedule.kind, schedule.lr, schedule.min_lr, schedule.warmup_lr) == ("cosine_by_epoch", 1e-4, 1e-5, 1e-5)
    assert schedule.warmup_iterations == 2000  # code; 1000 in the paper
    augment = pretrain.augment
    assert (augment.crop_scale, augment.randaugment_operations, augment.randaugment_magnitude) == ((0.2, 1.0), 2, 7)


def test_data() -> None:
    four, more = set(params("albef_4m").download.sources), set(params("albef_14m").download.sources)
    assert four == {"coco", "visual_genome", "sbu", "cc3m"}
    assert more == four | {"cc12m"}


RUNS = {  # recipe: kind, epochs, batch, lr, warm-up iterations, alpha ramp, crop
    "retrieval_coco": ("retrieval", 5, 256, 1e-5, 100, True, (0.5, 1.0)),
    "retrieval_flickr30k": ("retrieval", 10, 256, 1e-5, 100, True, (0.5, 1.0)),
    "vqa": ("vqa", 8, 256, 2e-5, 400, True, (0.5, 1.0)),
    "ve": ("entailment", 5, 256, 2e-5, 100, False, (0.5, 1.0)),
    "nlvr2": ("nlvr2", 10, 128, 2e-5, 100, True, (0.5, 1.0)),
    "refcoco_plus": ("grounding", 5, 256, 1e-5, 100, True, (1.0, 1.0)),
}


@pytest.mark.parametrize("name", RUNS)
def test_fine_tuning(name: str) -> None:
    (run,) = params(name).finetune.runs.values()
    schedule = run.schedule
    assert RUNS[name] == (
        run.kind,
        run.epochs,
        run.batch_size,
        schedule.lr,
        schedule.warmup_iterations,
        run.alpha_ramp,
        run.augment.crop_scale,
    )
    assert (run.image_size, run.alpha, run.momentum, run.weight_decay) == (384, 0.4, 0.995, 0.02)
    assert (schedule.kind, schedule.min_lr, schedule.warmup_lr) == ("cosine_by_epoch", 1e-6, 1e-5)


def test_what_belongs_to_one_task() -> None:
    assert [params(name).evaluate.top_k for name in ("retrieval_coco", "retrieval_flickr30k")] == [256, 128]
    vqa = params("vqa")
    assert (vqa.finetune.runs["vqa"].decoder_layers, vqa.finetune.runs["vqa"].max_tokens) == (6, 25)
    assert (vqa.evaluate.answers, vqa.evaluate.answer_top_k) == ("rank", 128)
    assert vqa.prepare_tasks.tasks["vqa"].answer_count == 3128
    nlvr2 = params("nlvr2")
    assign = nlvr2.pretrain.assign_text
    assert (assign.epochs, assign.schedule.lr, assign.schedule.min_lr, assign.batch_size) == (1, 2e-5, 1e-5, 512)
    assert (nlvr2.finetune.runs["nlvr2"].start, nlvr2.finetune.runs["nlvr2"].sharing) == ("assign_text", "key_value")
    grounding = params("refcoco_plus").evaluate
    assert (grounding.gradcam, grounding.gradcam_layer, grounding.gradcam_area_power) == ("itm", 8, 0.5)
    assert params("refcoco_plus").prepare_tasks.tasks["refcoco_plus"].splits["test"] == ("testA", "testB")


def test_rates_of_the_published_scheduler(reference: Path) -> None:
    """The reference file holds the schedules that the published configs name."""
    published = json.loads((reference / "albef" / "lr_schedules.json").read_text())
    names = {"VQA": "vqa", "NLVR": "nlvr2", "VE": "ve"}
    names |= {"Retrieval_coco": "retrieval_coco", "Retrieval_flickr": "retrieval_flickr30k"}
    for config, recipe in names.items():
        wanted = published[config]["schedule"]
        (run,) = params(recipe).finetune.runs.values()
        schedule = run.schedule
        assert (run.epochs, schedule.lr, schedule.min_lr) == (wanted["epochs"], wanted["lr"], wanted["min_lr"])
        assert schedule.warmup_lr == wanted["warmup_lr"]
        assert schedule.warmup_iterations == 100 * wanted["warmup_epochs"]


def test_the_demo_with_all_tasks_is_the_demo_and_more() -> None:
    demo, more = content("demo"), content("demo_tasks")
    assert set(more["finetune"]["runs"]) == {"retrieval", "vqa", "entailment", "nlvr2", "grounding"}
    del more["pretrain"]["assign_text"]
    assert more["pretrain"]["epochs"] > demo["pretrain"]["epochs"]  # five tasks start from it
    words = more["shard"]["tokenizer"].pop("words")
    assert {"how", "many", "exactly", "0", "10"} <= set(words)
    for key in ("epochs", "mlm_weight"):
        more["pretrain"][key] = demo["pretrain"][key]
    for section, key in (("prepare_tasks", "tasks"), ("finetune", "runs")):
        more[section][key] = {"retrieval": more[section][key]["retrieval"]}
    assert more == demo


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "entailment"}, "kind: entailment cannot learn from prepare_tasks.tasks.vqa of kind vqa"),
        ({"decoder_layers": 7}, "decoder_layers: 7 is above pretrain.model.fusion_layers 6"),
    ],
)
def test_contradictions_of_tasks(changes: dict[str, Any], said: str) -> None:
    wrong = content("vqa")
    run = {"kind": "vqa", "task": "data/tasks/vqa"} | changes
    wrong["finetune"]["runs"] = {"vqa": run}
    with pytest.raises(Exception, match=said):
        check_params(wrong, "x")


def test_text_assignment_must_come_first() -> None:
    wrong = content("nlvr2")
    del wrong["pretrain"]["assign_text"]
    with pytest.raises(Exception, match=r"finetune.runs.nlvr2.start: assign_text needs pretrain.assign_text"):
        check_params(wrong, "x")


def test_every_published_difference_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "paper-vs-code.md").read_text()
    keys = [
        "pretrain.schedule.warmup_iterations",
        "pretrain.model.temperature",
        "augment.randaugment_colour",
        "augment.crop_scale",
        "pretrain.model.negative_pool",
        "alpha_ramp",
        "epochs",
        "evaluate.top_k",
        "batch_size",
        "finetune.runs.*.schedule.warmup_iterations",
        "sharing",
    ]
    assert [key for key in keys if f"{key}`" not in page] == []
