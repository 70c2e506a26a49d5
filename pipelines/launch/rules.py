"""What is checked before a cluster is asked for: schemas, and mistakes that cost an hour to find on the cluster."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from components.io.errors import UserError
from pipelines.launch.settings import Clusters
from pipelines.params import Params

# What KubeRay's API reference says of the fields used here; pods inside are checked against Kubernetes' own schema.
_CLUSTER: dict[str, Any] = {
    "type": "object",
    "required": ["headGroupSpec"],
    "additionalProperties": False,
    "properties": {
        "rayVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "authOptions": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"mode": {"enum": ["disabled", "token"]}, "secretName": {"type": "string"}},
        },
        "enableInTreeAutoscaling": {"type": "boolean"},
        "autoscalerOptions": {
            "type": "object",
            "properties": {"idleTimeoutSeconds": {"type": "integer"}, "version": {"enum": ["v1", "v2"]}},
        },
        "headGroupSpec": {
            "type": "object",
            "required": ["template"],
            "properties": {"rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}}},
        },
        "workerGroupSpecs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["groupName", "template"],
                "properties": {
                    "groupName": {"type": "string"},
                    "replicas": {"type": "integer", "minimum": 0},
                    "minReplicas": {"type": "integer", "minimum": 0},
                    "maxReplicas": {"type": "integer", "minimum": 1},
                    "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
                },
            },
        },
    },
}
_JOB: dict[str, Any] = {
    "type": "object",
    "required": ["entrypoint", "rayClusterSpec"],
    "additionalProperties": False,
    "properties": {
        "entrypoint": {"type": "string", "minLength": 1},
        "shutdownAfterJobFinishes": {"type": "boolean"},
        "ttlSecondsAfterFinished": {"type": "integer", "minimum": 0},
        "backoffLimit": {"type": "integer", "minimum": 0},
        "rayClusterSpec": _CLUSTER,
    },
}


def check_ray(cluster: dict[str, Any]) -> None:
    """Check a Ray cluster file against the schema that the installed Ray brings. Raises UserError."""
    found = find_spec("ray")
    schema = Path(str(found and found.origin)).parent / "autoscaler" / "ray-schema.json"
    _validate(cluster, json.loads(schema.read_text(encoding="utf-8")), "Ray's cluster schema")


def check_kubernetes(objects: list[dict[str, Any]], kubernetes_version: str) -> None:
    """Check KubeRay's objects and, against Kubernetes' own schemas, the pods in them. Raises UserError."""
    import kubernetes_validate

    for one in objects:
        schema = {"RayCluster": _CLUSTER, "RayJob": _JOB}[one["kind"]]
        _validate(one["spec"], schema, f"KubeRay's {one['kind']}")
        spec = one["spec"].get("rayClusterSpec", one["spec"])
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, "spec": group["template"]["spec"]}
            try:
                kubernetes_validate.validate(pod, kubernetes_version, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise UserError(
                    f"Kubernetes' schema {kubernetes_version} refuses a pod: {error.message} at "
                    f"{'.'.join(map(str, error.path)) or 'its top'}"
                ) from None


def _validate(content: Any, schema: dict[str, Any], name: str) -> None:
    from jsonschema import Draft7Validator
    from jsonschema.exceptions import best_match

    if error := best_match(Draft7Validator(schema).iter_errors(content)):
        raise UserError(f"{name} refuses the file: {error.message} at {'.'.join(map(str, error.path)) or 'its top'}")


def check_rules(target: str, settings: Clusters, params: Params, gpus: dict[str, int]) -> None:
    """Raise UserError that lists what would go wrong on the cluster. `gpus` holds the GPUs of instance types."""
    found = list(_rules(target, settings, params, gpus))
    if found:
        raise UserError("\n  ".join([f"vlp launch {target}: {len(found)} to mend", *found]) if found[1:] else found[0])


def _rules(target: str, settings: Clusters, params: Any, gpus: dict[str, int]) -> Iterator[str]:
    if target not in ("aws", "kubernetes", "on-premise"):
        return
    if not re.fullmatch(r"/[\w./-]+", str(settings.storage)):
        yield f"storage: {settings.storage} must be an absolute path of letters, digits, dots and dashes"
    elif settings.storage.parts[1] in ("tmp", "root", "home"):
        yield f"storage: {settings.storage} is each node's own folder; name one that all nodes mount, such as /mnt/vlp"
    if "example" in settings.image or "example" in settings.repository or "//example" in settings.bucket:
        yield "image, repository and bucket still name the example: set your own"
    runs = {f"finetune.runs.{name}": run for name, run in params.finetune.runs.items()}
    trainings = {"pretrain": params.pretrain, **runs}
    workers = settings.max_workers
    if target == "on-premise" and settings.on_premise:
        workers = len(settings.on_premise.workers)
    room = workers * max(settings.gpus_per_worker, 1)
    for key, training in trainings.items():
        wanted = getattr(training, "num_workers", 0)
        if wanted == 0:
            yield f"{key}.num_workers: 0 trains in the flow's own process, on the head, which has no GPU; set 1 or more"
        elif wanted > room:
            yield f"{key}.num_workers: {wanted} training processes, but {workers} workers have room for {room}"
    if target == "aws" and settings.aws:
        worker, has = settings.aws.worker, gpus.get(settings.aws.worker, 0)
        if has < settings.gpus_per_worker:
            yield f"gpus_per_worker: {settings.gpus_per_worker}, but {worker} has {has} that infra/prices.yaml knows of"
        if settings.aws.head in gpus:
            yield f"aws.head: {settings.aws.head} has GPUs, which the head would leave idle; choose a type without"


def versions() -> dict[str, str]:
    """What must be the same on every node: the image is built from the same lock file as this installation."""
    return {"python": ".".join(map(str, sys.version_info[:3])), "ray": version("ray")}
