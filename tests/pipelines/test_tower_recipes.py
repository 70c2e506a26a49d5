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
