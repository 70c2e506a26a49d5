"""The tasks beside retrieval, from prepared items to trained weights and metrics, end to end and tiny."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageDraw

from components.data.prepare_tasks import PrepareTasksParams, TaskParams, prepare_tasks
from components.data.tokenizer import load_tokenizer
from components.evaluation.evaluate import EvaluateParams, evaluate
from components.io.errors import UserError
from components.io.runtime import Runtime
from components.training.data import Draw
from components.training.finetune import FinetuneParams, finetune
from components.training.pretrain import pretrain
from components.training.settings import AugmentParams
from components.training.task_data import TaskData, encode_answers
from models.albef.config import parse_config
from tests.training.conftest import outs_of_evaluate

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "yellow": (220, 210, 30)}
TRAINING = {
    "epochs": 2,
    "batch_size": 4,
    "schedule": {"kind": "cosine_by_iteration", "lr": 1e-3, "min_lr": 1e-5, "warmup_lr": 1e-5, "warmup_iterations": 2},
    "log_every": 1,
    "num_threads": 1,
    "text_dropout": 0.0,
    "augment": {"crop_scale": [1, 1], "flip": False, "randaugment_operations": 0},
}
OWN = {
    "vqa": {"decoder_layers": 1, "validate_epochs": True, "keep_weights": "best"},
    "entailment": {},
    "nlvr2": {},
    "grounding": {"queue_size": 8},
    "retrieval": {"queue_size": 8},
}
KINDS = [kind for kind in OWN if kind != "retrieval"]  # which has tests of its own


def draw(path: Path, left: str, right: str) -> None:
    picture = Image.new("RGB", (48, 40), (20, 20, 20))
    canvas = ImageDraw.Draw(picture)
    canvas.rectangle((4, 10, 19, 29), fill=COLOURS[left])
    canvas.rectangle((28, 10, 43, 29), fill=COLOURS[right])
    picture.save(path)


@pytest.fixture(scope="module")
def annotated(tmp_path_factory) -> Path:
    """Pictures of two squares and every task's annotations of them, in the built-in corpus's layout."""
    folder = tmp_path_factory.mktemp("annotated")
    (folder / "images").mkdir()
    rng = random.Random(0)
    content: dict[str, dict[str, list]] = {kind: {} for kind in KINDS}
    for split, count in (("train", 12), ("val", 4), ("test", 5)):
        names = []
        for index in range(count):
            left, right = rng.sample(sorted(COLOURS), 2)
            name = f"{split}-{index}.png"
            draw(folder / "images" / name, left, right)
            names.append((name, left, right))
        boxes = [[4, 10, 16, 20], [28, 10, 16, 20]]
        content["vqa"][split] = [
            {
                "id": f"q{name}",
                "image": name,
                "question": f"is the left {left} or {right}?",
                "answer": left,
                "type": "c",
            }
            for name, left, right in names
        ]
        content["entailment"][split] = [
            {"image": name, "sentence": f"a {(left, right)[number % 2]} square", "label": label}
            for number, (name, left, right) in enumerate(names)
            for label in (("entailment", "neutral", "contradiction")[number % 3],)
        ]
        content["nlvr2"][split] = [
            {"images": [one[0], other[0]], "sentence": f"both show {one[1]}", "label": str(number % 2 == 0)}
            for number, (one, other) in enumerate(zip(names, names[1:] + names[:1], strict=True))
        ]
        content["grounding"][split] = [
            {"id": f"g{name}", "image": name, "text": f"the {right} square", "box": boxes[1], "candidates": boxes}
            for name, _, right in names
        ]
    for kind, splits in content.items():
        (folder / f"{kind}.json").write_text(json.dumps(splits))
    return folder


@pytest.fixture(scope="module")
def tasks(annotated: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tasks")
    params = PrepareTasksParams(
        tasks={
            kind: TaskParams(path=annotated, kind=kind, annotations=f"{kind}.json", images="images") for kind in KINDS
        }
    )
    for kind in KINDS:
        prepare_tasks(
            params, task=kind, input=annotated, tasks=out / kind, runtime=Runtime(work=out / "w", processes=1)
        )
    return out


def tune(kind: str, tasks: Path, weights: Path, out: Path, **changes) -> Path:
    run = TRAINING | OWN[kind] | {"kind": kind, "task": str(tasks / kind)} | changes
    finetune(
        FinetuneParams.model_validate({"runs": {"tiny": run}}),
        run="tiny",
        task=tasks / kind,
        pretrained=weights,
        weights=out / "weights",
        curves=out / "curves",
        runtime=Runtime(work=out / "work"),
    )
    return out


def judge(kind: str, tasks: Path, out: Path, **changes) -> dict:
    params = EvaluateParams(batch_size=3, num_threads=1, **changes)
    evaluate(
        params,
        run="tiny",
        task=tasks / kind,
        weights=out / "weights",
        evaluation=out / "evaluation",
        runtime=Runtime(work=out / "work"),
    )
    return json.loads((out / "evaluation/metrics.json").read_text())


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_from_items_to_metrics(kind: str, tasks: Path, pretrained: Path, tmp_path: Path) -> None:
    out = tune(kind, tasks, pretrained / "weights", tmp_path)
    curves = json.loads((out / "curves/metrics.json").read_text())
    assert 0 <= curves["val"]["accuracy"] <= 100
    config = parse_config((out / "weights/config.json").read_text())
    assert getattr(config, "task", "grounding") == kind
    metrics = judge(kind, tasks, out)
    whole = files(out / "evaluation")
    assert {path.name for path in (out / "evaluation").iterdir()} == outs_of_evaluate()
    assert (out / "evaluation/extra/submission.json" in whole) == (kind == "vqa")
    judge(kind, tasks, out, pictures_per_part=3)  # two parts, of the same batches
    assert files(out / "evaluation") == whole
    assert metrics["kind"] == kind
    assert metrics["items"] == 5
    assert 0 <= metrics["accuracy"] <= 100
    assert 0 < metrics["chance"] < 100
    assert metrics["majority"] is not None
    ranks = pq.read_table(out / "evaluation/ranks.parquet").to_pylist()
    assert len({row["item"] for row in ranks}) == 5
    first = sum(row["rank"] == 1 for row in ranks)
    assert metrics["accuracy"] == pytest.approx(100 * first / 5)
    examples = json.loads((out / "evaluation/examples.json").read_text())
    assert len(examples["best"]) + len(examples["worst"]) == 5
    assert len(examples["best"]) == first
    again = tune(kind, tasks, pretrained / "weights", tmp_path / "again")
    for name in ("model.safetensors", "metrics.json", "config.json"):
        assert (again / "weights" / name).read_bytes() == (out / "weights" / name).read_bytes()


@pytest.mark.parametrize("kind", ["vqa", "entailment", "nlvr2"])
def test_a_few_items_can_be_learned_by_heart(kind: str, tasks: Path, pretrained: Path, tmp_path: Path) -> None:
    """Training and evaluation mean the same: what was learned is answered rightly, far above the commonest answer."""
    schedule = TRAINING["schedule"] | {"lr": 5e-3, "min_lr": 1e-3}
    changes = {"epochs": 40, "alpha": 0.0, "keep_weights": "last", "validate_epochs": False, "schedule": schedule}
    out = tune(kind, tasks, pretrained / "weights", tmp_path, **changes)
    metrics = judge(kind, tasks, out, split="train")
    assert metrics["majority"] <= 50
    assert metrics["accuracy"] >= 75


@pytest.mark.parametrize(("mode", "layer"), [("itc", None), ("itm", 1)])
def test_grounding_by_either_map(mode: str, layer: int | None, tasks: Path, pretrained: Path, tmp_path: Path) -> None:
    out = tune("grounding", tasks, pretrained / "weights", tmp_path, epochs=1)
    metrics = judge("grounding", tasks, out, gradcam=mode, gradcam_layer=layer)
    assert metrics["gradcam"] == mode
    assert metrics["chance"] == 50
    assert metrics["ceiling"] == 100
    with pytest.raises(UserError, match=r"evaluate.gradcam_layer: .* choose one of"):
        judge("grounding", tasks, out, gradcam=mode, gradcam_layer=7)


def test_free_answers(tasks: Path, pretrained: Path, tmp_path: Path) -> None:
    out = tune("vqa", tasks, pretrained / "weights", tmp_path, epochs=1)
    assert judge("vqa", tasks, out, answers="generate")["answers"] == "generate"


def test_weights_of_another_kind_are_refused(tasks: Path, pretrained: Path, tmp_path: Path) -> None:
    out = tune("entailment", tasks, pretrained / "weights", tmp_path, epochs=1)
    with pytest.raises(UserError, match="holds a model for entailment, the task is of kind nlvr2"):
        judge("nlvr2", tasks, out)
    with pytest.raises(UserError, match="is of a task of kind vqa, not entailment"):
        finetune(
            FinetuneParams.model_validate(
                {"runs": {"tiny": TRAINING | {"kind": "entailment", "task": str(tasks / "vqa")}}}
            ),
            run="tiny",
            task=tasks / "vqa",
            pretrained=pretrained / "weights",
            weights=tmp_path / "w",
            curves=tmp_path / "c",
            runtime=Runtime(work=tmp_path / "work"),
        )


def test_text_assignment_goes_before_nlvr2(
    tasks: Path, shards: Path, pretrained: Path, pretrain_params, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"set pretrain.assign_text, or finetune.runs.tiny.start to pretrain"):
        tune("nlvr2", tasks, pretrained / "weights", tmp_path, start="assign_text")
    assign = TRAINING | {"epochs": 1, "sharing": "none"}
    del assign["text_dropout"]
    params = pretrain_params(assign_text=assign)
    runtime = Runtime(work=tmp_path / "work")
    pretrain(params, shards=shards, weights=tmp_path / "weights", curves=tmp_path / "curves", runtime=runtime)
    same = (pretrained / "weights/model.safetensors").read_bytes()
    assert (tmp_path / "weights/model.safetensors").read_bytes() == same, "what follows changes nothing before it"
    config = parse_config((tmp_path / "weights/assign_text/config.json").read_text())
    assert (config.task, config.sharing) == ("assign_text", "none")
    points = json.loads((tmp_path / "weights/assign_text/metrics.json").read_text())
    assert points["last"]["loss"] > 0
    out = tune("nlvr2", tasks, tmp_path / "weights", tmp_path / "tuned", start="assign_text", epochs=1)
    assert judge("nlvr2", tasks, out)["items"] == 5


def test_batches_of_pairs_and_answers(tasks: Path, shards: Path) -> None:
    words = load_tokenizer(shards)
    options = {"image_size": 32, "max_tokens": 20, "augment": AugmentParams(flip=False), "seed": 0}
    pairs = TaskData(tasks / "nlvr2/train", "nlvr2", words, **options)
    batch = pairs[Draw(0, (0, 3))]
    assert batch.images.shape == (4, 3, 32, 32)
    assert batch.targets.tolist() == [1, 0]
    alone = pairs[Draw(0, (3,))]
    assert torch.equal(batch.images[[1, 3]], alone.images), "first pictures first, and no draw depends on the batch"
    asked = TaskData(tasks / "vqa/train", "vqa", words, max_answer_tokens=9, **options)[Draw(0, (0, 1, 2))]
    assert asked.answer_rows.tolist() == [0, 1, 2]
    assert asked.weights.tolist() == [1.0, 1.0, 1.0]
    ends = asked.answer_ids.gather(1, asked.answer_mask.sum(1, keepdim=True) - 1)
    assert (ends == words.sep_id).all()


def test_answers_end_in_sep_whatever_the_tokenizer_does(shards: Path) -> None:
    from tokenizers import processors

    answers = ["red", "red and green squares"]
    words = load_tokenizer(shards)
    wanted = encode_answers(words, answers, 9)
    words.inner.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0", special_tokens=[("[CLS]", words.cls_id)]
    )
    got = encode_answers(words, answers, 9)
    assert all(np.array_equal(one, other) for one, other in zip(wanted, got, strict=True))


def evaluate_split(task: Path, weights: Path, out: Path, **changes) -> dict:
    params = EvaluateParams(num_threads=1, **changes)
    evaluate(params, run="real", task=task, weights=weights, evaluation=out, runtime=Runtime(work=out / "work"))
    return json.loads((out / "metrics.json").read_text())


def prepare(name: str, params: TaskParams, tmp_path: Path) -> Path:
    """The folder of tasks in which the task `name` is now."""
    tasks = tmp_path / "tasks"
    prepare_tasks(
        PrepareTasksParams(tasks={name: params}),
        task=name,
        input=params.path,
        tasks=tasks / name,
        runtime=Runtime(work=tmp_path / "work", processes=1),
    )
    return tasks


def test_grounding_on_real_pictures(shared: Path, pretrained: Path, tmp_path: Path) -> None:
    """COCO's single things: an untrained model points somewhere, near chance, and every number is there."""
    source, file = shared / "data/coco_mini", "annotations/instances_val2017.json"
    params = TaskParams(path=source, kind="grounding", annotations=file, images="val2017", splits={"test": [file]})
    tasks = prepare("coco", params, tmp_path)
    metrics = evaluate_split(tasks / "coco", pretrained / "weights", tmp_path / "out")
    assert metrics["items"] > 50
    assert metrics["ceiling"] == 100
    assert 0 < metrics["chance"] < metrics["majority"] < 100


def test_retrieval_on_real_pictures(shared: Path, pretrained: Path, tmp_path: Path) -> None:
    """Flickr8k's pictures with five captions each, from Karpathy's file to the recalls."""
    source, folder = shared / "data/flickr8k", tmp_path / "flickr8k"
    (folder / "images").mkdir(parents=True)
    images = json.loads((source / "dataset_flickr8k.json").read_text())["images"]
    chosen = [image for split in ("train", "test") for image in [i for i in images if i["split"] == split][:6]]
    for image in chosen:
        shutil.copy(source / "images" / image["filename"], folder / "images")
    (folder / "karpathy.json").write_text(json.dumps({"dataset": "flickr8k", "images": chosen}))
    params = TaskParams(path=folder, kind="retrieval", annotations="karpathy.json", images="images")
    tasks = prepare("retrieval", params, tmp_path)
    out = tune(
        "retrieval", tasks, pretrained / "weights", tmp_path / "tuned", validate_epochs=False, keep_weights="last"
    )
    metrics = evaluate_split(tasks / "retrieval", out / "weights", tmp_path / "out", top_k=4)
    assert (metrics["pictures"], metrics["captions"]) == (6, 30)
    for way in ("itc", "itm"):
        assert 0 < metrics[way]["txt_r10"] <= 100
        assert 0 < metrics[way]["img_r10"] == 100  # six pictures
    assert metrics["chance"]["img_r1"] == pytest.approx(100 / 6)


def test_entailment_on_real_pairs(shared: Path, pretrained: Path, tmp_path: Path) -> None:
    """SNLI-VE's pairs on Flickr8k's pictures, from the files to the metrics: learned on dev's, judged on test's."""
    folder = tmp_path / "snli"
    (folder / "images").mkdir(parents=True)
    for split in ("dev", "test"):
        lines = (shared / "data/snli_ve" / f"{split}.jsonl").read_text().splitlines()[:24]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
        for name in {json.loads(line)["image"] for line in lines}:
            if (shared / "data/flickr8k/images" / name).is_file():
                (folder / "images" / name).symlink_to(shared / "data/flickr8k/images" / name)
    params = TaskParams(
        path=folder,
        kind="entailment",
        annotations=["dev.jsonl", "test.jsonl"],
        images="images",
        splits={"train": ["dev.jsonl"], "test": ["test.jsonl"]},
    )
    tasks = prepare("entailment", params, tmp_path)
    changes = {"validate_epochs": False, "keep_weights": "last", "epochs": 1}
    out = tune("entailment", tasks, pretrained / "weights", tmp_path / "tuned", **changes)
    metrics = evaluate_split(tasks / "entailment", out / "weights", tmp_path / "out")
    assert metrics["items"] > 15
    assert set(metrics["by_class"]) == {"contradiction", "neutral", "entailment"}
