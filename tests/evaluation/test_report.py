import html
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from components.evaluation.ablations import AblationResult, AblationRow, write_ablation
from components.evaluation.page.funnel import read_funnel
from components.evaluation.page.plots import COLOURS
from components.evaluation.page.samples import kept_samples
from components.evaluation.page.thumbnails import thumbnail
from components.io.errors import UserError
from tests.evaluation import made_stages as made

STAGES = ("corpus", "raw", "clean", "unique", "shards", "tasks")
VOID = {"meta", "link", "img", "br", "use", "path"}


class Page(HTMLParser):
    """Elements, attributes and visible text of a page; every element must be closed in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.text, self.elements, self.open = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    @property
    def visible(self):
        return re.sub(r"\s+", " ", " ".join(self.text))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "data"
    made.make_all(folder)
    return folder


@pytest.fixture(scope="module")
def text(data):
    return made.build_report(data, title="A run & its <results>")


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_ablations_show_means_deviations_and_the_best(data, page, tmp_path):
    assert "Ablations" not in page.visible  # there are none
    shutil.copytree(data, tmp_path / "data")
    rows = (
        AblationRow(name=made.HOSTILE, values={"text": (40.0, 42.0), "image": (30.0, 30.0)}),
        AblationRow(name="less", values={"text": (45.0, 47.5), "image": (29.0, 30.0)}),
    )
    result = AblationResult(
        name="mine",
        title="What helps",
        paper="ALBEF, table 1",
        recipe="demo",
        seeds=(1, 2),
        columns=("text", "image"),
        rows=rows,
    )
    write_ablation(result, tmp_path / "data" / "ablations")
    shown = Page(made.build_report(tmp_path / "data"))
    assert made.HOSTILE in shown.visible
    for words in (
        "What helps after ALBEF, table 1",
        "Recipe demo, seeds 1, 2",
        "less 46.2 ± 1.8 29.5 ± 0.7",
        "30.0 ± 0.0",
    ):
        assert words in shown.visible
    assert len(shown.all("b")) == len(page.all("b")) + 2  # the best of each column


def test_a_damaged_ablation_is_named(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "ablations").mkdir()
    (tmp_path / "data" / "ablations" / "mine.json").write_text('{"name": "mine"}')
    with pytest.raises(UserError, match=r"mine\.json is no result of `vlp flow ablation`"):
        made.build_report(tmp_path / "data")


def test_hostile_texts_are_shown_as_text(text, page):
    assert made.HOSTILE in page.visible  # parsed back, character by character
    assert html.escape("<script>alert('x')", quote=True).replace("&#x27;", "&#39;") in text
    assert not page.all("script")
    assert all("onerror" not in attrs for _, attrs in page.elements)
    for raw in ("<b>gone", "<i>tilted", "<results>"):
        assert raw not in text
        assert html.escape(raw) in text
    assert "ftp://…@corpus.test/x" in page.visible
    assert "secret" not in text
    # a URL of the data is never a link
    assert [a["href"] for a in page.all("a") if not a["href"].startswith("#")] == ["../validation/docs/index.html"]


def test_nothing_is_asked_of_a_network(text, page):
    assert all(img["src"].startswith("data:image/jpeg;base64,") for img in page.all("img"))
    assert all(link["href"].startswith("data:") for link in page.all("link"))
    assert not re.search(r"url\((?!#)|@import|src=\"http", text)
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


def test_pictures_and_captions_in_the_plane(text, page):
    assert "Pictures (dots) and captions (rings), t-SNE" in page.visible
    assert "of 4 pictures 100 % lie nearest to their own caption" in text


def test_numbers_of_the_funnel(page):
    for numbers in ("8 in, 6 kept, 2 rejected", "6 in, 5 kept, 1 rejected", "5 in, 4 kept, 1 rejected"):
        assert numbers in page.visible
    for reason in ("HTTP not found", "URL scheme", "truncated image", "duplicate exact"):
        assert reason in page.visible
    assert "Look at this first" not in page.visible


def test_recalls_stand_beside_chance(data, page):
    metrics = json.loads((data / "evaluation" / "task" / "metrics.json").read_text())
    cells = page.visible
    for name in ("chance", "itc", "itm"):
        row = " ".join(f"{metrics[name][key]:.1f}" for key in ("txt_r1", "txt_r5", "txt_r10", "txt_r_mean", "img_r1"))
        assert row in cells, name


def test_pictures_and_plots_say_what_they_show(page):
    assert len(page.all("img")) > 20
    assert all(img["alt"].strip() for img in page.all("img"))
    labels = [div["aria-label"] for div in page.all("div") if div.get("role") == "img"]
    assert any(label.startswith("Loss over 59 steps: from 10.5 to 1.161") for label in labels)
    assert len(labels) == len(page.all("svg"))
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = [a["href"][1:] for a in page.all("a") if a["href"].startswith("#")]
    assert set(targets) <= set(ids)


def test_plots_take_the_colours_of_the_page(text):
    assert not any(colour in text for colour in COLOURS)
    assert "var(--series-1)" in text
    assert not re.findall(r"(?:fill|stroke): #[0-9a-f]+", text)


def test_right_answers_are_marked_in_words(page):
    assert page.visible.count("✓ right") >= 8
    assert any("the right one" in img["alt"] for img in page.all("img"))


def test_same_inputs_same_bytes(data, text, tmp_path):
    shutil.copytree(data, tmp_path / "elsewhere")
    assert made.build_report(tmp_path / "elsewhere", title="A run & its <results>") == text
    assert str(data) not in text


def test_caps_hold(data):
    page = Page(made.build_report(data, max_samples=0, max_queries=0))
    assert not page.all("img")
    assert len(Page(made.build_report(data, max_samples=1, max_queries=0)).all("img")) <= 2


def test_a_page_of_nothing(tmp_path):
    page = Page(made.build_report(tmp_path))
    assert "Nothing has run yet." in page.visible
    assert "No run has been evaluated." in page.visible
    assert "The data have not been validated." in page.visible


@pytest.mark.parametrize("missing", [name for name in made.FOLDERS if name != "report"])
def test_any_part_may_be_missing(data, tmp_path, missing):
    shutil.copytree(data, tmp_path / "data", ignore=lambda folder, names: [n for n in names if n == missing])
    shutil.rmtree(tmp_path / "data" / missing, ignore_errors=True)
    assert Page(made.build_report(tmp_path / "data")).all("h1")


def test_what_went_wrong_comes_first(tmp_path):
    made.make_data(tmp_path)
    made.make_ills(tmp_path, duplicate_exact=3)
    made.make_evaluation(tmp_path, wrong=4)
    made.make_validation(tmp_path, success=False)
    visible = Page(made.build_report(tmp_path)).visible
    warned = visible[visible.index("Look at this first") : visible.index("Results")]
    assert "deduplicate: 1 rows are “duplicate exact”, the corpus planted 3." in warned
    assert "re-ranking lowers the mean recall" in warned
    assert "Validation, unique: Pictures are distinct: <u>web/000000005</u> is not." in warned


def test_rows_that_vanish_between_stages_are_named(tmp_path):
    made.make_data(tmp_path)
    shutil.rmtree(tmp_path / "unique")
    made.make_folder(tmp_path / "unique", [], [(made.row(0), made.KEPT, "ok", None)])
    assert "deduplicate took in 1 rows, but clean handed on 5." in Page(made.build_report(tmp_path)).visible


def test_planted_numbers_of_another_corpus_are_left_out(tmp_path):
    made.make_data(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "ills.json").write_text('{"enabled": false, "rows_in": 0}')
    steps = read_funnel({"download": tmp_path / "raw"}, tmp_path / "corpus")
    assert not steps[0].checked


def test_samples_are_spread_over_the_whole(tmp_path):
    records = [made.make_record("web", 10 * n, ["a"]) for n in range(9)]
    made.make_folder(tmp_path / "unique", records)
    assert [sample.name for sample in kept_samples(tmp_path / "unique", 3)] == [made.row(n) for n in (0, 30, 60)]
    assert len(kept_samples(tmp_path / "unique", 99)) == 9


def test_thumbnails_are_small_and_hostile_bytes_give_none():
    small = thumbnail(made.jpeg(1, (4000, 500)))
    assert (small.width, small.height) == (240, 30)
    for data in (b"", b"\xff\xd8\xff\xe0", b"<svg onload='x'/>", made.jpeg(1)[:300]):
        assert thumbnail(data) is None


def test_what_each_rule_of_cleaning_did(tmp_path):
    made.make_data(tmp_path)
    manifest = tmp_path / "clean" / "manifest.json"
    content = json.loads(manifest.read_text()) | {
        "changes": {"caption_spaces": 2, "picture_<b>": 41},
        "rejects": {"truncated_image": 1},
    }
    manifest.write_text(json.dumps(content))
    visible = Page(made.build_report(tmp_path)).visible
    rules = visible[visible.index("Rules of cleaning") :]
    assert rules.index("picture <b> 41") < rules.index("caption spaces 2") < rules.index("truncated image 1")


def test_intervals_and_the_papers_stand_beside_recalls(tmp_path):
    made.make_evaluation(tmp_path)
    page = Page(made.build_report(tmp_path))
    low, high = json.loads((tmp_path / "evaluation" / "task" / "metrics.json").read_text())["intervals"]["itm"][
        "r_mean"
    ]
    assert f"{low:.1f}–{high:.1f}" in page.visible
    assert "1,000 draws of the pictures" in page.visible
    assert "Not comparable with a paper: task has no readable config.json." in page.visible


def test_parts_of_accuracies_and_what_is_not_available(tmp_path):
    model = {"patch_size": 16, "vision_width": 768, "vision_depth": 12, "text_width": 768, "text_layers": 12}
    metrics = {"run": "nlvr2", "task": "nlvr2", "kind": "nlvr2", "split": "test", "items": 6967, "image_size": 384}
    metrics |= {"accuracy": 80.0, "consistency": 41.26, "by_class": {"false": 79.5, "<true>": None}}
    for folder, content in (
        ("evaluation/nlvr2/metrics", metrics),
        ("models/nlvr2/config", model | {"fusion_layers": 6}),
    ):
        path = tmp_path / f"{folder}.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
    page = Page(made.build_report(tmp_path))
    assert "ALBEF 14M, table 4 accuracy 83.1 80.0 −3.1" in page.visible
    assert "consistency per sentence 41.3" in page.visible
    assert "class <true> not available" in page.visible


def test_several_runs_stand_in_one_table_best_first(tmp_path):
    made.make_evaluation(tmp_path, wrong=4)
    shutil.copytree(tmp_path / "evaluation" / "task", tmp_path / "evaluation" / "better")
    metrics = json.loads((tmp_path / "evaluation" / "better" / "metrics.json").read_text())
    metrics["itm"]["r_mean"] = 98.76
    del metrics["intervals"], metrics["top_k"]  # as models over two towers have none
    (tmp_path / "evaluation" / "better" / "metrics.json").write_text(json.dumps(metrics))
    visible = Page(made.build_report(tmp_path)).visible
    table = visible[visible.index("All runs") :]
    assert table.index("better task/test") < table.index("98.8 –") < table.index("task task/test")
