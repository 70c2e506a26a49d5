"""Two runs beside each other, as a library call and as a command."""

import json

import pytest
from typer.testing import CliRunner

from components.evaluation.side_by_side import as_text, side_by_side
from components.io.errors import UserError
from pipelines.cli import app
from tests.evaluation import made_stages as made


@pytest.fixture
def runs(tmp_path):
    for name, wrong in (("one", 0), ("other", 2)):
        data = tmp_path / name / "data"
        made.make_data(data)
        made.make_evaluation(data, wrong=wrong)
        made.make_training(data)
    lineage = tmp_path / "other" / "data" / "models" / "task" / "lineage.json"
    content = json.loads(lineage.read_text())
    content["params"] |= {"epochs": 5, "note": "\x1b[31mred", "new": None}
    lineage.write_text(json.dumps(content))
    return tmp_path / "one", tmp_path / "other"


def test_what_differs_and_by_how_much(runs) -> None:
    found = side_by_side(*runs)
    settings = {row.name: row for row in found.settings}
    assert set(settings) == {"task.epochs", "task.note"}, "what is the same is left out"
    assert (settings["task.epochs"].first, settings["task.epochs"].difference) == ("3", "+2")
    assert "\x1b" not in settings["task.note"].second
    data = {row.name: row for row in found.data}
    assert (data["raw/web pictures"].first, data["clean captions"].second) == ("4", "5")
    metrics = {row.name: row for row in found.metrics}
    first, second = (
        json.loads((run / "data" / "evaluation" / "task" / "metrics.json").read_text())["itm"]["r_mean"] for run in runs
    )
    row = metrics["task.itm.r_mean"]
    assert float(row.first) == pytest.approx(first, rel=1e-5)
    assert float(row.difference) == pytest.approx(second - first, rel=0.01)
    assert second < first
    assert not any("intervals" in name for name in metrics)


def test_a_run_beside_itself_and_beside_one_without_results(runs, tmp_path) -> None:
    same = side_by_side(runs[0], runs[0] / "data")
    assert same.settings == ()
    assert {row.difference for row in same.metrics} == {"+0"}
    assert "Parameters that differ: none" in as_text(same, ("a", "b"))
    made.make_data(tmp_path / "bare")
    bare = side_by_side(runs[0], tmp_path / "bare")
    assert {row.second for row in bare.metrics} == {"–"}
    assert {row.second for row in bare.settings} == {"–"}


def test_the_command(runs, tmp_path) -> None:
    result = CliRunner().invoke(app, ["report", "compare", *map(str, runs)])
    assert result.exit_code == 0, result.output
    assert any(line.split() == ["task.epochs", "3", "5", "+2"] for line in result.output.splitlines())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        side_by_side(runs[0], tmp_path / "empty")
    (runs[0] / "data" / "evaluation" / "task" / "metrics.json").write_text("[]")
    with pytest.raises(UserError, match="holds no JSON object"):
        side_by_side(*runs)
