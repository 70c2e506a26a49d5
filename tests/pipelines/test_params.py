"""What is said about a wrong params.yaml."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from components.io.errors import UserError
from pipelines.params import check_params, load_params, override, parse_yaml, read_yaml
from pipelines.recipe import RECIPES, recipe_names

ROOT = Path(__file__).resolve().parents[2]
DEMO = RECIPES / "demo.yaml"


def message_of(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_params(DEMO, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_are_valid(name):
    params = load_params(RECIPES / f"{name}.yaml")
    assert params.runtime.processes == 0
    assert params.finetune.runs


def test_params_file_is_the_demo():
    assert (ROOT / "params.yaml").read_text() == DEMO.read_text()


def test_overrides_are_yaml_and_win():
    params = load_params(DEMO, ["clean.caption.max_words=7", "runtime.work=elsewhere", "pretrain.clip_norm=null"])
    assert params.clean.caption.max_words == 7
    assert params.runtime.work == Path("elsewhere")
    assert params.pretrain.clip_norm is None


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        # unknown names, with the nearest
        ("clean.captoin=1", ["clean.captoin: no such key", "did you mean caption?", "allowed: picture, caption"]),
        ("cleen={}", ["cleen: no such key", "did you mean clean?"]),
        ("finetune.runs.retrieval.epoch=3", ["finetune.runs.retrieval.epoch: no such key", "did you mean epochs?"]),
        ("pretrain.model.patchsize=8", ["pretrain.model.patchsize: no such key", "did you mean patch_size?"]),
        # wrong types: nothing is converted in silence
        ("clean.caption.max_words=many", ['clean.caption.max_words: "many" is not allowed', "a whole number"]),
        ('clean.caption.max_words="20"', ['clean.caption.max_words: "20" is not allowed']),
        ("pretrain.epochs=1.5", ["pretrain.epochs: 1.5 is not allowed", "a whole number"]),
        ("pretrain.weight_decay=true", ["pretrain.weight_decay: true is not allowed", "a number"]),
        ("pretrain.augment.flip=1", ["pretrain.augment.flip: 1 is not allowed", "true or false"]),
        ("pretrain=3", ["pretrain: 3 is not allowed", "a mapping"]),
        ("download.sources.corpus=list.tsv", ["download.sources.corpus:", "is not allowed", "a mapping"]),
        # out of range
        ("pretrain.batch_size=1", ["pretrain.batch_size: 1 is not allowed", "at least 2"]),
        ("evaluate.top_k=0", ["evaluate.top_k: 0 is not allowed", "at least 1 and at most 100000"]),
        ("pretrain.schedule.lr=0", ["pretrain.schedule.lr: 0 is not allowed", "greater than 0"]),
        ("runtime.processes=-1", ["runtime.processes: -1 is not allowed", "at least 0"]),
        ("pretrain.augment.crop_scale=[0.5, 2]", ["pretrain.augment.crop_scale.1: 2 is not allowed", "at most 1"]),
        # choices
        ("shard.tokenizer.kind=trian", ["shard.tokenizer.kind", "one of train, file, name", "did you mean train?"]),
        ("download.sources.Bad name={path: x}", ["download.sources.Bad name: this name is not allowed", "matches"]),
        # contradictions within a section and between sections
        ("pretrain.model.patch_size=7", ["pretrain.model:", "image_size=96", "patch_size=7"]),
        (
            "finetune.runs.retrieval.task=data/tasks/vqa",
            ["finetune.runs.retrieval.task: data/tasks/vqa", "prepare_tasks.tasks", "allowed: data/tasks/retrieval"],
        ),
        ("finetune.runs.retrieval.kind=vqas", ["finetune.runs.retrieval.kind", '"vqas"', "did you mean vqa?"]),
        ("evaluate.split=dev", ["evaluate.split: dev", "prepare_tasks.tasks.retrieval.splits", "train, val, test"]),
        ("evaluate.image_size=100", ["evaluate.image_size: 100", "pretrain.model.patch_size 16"]),
        ("finetune.runs.retrieval.image_size=100", ["finetune.runs.retrieval.image_size: 100", "patch_size 16"]),
        ("evaluate.max_tokens=65", ["evaluate.max_tokens: 65", "pretrain.model.max_positions 64"]),
    ],
)
def test_one_problem_is_one_line(change, parts):
    message = message_of(change)
    assert message.startswith(f"{DEMO}: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_an_undrawn_corpus_cannot_be_read():
    message = message_of("synthesize.enabled=false")
    assert "download.sources.corpus.path: data/corpus" in message
    assert "prepare_tasks.tasks.retrieval.path: data/corpus" in message


def test_problems_are_listed_one_per_line_in_full():
    first, *lines = message_of("clean.captoin=1", "pretrain.epochs=0", "pretrain.batch_size=no").splitlines()
    assert first == f"{DEMO}: 3 problems"
    assert [line.strip().partition(":")[0] for line in lines] == [
        "clean.captoin",
        "pretrain.epochs",
        "pretrain.batch_size",
    ]


def test_a_missing_section_is_named():
    content = read_yaml(DEMO)
    del content["clean"]
    with pytest.raises(UserError, match=r"clean: missing; it must be a mapping"):
        check_params(content, "p")


@pytest.mark.parametrize(
    ("assignment", "part"),
    [
        ("clean", "write it as section.key=value"),
        ("=3", "write it as section.key=value"),
        ("clean..x=3", "write it as section.key=value"),
        ("clean.caption.max_words.x=3", "max_words is a value, not a section"),
        ("clean.caption.max_words=[", "is not a YAML value"),
    ],
)
def test_malformed_overrides(assignment, part):
    with pytest.raises(UserError, match="--set") as caught:
        override(read_yaml(DEMO), assignment)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("clean:\n  a: 1\n  a: 2\n", "p.yaml:3: key a stands twice"),
        ("clean: [1,\n", "p.yaml:2: this is not YAML"),
        ("clean: 'x\n", "this is not YAML"),
        ("a: 1\n b: 2\n", "p.yaml:2: this is not YAML"),
        ("- a\n", "a mapping of stages"),
        ("", "a mapping of stages"),
        ("a: !!python/object/apply:os.system ['true']\n", "this is not YAML"),
    ],
)
def test_text_that_is_no_parameter_file(text, part):
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "p.yaml")
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="does not exist: write one with `vlp recipe demo`"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"clean: \xe4\n")
    with pytest.raises(UserError, match="must be a text file in UTF-8"):
        read_yaml(tmp_path / "latin.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path)


def test_checking_imports_nothing_heavy():
    heavy = [
        "torch",
        "ray",
        "pyarrow",
        "great_expectations",
        "transformers",
        "pandas",
        "PIL",
        "prefect",
        "dvc",
        "numpy",
    ]
    code = textwrap.dedent(f"""
        import json, sys
        from pathlib import Path
        from pipelines.params import load_params
        load_params(Path({str(DEMO)!r}))
        print(json.dumps([name for name in {heavy} if name in sys.modules]))
    """)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_yaml_is_read_as_dvc_reads_it():
    from dvc.utils.serialize import parse_yaml as dvc_parse

    for name in recipe_names():
        text = (RECIPES / f"{name}.yaml").read_text()
        assert parse_yaml(text, name) == dvc_parse(text, name)
        assert YAML(typ="safe").load(text) == parse_yaml(text, name)
