"""Recipes of HAT and VITR: what they say of towers and runs must fit together, and be the papers'."""

import pytest

from components.io.errors import UserError
from pipelines.dvcfile import read_entries
from pipelines.params import check_params, parse_yaml
from pipelines.recipe import RECIPES, recipe_names

NAMES = [name for name in recipe_names() if name.startswith(("hat_", "vitr_"))]


def content(name="hat_flickr8k_small"):
    return parse_yaml((RECIPES / f"{name}.yaml").read_text(), name)


@pytest.mark.parametrize("name", NAMES)
def test_runs_read_the_features_that_a_stage_writes(name):
    entries = read_entries(content(name))
    written = {out for address, entry in entries.items() if address.startswith("features@") for out in entry.outs}
    runs = [entry for address, entry in entries.items() if address.startswith("finetune@")]
    assert written
    assert {entry.options()["pretrained"] for entry in runs} == written
    assert all(entry.options()["pretrained"] in entry.deps for entry in runs)


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("run", "pretrained", "data/features/other", "allowed: data/features/small"),
        ("run", "pretrained", "data/models/pretrain", "written by none of features.towers"),
        ("run", "task", "data/tasks/other", "written by none of prepare_tasks.tasks"),
        (
            "towers",
            "task",
            "data/tasks/other",
            "no retrieval task of prepare_tasks.tasks; allowed: data/tasks/retrieval",
        ),
        ("towers", "text", {"max_positions": 16}, "above text.max_positions 16"),
        ("run", "batch_size", 1, "batch_size"),
    ],
)
def test_what_does_not_fit_is_said(section, key, value, said):
    wrong = content()
    chosen = wrong["finetune"]["runs"]["hat"] if section == "run" else wrong["features"]["towers"]["small"]
    chosen[key] = value
    with pytest.raises(UserError, match=said):
        check_params(wrong, "x")


def test_levels_go_in_pairs():
    wrong = content()
    wrong["features"]["towers"]["small"]["text"]["take"] = [6]
    with pytest.raises(UserError, match="they go in pairs"):
        check_params(wrong, "x")


@pytest.mark.parametrize("name", ["hat_flickr30k", "hat_coco"])
def test_hat_as_published(name):
    """HAT sections 3.2, 4.1; where paper and code differ, the code (shared/reference/README.md)."""
    params = check_params(content(name), name)
    (run,), (towers,) = params.finetune.runs.values(), params.features.towers.values()
    assert (run.optimizer, run.batch_size, run.freeze_epochs, run.margin) == ("adam", 58, 10, 0.2)
    assert (run.schedule.kind, run.schedule.lr, run.schedule.decay, run.schedule.decay_epochs) == (
        "step",
        1e-4,
        0.1,
        10,
    )
    assert (run.head.direction, run.head.width, run.head.levels) == ("both", 768, (1, 2, 3))
    assert (run.head.smoothing, run.head.clip) == (9, "leaky")
    assert (towers.image.stages, towers.text.take, towers.max_tokens) == ((2, 3, 4), (4, 10, 12), 32)
    assert (towers.image.model, towers.image.image_size) == ("swin_base_patch4_window7_224", 224)
    assert (towers.text.layers, towers.text.width, towers.text.heads) == (12, 768, 12)
