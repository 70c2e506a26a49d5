import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from components.evaluation.weights import load_model
from components.io.errors import UserError
from components.io.runtime import Runtime
from components.training.finetune import finetune
from components.training.pretrain import pretrain

FILES = ["config.json", "lineage.json", "metrics.json", "model.safetensors", "tokenizer.json"]


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pretraining_leaves_weights_that_evaluation_reads(pretrained):
    assert sorted(path.name for path in (pretrained / "weights").iterdir()) == FILES
    model, config = load_model(pretrained / "weights")
    assert config.vocab_size == model.text_encoder.bert.embeddings.word_embeddings.num_embeddings
    assert not any(
        name.startswith(("teacher", "queue")) for name in load_file(pretrained / "weights/model.safetensors")
    )
    metrics = json.loads((pretrained / "weights" / "metrics.json").read_text())
    assert metrics["steps"] == metrics["last"]["step"] == 6
    assert metrics["last"]["loss"] < metrics["first"]["loss"]


def test_the_same_training_elsewhere_gives_the_same_bytes(pretrained, shards, pretrain_params, tmp_path):
    """Other work folder, other place of the data, and settings that are about how, not what."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(shards, moved)
    params = pretrain_params(checkpoint={"steps": 1}, cache_mb=0)
    outs = tmp_path / "weights", tmp_path / "curves"
    pretrain(params, shards=moved, weights=outs[0], curves=outs[1], runtime=Runtime(work=tmp_path / "work"))
    lineage = json.loads((outs[0] / "lineage.json").read_text())
    assert lineage["params"]["cache_mb"] == 0
    first = content(pretrained / "weights") | {"lineage.json": b""}
    assert content(outs[0]) | {"lineage.json": b""} == first
    assert content(outs[1]) == content(pretrained / "curves")
    assert str(tmp_path) not in (outs[0] / "lineage.json").read_text()


def tune(params, task, pretrained, out, run="tiny"):
    finetune(
        params,
        run=run,
        task=task,
        pretrained=pretrained / "weights",
        weights=out / "weights",
        curves=out / "curves",
        runtime=Runtime(work=out / "work"),
    )
    return out


def test_finetuning_starts_from_the_pretrained_weights_and_ranks_val(pretrained, task, finetune_params, tmp_path):
    out = tune(finetune_params(image_size=48), task, pretrained, tmp_path)
    assert sorted(path.name for path in (out / "weights").iterdir()) == FILES
    model, config = load_model(out / "weights")
    assert config.image_size == 48
    assert model.visual_encoder.pos_embed.shape[1] == 1 + 9
    before = load_file(pretrained / "weights/model.safetensors")["visual_encoder.patch_embed.proj.weight"]
    moved = (model.visual_encoder.patch_embed.proj.weight - before).abs().max()
    assert 0 < moved < 0.1
    curves = json.loads((out / "curves/metrics.json").read_text())
    assert set(curves["val"]) >= {"txt_r1", "img_r1", "r_mean"}
    assert "loss_mlm" not in curves["train"]
    metrics = json.loads((out / "weights/metrics.json").read_text())
    assert metrics["best"]["score"] >= metrics["last"]["r_mean"]


def test_finetuning_twice_gives_the_same_bytes(pretrained, task, finetune_params, tmp_path):
    first = tune(finetune_params(keep_weights="last"), task, pretrained, tmp_path / "a")
    second = tune(finetune_params(keep_weights="last"), task, pretrained, tmp_path / "b")
    assert content(first / "weights") == content(second / "weights")
    assert content(first / "curves") == content(second / "curves")


def test_finetuning_says_what_is_missing(pretrained, task, finetune_params, tmp_path):
    with pytest.raises(UserError, match="no run 'other': it has tiny"):
        tune(finetune_params(), task, pretrained, tmp_path, run="other")
    with pytest.raises(
        UserError, match=r"config\.json does not exist: run pretrain first|does not exist: run pretrain"
    ):
        tune(finetune_params(), task, tmp_path, tmp_path)
    shutil.copytree(task / "train", tmp_path / "task/train")
    with pytest.raises(UserError, match="val does not exist: run prepare_tasks, or set keep_weights to last"):
        tune(finetune_params(), tmp_path / "task", pretrained, tmp_path)
    with pytest.raises(UserError, match="max_tokens is 100, but the pre-trained model reads at most 32"):
        tune(finetune_params(max_tokens=100), task, pretrained, tmp_path)
    with pytest.raises(UserError, match="image_size=40 must be a multiple of patch_size=16"):
        tune(finetune_params(image_size=40), task, pretrained, tmp_path)


def test_a_damaged_weights_file_is_named(pretrained, task, finetune_params, tmp_path):
    shutil.copytree(pretrained / "weights", tmp_path / "weights")
    path = tmp_path / "weights/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="holds no ALBEF weights"):
        tune(finetune_params(), task, tmp_path, tmp_path)


def test_no_process_group_is_left_behind(pretrained):
    assert not torch.distributed.is_initialized()


def test_with_extend_a_longer_pretraining_goes_on_from_the_shorter_one(shards, pretrain_params, tmp_path, capfd):
    def go(name, **changes):
        outs = tmp_path / name / "weights", tmp_path / name / "curves"
        runtime = Runtime(work=tmp_path / "work")
        pretrain(pretrain_params(**changes), shards=shards, weights=outs[0], curves=outs[1], runtime=runtime)
        return json.loads((outs[0] / "metrics.json").read_text()), capfd.readouterr().err

    short, _ = go("short", epochs=1)
    go("other", epochs=1, seed=5)
    longer, said = go("longer", epochs=2, checkpoint={"extend": True})
    assert "pretrain goes on from step 3 of a training of 1 epochs, now 2" in said
    assert longer["first"] == short["first"]
    assert longer["last"]["step"] == 6
    _, said = go("anew", epochs=2, checkpoint={"extend": True}, seed=6)
    assert "goes on" not in said
