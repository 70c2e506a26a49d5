"""The data stages on a Ray cluster of two nodes with a core each: run by test_spread_ray.py, in a process of its own.

Prints the nodes that ran a job, then runs `clean`, `deduplicate` and `shard` on the cluster and in this process.
"""

import os
import sys
import time
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray.cluster_utils import Cluster

from components.data.clean import CleanParams, clean
from components.data.deduplicate import DeduplicateParams, deduplicate
from components.data.shard import ShardParams, TokenizerParams, shard
from components.io.errors import UserError
from components.io.runtime import Runtime
from components.io.spread import spread


def meet(folder, name, others):
    """Say which node this is, once all the others are running too: no core is shared, so they are on other nodes."""
    (folder / name).write_text(ray.get_runtime_context().get_node_id())
    until = time.monotonic() + 120
    while not all((folder / other).exists() for other in others):
        if time.monotonic() > until:
            raise TimeoutError(f"{others} never came")
        time.sleep(0.05)


def fail(text):
    raise UserError(text)


def stages(folder, out, runtime):
    clean(CleanParams(), raw=folder / "raw", clean=out / "clean", runtime=runtime)
    params = DeduplicateParams()
    deduplicate(params, clean=out / "clean", tasks=folder / "tasks", unique=out / "unique", runtime=runtime)
    tokenizer = TokenizerParams(vocab_size=200, min_frequency=1)
    params = ShardParams(pictures_per_shard=3, tokenizer=tokenizer)
    shard(params, unique=out / "unique", shards=out / "shards", runtime=runtime)


def main():
    folder = Path(sys.argv[1])
    stages(folder, folder / "here", Runtime(processes=1, work=folder / "work-here"))
    memory = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **memory})
    try:
        cluster.add_node(num_cpus=1, **memory)
        cluster.wait_for_nodes()
        names = ["one", "two"]
        jobs = [(folder, name, names) for name in names]
        assert sorted(spread(meet, jobs, ray_address=cluster.address)) == [0, 1]
        sys.stdout.write(f"nodes: {len({(folder / name).read_text() for name in names})}\n")
        try:
            list(spread(fail, [("said by a worker",)], ray_address=cluster.address))
        except UserError as error:
            sys.stdout.write(f"error: {'said by a worker' in str(error)}\n")
        stages(folder, folder / "cluster", Runtime(ray_address=cluster.address, work=folder / "work-cluster"))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
