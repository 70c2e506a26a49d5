"""Published checkpoints to weights folders and back, through the command line too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.data.tokenizer import SPECIAL_TOKENS, load_tokenizer
from components.evaluation.weights import load_model
from components.io.errors import UserError
from components.training.albef_tasks import read_weights
from components.training.published import describe, export_to, import_to, local_copy, read_checkpoint
from components.training.task_data import encode_answers
from models.albef.config import AlbefConfig, EntailmentConfig, Nlvr2Config, VqaConfig
from models.albef.entailment import AlbefEntailment
from models.albef.nlvr2 import AlbefNlvr2
from models.albef.pretraining import AlbefPretraining
from models.albef.published import export_official
from models.albef.retrieval import AlbefRetrieval
from models.albef.vqa import AlbefVqa

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "image_size": 16,
    "patch_size": 8,
    "vision_width": 64,
    "vision_depth": 1,
    "vision_heads": 1,
    "vocab_size": 120,
    "text_width": 64,
    "text_layers": 2,
    "fusion_layers": 1,
    "text_heads": 1,
    "text_intermediate": 32,
    "max_positions": 12,
    "embed_dim": 8,
    "queue_size": 6,
}
MODELS = {
    "pretraining": lambda: AlbefPretraining(AlbefConfig(**SIZES)),
    "retrieval": lambda: AlbefRetrieval(AlbefConfig(**SIZES)),
    "vqa": lambda: AlbefVqa(VqaConfig(**SIZES, decoder_layers=1)),
    "entailment": lambda: AlbefEntailment(EntailmentConfig(**SIZES)),
    "nlvr2": lambda: AlbefNlvr2(Nlvr2Config(**SIZES)),
}


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """As bert-base-uncased's: [PAD] first, the other special tokens at 100 to 103."""
    words = [f"w{index}" for index in range(115)]
    words[0], words[100:104] = SPECIAL_TOKENS[0], SPECIAL_TOKENS[1:]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(words) + "\n")
    return path


def write(tmp_path: Path, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    model = MODELS[kind]()
    with torch.no_grad():
        for parameter in model.teacher.parameters():
            parameter.add_(1.0)  # not the student
    state = export_official(model)
    torch.save({"model": state, "epoch": 29, "config": {"optimizer": {"lr": 1e-4}}}, tmp_path / f"{kind}.pth")
    return tmp_path / f"{kind}.pth", state


@pytest.mark.parametrize("kind", MODELS)
def test_import_and_export_give_back_every_tensor(tmp_path: Path, vocabulary: Path, kind: str) -> None:
    path, state = write(tmp_path, kind)
    found, report = import_to(tmp_path / "weights", path, vocabulary)
    assert found == kind
    assert set(report.matched) | set(report.ignored) == state.keys()
    lineage = json.loads((tmp_path / "weights/lineage.json").read_text())
    assert (lineage["kind"], lineage["file"], lineage["epoch"]) == (kind, f"{kind}.pth", 29)
    assert not [name for name in load_file(tmp_path / "weights/model.safetensors") if name.startswith("teacher")]

    assert export_to(tmp_path / "again.pth", tmp_path / "weights") == len(state)
    again = torch.load(tmp_path / "again.pth", weights_only=True)["model"]
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key], value) for key, value in state.items())
    (tmp_path / "weights/training.safetensors").unlink()
    export_to(tmp_path / "student.pth", tmp_path / "weights")
    student = torch.load(tmp_path / "student.pth", weights_only=True)["model"]
    assert student.keys() == {key for key in state if "_m." not in key and "queue" not in key}


def test_imported_weights_are_read_by_training_and_evaluation(tmp_path: Path, vocabulary: Path) -> None:
    path, state = write(tmp_path, "pretraining")
    import_to(tmp_path / "weights", path, vocabulary, image_size=32)
    weights, sizes = read_weights(tmp_path / "weights")
    assert (sizes["image_size"], sizes["mask_id"], sizes["cls_id"]) == (32, 103, 101)
    assert weights["visual_encoder.pos_embed"].shape[1] == 1 + 16
    model, _ = load_model(tmp_path / "weights")
    assert torch.equal(model.itm_head.weight, state["itm_head.weight"])


def test_texts_end_as_in_the_published_training(tmp_path: Path, vocabulary: Path) -> None:
    path, _ = write(tmp_path, "retrieval")
    for separator, ids in ((False, [101, 5, 6]), (True, [101, 5, 6, 102])):
        import_to(tmp_path / f"{separator}", path, vocabulary, separator=separator)
        words = load_tokenizer(tmp_path / f"{separator}")
        assert words.encode_batch(["w5 w6"], 12)[0].tolist() == [ids]
        answer_ids, mask = encode_answers(words, ["w5 w6", "w7"], 12)
        assert answer_ids.tolist() == [[101, 5, 6, 102], [101, 7, 102, 0]]
        assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


def test_what_show_says(tmp_path: Path) -> None:
    text = "\n".join(describe(write(tmp_path, "nlvr2")[0]))
    assert "ALBEF for nlvr2" in text
    assert "sharing key_value" in text
    assert "saved after epoch 29" in text
    assert "2 left out, which hold nothing of their own: text_encoder.embeddings.position_ids" in text
    path, state = write(tmp_path, "retrieval")
    torch.save({k: v for k, v in state.items() if "_m." not in k}, path)  # bare, and without a teacher
    assert "not in the checkpoint, set anew: teacher." in "\n".join(describe(path))


class Harm:
    def __reduce__(self):
        return (os.mkdir, ("harm",))


def test_nothing_is_run_and_nothing_half_read(tmp_path: Path, vocabulary: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "more": Harm()}, "harm.pth")
    with pytest.raises(UserError, match="is not read, since that could run code"):
        read_checkpoint(Path("harm.pth"))
    assert not Path("harm").exists()
    path, state = write(tmp_path, "retrieval")
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UserError, match="is damaged or no checkpoint"):
        read_checkpoint(path)
    torch.save([1, 2], "list.pth")
    with pytest.raises(UserError, match="holds no state dict"):
        read_checkpoint(Path("list.pth"))
    save_file({"conv1.weight": torch.zeros(3)}, "other.safetensors")
    with pytest.raises(UserError, match=r"no published ALBEF checkpoint: .* but conv1"):
        import_to(tmp_path / "weights", Path("other.safetensors"), vocabulary)
    for tower in ("visual_encoder.", "text_encoder."):
        torch.save({"model": {k: v for k, v in state.items() if not k.startswith(tower)}}, "half.pth")
        with pytest.raises(UserError, match="not an ALBEF checkpoint with both towers"):
            import_to(tmp_path / "weights", Path("half.pth"), vocabulary)
    torch.save({"model": {k: v for k, v in state.items() if k != "visual_encoder.norm.bias"}}, "half.pth")
    with pytest.raises(UserError, match=r"lacks the tower visual_encoder: 1 missing \(visual_encoder.norm.bias\)"):
        import_to(tmp_path / "weights", Path("half.pth"), vocabulary)
    assert not (tmp_path / "weights").exists()


def test_a_larger_vocabulary_is_refused(tmp_path: Path, vocabulary: Path) -> None:
    path, _ = write(tmp_path, "retrieval")
    with vocabulary.open("a") as stream:
        stream.write("\n".join(f"more{index}" for index in range(10)) + "\n")
    with pytest.raises(UserError, match=r"has 125 words, but .* was trained with 120"):
        import_to(tmp_path / "weights", path, vocabulary)


def test_from_a_bucket(tmp_path: Path, monkeypatch) -> None:
    class Client:
        def download_file(self, bucket: str, key: str, target: str) -> None:
            assert (bucket, key) == ("bucket", "a/x.pth")
            Path(target).write_bytes(b"content")

    monkeypatch.setattr("boto3.client", lambda service: Client())
    with local_copy("s3://bucket/a/x.pth") as path:
        assert (path.name, path.read_bytes()) == ("x.pth", b"content")
    with pytest.raises(UserError, match="does not exist or is no file"), local_copy(str(tmp_path / "no.pth")):
        pass


def test_the_commands(tmp_path: Path, vocabulary: Path) -> None:
    path, _ = write(tmp_path, "vqa")

    def vlp(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pipelines.cli", "checkpoint", *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    done = vlp("import", path.name, "--out", "weights", "--tokenizer", vocabulary.name)
    assert (done.returncode, done.stdout.partition("\n")[0]) == (0, "weights: ALBEF for vqa"), done.stderr
    assert vlp("export", "weights", "out.pth").returncode == 0
    again = vlp("import", path.name, "--out", "weights", "--tokenizer", vocabulary.name)
    assert again.returncode == 2
    assert again.stderr == "vlp: weights exists already: remove it, or choose another folder\n"
