"""The command line as a user meets it: messages, exit statuses, recipes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from components.io.errors import UserError
from pipelines import cli, recipe, stages
from pipelines.failure import MESSAGE_FILE
from pipelines.recipe import RECIPES, describe_recipes, recipe_names, write_recipe

ROOT = Path(__file__).resolve().parents[2]


def vlp(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines.cli", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def at_demo(tmp_path, monkeypatch):
    """A working folder with the demo's parameters and the graph, but no data."""
    shutil.copyfile(RECIPES / "demo.yaml", tmp_path / "params.yaml")
    shutil.copyfile(ROOT / "dvc.yaml", tmp_path / "dvc.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_help_names_the_commands_and_imports_little():
    done = vlp("--help")
    assert done.returncode == 0
    for name in ("run", "flow", "recipe", "shards"):
        assert f"  {name} " in done.stdout
    code = "import sys; sys.argv = ['vlp', '--help']\nfrom pipelines import cli\n"
    code += "try: cli.main()\nexcept SystemExit: pass\n"
    code += "print('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "typer" in loaded
    assert not loaded & {"pydantic", "ruamel", "dvc", "prefect", "torch", "pyarrow", "numpy", "rich"}


def test_a_wrong_parameter_is_one_message_and_status_2(at_demo):
    done = vlp("run", "clean", "--set", "clean.caption.max_word=3", cwd=at_demo)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "vlp: params.yaml: clean.caption.max_word: no such key; did you mean max_words? "
        "allowed: rules, web, unicode, max_words, max_tokens, tokenizer, max_characters"
    )
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["run", "cleen"], "cleen is no stage; did you mean clean?"),
        (["run", "finetune@retrieve"], "did you mean finetune@retrieval?"),
        (["run", "clean", "--params", "none.yaml"], "none.yaml does not exist: write one with `vlp recipe demo`"),
        (["run", "clean"], "data/raw"),  # the stage's own message about its input
        (["recipe", "flickr"], "flickr is no recipe; did you mean flickr8k?"),
        (["shards", "verify", "nowhere"], "nowhere/manifest.json does not exist"),
        (["flow", "trainin"], "trainin is no flow; did you mean training?"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_status_2(at_demo, arguments, part):
    done = vlp(*arguments, cwd=at_demo)
    assert done.returncode == 2, done.stderr
    assert part in done.stderr
    assert done.stderr.startswith("vlp: ")
    assert len(done.stderr.splitlines()) == 1


def test_unknown_option_is_status_2(at_demo):
    done = vlp("run", "clean", "--row", "data/raw", cwd=at_demo)
    assert done.returncode == 2
    assert "--raw" in done.stderr
    assert "Traceback" not in done.stderr


def test_options_left_out_are_those_of_dvc_yaml(at_demo, monkeypatch):
    calls = []
    monkeypatch.setattr(stages.Stage, "run", lambda stage, params, **options: calls.append((stage.name, options)))
    cli.run_stage("finetune@retrieval", {}, Path("params.yaml"), [])
    cli.run_stage("clean", {"raw": Path("elsewhere"), "clean": None}, Path("params.yaml"), [])
    assert calls == [
        (
            "finetune",
            {
                "run": "retrieval",
                "task": Path("data/tasks/retrieval"),
                "pretrained": Path("data/models/pretrain"),
                "weights": Path("data/models/retrieval"),
                "curves": Path("data/curves/retrieval"),
            },
        ),
        ("clean", {"raw": Path("elsewhere"), "clean": Path("data/clean")}),
    ]


def test_a_stage_runs_where_there_is_no_dvc_yaml_when_all_is_given(at_demo, monkeypatch):
    calls = []
    monkeypatch.setattr(stages.Stage, "run", lambda stage, params, **options: calls.append(options))
    Path("dvc.yaml").unlink()
    cli.run_stage("clean", {"raw": Path("a"), "clean": Path("b")}, Path("params.yaml"), [])
    assert calls == [{"raw": Path("a"), "clean": Path("b")}]
    with pytest.raises(UserError, match=r"dvc.yaml does not exist"):
        cli.run_stage("clean", {"raw": Path("a"), "clean": None}, Path("params.yaml"), [])


def test_a_folder_of_no_stage_among_the_inputs_is_refused(at_demo, monkeypatch):
    monkeypatch.setattr(stages.Stage, "run", lambda *_, **__: pytest.fail("ran"))
    Path("data/raw/old").mkdir(parents=True)
    with pytest.raises(UserError, match=r"data/raw/old is written by no stage .*rm -r data/raw/old\)"):
        cli.run_stage("clean", {}, Path("params.yaml"), [])


def test_statuses_and_messages(monkeypatch, tmp_path, capsys):
    message = tmp_path / "message"
    monkeypatch.setenv(MESSAGE_FILE, str(message))

    def fail(error):
        def call():
            raise error

        return call

    assert cli.guarded(fail(UserError("mend it"))) == 2
    assert message.read_text() == "mend it"
    assert capsys.readouterr().err == "vlp: mend it\n"
    assert cli.guarded(fail(ZeroDivisionError("oops"))) == 1
    assert message.read_text() == "ZeroDivisionError: oops"
    assert "Traceback" in capsys.readouterr().err
    assert cli.guarded(fail(SystemExit(cli.INTERRUPTED))) == 130
    assert "interrupted" in capsys.readouterr().err
    assert cli.guarded(lambda: None) == 0


def test_interrupt_is_status_130(at_demo, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(stages.Stage, "run", interrupt)
    monkeypatch.setattr(sys, "argv", ["vlp", "run", "clean"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    assert "run the same command to go on" in capsys.readouterr().err


# -- recipes


def test_recipe_list_has_a_line_for_each():
    lines = describe_recipes().splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert all(len(line.split()) > 3 for line in lines)


def git(*arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t.invalid", *arguments], check=True)


def test_recipe_never_writes_over_uncommitted_edits(at_demo):
    target = Path("params.yaml")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "x")
    assert "is now the recipe flickr8k" in write_recipe("flickr8k", target)
    assert target.read_text() == (RECIPES / "flickr8k.yaml").read_text()
    assert "already" in write_recipe("flickr8k", target)
    write_recipe("demo", target)  # an untouched recipe is nobody's edit
    edit = target.read_text().replace("top_k: 32", "top_k: 33")
    target.write_text(edit)
    with pytest.raises(UserError, match="edits that no commit holds"):
        write_recipe("flickr8k", target)
    assert target.read_text() == edit
    git("commit", "-qam", "y")
    write_recipe("flickr8k", target)  # the edit is in a commit now
    target.write_text(edit + "# more\n")
    write_recipe("demo", target, force=True)
    assert target.read_text() == (RECIPES / "demo.yaml").read_text()


def test_recipe_outside_git_keeps_edits(at_demo, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(at_demo.parent))
    target = Path("params.yaml")
    target.write_text("clean: {}\n")
    with pytest.raises(UserError, match="edits that no commit holds"):
        write_recipe("demo", target)
    target.unlink()
    write_recipe("demo", target)
    assert target.read_text() == (RECIPES / "demo.yaml").read_text()


def test_a_wrong_recipe_is_not_written(at_demo, tmp_path, monkeypatch):
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "broken.yaml").write_text((RECIPES / "demo.yaml").read_text().replace("top_k: 32", "top_k: 0"))
    monkeypatch.setattr(recipe, "RECIPES", recipes)
    before = Path("params.yaml").read_text()
    with pytest.raises(UserError, match=r"broken.yaml: evaluate.top_k: 0 is not allowed"):
        write_recipe("broken", Path("params.yaml"), force=True)
    assert Path("params.yaml").read_text() == before


@pytest.mark.slow
def test_recipe_removes_what_only_the_old_parameters_made(finished_project):
    text = write_recipe("flickr8k", Path("params.yaml"))
    assert "removed data/raw/corpus" in text
    assert not Path("data/raw/corpus").exists()
    assert Path("data/tasks/retrieval").is_dir(), "both recipes make it"
    assert Path("data/clean").is_dir()
