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


@pytest.mark.parametrize("name", ["vitr_flickr30k", "vitr_refcocog", "vitr_clevr"])
def test_vitr_as_published(name):
    """VITR section 4.2, and table 7's variants of VITR_L."""
    params = check_params(content(name), name)
    runs, towers = params.finetune.runs, params.features.towers
    assert list(runs) == ["clip_b16", "clip_l14", "vitr_b", "vitr_l", "novit_l", "norel_l", "vse", "vsrn"]
    for run in (runs[name] for name in ("vitr_b", "vitr_l", "novit_l", "norel_l")):
        assert (run.kind, run.epochs, run.batch_size, run.optimizer) == ("vitr", 20, 128, "adam")
        assert (run.schedule.kind, run.schedule.lr, run.schedule.decay, run.schedule.decay_epochs) == (
            "late_decay",
            4e-4,
            0.1,
            5,
        )
        assert (run.margin, run.temperature) == (0.185, 0.025)  # eq. 20, 21
        assert run.freeze_epochs >= run.epochs  # pre-trained encoders rest (section 3.5)
        assert (run.head.gamma, run.head.reasoning_steps, run.head.fusion_steps) == (12, 4, 2)  # eq. 10; g1, g2
        assert (run.head.regions, run.head.join_width, run.head.projection) == (49, 128, False)
    shared = runs["vitr_l"].head
    assert runs["vitr_b"].head == shared
    assert (shared.use_global, shared.relations) == (True, True)
    assert runs["novit_l"].head == shared.model_copy(update={"use_global": False})
    assert runs["norel_l"].head == shared.model_copy(update={"relations": False})
    for size, patch, width, text_width, joint in (("b", 16, 768, 512, 512), ("l", 14, 1024, 768, 768)):
        both = [towers[f"vitr_{size}"], towers["clip_b16" if size == "b" else "clip_l14"]]
        for chosen in both:
            clip = chosen.clip
            assert (clip.patch_size, clip.image_width, clip.text_width, clip.joint_width) == (
                patch,
                width,
                text_width,
                joint,  # d1
            )
        assert both[0].clip == both[1].clip.model_copy(update={"alone": False})
        assert both[0].image.model == "resnet101_clip"
        assert both[0].semantic_values > 0
    assert towers["vitr_b"].image == towers["vitr_l"].image == towers["rn101_bert"].image
    for name in ("clip_b16", "clip_l14"):
        assert (runs[name].kind, runs[name].head.projection, runs[name].freeze_epochs) == ("linear", False, 0)


@pytest.mark.parametrize(("towers", "count"), [("clip_b16", 149_620_737), ("clip_l14", 427_616_513)])
def test_clips_of_the_recipes_have_the_published_number_of_parameters(towers, count):
    import torch

    from models.towers.clip import make_towers

    chosen = check_params(content("vitr_clevr"), "x").features.towers[towers]
    with torch.device("meta"):
        both = make_towers(chosen.image, chosen.text, chosen.clip)
    scale = 1
    assert sum(weight.numel() for tower in both for weight in tower.parameters()) + scale == count


def test_vitr_comes_after_the_clip_that_it_stands_on():
    entries = read_entries(content("vitr_clevr"))
    assert entries["finetune@clip_l14"].outs[0] == "data/models/clip_l14"
    assert "data/models/clip_l14" in entries["features@vitr_l"].deps
    assert "data/tasks/clevr/train" in entries["features@clip_l14"].deps


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"after": "data/tasks/clevr/train"}, r"vitr_b.after: data/tasks/clevr/train; allowed: data/models/clip_b16"),
        ({"clip_weights": None}, r"vitr_b.after: data/models/clip_b16; allowed: data/tasks/clevr/train"),
        ({"after": None}, r"vitr_b.after: not there; allowed: data/models/clip_b16"),
        ({"clip_weights": "data/models/x/model.safetensors"}, "data/models/x is written by none of finetune.runs"),
        ({"clip_weights": "data/models/vitr_b/model.safetensors"}, "data/models/vitr_b itself comes from these towers"),
        ({"image_weights": "data/models/x/model.safetensors"}, "image_weights: data/models/x is written by none"),
        ({"image_weights": "data/models/clip_l14/model.safetensors"}, "weights of data/models/clip_b16 and .*clip_l14"),
    ],
)
def test_towers_of_a_run_say_what_they_come_after(changes, said):
    wrong = content("vitr_clevr")
    wrong["features"]["towers"]["vitr_b"] |= changes
    with pytest.raises(UserError, match=said):
        check_params(wrong, "x")


def test_towers_may_take_their_text_from_a_run():
    chosen = content("hat_flickr8k_small")
    tuned = chosen["features"]["towers"]["small"] | {"text_weights": "data/models/levels_text/model.safetensors"}
    chosen["features"]["towers"]["tuned"] = tuned
    with pytest.raises(UserError, match=r"tuned.after: data/tasks/retrieval/train; allowed: data/models/levels_text"):
        check_params(chosen, "x")
    tuned["after"] = "data/models/levels_text"
    check_params(chosen, "x")
    assert "data/models/levels_text" in read_entries(chosen)["features@tuned"].deps
