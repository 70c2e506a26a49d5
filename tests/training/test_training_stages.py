import json

import pytest
from safetensors.torch import load_file

from components.evaluation.weights import load_model
from components.io.errors import UserError
from components.io.runtime import Runtime
from components.training.finetune import finetune
from components.training.pretrain import pretrain

FILES = ["config.json", "lineage.json", "metrics.json", "model.safetensors", "tokenizer.json"]


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def pretrained(shards, tmp_path_factory):
    from components.training.pretrain import PretrainParams
    from tests.training.conftest import MODEL, TRAINING

    folder = tmp_path_factory.mktemp("pretrained")
    params = PretrainParams.model_validate(TRAINING | {"model": MODEL})
    pretrain(
        params, shards=shards, weights=folder / "weights", curves=folder / "curves", runtime=Runtime(work=folder / "w")
    )
    return folder


def test_pretraining_leaves_weights_that_evaluation_reads(pretrained):
    assert sorted(path.name for path in (pretrained / "weights").iterdir()) == FILES
    model, config = load_model(pretrained / "weights")
    assert config.vocab_size == model.text_encoder.bert.embeddings.word_embeddings.num_embeddings
    metrics = json.loads((pretrained / "weights" / "metrics.json").read_text())
    assert metrics["steps"] == 6
    assert metrics["last"]["loss"] < metrics["first"]["loss"]
