"""``infra/clusters.yaml`` as one typed object."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from components.io.errors import UserError
from pipelines.messages import problems
from pipelines.params import read_yaml

CLUSTERS = Path("infra", "clusters.yaml")
PRICES = Path("infra", "prices.yaml")

Name = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")]
InstanceType = Annotated[str, Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?$", max_length=253)]


class Section(BaseModel, frozen=True, extra="forbid"):
    """A section of the file."""


class Aws(Section):
    """Machines of EC2."""

    region: str = Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$", description="such as eu-central-1")
    head: InstanceType = Field(description="runs the flow and Ray's control; no GPU")
    worker: InstanceType = Field(description="trains")
    spot: bool = Field(default=True, description="spot workers: cheaper, and may be taken away")
    instance_profile: Name = Field(description="an IAM instance profile with infra/iam-policy.json")
    efs: str = Field(pattern=r"^fs-[0-9a-f]{8,17}$", description="the EFS file system that all nodes mount")
    image_id: str = Field(pattern=r"^ami-[0-9a-f]{8,17}$", description="an AMI with docker and an NFS client")
    disk_gib: int = Field(default=200, ge=30, le=16384, description="each node's own disk")


class Size(Section):
    """What one pod asks for."""

    cpu: int = Field(ge=1, le=512, description="cores")
    memory_gib: int = Field(ge=1, le=24576, description="memory")


class Kubernetes(Section):
    """Pods that the KubeRay operator runs."""

    namespace: Name = Field(default="default", description="the namespace")
    version: str = Field(default="1.37", pattern=r"^1\.\d+$", description="whose schemas the pods are checked against")
    service_account: Name = Field(description="the pods' service account; its role gives access to the bucket")
    claim: Name = Field(description="a ReadWriteMany persistent volume claim behind `storage`")
    secret: Name | None = Field(default=None, description="a secret that becomes the pods' environment")
    head: Size = Field(description="the head pod")
    worker: Size = Field(description="a worker pod")


class OnPremise(Section):
    """Machines at hand, reached by SSH."""

    head: Host = Field(description="the head's address")
    workers: list[Host] = Field(min_length=1, description="the workers' addresses")
    user: Name = Field(description="the SSH user")


class Clusters(Section):
    """The whole file."""

    name: Name = Field(description="the cluster's name")
    image: str = Field(pattern=r"^[a-z0-9][\w./:@-]+$", description="one image for driver and workers")
    repository: str = Field(pattern=r"^((https|ssh|git)://)?[\w@.:/~-]+$", description="cloned into `storage`")
    storage: PurePosixPath = Field(description="a folder that all nodes share")
    bucket: str = Field(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/\S*)?$", description="the DVC remote")
    flow: str = Field(default="end-to-end", description="the flow that the cluster is for")
    max_workers: int = Field(ge=1, le=1000, description="the autoscaler starts no more")
    gpus_per_worker: int = Field(default=1, ge=0, le=16, description="GPUs of a worker")
    aws: Aws | None = Field(default=None, description="for `vlp launch aws`")
    kubernetes: Kubernetes | None = Field(default=None, description="for `vlp launch kubernetes`")
    on_premise: OnPremise | None = Field(default=None, description="for `vlp launch on-premise`")

    @property
    def clone(self) -> PurePosixPath:
        """The project's clone in `storage`: the working folder of the driver and of all workers."""
        return self.storage / self.name


def load_clusters(path: Path = CLUSTERS) -> Clusters:
    """Read and check the file. Raises UserError that lists every problem."""
    try:
        return TypeAdapter(Clusters).validate_python(read_yaml(path))
    except ValidationError as error:
        raise UserError("\n  ".join([f"{path}:", *problems(error, Clusters)])) from None
