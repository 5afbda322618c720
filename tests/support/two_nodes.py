"""A batch made on one node and used on another: two nodes of Ray's own test cluster, on one machine.

    python -m tests.support.two_nodes

prints one JSON object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import torch
from ray.cluster_utils import Cluster

from engine3d.layout import Layout
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.cluster.devices.device_map import pool_devices
from hybridflow.cluster.ray.ray_session import start_ray, stop_ray
from hybridflow.cluster.ray.resource_pool import ResourcePool, cluster_nodes, release, reserve
from hybridflow.workers.worker_group import WorkerGroup
from tests.support.group_workers import Model, response_tokens

SAMPLES, LONGEST = list(range(40, 50)), 9


def main() -> None:
    """Rollout on node 0, one replica of the actor there and one on node 1; the roles hold every CPU."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=1)
    start_ray(address=cluster.address)
    try:
        pools = reserve(pool_devices({"rollout": "cpu:0", "actor": "cpu:1-2"}, {}, cluster_nodes()))
        with (
            _group("rollout", pools, Layout()) as rollout,
            _group("actor", pools, Layout(dp=2)) as actor,
        ):
            batch = rollout.generate(SAMPLES, longest=LONGEST).batch()
            print(json.dumps(exchanged(batch, actor)), flush=True)
        release(pools)
    finally:
        stop_ray()
        cluster.shutdown()


def _group(role: str, pools: Mapping[str, ResourcePool], layout: Layout) -> Any:
    """Group of models. Methods of workers are attributes of it that no type declares."""
    return WorkerGroup(role, Model, pools[role], layout, call_timeout_s=600)


def exchanged(batch: RemoteBatch, actor: Any) -> dict[str, object]:
    """Return what the ranks got, and what went to each node for it."""
    future = actor.logprobs(batch)
    complete = batch.with_columns(ref_logprobs=future).fetch()
    assert complete.ref_logprobs is not None and future.shard_indices is not None
    shards = batch.shard(future.shard_indices, [frozenset({node}) for node in actor.ranks.nodes])
    return {
        "nodes": len(set(actor.ranks.nodes)),
        "sample_ids": complete.sample_ids.tolist(),
        "right": bool(torch.equal(complete.ref_logprobs, response_tokens(complete) / 10)),
        "parts": [list(indices) for indices in future.shard_indices],
        "rows": [
            sum(len(ray.get(rows.ref).arrays["sample_ids"]) for rows in shard.slices)  # of the objects that are read
            for shard in shards
        ],
    }


if __name__ == "__main__":
    main()
