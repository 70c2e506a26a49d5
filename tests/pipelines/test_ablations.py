"""Ablations: their files, their cells, and carrying them out by DVC with stages that are cheap."""

import json
from pathlib import Path

import pytest

from components.evaluation.ablations import cell
from components.io.errors import UserError
from pipelines import ablation
from pipelines.ablation import Ablation, ablation_names, merged, plan, read_ablation
from pipelines.cli import app, guarded

MINE = """
title: What helps
paper: Nobody, table 1
recipe: demo
seeds: [3, 4]
common: {pretrain: {epochs: 1}}
variants:
  plain:
  hard:
    pretrain: {model: {negative_hardness: 1}}
columns:
  digest: {run: retrieval, mean: [itm.digest]}
  recall: {run: retrieval, mean: [itm.txt_r1, itc.img_r1]}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    return path


def changed(path: Path, old: str, new: str) -> str:
    assert MINE.count(old) == 1
    path.write_text(MINE.replace(old, new))
    return str(path)


# -- files and cells


@pytest.mark.parametrize("name", ablation_names())
def test_every_ablation_is_valid(name):
    content = read_ablation(name)[1]
    cells = plan(content, name)
    assert len(content.seeds) >= 3
    assert len(cells) == len(content.variants) * len(content.seeds)
    texts = [json.dumps(one.content, sort_keys=True) for one in cells]
    assert len(set(texts)) == len(texts), "two variants are the same"


def test_a_number_is_albef_s_table():
    assert read_ablation("1") == read_ablation("albef-1")


def test_cells_are_the_recipe_with_what_differs(mine):
    name, content = read_ablation(str(mine))
    cells = plan(content, name)
    assert [(one.variant, one.seed) for one in cells] == [("plain", 3), ("hard", 3), ("plain", 4), ("hard", 4)]
    for one in cells:
        assert one.content["pretrain"]["seed"] == one.content["finetune"]["runs"]["retrieval"]["seed"] == one.seed
        assert one.content["pretrain"]["epochs"] == 1
        assert one.content["pretrain"]["model"]["negative_hardness"] == (1 if one.variant == "hard" else 0.3)
        assert one.content["pretrain"]["model"]["embed_dim"] == 128, "the rest of a section stays"
    assert [one.seed for one in plan(content, name, [9])] == [9, 9]


def test_merging_changes_no_input():
    base, changes = {"a": {"b": 1, "c": [1, 2]}, "d": 4}, {"a": {"c": [3]}, "e": {"f": 5}}
    kept = json.dumps([base, changes])
    assert merged(base, changes) == {"a": {"b": 1, "c": [3]}, "d": 4, "e": {"f": 5}}
    assert json.dumps([base, changes]) == kept


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("recipe: demo", "recipe: dem", r"dem is no recipe; did you mean demo"),
        ("seeds: [3, 4]", "seeds: [3, 3]", r"name each once"),
        ("seeds: [3, 4]", "seeds: []", r"seeds: "),
        ("title:", "titel:", r"mine.yaml: "),
        ("negative_hardness: 1", "negative_hardnes: 1", r"mine: hard: .*did you mean negative_hardness"),
        ("run: retrieval, mean: [itm.digest]", "run: retrival, mean: [itm.digest]", r"plain has no run retrival"),
    ],
)
def test_wrong_files_are_refused_before_anything_runs(mine, old, new, message):
    table = changed(mine, old, new)
    with pytest.raises(UserError, match=message):
        name, content = read_ablation(table)
        plan(content, name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ablation"], "which ablation? name one by --table"),
        (["ablation", "--table", "12"], "12 is no ablation"),
        (["data", "--table", "1"], "--table and --seed are for the flow ablation"),
    ],
)
def test_wrong_commands(arguments, message, capsys):
    assert guarded(lambda: app(["flow", *arguments], standalone_mode=False)) == 2
    assert message in capsys.readouterr().err


def test_the_list(capsys):
    assert guarded(lambda: app(["flow", "ablation", "--table", "list"], standalone_mode=False)) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ablation_names()


def test_cells_of_the_table():
    assert cell((40.0, 42.0, 44.0)) == "42.0 ± 2.0"
    assert cell((41.26,)) == "41.3"


# -- carried out


def ran(project) -> list[str]:
    """Stages that ran in the workspace since the last look."""
    log = project.folder / ablation.WORKSPACE / "ran.log"
    text = log.read_text() if log.is_file() else ""
    log.unlink(missing_ok=True)
    return text.split()


@pytest.fixture
def wide_project(project):
    """The copy of the project whose stages can be run from the workspace too."""
    text = (project.folder / "dvc.yaml").read_text()
    (project.folder / "dvc.yaml").write_text(text.replace("fake_stage.py", str(project.folder / "fake_stage.py")))
    return project


@pytest.mark.slow
def test_variants_share_what_they_have_in_common(wide_project, mine, prefect_server, capsys):
    from pipelines.flows import run_ablation

    run_ablation(str(mine))
    out = capsys.readouterr().out
    assert "What helps (Nobody, table 1)" in out
    assert "seeds 3, 4" in out
    stages = ran(wide_project)
    assert {stages.count(name) for name in ("synthesize", "download@corpus", "clean", "shard", "validate")} == {1}
    assert {stages.count(name) for name in ("pretrain", "finetune@retrieval", "evaluate@retrieval")} == {4}
    assert "report" not in stages
    assert [path.name for path in Path("data").iterdir() if path.is_dir()] == ["ablations"], "the project's own data"

    path = Path("data/ablations/mine.json")
    result = json.loads(path.read_text())
    assert result["seeds"] == [3, 4]
    assert result["columns"] == ["digest", "recall"]
    digests = [number for row in result["rows"] for number in row["values"]["digest"]]
    assert len(set(digests)) == 4, "each cell's own number"
    assert [row["values"]["recall"] for row in result["rows"]] == [[50.0, 50.0]] * 2
    assert list(result["inputs"]) == ["data/tasks/retrieval"]

    before = path.read_bytes()
    path.unlink()
    run_ablation(str(mine))
    assert ran(wide_project) == [], "all from DVC's cache"
    assert path.read_bytes() == before


@pytest.mark.slow
def test_a_variant_that_fails_says_which_and_keeps_the_rest(wide_project, mine, prefect_server, monkeypatch):
    from pipelines.flows import run_ablation

    monkeypatch.setenv("FAIL_STAGE", "pretrain")
    with pytest.raises(UserError, match=r"plain, seed 3: evaluate@retrieval failed: the disk is full: free some space"):
        run_ablation(str(mine))
    assert ran(wide_project)[0] == "synthesize"
    monkeypatch.delenv("FAIL_STAGE")
    run_ablation(str(mine), [3])
    assert set(ran(wide_project)) == {"pretrain", "finetune@retrieval", "evaluate@retrieval"}


def test_inputs_from_elsewhere_are_linked(project, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "pairs.tsv").write_text("a\thttp://x.test/a.jpg\n")
    content = plan(
        Ablation.model_validate(
            {
                "title": "t",
                "recipe": "demo",
                "variants": {"a": {}},
                "columns": {"c": {"run": "retrieval", "mean": ["itm.r_mean"]}},
            }
        ),
        "mine",
        [1],
    )
    content[0].content["download"]["sources"]["corpus"]["path"] = "../shared"
    workspace = ablation.open_workspace(project.folder, content)
    assert (workspace / "../shared/pairs.tsv").read_text().startswith("a\t")
    content[0].content["download"]["sources"]["corpus"]["path"] = "../../../../shared"
    with pytest.raises(UserError, match="name it by its absolute path"):
        ablation.open_workspace(project.folder, content)
