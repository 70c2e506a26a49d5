"""DVC's remote in a folder and in a bucket: a fresh clone, missing objects, where models come from, what runs leave."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from dvc.repo import Repo

from components.io.errors import UserError
from pipelines import remote
from pipelines.lineage import as_json, describe, lineage
from pipelines.publish import publish_pages
from pipelines.revisions import commit_run, commits_of, git
from tests.faults import faults_before

BIN = Path(sys.executable).parent
STAGES = 11

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 server on loopback with the bucket `data`; the environment holds its keys."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            patch.setenv(f"AWS_{name}", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        boto3.client("s3").create_bucket(Bucket="data")
        yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def stored(request, finished_project, tmp_path):
    """A finished project whose outs are in a remote; its lock file is committed. The kind is the test's parameter."""
    kind = getattr(request, "param", "folder")
    if kind == "s3":
        endpoint = request.getfixturevalue("s3")
        url = f"s3://data/{tmp_path.name}"
    else:
        endpoint, url = "", str(tmp_path / "store")
    config = Path(".dvc/config")
    option = f"    endpointurl = {endpoint}\n" if endpoint else ""
    config.write_text(config.read_text() + f"    remote = store\n['remote \"store\"']\n    url = {url}\n{option}")
    text = config.read_text()
    head, _, tail = text.partition("    remote = store\n")
    config.write_text(head.replace("[core]\n", "[core]\n    remote = store\n") + tail)
    git(Path.cwd(), "add", "-A")
    git(Path.cwd(), "-c", "user.name=t", "-c", "user.email=t@t.invalid", "commit", "-qm", "ran")
    assert remote.push(Path.cwd()) > STAGES
    return finished_project


@pytest.fixture
def clone(stored, tmp_path, monkeypatch):
    """A fresh clone of it, which is the working folder."""
    git(tmp_path, "clone", "-q", str(stored.folder), "clone")
    monkeypatch.chdir(tmp_path / "clone")
    return tmp_path / "clone"


def dvc(*arguments: str) -> str:
    done = subprocess.run([str(BIN / "dvc"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lose(clone: Path, out: str) -> None:
    """Take the first file of a folder out of the remote."""
    stages = remote_lock(clone)
    md5 = next(one["md5"] for stage in stages.values() for one in stage["outs"] if one["path"] == out)
    config = (clone / ".dvc/config").read_text()
    url = config.partition("url = ")[2].partition("\n")[0]
    key = f"files/md5/{md5[:2]}/{md5[2:]}"
    if url.startswith("s3://"):
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        client = boto3.client("s3")
        listed = json.loads(client.get_object(Bucket=bucket, Key=f"{prefix}/{key}")["Body"].read())
        file = listed[0]["md5"]
        client.delete_object(Bucket=bucket, Key=f"{prefix}/files/md5/{file[:2]}/{file[2:]}")
    else:
        file = json.loads(Path(url, key).read_text())[0]["md5"]
        Path(url, "files", "md5", file[:2], file[2:]).unlink()


def out_of(stage: dict, path: str) -> str:
    return next(out["md5"] for out in stage["outs"] if out["path"] == path)


def remote_lock(folder: Path) -> dict:
    from pipelines.params import read_yaml

    return read_yaml(folder / "dvc.lock")["stages"]


@pytest.mark.parametrize("stored", ["folder", "s3"], indirect=True)
def test_a_fresh_clone_needs_to_run_nothing(clone):
    assert not (clone / "data/models").exists()
    assert remote.pull(clone) > STAGES
    assert "up to date" in dvc("repro")
    assert not (clone / "ran.log").exists()
    assert "50" in dvc("metrics", "show")
    assert remote.default_remote(clone) == "store"


@pytest.fixture
def faults(s3):
    """A proxy before the bucket, which the clone's remote goes through; its tries follow each other soon."""
    with faults_before(s3) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # of botocore; those of DVC's file system remain
        Path(".dvc/config.local").write_text(f"['remote \"store\"']\n    endpointurl = {proxy.url}\n")
        yield proxy


@pytest.mark.parametrize("stored", ["s3"], indirect=True)
def test_a_missing_object_is_named_by_its_stage(clone, faults):
    lose(clone, "data/unique")
    refused = [faults.add(kind, "^GET .*/files/", times=2) for kind in ("refuse", "unavailable", "cut")]
    done = subprocess.run([str(BIN / "vlp"), "pull"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("vlp: the DVC remote lacks objects of data/unique, which the stage deduplicate wrote")
    assert Path("data/models/retrieval/results.json").is_file(), "the rest is in place"
    assert [rule.hits for rule in refused] == [2, 2, 2], "what is refused is tried again"


@pytest.mark.parametrize("stored", ["s3"], indirect=True)
def test_what_is_refused_is_tried_again_and_what_fails_is_said_and_finished_by_the_next(stored, faults):
    for number in range(4):
        Path(f"data/unique/{number}").write_text(f"{number}")
    with Repo() as repository:
        repository.commit("deduplicate", force=True)
    away = faults.add("refuse", "^PUT .*/files/")
    with pytest.raises(UserError, match=r"^the DVC remote could not be written to: 4 files failed; `vlp push` again"):
        remote.push(Path.cwd())
    assert away.hits > 4, "each was tried more than once"
    away.end()
    lists = faults.add("unavailable", r"^PUT .*\.dir$", times=50)
    with pytest.raises(
        UserError, match=r"^the DVC remote could not be written to: 1 files failed to upload; `vlp push`"
    ):
        remote.push(Path.cwd())
    lists.end()
    sure = [faults.add(kind, "^PUT .*/files/", times=1) for kind in ("refuse", "unavailable", "cut")]
    remote.push(Path.cwd())
    assert sum(rule.hits for rule in sure) > 0
    shutil.rmtree(".dvc/cache")
    shutil.rmtree("data/unique")
    md5 = out_of(remote_lock(stored.folder)["deduplicate"], "data/unique")
    hidden = faults.add("missing", f"^(GET|HEAD) .*{md5[2:]}$")  # seen in the listing all the same
    with pytest.raises(remote.MissingObjectsError, match=r"data/unique, which the stage deduplicate wrote") as caught:
        remote.pull(Path.cwd())
    assert caught.value.stages == ["deduplicate"], "the rest came"
    hidden.end()
    assert remote.pull(Path.cwd()) > 4, "and the files of the folder had been sent"
    faults.add("refuse")
    with pytest.raises(UserError, match=r"^the DVC remote does not answer: ") as caught:
        remote.push(Path.cwd())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stored", ["s3"], indirect=True)
def test_a_remote_that_does_not_answer(clone, monkeypatch):
    config = Path(".dvc/config")
    config.write_text("".join(f"{line}\n" for line in config.read_text().splitlines() if "endpointurl" not in line))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(UserError) as caught:
        remote.pull(clone)
    assert not isinstance(caught.value, remote.MissingObjectsError), caught.value


def test_without_a_remote(finished_project):
    assert remote.default_remote(Path.cwd()) is None
    with pytest.raises(UserError, match="no DVC remote is set up"):
        remote.pull(Path.cwd())


def test_imported_source_lists_are_refreshed(project, tmp_path):
    source = tmp_path / "elsewhere.tsv"
    source.write_text("a\thttp://a.test/1.png\n")
    Path("lists").mkdir()
    dvc("import-url", str(source), "lists/pairs.tsv")
    source.write_text("a\thttp://a.test/1.png\nb\thttp://a.test/2.png\n")
    assert remote.refresh(Path.cwd()) == ["lists/pairs.tsv"]
    assert Path("lists/pairs.tsv").read_text() == source.read_text()


# -- where a model comes from


def test_lineage_reaches_the_source_list(finished_project):
    origins = lineage("retrieval", Path.cwd())
    assert origins[0].stage == "finetune@retrieval"
    assert ("data/models/pretrain", "pretrain") in {(path, stage) for path, _, stage in origins[0].inputs}
    assert {origin.stage for origin in origins} == {*remote_lock(Path.cwd())} - {"evaluate@retrieval", "report"}
    lock = remote_lock(Path.cwd())
    assert origins[0].md5 == out_of(lock["finetune@retrieval"], "data/models/retrieval")
    assert origins[0].params["finetune.runs.retrieval"]["epochs"] == 5
    head = git(Path.cwd(), "rev-parse", "HEAD")
    assert all(origin.commits == (head,) for origin in origins), "the commit with the code that the stages ran on"
    text = describe(origins, Path.cwd())
    assert "data/models/pretrain  " in text
    assert "  code    " + head[:7] in text
    assert json.loads(json.dumps(as_json(origins)))[0]["out"] == "data/models/retrieval"


def test_lineage_of_a_source_that_is_a_file(finished_project):
    finished_project.replace("corpus:\n      path: data/corpus", "corpus:\n      path: lists/pairs.tsv")
    Path("lists").mkdir()
    Path("lists/pairs.tsv").write_text("a\thttp://a.test/1.png\n")
    finished_project.repro()
    by_stage = {origin.stage: origin for origin in lineage("pretrain", Path.cwd())}
    ((path, md5, writer),) = by_stage["download@corpus"].inputs
    assert (path, writer) == ("lists/pairs.tsv", None)
    assert len(md5) == 32


def test_lineage_says_when_the_lock_file_no_longer_tells(finished_project):
    lock = Path("dvc.lock")
    used = out_of(remote_lock(Path.cwd())["pretrain"], "data/models/pretrain")
    before, mark, after = lock.read_text().partition("  finetune@retrieval:")
    lock.write_text(before.replace(used, "0" * 32 + ".dir") + mark + after)
    with pytest.raises(
        UserError, match=r"finetune@retrieval ran on data/models/pretrain as it was before pretrain ran"
    ):
        lineage("retrieval", Path.cwd())
    with pytest.raises(UserError, match=r"retrieva is no model of dvc\.lock; did you mean retrieval"):
        lineage("retrieva", Path.cwd())


def test_code_that_no_commit_holds(finished_project):
    root = Path.cwd()
    module = "components/data/clean.py"
    md5 = next(dep["md5"] for dep in remote_lock(root)["clean"]["deps"] if dep["path"] == module)
    assert commits_of(root, {module: md5}) == [git(root, "rev-parse", "HEAD")]
    assert commits_of(root, {module: "0" * 32}) == []
    assert commits_of(root, {}) == []


# -- what a run leaves behind


def test_runs_are_committed_beside_the_work(finished_project):
    root = Path.cwd()
    for key, value in {"user.name": "t", "user.email": "t@t.invalid"}.items():
        git(root, "config", key, value)
    head = git(root, "rev-parse", "HEAD")
    Path("params.yaml").write_text(Path("params.yaml").read_text() + "# edited\n")
    status = git(root, "status", "--porcelain")
    first = commit_run(root, "runs", "one")
    assert git(root, "rev-parse", "HEAD") == head
    assert git(root, "status", "--porcelain") == status, "neither index nor working folder is touched"
    assert git(root, "show", "runs:dvc.lock") == Path("dvc.lock").read_text().strip()
    assert git(root, "show", "runs:params.yaml").endswith("# edited")
    assert commit_run(root, "runs", "two") == first, "nothing new"

    git(root, "commit", "-qm", "on", "--allow-empty")
    Path("params.yaml").write_text(Path("params.yaml").read_text() + "# again\n")
    second = commit_run(root, "runs", "three")
    assert git(root, "show", "-s", "--format=%P", second).split() == [first, git(root, "rev-parse", "HEAD")]
    with pytest.raises(UserError, match="is checked out"):
        commit_run(root, git(root, "branch", "--show-current"), "no")


def test_runs_are_pushed(finished_project, tmp_path):
    git(tmp_path, "init", "-q", "--bare", "origin.git")
    git(Path.cwd(), "remote", "add", "origin", str(tmp_path / "origin.git"))
    commit = commit_run(Path.cwd(), "runs", "one", push_to="origin")
    assert git(tmp_path / "origin.git", "rev-parse", "runs") == commit
    with pytest.raises(UserError, match="git push"):
        commit_run(Path.cwd(), "runs", "one", push_to="nowhere")


def page(folder: Path, text: str) -> Path:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(text)
    (folder / "images" / "a.png").write_bytes(b"png")
    return folder


def test_pages_in_a_folder(tmp_path):
    made = page(tmp_path / "report", "one")
    target = tmp_path / "site"
    published = publish_pages({"report": made, "data-docs": tmp_path / "none"}, str(target))
    assert published == {"report": (target / "report/index.html").as_uri()}
    (made / "images" / "a.png").unlink()
    publish_pages({"report": page(made, "two")}, str(target))
    assert (target / "report/index.html").read_text() == "two"
    with pytest.raises(UserError, match="name a folder or s3://"):
        publish_pages({"report": made}, "ftp://x")


def test_pages_in_a_bucket(tmp_path, s3):
    published = publish_pages({"report": page(tmp_path / "report", "one")}, "s3://data/site/")
    assert published == {"report": "s3://data/site/report/index.html"}
    got = boto3.client("s3").get_object(Bucket="data", Key="site/report/index.html")
    assert (got["Body"].read(), got["ContentType"]) == (b"one", "text/html")
    with pytest.raises(UserError, match="s3://nobody/x cannot be written"):
        publish_pages({"report": tmp_path / "report"}, "s3://nobody/x")


@pytest.mark.prefect
def test_a_run_pulls_pushes_commits_and_publishes(clone, prefect_server, tmp_path):
    from pipelines import flows

    lose(clone, "data/report")
    flows.run_flow(
        "evaluation",
        pull=True,
        refresh=True,
        push=True,
        commit="runs",
        git_remote="origin",
        publish=str(tmp_path / "site"),
    )
    ran = (clone / "ran.log").read_text().split()
    assert ran == ["report"], "what the remote lacks is made again, the rest is not"
    assert git(clone, "rev-parse", "runs") == git(tmp_path / "project", "rev-parse", "runs")
    shutil.rmtree(clone / ".dvc" / "cache")
    assert remote.pull(clone) > STAGES, "and it was sent"
    page(clone / "data/report", "seen")
    assert set(flows.published(str(tmp_path / "site"))) == {"report"}
