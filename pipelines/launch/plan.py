"""``vlp launch``: render, check, say what it costs, and start; and take down again."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from components.io.errors import UserError
from pipelines.launch import local, render
from pipelines.launch.bucket import check_bucket
from pipelines.launch.rules import check_kubernetes, check_ray, check_rules, versions
from pipelines.launch.settings import PRICES, Clusters, load_clusters
from pipelines.params import load_params, read_yaml

RENDERED = Path("work", "launch")
TARGETS = ("aws", "kubernetes", "on-premise", "local")
# the files of a target, and the command that takes down what a file describes
ENDINGS = {
    "aws": (("aws",), ("ray", "down", "--yes")),
    "on-premise": (("on-premise",), ("ray", "down", "--yes")),
    "kubernetes": (("kubernetes-job", "kubernetes"), ("kubectl", "delete", "--ignore-not-found", "-f")),
}


def launch(target: str, root: Path, *, dry_run: bool, nodes: int, flow: bool) -> None:
    """Start a cluster, or with `dry_run` only say what would be started, after all checks but those of the bucket.

    `flow` runs the flow of ``infra/clusters.yaml`` on it and follows its output. Raises UserError.
    """
    settings = load_clusters()
    if target == "local":
        _local(root, settings, nodes, dry_run=dry_run, flow=flow)
        return
    files, commands = prepare(target, settings)
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as stream:
            YAML().dump_all(content, stream) if isinstance(content, list) else YAML().dump(content, stream)
        print(f"rendered {path}")
    print("\n".join(describe(target, settings)))
    if flow:
        submitting = submission(target, settings, next(iter(files)))
        # KubeRay's job brings a cluster of its own
        commands = submitting if target == "kubernetes" else [*commands, *submitting]
    if dry_run:
        print("would run:", *(shlex.join(command) for command in commands), sep="\n  ")
        return
    for line in check_bucket(settings.bucket, settings.aws.region if target == "aws" and settings.aws else None):
        print(line)
    _launched(target).touch()  # first: what a command has half started must be taken down too
    for command in commands:
        _run(command)


def prepare(target: str, settings: Clusters) -> tuple[dict[Path, Any], list[list[str]]]:
    """The checked files of a target by path, and the commands that start it. Raises UserError."""
    section = {"aws": settings.aws, "kubernetes": settings.kubernetes, "on-premise": settings.on_premise}
    if section[target] is None:
        raise UserError(f"infra/clusters.yaml has no section {target.replace('-', '_')}: write one to launch {target}")
    prices = read_yaml(PRICES)
    check_rules(target, settings, load_params(), prices["gpus"])
    path = RENDERED / f"{target}.yaml"
    if target == "kubernetes" and settings.kubernetes:
        objects = render.kubernetes(settings)
        check_kubernetes(objects, settings.kubernetes.version)
        files = {RENDERED / "kubernetes-job.yaml": objects[1:], RENDERED / "kubernetes.yaml": objects[:1]}
        return dict(reversed(files.items())), [["kubectl", "apply", "-f", str(path)]]
    if target == "aws" and settings.aws:
        worker = settings.aws.worker
        if worker not in prices["cpus"]:
            raise UserError(
                f"aws.worker: infra/prices.yaml does not know {worker}: add its cpus, gpus and hourly price"
            )
        resources = {worker: {"CPU": prices["cpus"][worker], "GPU": prices["gpus"].get(worker, 0)}}
        cluster = render.aws(settings, resources)
    else:
        cluster = render.on_premise(settings)
    check_ray(cluster)
    return {path: cluster}, [["ray", "up", "--yes", str(path)]]


def submission(target: str, settings: Clusters, rendered: Path) -> list[list[str]]:
    """The commands that run the flow on a started cluster and follow it."""
    if target == "kubernetes" and settings.kubernetes:
        name, namespace = f"{settings.name}-run", settings.kubernetes.namespace
        within = ["-n", namespace, "--timeout=30m"]
        return [
            ["kubectl", "apply", "-f", str(RENDERED / "kubernetes-job.yaml")],
            # KubeRay makes the Kubernetes job that submits once its cluster is up
            ["kubectl", "wait", "--for=create", *within, f"job/{name}"],
            ["kubectl", "logs", "-n", namespace, "--follow", "--pod-running-timeout=30m", f"job/{name}"],
            # following a log succeeds, whatever the log says
            [
                "kubectl",
                "wait",
                "--for=jsonpath={.status.jobStatus}=SUCCEEDED",
                *within[:2],
                "--timeout=1m",
                f"rayjob/{name}",
            ],
        ]
    exports = " ".join(f"{name}={value}" for name, value in render.environment(settings).items())
    command = f"bash -c {shlex.quote(render.entrypoint(settings))}"
    job = f"{exports} ray job submit --address http://127.0.0.1:8265 -- {command}"
    return [["ray", "exec", str(rendered), job]]


def describe(target: str, settings: Clusters) -> Iterator[str]:
    """The plan: what starts, with which versions, and for how much."""
    own = versions()
    yield f"{target}: a head and up to {settings.max_workers} workers with {settings.gpus_per_worker} GPUs each"
    yield f"image {settings.image}; it must hold Python {own['python']} and Ray {own['ray']}, as this machine does"
    yield f"storage {settings.storage}; remote {settings.bucket}; flow {settings.flow}"
    if target == "aws" and settings.aws:
        prices = read_yaml(PRICES)
        hourly = prices["hourly_usd"]
        total = 0.0
        for role, kind, number in (
            ("head", settings.aws.head, 1),
            ("worker", settings.aws.worker, settings.max_workers),
        ):
            price = hourly.get(kind)
            yield f"  {number} x {role:7} {kind:14} {'unknown' if price is None else f'{price:.4f}'} USD/h"
            total += number * (price or 0.0)
        spot = ", less for spot workers" if settings.aws.spot else ""
        yield f"  at most {total:.2f} USD/h by the list of {prices['date']} for {prices['region']}{spot}"


def down(root: Path) -> str:
    """Take down the local cluster and those that `launch` started, by the files it rendered; returns what was done."""
    done = []
    if local.down(root):
        done.append("the local cluster")
    for target, (names, ending) in ENDINGS.items():
        if not _launched(target).is_file():
            continue  # rendered by a dry run, if at all
        for path in (RENDERED / f"{name}.yaml" for name in names):
            if path.is_file():
                _run([*ending, str(path)])
                path.unlink()
        _launched(target).unlink()
        done.append(target)
    return f"taken down: {', '.join(done)}" if done else "nothing was launched from here"


def _local(root: Path, settings: Clusters, nodes: int, *, dry_run: bool, flow: bool) -> None:
    print(f"local: a head and {nodes - 1} workers of one core each, as processes of this machine")
    if dry_run:
        return
    given = local.up(root, nodes)
    exports = " ".join(f"{name}={value}" for name, value in given.items())
    print(f"{nodes} nodes are up; run on them with: env {exports} vlp flow {settings.flow}")
    if flow:
        os.environ.update(given)
        from pipelines.flows import run_flow

        run_flow(settings.flow)


def _launched(target: str) -> Path:
    """The file that says that a target was not only rendered."""
    return RENDERED / f"{target}.launched"


def _run(command: list[str]) -> None:
    print(f"$ {shlex.join(command)}", flush=True)
    try:
        done = subprocess.run(command, check=False)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed on this machine, and the launch needs it") from None
    if done.returncode != 0:
        raise UserError(f"`{shlex.join(command)}` ended with status {done.returncode}; its output is above")
