"""Clusters as files: rendered, refused, priced; a bucket that will do or not; and real Ray nodes on this machine."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from ruamel.yaml import YAML

from components.io.errors import UserError
from pipelines.environment import apply_environment
from pipelines.launch import plan, render
from pipelines.launch.bucket import check_bucket
from pipelines.launch.rules import check_kubernetes, check_ray, check_rules
from pipelines.launch.settings import load_clusters
from pipelines.params import load_params, read_yaml
from tests.faults import faults_before

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ["pretrain.num_workers=2", "finetune.runs.retrieval.num_workers=2"]
OWN = {"image": "registry.test/vlp@sha256:" + "0" * 64, "repository": "git@git.test:vlp.git", "bucket": "s3://own/dvc"}


def settings_of(folder, **changes):
    """The project's clusters.yaml with changes, read back."""
    content = read_yaml(ROOT / "infra/clusters.yaml") | OWN
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            content[section][name] = value
        else:
            content[section] = value
    (folder / "clusters.yaml").write_text("")
    YAML().dump(content, folder / "clusters.yaml")
    return load_clusters(folder / "clusters.yaml")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the project's infra/ and parameters that train with workers."""
    (tmp_path / "infra").mkdir()
    for name in ("clusters.yaml", "prices.yaml"):
        (tmp_path / "infra" / name).write_text((ROOT / "infra" / name).read_text())
    settings = settings_of(tmp_path)
    (tmp_path / "clusters.yaml").rename(tmp_path / "infra" / "clusters.yaml")
    content = read_yaml(ROOT / "params.yaml")
    for section in (content["pretrain"], content["finetune"]["runs"]["retrieval"]):
        section["num_workers"] = 2
    YAML().dump(content, tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    return settings


# -- files


@pytest.mark.parametrize("target", ["aws", "kubernetes", "on-premise"])
def test_dry_run_renders_and_starts_nothing(here, target, monkeypatch, capsys):
    monkeypatch.setattr(plan, "_run", lambda command: pytest.fail(f"ran {command}"))
    plan.launch(target, Path.cwd(), dry_run=True, nodes=3, flow=True)
    said = capsys.readouterr().out
    assert "would run:" in said
    rendered = Path("work/launch", f"{target}.yaml").read_text()
    assert "token" in rendered.lower()
    for secret in ("AWS_SECRET", "aws_secret", "BEGIN"):
        assert secret not in rendered
    assert "VLP_RUNTIME_GPUS" in rendered
    if target == "aws":
        assert "at most 2.16 USD/h by the list of 2025-06-01" in said  # 0.2016 + 2 x 0.9776


@pytest.mark.parametrize(
    ("target", "flow", "starts", "ends"),
    [
        ("aws", True, ["ray up", "ray exec"], ["ray down"]),
        ("aws", False, ["ray up"], ["ray down"]),
        ("kubernetes", True, ["apply job", "wait", "logs", "wait"], ["delete job", "delete"]),
        ("kubernetes", False, ["apply"], ["delete job", "delete"]),
    ],
)
def test_what_was_launched_is_taken_down_and_what_was_rendered_is_not(here, target, flow, starts, ends, monkeypatch):
    ran = []

    def note(command):
        word = command[1] if command[0] == "kubectl" else " ".join(command[:2])
        ran.append(word + " job" * (command[-1].endswith("kubernetes-job.yaml")))

    monkeypatch.setattr(plan, "_run", note)
    monkeypatch.setattr(plan, "check_bucket", lambda *_: [])
    plan.launch(target, Path.cwd(), dry_run=True, nodes=3, flow=flow)
    assert plan.down(Path.cwd()) == "nothing was launched from here"
    assert ran == []
    plan.launch(target, Path.cwd(), dry_run=False, nodes=3, flow=flow)
    assert ran == starts
    ran.clear()
    assert plan.down(Path.cwd()) == f"taken down: {target}"
    assert ran == ends
    assert plan.down(Path.cwd()) == "nothing was launched from here"


def test_a_launch_that_breaks_off_is_taken_down_too(here, monkeypatch):
    monkeypatch.setattr(plan, "check_bucket", lambda *_: [])
    monkeypatch.setattr(plan.subprocess, "run", lambda command, **_: SimpleNamespace(returncode=int("up" in command)))
    with pytest.raises(UserError, match=r"`ray up --yes work/launch/aws.yaml` ended with status 1"):
        plan.launch("aws", Path.cwd(), dry_run=False, nodes=3, flow=True)
    assert plan.down(Path.cwd()) == "taken down: aws"


def test_the_files_as_they_stand_are_examples():
    with pytest.raises(UserError, match="image, repository and bucket still name the example"):
        check_rules("aws", load_clusters(ROOT / "infra/clusters.yaml"), load_params(ROOT / "params.yaml", WORKERS), {})


def test_ray_s_own_schema_refuses_what_it_does_not_know(here):
    good = render.aws(here, {"g6.2xlarge": {"CPU": 8, "GPU": 1}})
    check_ray(good)
    bad = copy.deepcopy(good)
    bad["available_node_types"]["worker"]["max_worker"] = 3
    with pytest.raises(
        UserError, match=r"Ray's cluster schema refuses the file: .*max_worker.*available_node_types.worker"
    ):
        check_ray(bad)
    del good["provider"]
    with pytest.raises(UserError, match="provider"):
        check_ray(good)


def test_ray_itself_takes_the_file(here):
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(render.aws(here, {"g6.2xlarge": {"CPU": 8, "GPU": 1}}))
    validate_config(config)
    head, worker = (config["available_node_types"][name] for name in ("head", "worker"))
    assert head["resources"]["CPU"] == 0, "the head is not scheduled with work"
    assert worker["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in head["node_config"]
    validate_config(prepare_config(render.on_premise(here)))


def test_kubernetes_schemas_refuse_what_they_do_not_know(here):
    good = render.kubernetes(here)
    check_kubernetes(good, "1.37")
    bad = copy.deepcopy(good)
    bad[0]["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(UserError, match="imagePullPolice"):
        check_kubernetes(bad, "1.37")
    bad = copy.deepcopy(good)
    bad[1]["spec"]["shutdownAfterJobFinished"] = True
    with pytest.raises(UserError, match=r"KubeRay's RayJob refuses the file: .*shutdownAfterJobFinished"):
        check_kubernetes(bad, "1.37")
    bad = copy.deepcopy(good)
    bad[0]["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    with pytest.raises(UserError, match="0 is not of type 'string'"):
        check_kubernetes(bad, "1.37")


def test_pods_are_not_root_and_the_head_takes_no_work(here):
    cluster = render.kubernetes(here)[0]["spec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"]
    limits = [g["template"]["spec"]["containers"][0]["resources"]["limits"] for g in cluster["workerGroupSpecs"]]
    assert limits[0]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]["limits"]


@pytest.mark.parametrize(
    ("target", "changes", "params", "part"),
    [
        ("aws", {"storage": "/tmp/vlp"}, WORKERS, "is each node's own folder"),
        ("aws", {"storage": "/mnt/a b"}, WORKERS, "must be an absolute path"),
        ("aws", {"aws__worker": "m7i.xlarge"}, WORKERS, "gpus_per_worker: 1, but m7i.xlarge has 0"),
        ("aws", {"gpus_per_worker": 4}, WORKERS, "gpus_per_worker: 4, but g6.2xlarge has 1"),
        ("aws", {"aws__head": "g6.xlarge"}, WORKERS, "g6.xlarge has GPUs, which the head would leave idle"),
        ("kubernetes", {}, [], "pretrain.num_workers: 0 trains in the flow's own process"),
        ("kubernetes", {"max_workers": 1}, WORKERS, "2 training processes, but 1 workers have room for 1"),
        ("on-premise", {"on_premise__workers": ["a.test"]}, WORKERS, "but 1 workers have room for 1"),
    ],
)
def test_rules_people_trip_over(tmp_path, target, changes, params, part):
    gpus = read_yaml(ROOT / "infra/prices.yaml")["gpus"]
    with pytest.raises(UserError) as caught:
        check_rules(target, settings_of(tmp_path, **changes), load_params(ROOT / "params.yaml", params), gpus)
    assert part in str(caught.value)


def test_settings_are_checked(tmp_path):
    with pytest.raises(UserError, match=r"aws\.efs") as caught:
        settings_of(tmp_path, aws__efs="mine", max_workers=0)
    assert "max_workers: 0 is not allowed" in str(caught.value)
    content = read_yaml(ROOT / "infra/clusters.yaml")
    content["max_worker"] = 3
    YAML().dump(content, tmp_path / "c.yaml")
    with pytest.raises(UserError, match=r"max_worker: no such key.*did you mean max_workers"):
        load_clusters(tmp_path / "c.yaml")


def test_the_iam_policy_covers_what_the_preflight_does():
    policy = json.loads((ROOT / "infra/iam-policy.json").read_text())
    actions = {action for statement in policy["Statement"] for action in [*statement["Action"]] if ":" in action}
    assert {"s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:AbortMultipartUpload"} <= actions
    assert not [action for action in actions if action.endswith("*")], "no wildcards"


def test_the_kubernetes_work_pool_is_one_that_kubernetes_takes():
    import kubernetes_validate

    template = json.loads((ROOT / "infra/work-pool-kubernetes.json").read_text())
    variables = {key: value.get("default", "x") for key, value in template["variables"]["properties"].items()}
    variables |= {"labels": {}, "env": [], "command": ["vlp"], "cpu_limit": "4", "finished_job_ttl": 60}

    def fill(value):
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, str) and value.startswith("{{ ") and value.endswith(" }}"):
            return variables[value[3:-3]]
        return value

    job = fill(template["job_configuration"]["job_manifest"])
    job["metadata"]["generateName"] = "vlp-"
    kubernetes_validate.validate(job, "1.37", strict=True)


def test_the_image_is_not_root_and_installs_the_lock():
    text = (ROOT / "infra/Dockerfile").read_text()
    stages = text.split("\nFROM ")
    assert len(stages) == 3, "what builds is not in what runs"
    assert "\nUSER vlp\n" in stages[2]
    assert "requirements.lock" in stages[1]
    copied = [line.split()[1] for line in stages[1].splitlines() if line.startswith("COPY ")]
    assert all((ROOT / name).exists() for name in copied)


# -- buckets


@pytest.fixture(scope="module")
def s3():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            patch.setenv(f"AWS_{name}", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        client = boto3.client("s3")
        client.create_bucket(Bucket="own")
        client.create_bucket(Bucket="far", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
        yield client
    server.stop()


def test_a_bucket_that_will_do(s3):
    found = check_bucket("s3://own/dvc", "us-east-1")
    assert found[0] == "own is in us-east-1; objects can be written, read, written in parts and deleted"
    assert any("does not block public access" in line for line in found)
    assert "Contents" not in s3.list_objects_v2(Bucket="own"), "nothing stays"
    assert not s3.list_multipart_uploads(Bucket="own").get("Uploads")


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("s3://nobody/x", "the bucket exists and may be seen"),
        ("s3://far/x", "is in eu-west-1, the cluster in us-east-1"),
    ],
)
def test_a_bucket_that_will_not(s3, address, part):
    with pytest.raises(UserError) as caught:
        check_bucket(address, "us-east-1")
    assert part in str(caught.value)


def test_no_answer(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"refused, 3 times, on trying that the bucket exists .*Could not connect"):
        check_bucket("s3://own/x")


STEPS = [
    (r"^HEAD /own$", "exists and may be seen"),
    (r"^PUT /own/dvc/[^?]*$", "may be written to"),
    (r"partNumber=2", "may be written to in parts"),
    (r"^DELETE [^?]*$", "lets objects be deleted"),
]


@pytest.fixture
def faults(s3, monkeypatch):
    """A proxy before the bucket; tries follow each other at once, and a second is already slow."""
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr("pipelines.launch.bucket.READ_SECONDS", 1.0)
    with faults_before(s3.meta.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


REFUSED, BUSY = "refused, 3 times, on trying that the bucket {}", "not so that the bucket {}: .*(SlowDown|503)"
SLOW = "no answer within 1 s, 3 times, on trying that the bucket {}"
FAILURES = [*(("refuse", REFUSED, *step) for step in STEPS), *(("unavailable", BUSY, *step) for step in STEPS)]


@pytest.mark.parametrize(("kind", "words", "pattern", "step"), [*FAILURES, ("hang", SLOW, *STEPS[1])])
def test_an_endpoint_that_fails_at_a_step_is_said_with_the_step(faults, s3, kind, words, pattern, step):
    rule = faults.add(kind, pattern)
    with pytest.raises(UserError, match=r"^s3://own/dvc: " + words.format(step)) as caught:
        check_bucket("s3://own/dvc")
    assert rule.hits == 3
    assert "\n" not in str(caught.value)
    assert not s3.list_multipart_uploads(Bucket="own").get("Uploads"), "no part is left to be paid for"
    if step != "lets objects be deleted":
        assert "Contents" not in s3.list_objects_v2(Bucket="own"), "nothing stays"
    else:
        for item in s3.list_objects_v2(Bucket="own")["Contents"]:
            s3.delete_object(Bucket="own", Key=item["Key"])


def test_an_endpoint_that_refuses_or_is_slow_for_a_moment_will_do(faults):
    rules = [faults.add(kind, "^PUT", times=1) for kind in ("refuse", "cut")]
    rules += [faults.add("unavailable", "^POST", times=2), faults.add("hang", "^(HEAD|GET)", times=2)]
    assert "can be written, read, written in parts and deleted" in check_bucket("s3://own/dvc")[0]
    assert [rule.hits for rule in rules] == [1, 1, 2, 2]


# -- this machine as a cluster


def test_runtime_from_the_environment(monkeypatch):
    content = read_yaml(ROOT / "params.yaml")
    monkeypatch.setenv("VLP_RUNTIME_RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("VLP_RUNTIME_PROCESSES", "2")
    apply_environment(content)
    assert content["runtime"] == {"processes": 2, "ray_address": "127.0.0.1:1"}
    monkeypatch.setenv("VLP_RUNTIME_ADRESS", "x")
    with pytest.raises(UserError, match="VLP_RUNTIME_ADRESS"):
        apply_environment(content)


def test_doctor_finds_nothing_wrong_here(monkeypatch):
    from pipelines import doctor

    monkeypatch.chdir(ROOT)
    findings = doctor.doctor(ROOT)
    assert all(fine for fine, _ in findings), findings
    assert any("gloo: two processes of this machine reach each other" in sentence for _, sentence in findings)


def test_doctor_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    from pipelines import doctor

    monkeypatch.setattr(doctor, "_torch", lambda root: iter(()))
    (tmp_path / "params.yaml").write_text("clean: 3\n")
    with pytest.raises(UserError, match="of these would stop a run"):
        doctor.report(tmp_path)
    said = capsys.readouterr().out
    assert "BAD  " + str(tmp_path) + " is not a DVC repository" in said
    assert "clean: 3 is not allowed" in said
