"""The report in a real browser, where one is installed: as wide as its screen, without scripts or complaints."""

import json
import re
import shutil
import subprocess

import pytest

from tests.evaluation import made_stages as made
from tests.evaluation.test_versus import evaluate, scores

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]
QUIET += ["--disable-component-update", "--allow-file-access-from-files", "--disable-web-security"]
WIDTHS = (390, 820, 1280)
LONG = "Pneumonoultramicroscopicsilicovolcanoconiosis" * 6

MEASURE = """<!doctype html><body style="margin:0"><script>
(async () => {
  const found = [];
  for (const width of WIDTHS) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width:${width}px;height:800px;border:0`;
    document.body.append(frame);
    await new Promise(done => { frame.onload = done; frame.src = "report/index.html"; });
    const page = frame.contentDocument;
    found.push([width, page.documentElement.scrollWidth, page.documentElement.clientWidth, page.scripts.length]);
    frame.remove();
  }
  document.body.textContent = "measured " + JSON.stringify(found);
})();
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to look at the page with: install the system's chromium")
def test_hostile_texts_fit_every_screen(tmp_path, monkeypatch) -> None:
    captions = [f"{made.HOSTILE} {LONG} \u202eevil", *made.SPLIT.captions[1:]]
    split = made.Split(made.SPLIT.picture_ids, made.SPLIT.caption_ids, captions, made.SPLIT.picture_of)
    monkeypatch.setattr(made, "HOSTILE", captions[0])
    made.make_data(tmp_path)
    made.make_evaluation(tmp_path, split)
    evaluate(tmp_path, LONG[:60], "vitr", scores(wrong_pictures=[2], wrong_captions=[3]), split)
    evaluate(tmp_path, "clip", "linear", scores(wrong_pictures=[0], wrong_captions=[0]), split)
    made.make_training(tmp_path)
    made.make_validation(tmp_path, success=False)
    run = tmp_path / "evaluation" / LONG[:120]
    run.mkdir()
    metrics = {"kind": "vqa", "task": "<b>t", "items": 3, "accuracy": 1.0, "by_type": {LONG: 3.0}, "note": captions[0]}
    (run / "metrics.json").write_text(json.dumps(metrics))
    made.build_report(tmp_path, title=LONG[:200])

    measure = tmp_path / "measure.html"
    measure.write_text(MEASURE.replace("WIDTHS", json.dumps(WIDTHS)))
    command = [CHROMIUM, "--headless", "--no-sandbox", *QUIET, f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=9000", "--enable-logging=stderr", "--dump-dom", measure.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    found = re.search(r"measured (\[.*\])", done.stdout)
    assert found, done.stdout[-500:] + done.stderr[-2000:]
    for width, page, screen, scripts in json.loads(found[1]):
        assert page <= screen <= width, f"{page} pixels on a screen of {width}"
        assert scripts == 0
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
