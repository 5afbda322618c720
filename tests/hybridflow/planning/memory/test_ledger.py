"""The ledger of pipeline stages: the heaviest decides, and is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import Device
from hybridflow.planning.memory.ledger import GpuMemory, MemoryLedger, MemoryPhase


def _gpu(number: int, stage: int, gigabytes: int) -> GpuMemory:
    phase = MemoryPhase("update of actor", {"activations": gigabytes * 10**9}, "train.recompute=full")
    return GpuMemory((Device(0, "cuda", number),), {}, (phase,), 0, {"actor": (4, (stage,))})


def test_the_heaviest_stage_is_refused_by_name() -> None:
    ledger = MemoryLedger((_gpu(0, 0, 90), _gpu(1, 1, 120), _gpu(2, 2, 100)), 80 * 10**9, (), 10, 10)
    heaviest = r"^GPU 1 of node 0 \(actor stage 1 of 4\): 120.0 GB in phase update of actor on a GPU of 80.0 GB"
    with pytest.raises(UserError, match=heaviest):
        ledger.check()
    assert ledger.lines()[0] == "GPU 0 of node 0 (actor stage 0 of 4): at most 90.0 of 80.0 GB in update of actor"
    assert ledger.lines()[-1] == "most: 120.0 GB on GPU 1 of node 0 (actor stage 1 of 4) in update of actor"
    replace(ledger, gpu_bytes=120 * 10**9).check()
    replace(ledger, gpu_bytes=None).check()


def test_stages_that_hold_the_same_are_one_line() -> None:
    first, third = _gpu(0, 0, 90), _gpu(2, 2, 90)
    assert first.is_like(third) and not first.is_like(_gpu(1, 1, 91))
    assert first.joined(third).name == "GPU 0 of node 0 and 1 like it (actor stages 0, 2 of 4)"
    assert replace(first, stages={}).name == "GPU 0 of node 0"
