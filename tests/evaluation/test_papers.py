"""The papers' numbers as data, and which runs may stand beside them."""

import json

import pytest

from components.evaluation.papers.compare import compare, papers, summary

MODEL = {"patch_size": 16, "vision_width": 768, "vision_depth": 12, "text_width": 768, "text_layers": 12}
MODEL |= {"fusion_layers": 6}
RECALLS = {"txt_r1": 90.0, "txt_r5": 95.0, "txt_r10": 99.0, "img_r1": 80.5, "img_r5": 90.0, "img_r10": 95.0}
METRICS = {"task": "flickr30k", "split": "test", "pictures": 1000, "image_size": 384, "itm": RECALLS, "itc": {}}


@pytest.fixture
def run(tmp_path):
    def beside(metrics, config=MODEL, pictures=14_060_000):
        for name, file, content in (("model", "config", config), ("shards", "manifest", {"rows": pictures})):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{file}.json").write_text(json.dumps(content))
        return compare(metrics, tmp_path / "model", tmp_path / "shards")

    return beside


def test_every_number_has_a_source_and_lies_in_percent() -> None:
    assert set(papers()) == {"albef", "hat", "vitr"}
    for name, paper in papers().items():
        rows = paper["results"] + paper.get("baselines", [])
        for row in rows:
            assert row["source"] in paper["sources"], (name, row)
            assert all(0 < value <= 100 for value in (row.get("values") or row["derived"]).values()), (name, row)


def test_derived_numbers_are_the_printed_ones_less_the_printed_differences() -> None:
    """As the text has it: so much the model reaches, so much it is above another."""
    rows = papers()["vitr"]["baselines"]
    found = {(row["model"], row["dataset"]): (row["derived"]["txt_r1"], row["derived"]["img_r1"]) for row in rows}
    expected = {
        ("CLIP_L14", "refcocog"): (45.2 - 2.8, 29.5 - 4.3),
        ("CLIP_B16", "refcocog"): (42.9 - 3.6, 27.9 - 4.1),
        ("VSE-infinity", "refcocog"): (45.2 - 14.1, 29.5 - 10),
        ("CLIP_L14", "clevr"): (90.7 - 25.1, 79.3 - 14.1),
        ("CLIP_B16", "clevr"): (88.3 - 21.5, 79.4 - 13.9),
        ("VSE-infinity", "clevr"): (90.7 - 22.9, 79.3 - 8.5),
        ("CLIP_L14", "flickr30k"): (94.7 - 2.1, 82.5 - 4.7),
        ("CLIP_B16", "flickr30k"): (93.7 - 2.5, 80.8 - 3.8),
        ("COTS", "flickr30k"): (94.7 - 3.0, 82.5 - 4.2),
        ("VITR-NoViT", "refcocog"): (45.2 - 9.1, 29.5 - 5.2),
        ("VITR-NoRel", "refcocog"): (45.2 - 2.1, 29.5 - 4.2),
    }
    assert found == {name: pytest.approx(values) for name, values in expected.items()}


def test_a_run_at_the_papers_scale_stands_beside_it(run) -> None:
    found = run(METRICS)
    assert found.sentence == ""
    lines = {(line.reference, line.metric): line for line in found.lines}
    assert lines["ALBEF 14M, table 2", "img_r1"].difference == pytest.approx(80.5 - 85.6)
    assert lines["ALBEF 14M, table 3, fine-tuned on COCO", "txt_r1"].paper == 94.1
    assert {line.metric for line in found.lines} == set(RECALLS)


@pytest.mark.parametrize(
    ("metrics", "config", "pictures", "reason"),
    [
        ({"pictures": 200}, {}, 14_000_000, "test items 200 (paper 1,000)"),
        ({"image_size": 96}, {}, 14_000_000, "image size 96 (paper 384)"),
        ({}, {"vision_width": 96}, 14_000_000, "vision width 96 (paper 768)"),
        ({}, {}, 3000, "pre-training pictures 3,000 (paper 14,000,000)"),
        ({"split": "val"}, {}, 14_000_000, "split val (paper test)"),
        ({"task": "retrieval"}, {}, 14_000_000, "a task retrieval stands in none of them (they have coco, flickr30k"),
        ({}, {"kind": "hat"}, 14_000_000, "Not comparable with HAT's tables"),
        ({}, {"kind": "linear"}, 14_000_000, "none here reports on a model of kind linear"),
        ({}, {"kind": "vitr"}, 14_000_000, "image.model unknown (paper resnet101_clip)"),
    ],
)
def test_a_run_at_another_scale_is_not_compared(run, metrics, config, pictures, reason) -> None:
    found = run(METRICS | metrics, MODEL | config, pictures)
    assert not found.lines
    assert reason in found.sentence.replace("image model", "image.model")


VITR = {"kind": "vitr", "image": {"model": "resnet101_clip"}, "clip": {"image_width": 768, "patch_size": 16}}
VITR |= {"head": {"regions": 49, "join_width": 128, "use_global": True, "relations": True}}


def test_vitr_s_sizes_and_variants_are_told_apart(run) -> None:
    found = run(METRICS | {"image_size": 224}, VITR)
    assert {line.reference for line in found.lines} == {"VITR VITR_B, table 4"}
    large = VITR | {"clip": {"image_width": 1024, "patch_size": 14}}
    assert {line.reference for line in run(METRICS, large).lines} == {"VITR VITR_L, table 4"}
    for name in ("use_global", "relations"):
        assert not run(METRICS, VITR | {"head": VITR["head"] | {name: False}}).lines


def test_weights_without_their_data_are_compared_with_a_note(run, tmp_path) -> None:
    run(METRICS)
    (tmp_path / "shards" / "manifest.json").unlink()
    found = compare(METRICS, tmp_path / "model", tmp_path / "shards")
    assert found.lines
    assert "not here to be counted" in found.sentence
    assert "no readable config.json" in compare(METRICS, tmp_path / "none", tmp_path / "shards").sentence


def test_other_tasks(run) -> None:
    (line,) = run(
        {"kind": "nlvr2", "task": "nlvr2", "split": "test", "items": 6967, "image_size": 384, "accuracy": 80.0}
    ).lines
    assert (line.reference, line.paper, line.difference) == ("ALBEF 14M, table 4", 83.14, pytest.approx(-3.14))


def test_the_command_lines_summary(run, tmp_path) -> None:
    run(METRICS)
    for name, metrics in (("small", METRICS | {"pictures": 7}), ("model", METRICS)):
        (tmp_path / "evaluation" / name).mkdir(parents=True)
        (tmp_path / "evaluation" / name / "metrics.json").write_text(json.dumps(metrics))
    lines = summary(tmp_path / "evaluation", tmp_path, tmp_path / "shards")
    assert "model: img_r1 80.5, ALBEF 14M, table 2 85.6, difference -5.1" in lines
    assert lines[-1] == "small: Not comparable with a paper: small has no readable config.json."
    assert summary(tmp_path / "none", tmp_path, tmp_path) == []
