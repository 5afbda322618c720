"""Process groups of torch that meet at our store."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from engine3d.platform import platform
from engine3d.stores import join, listen, serve, tcp_address
from tests.support.distributed import run_distributed

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(platform.device_type != "cpu", reason="a process that has asked for GPUs cannot fork"),
]


def _groups(address: str) -> list[float]:
    """Meet, make many groups, also of threads, and reduce in each; what came out."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=join(address, 60.0), rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    groups = [dist.new_group(ranks, timeout=timedelta(seconds=60)) for ranks in ([0, 1], [0, 2], [1, 2], None) * 3]
    found = []
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            value = torch.tensor([float(rank + 1)])
            dist.all_reduce(value, group=group)
            found.append(float(value))
    everything: list[object] = [None] * size
    dist.all_gather_object(everything, {"rank": rank})
    assert everything == [{"rank": number} for number in range(size)]
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_gloo_groups_meet_while_strangers_knock() -> None:
    served = serve(listen("127.0.0.1"))
    over = threading.Event()

    def knock() -> None:
        while not over.wait(0.01):
            with socket.create_connection((served.host, served.port)) as stranger:
                stranger.sendall(b"\0" * 64)

    knocking = threading.Thread(target=knock)
    knocking.start()
    try:
        found = run_distributed(_groups, 3, tcp_address(served.host, served.port), timeout_s=180)
    finally:
        over.set()
        knocking.join()
        served.close()
    assert found == [[3.0, 4.0, 6.0] * 3, [3.0, 5.0, 6.0] * 3, [4.0, 5.0, 6.0] * 3]
