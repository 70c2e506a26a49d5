"""dvc.yaml: our reading of it against DVC's, its deps against the imports, and what a change makes stale."""

import shutil
import subprocess
from pathlib import Path

import grimp
import pytest

from components.io import code
from components.io.errors import UserError
from pipelines import deps
from pipelines.dvcfile import check_tracked, fill, find_entry, read_entries, strangers
from pipelines.params import read_yaml
from pipelines.recipe import RECIPES, recipe_names
from pipelines.stages import STAGES, Stage

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("recipe", recipe_names())
def test_read_as_dvc_reads_it(project, recipe):
    from dvc.repo import Repo

    shutil.copyfile(RECIPES / f"{recipe}.yaml", "params.yaml")
    shutil.copyfile(ROOT / "dvc.yaml", "dvc.yaml")
    ours = read_entries(read_yaml(Path("params.yaml")))
    with Repo(".") as repository:
        stages = {stage.addressing: stage for stage in repository.index.stages}
        assert set(stages) == set(ours)
        for address, stage in stages.items():
            entry = ours[address]
            assert stage.cmd == entry.cmd
            files = [dep for dep in stage.deps if not hasattr(dep, "params")]
            assert {Path(dep.fs_path).resolve() for dep in files} == {Path(dep).resolve() for dep in entry.deps}
            assert {Path(out.fs_path) for out in stage.outs} == {Path(out).absolute() for out in entry.outs}
            tracked = {key for dep in stage.deps if hasattr(dep, "params") for key in dep.params}
            assert tracked == set(entry.params)


# -- deps against imports


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("components", "models", exclude_type_checking_imports=True, cache_dir=None)


@pytest.mark.parametrize("name", STAGES)
def test_deps_name_every_module_that_the_stage_imports(graph, name):
    definition = read_yaml(ROOT / "dvc.yaml")["stages"][name]
    listed = {dep for dep in definition.get("do", definition)["deps"] if deps.is_code(dep)}
    module = STAGES[name].module
    for imported in {module} | graph.find_upstream_modules(module):
        path = imported.replace(".", "/")
        assert listed & {f"{path}.py", f"{path}/__init__.py"}, f"{name} imports {imported}: run `make deps`"
    for dep in listed:
        assert (ROOT / dep).is_file(), f"{name} lists {dep}, which is gone: run `make deps`"


def test_make_deps_has_nothing_to_do():
    text = (ROOT / "dvc.yaml").read_text()
    assert deps.with_code_deps(text, ROOT) == text


def test_make_deps_restores_what_was_taken_out_and_drops_what_is_not_imported():
    text = (ROOT / "dvc.yaml").read_text()
    less = text.replace("    - components/data/clean.py\n", "", 1)
    more = text.replace("    - components/data/clean.py\n", "    - components/data/clean.py\n    - models/gone.py\n", 1)
    assert less != text != more
    assert deps.with_code_deps(less, ROOT) == text
    assert deps.with_code_deps(more, ROOT) == text


def test_lazy_imports_packages_and_named_files_count(tmp_path, monkeypatch):
    package = tmp_path / "made_up_package"
    (package / "room").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "room" / "__init__.py").write_text("from made_up_package import base\n")
    (package / "base.py").write_text("")
    (package / "room" / "stage.py").write_text("def stage():\n    from made_up_package.room import deep\n")
    (package / "room" / "deep.py").write_text("TEMPLATE = 'pages/page.html'\n")
    (package / "room" / "other.py").write_text("")
    (package / "room" / "pages").mkdir()
    (package / "room" / "pages" / "page.html").write_text("")
    (package / "room" / "pages" / "unused.html").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in (deps, code):
        monkeypatch.setattr(module, "PACKAGES", ("made_up_package",))
    monkeypatch.setattr(Stage, "module", property(lambda self: "made_up_package.room.stage"))
    found = deps.code_deps(Stage("stage", "room"), deps.import_graph.__wrapped__(), tmp_path)
    assert found == [
        "made_up_package/__init__.py",
        "made_up_package/base.py",
        "made_up_package/room/__init__.py",
        "made_up_package/room/deep.py",
        "made_up_package/room/pages/page.html",
        "made_up_package/room/stage.py",
    ]


# -- addresses, values, left-over folders


@pytest.fixture
def entries():
    return read_entries(read_yaml(RECIPES / "demo.yaml"), ROOT / "dvc.yaml")


def test_find_entry(entries):
    assert find_entry(entries, "clean").address == "clean"
    assert find_entry(entries, "finetune@retrieval").options()["weights"] == "data/models/retrieval"
    assert find_entry(entries, "finetune").address == "finetune@retrieval"
    with pytest.raises(UserError, match="say which of finetune@retrieval, finetune@vqa"):
        find_entry({**entries, "finetune@vqa": entries["finetune@retrieval"]}, "finetune")
    with pytest.raises(UserError, match=r"did you mean finetune@retrieval\?"):
        find_entry(entries, "finetune@retrieve")


def test_fill():
    content = {"a": {"b": 3}, "item": {"path": "x y"}}
    assert fill("${a}", content) == {"b": 3}
    assert fill("n ${a.b} ${ item.path }", content) == "n 3 x y"
    with pytest.raises(UserError, match=r"\$\{a.c\}"):
        fill("${a.c}", content)


def test_a_tracked_parameter_must_be_written_out(entries):
    content = read_yaml(RECIPES / "demo.yaml")
    check_tracked(entries, content, "params.yaml")
    del content["download"]["retries"]
    with pytest.raises(UserError, match=r"params.yaml: download.retries must be written out"):
        check_tracked(entries, content, "params.yaml")


def test_strangers(entries, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("raw/corpus", "raw/old", "tasks/retrieval/test", "models/pretrain", "models/retrieval"):
        Path("data", folder).mkdir(parents=True)
    assert strangers(entries["clean"], entries) == ["data/raw/old"]
    assert strangers(entries["report"], entries) == ["data/raw/old"]
    assert strangers(entries["deduplicate"], entries) == []
    Path("data/models/old").mkdir()
    Path("data/evaluation/old").mkdir(parents=True)
    assert strangers(entries["report"], entries) == ["data/evaluation/old", "data/models/old", "data/raw/old"]
    assert strangers(entries["finetune@retrieval"], entries) == []


# -- what runs again

ALL = ["synthesize", "download@corpus", "prepare_tasks@retrieval", "clean", "deduplicate", "shard", "validate"]
ALL += ["pretrain", "finetune@retrieval", "evaluate@retrieval", "report"]


@pytest.mark.slow
def test_first_runs_all_second_runs_nothing(project):
    assert sorted(project.repro()) == sorted(ALL)
    assert project.repro() == []
    status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    assert status.split() == ["??", "dvc.lock"], "a run leaves nothing but dvc.lock to commit"


FROM_CLEAN = ALL[3:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("params.yaml", "train: 3000", "train: 2999", ALL),
        ("params.yaml", "retries: 1", "retries: 0", ["download@corpus", *FROM_CLEAN]),
        ("params.yaml", "images: images", "images: pictures", ["prepare_tasks@retrieval", *ALL[4:]]),
        ("params.yaml", "max_words: 30", "max_words: 20", FROM_CLEAN),
        ("params.yaml", "vocab_size: 1000", "vocab_size: 999", ALL[5:]),
        ("params.yaml", "mlm_weight: 0.1", "mlm_weight: 0.2", ALL[7:]),
        ("params.yaml", "warmup_lr: 3.0e-4", "warmup_lr: 2.0e-4", ALL[8:]),
        ("params.yaml", "top_k: 32", "top_k: 31", ALL[9:]),
        ("params.yaml", "processes: 0", "processes: 1", []),
        ("params.yaml", "fetch: true", "fetch: true # on", []),
        ("components/evaluation/report.py", "from __future__", "# changed\nfrom __future__", ["report"]),
        ("components/data/clean.py", "from __future__", "# changed\nfrom __future__", FROM_CLEAN),
    ],
)
def test_a_change_runs_what_depends_on_it(finished_project, name, old, new, expected):
    finished_project.replace(old, new, name)
    assert sorted(finished_project.repro()) == sorted(expected)


@pytest.mark.slow
def test_another_source_leaves_the_first_alone(finished_project):
    Path("pairs.tsv").write_text("a caption\thttp://a.test/a.jpg\n")
    finished_project.replace("  sources:\n", "  sources:\n    second: {path: pairs.tsv}\n")
    assert sorted(finished_project.repro()) == sorted(["download@second", *FROM_CLEAN])


@pytest.mark.slow
def test_metrics_and_plots_are_dvc_s(finished_project):
    from dvc.repo import Repo

    with Repo(".") as repository:
        metrics = repository.metrics.show()[""]["data"]
        assert {"data/evaluation/retrieval/metrics.json", "data/curves/pretrain/metrics.json"} <= set(metrics)
        assert metrics["data/evaluation/retrieval/metrics.json"]["data"]["itm"]["txt_r1"] == 50.0
        plots = repository.plots.show()["workspace"]["sources"]["data"]
        assert {"data/curves/pretrain/plots/metrics/loss.tsv", "data/curves/retrieval/plots/metrics/loss.tsv"} <= set(
            plots
        )
