"""The files that start a cluster: Ray's for AWS and machines at hand, KubeRay's for Kubernetes. No secrets in them.

Every node's working folder is the clone in the shared storage, so that the stages' relative paths mean the same
everywhere. Ray's tokens are made on the head (or by KubeRay) and handed on through the storage or a Kubernetes secret.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from pipelines.launch.settings import Clusters

TOKEN = ".ray-token"
PORT = 6379
LABELS = {"app.kubernetes.io/name": "vlp"}


def environment(settings: Clusters) -> dict[str, str]:
    """What every Ray process is started with."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(settings.storage / TOKEN),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(settings.clone),  # its code goes before the image's
        "VLP_RUNTIME_RAY_ADDRESS": "auto",
        # workers start when they are asked for, so that a training cannot see at its start what it may have
        "VLP_RUNTIME_GPUS": str(settings.max_workers * settings.gpus_per_worker),
        "VLP_RUNTIME_WORK": str(settings.clone / "work"),
    }


def entrypoint(settings: Clusters) -> str:
    """What the job runs on the head."""
    return f"cd {settings.clone} && vlp flow {settings.flow} --retries 2 --pull --push"


def _ray_cluster(settings: Clusters) -> dict[str, Any]:
    """What AWS and machines at hand have in common."""
    exports = " ".join(f"{name}={value}" for name, value in environment(settings).items())
    token = settings.storage / TOKEN
    start = f"cd {settings.clone} && {exports} ray start"
    return {
        "cluster_name": settings.name,
        "max_workers": settings.max_workers,
        "idle_timeout_minutes": 10,
        "docker": {
            "image": settings.image,
            "container_name": "vlp",
            "pull_before_run": True,
            "run_options": [f"--volume={settings.storage}:{settings.storage}", "--ulimit=nofile=65536:65536"],
        },
        "head_setup_commands": [
            f"test -d {settings.clone} || git clone {settings.repository} {settings.clone}",
            f"test -s {token} || (umask 077 && openssl rand -hex 32 | tr -d '\\n' > {token})",
        ],
        "head_start_ray_commands": [
            "ray stop",
            f"{start} --head --port={PORT} --num-cpus=0 --num-gpus=0 --dashboard-host=127.0.0.1 "
            "--autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": ["ray stop", f"{start} --address=$RAY_HEAD_IP:{PORT}"],
    }


def aws(settings: Clusters, resources: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Ray's cluster file for EC2. `resources` holds the CPUs and GPUs of instance types."""
    chosen = settings.aws
    assert chosen is not None
    mount = (
        f"sudo mkdir -p {settings.storage} && (mountpoint -q {settings.storage} || sudo mount -t nfs4 "
        f"-o nfsvers=4.1,hard,timeo=600,noresvport {chosen.efs}.efs.{chosen.region}.amazonaws.com:/ {settings.storage})"
    )
    node = {
        "ImageId": chosen.image_id,
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        "BlockDeviceMappings": [
            {
                "DeviceName": "/dev/sda1",
                "Ebs": {"VolumeSize": chosen.disk_gib, "VolumeType": "gp3", "Encrypted": True},
            }
        ],
        # the head has it too: the autoscaler on it passes the profile on to workers
        "IamInstanceProfile": {"Name": chosen.instance_profile},
    }
    market = {"InstanceMarketOptions": {"MarketType": "spot"}} if chosen.spot else {}
    return {
        **_ray_cluster(settings),
        "provider": {
            "type": "aws",
            "region": chosen.region,
            "cache_stopped_nodes": False,
            "use_internal_ips": True,
        },
        "auth": {"ssh_user": "ubuntu"},
        "initialization_commands": [mount],
        "available_node_types": {
            "head": {
                # no CPUs and no GPUs for tasks: the head holds the flow, and must not be busy or short of memory
                "resources": {"CPU": 0},
                "node_config": {"InstanceType": chosen.head, **node},
            },
            "worker": {
                "min_workers": 0,
                "max_workers": settings.max_workers,
                "resources": dict(resources[chosen.worker]),
                "node_config": {"InstanceType": chosen.worker, **node, **market},
            },
        },
        "head_node_type": "head",
    }


def on_premise(settings: Clusters) -> dict[str, Any]:
    """Ray's cluster file for machines that are there already."""
    machines = settings.on_premise
    assert machines is not None
    return {
        **_ray_cluster(settings),
        "max_workers": len(machines.workers),
        "provider": {"type": "local", "head_ip": machines.head, "worker_ips": list(machines.workers)},
        "auth": {"ssh_user": machines.user},
    }


def kubernetes(settings: Clusters) -> list[dict[str, Any]]:
    """A RayCluster to keep, and a RayJob that brings a cluster of its own and takes it down when it is done."""
    cluster = _cluster_spec(settings)
    chosen = settings.kubernetes
    assert chosen is not None
    meta = {"name": settings.name, "namespace": chosen.namespace, "labels": LABELS}
    return [
        {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": meta, "spec": cluster},
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {**meta, "name": f"{settings.name}-run"},
            "spec": {
                "entrypoint": f"bash -c '{entrypoint(settings)}'",
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": 600,
                "backoffLimit": 2,
                "rayClusterSpec": cluster,
            },
        },
    ]


def _cluster_spec(settings: Clusters) -> dict[str, Any]:
    chosen = settings.kubernetes
    assert chosen is not None
    return {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},  # KubeRay makes the token, keeps it in a secret, and hands it to all pods
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"idleTimeoutSeconds": 600, "version": "v2"},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
            "template": _pod(settings, "ray-head", chosen.head.cpu, chosen.head.memory_gib, 0),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": 0,
                "minReplicas": 0,
                "maxReplicas": settings.max_workers,
                "rayStartParams": {},
                "template": _pod(
                    settings, "ray-worker", chosen.worker.cpu, chosen.worker.memory_gib, settings.gpus_per_worker
                ),
            }
        ],
    }


def _pod(settings: Clusters, name: str, cpu: int, memory_gib: int, gpus: int) -> dict[str, Any]:
    chosen = settings.kubernetes
    assert chosen is not None
    size: dict[str, str] = {"cpu": str(cpu), "memory": f"{memory_gib}Gi"}
    if gpus:
        size["nvidia.com/gpu"] = str(gpus)
    given = {key: value for key, value in environment(settings).items() if not key.startswith("RAY_AUTH")}
    container: dict[str, Any] = {
        "name": name,
        "image": settings.image,
        "workingDir": str(settings.clone),
        "resources": {"requests": size, "limits": size},
        "env": [{"name": key, "value": value} for key, value in given.items()],
        "volumeMounts": [
            {"name": "storage", "mountPath": str(settings.storage)},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if chosen.secret:
        container["envFrom"] = [{"secretRef": {"name": chosen.secret, "optional": True}}]
    return {
        "metadata": {"labels": LABELS},
        "spec": {
            "serviceAccountName": chosen.service_account,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "fsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [
                {"name": "storage", "persistentVolumeClaim": {"claimName": chosen.claim}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(1, memory_gib // 3)}Gi"}},
            ],
        },
    }
