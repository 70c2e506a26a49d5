"""The ills of the built-in web: planted in the numbers asked for, and found by the stages row by row."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from components.data.clean import CleanParams, clean
from components.data.corpus.ills import KEPT, STAGES, Row, fates
from components.data.corpus.params import WebParams
from components.data.deduplicate import DeduplicateParams, deduplicate
from components.data.download import DownloadParams, SourceParams, download
from components.data.prepare_tasks import PrepareTasksParams, TaskParams, prepare_tasks
from components.data.synthesize import SynthesizeParams, synthesize
from components.io.outcomes import Reason, check_conservation, kept_row_ids, read_outcomes
from components.io.records import row_name
from components.io.runtime import Runtime

WEB = WebParams(
    **{name: 6 if name in ("malformed_lines", "empty_captions") else 4 for name in WebParams.model_fields},
)
PARAMS = SynthesizeParams(train=44, val=6, test=6, seed=3, web=WEB)
PLANTED = {  # reason: the parameter that asks for it, as the description of each says
    "malformed_row": WEB.malformed_lines,
    "missing_url": WEB.missing_urls,
    "duplicate_row": WEB.repeated_lines,
    "url_invalid": WEB.invalid_urls,
    "url_scheme": WEB.foreign_schemes,
    "url_credentials": WEB.credentials,
    "url_too_long": WEB.long_urls,
    "url_forbidden_host": WEB.forbidden_hosts,
    "dns_failure": WEB.dead_hosts,
    "http_not_found": WEB.not_found,
    "http_error": WEB.refused,
    "too_many_redirects": WEB.redirect_loops,
    "not_an_image": WEB.html_as_jpeg,
    "empty_body": WEB.empty_files,
    "truncated_image": WEB.truncated_files,
    "caption_empty": WEB.empty_captions,
    "caption_truncated": WEB.long_captions,
    "duplicate_exact": WEB.exact_duplicates,
    "merged": WEB.merged_duplicates,
    "duplicate_near": WEB.near_duplicates,
    "leak_exact": WEB.exact_leaks,
    "leak_near": WEB.near_leaks,
}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Runtime]:
    folder = tmp_path_factory.mktemp("ills")
    runtime = Runtime(work=folder / "work", processes=1)
    synthesize(PARAMS, corpus=folder / "corpus", runtime=runtime)
    return folder, runtime


@pytest.fixture(scope="module")
def ills(built) -> dict:
    return json.loads((built[0] / "corpus" / "ills.json").read_text())


def test_ills_are_as_many_as_asked_for(ills):
    counts: Counter[str] = Counter()
    for stage in STAGES:
        counts.update({reason: rows for reason, rows in ills[stage]["counts"].items() if reason != "ok"})
    assert counts == PLANTED


def test_counts_add_up_from_stage_to_stage(built, ills):
    lines = (built[0] / "corpus" / "pairs.tsv").read_bytes().removesuffix(b"\n").split(b"\n")
    scenes = json.loads((built[0] / "corpus" / "scenes.json").read_text())
    good = sum(len(scene["captions"]) for scene in scenes if scene["split"] == "train")
    assert len(lines) == ills["rows_in"] == good + sum(PLANTED.values())
    entering = ills["rows_in"]
    for stage in STAGES:
        found = ills[stage]
        assert found["rows_in"] == entering == sum(found["counts"].values())
        assert {reason: len(rows) for reason, rows in found["rows"].items()} | {"ok": found["counts"]["ok"]} == (
            found["counts"]
        )
        entering = sum(rows for reason, rows in found["counts"].items() if reason == "ok" or reason in KEPT)
    hit = [row for stage in STAGES for rows in ills[stage]["rows"].values() for row in rows]
    assert len(hit) == len(set(hit))


def test_wrong_captions_are_of_other_scenes_and_nothing_else_changes(built, ills, tmp_path):
    folder, _runtime = built
    true = PARAMS.model_copy(update={"web": WEB.model_copy(update={"wrong_captions": 0})})
    synthesize(true, corpus=tmp_path / "corpus", runtime=Runtime(work=tmp_path / "work", processes=1))
    assert json.loads((tmp_path / "corpus" / "ills.json").read_text()) == ills
    wrong, right = (
        (place / "corpus" / "pairs.tsv").read_bytes().removesuffix(b"\n").split(b"\n") for place in (folder, tmp_path)
    )
    changed = [(one, other) for one, other in zip(wrong, right, strict=True) if one != other]
    assert len(changed) == WEB.wrong_captions == 4
    scenes = json.loads((folder / "corpus" / "scenes.json").read_text())
    captions = {f"{scene['name']}.jpg": scene["captions"] for scene in scenes if scene["split"] == "train"}
    everything = {caption for texts in captions.values() for caption in texts}
    for line, before in changed:
        caption, url = line.decode().split("\t")
        assert url == before.decode().split("\t")[1]
        assert caption in everything
        assert caption not in captions[url.rsplit("/", 1)[-1]]


def test_no_row_suffers_from_two_ills(built, ills):
    """What rows name (a picture and its scene) is shared by good rows and by rows of one ill at most."""
    lines = (built[0] / "corpus" / "pairs.tsv").read_bytes().split(b"\n")
    of_scene: dict[str, set[str]] = defaultdict(set)
    for stage in STAGES:
        for reason, rows in ills[stage]["rows"].items():
            for row in rows:
                name = lines[row].decode("latin-1").rsplit("/", 1)[-1]
                if name.startswith(("train-", "val-", "test-")):
                    of_scene[name].add(reason)
    assert len(of_scene) >= 36
    assert all(len(reasons) == 1 for reasons in of_scene.values())


def test_stages_find_each_ill_where_it_was_planted(built, ills):
    folder, runtime = built
    corpus, raw, tasks = folder / "corpus", folder / "raw", folder / "tasks"
    source = SourceParams(path=corpus, list="pairs.tsv", format="tsv", serve="web")
    download(
        DownloadParams(sources={"corpus": source}), source="corpus", input=corpus, raw=raw / "corpus", runtime=runtime
    )
    task = TaskParams(path=corpus, annotations="retrieval.json", images="images")
    retrieval = PrepareTasksParams(tasks={"retrieval": task})
    prepare_tasks(retrieval, task="retrieval", input=corpus, tasks=tasks / "retrieval", runtime=runtime)
    clean(CleanParams(), raw=raw, clean=folder / "clean", runtime=runtime)
    deduplicate(DeduplicateParams(), clean=folder / "clean", tasks=tasks, unique=folder / "unique", runtime=runtime)

    entering = [row_name("corpus", row) for row in range(ills["rows_in"])]
    for stage, out in zip(STAGES, (raw / "corpus", folder / "clean", folder / "unique"), strict=True):
        check_conservation(out, entering)
        expected = {row_name("corpus", row): reason for reason, rows in ills[stage]["rows"].items() for row in rows}
        wrong = [
            (row["row_id"], row["reason"], row["detail"], expected.get(row["row_id"], "ok"))
            for row in read_outcomes(out).to_pylist()
            if row["reason"] != expected.get(row["row_id"], "ok")
        ]
        assert not wrong, (stage, wrong[:5])
        entering = kept_row_ids(out).to_pylist()
    assert len(entering) == ills["deduplicate"]["counts"]["ok"] + ills["deduplicate"]["counts"]["merged"]


def test_fates_follow_rows_from_stage_to_stage():
    rows = [
        Row(b"", 0.1),
        Row(b"", 0.2, "download", Reason.DNS_FAILURE),
        Row(b"", 0.3, "clean", Reason.CAPTION_TRUNCATED),
        Row(b"", 0.4, "clean", Reason.CAPTION_EMPTY),
        Row(b"", 0.5, "deduplicate", Reason.LEAK_NEAR),
    ]
    found = fates(rows)
    assert found["rows_in"] == 5
    assert found["download"] == {"rows_in": 5, "counts": {"dns_failure": 1, "ok": 4}, "rows": {"dns_failure": [1]}}
    assert found["clean"]["rows_in"] == 4
    assert found["clean"]["counts"] == {"caption_empty": 1, "caption_truncated": 1, "ok": 2}
    assert found["deduplicate"] == {"rows_in": 3, "counts": {"leak_near": 1, "ok": 2}, "rows": {"leak_near": [4]}}
