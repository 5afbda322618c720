"""GPUs in use by others, before a run begins: on a real Ray; only the GPUs themselves are made up."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine3d.errors import UserError
from hybridflow.cluster.devices import gpu_availability
from hybridflow.cluster.devices import nvml as gpu_reader
from hybridflow.cluster.devices.device_map import Device, Node, pool_devices
from hybridflow.cluster.devices.gpu_availability import check_bundles_free, check_gpus_free, gpus_in_use
from hybridflow.cluster.devices.nvml import MakeReader, MemoryUse, NvmlReader
from hybridflow.cluster.ray import ray_session, resource_pool
from hybridflow.cluster.ray.resource_pool import Bundle, ResourcePool, cluster_nodes, release, reserve
from hybridflow.config.recipe import load_recipe
from hybridflow.trainer.startup import role_startup
from tests.support.fake_devices import Absent, Freed, Steady, Stuck, Taken
from tests.support.runs import DEMO

ALL = {index: str(index) for index in range(8)}


def use(monkeypatch: pytest.MonkeyPatch, reader: MakeReader) -> None:
    """Replace NVML in this process by a stand-in."""
    monkeypatch.setattr(gpu_reader, "NvmlReader", reader)


def refusal(monkeypatch: pytest.MonkeyPatch, reader: MakeReader, visible: dict[int, str]) -> str:
    use(monkeypatch, reader)
    with pytest.raises(UserError) as refused:
        check_gpus_free(visible, wait_s=0)
    return str(refused.value)


@pytest.mark.parametrize("reader", [Steady, Absent])
def test_gpus_that_are_idle_or_cannot_be_read_are_not_refused(
    monkeypatch: pytest.MonkeyPatch, reader: MakeReader
) -> None:
    use(monkeypatch, reader)
    check_gpus_free(ALL, wait_s=0)
    use(monkeypatch, Taken)
    check_gpus_free({0: "0"}, wait_s=0)
    check_gpus_free({}, wait_s=0)


def test_one_line_says_which_gpu_how_much_and_who(monkeypatch: pytest.MonkeyPatch) -> None:
    me = f"pid {os.getpid()} {psutil.Process().name()}"
    assert refusal(monkeypatch, Taken, {0: "0", 3: "3"}) == (
        f"placement: GPUs in use by others: GPU 3 (47.2 of 150.8 GB, {me}, pid 4194311) of this machine; "
        "expected them free, or placement.shared_gpus=true"
    )


def test_of_many_gpus_the_first_four_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    line = refusal(monkeypatch, Taken, ALL)
    assert [f"GPU {index} (" in line for index in range(8)] == [False, True, True, True, True, False, False, False]
    assert ", pid" in line and " and 3 more; expected them free" in line and "\n" not in line


def test_a_gpu_that_is_counted_otherwise_here_is_told_as_nvidia_smi_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "GPU 0 (47.2 of 150.8 GB, nvidia-smi: 5, pid" in refusal(monkeypatch, Taken, {0: "5"})


def test_without_processes_and_with_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for pids, lines_said in (
        ((), "(3.0 of 100.0 GB) of this machine; expected"),
        ((2**22 + 1,) * 5, ", pid 4194305, pid 4194305, pid 4194305 and 2 more) of this machine"),
    ):
        monkeypatch.setattr(Taken, "memory", lambda *_, pids=pids: MemoryUse(3 * 10**9, 10**11, pids))
        assert lines_said in refusal(monkeypatch, Taken, {0: "0"})


def test_memory_that_comes_free_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_availability, "_POLL_S", 0.01)
    monkeypatch.setattr(Freed, "looks", 0)
    assert "GPU 1 (" in refusal(monkeypatch, Freed, {1: "1"})
    check_gpus_free({1: "1"}, wait_s=30)
    assert Freed.looks == 3
    begin = time.monotonic()
    assert len(gpus_in_use({1: "1"}, 0.3, Taken)) == 1
    assert time.monotonic() - begin >= 0.3


class NvmlError(Exception):
    """The library's own error."""


def refused_by_the_driver(*_: object) -> Any:
    raise NvmlError


def nvml(**calls: Any) -> SimpleNamespace:
    """The part of pynvml that reads memory, of a machine whose GPU 5 has the identifier GPU-b."""
    properties: dict[str, Any] = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCount": lambda: 6,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-b{handle}",
        "nvmlDeviceGetHandleByUUID": refused_by_the_driver,
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=handle * 10**9, total=10**11),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=handle, usedGpuMemory=None)],
        "nvmlDeviceGetCudaComputeCapability": lambda handle: [9, handle],
    }
    return SimpleNamespace(**properties | calls)


def test_nvml_is_asked_for_the_gpu_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    reader = NvmlReader(["GPU-b5", "3"])
    assert reader.gpus == [3, 5]
    assert reader.memory(5) == MemoryUse(5 * 10**9, 10**11, (5,))
    assert reader.capability(3) == (9, 3)
    assert [(item.index, item.number) for item in gpus_in_use({0: "GPU-b5", 1: "1", 2: "GPU-c"}, 0)] == [(0, 5)]


def test_processes_that_the_driver_keeps_to_itself_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = nvml(nvmlDeviceGetComputeRunningProcesses=refused_by_the_driver)
    monkeypatch.setitem(sys.modules, "pynvml", silent)
    assert NvmlReader(["3"]).memory(3) == MemoryUse(3 * 10**9, 10**11, ())


def as_gpus(pools: dict[str, ResourcePool]) -> dict[str, ResourcePool]:
    """Pools of CPU slots, taken for GPUs."""
    return {
        role: replace(pool, bundles=tuple(as_gpu(bundle) for bundle in pool.bundles)) for role, pool in pools.items()
    }


def as_gpu(bundle: Bundle) -> Bundle:
    index = bundle.device.index
    return replace(bundle, device=Device(0, "cuda", index), visible=str(index))


@pytest.fixture
def bundles(ray_cluster: None) -> Iterator[tuple[Bundle, ...]]:
    reserved = reserve(pool_devices({"role": "cpu:0-1"}, {}, cluster_nodes()))
    yield as_gpus(reserved)["role"].bundles
    release(reserved)


@pytest.mark.processes
def test_a_node_of_a_cluster_looks_at_its_own_gpus(bundles: tuple[Bundle, ...]) -> None:
    nodes = [Node("10.0.0.7", gpus=2, cpu_slots=2)]
    for reader in (Steady, Absent):
        check_bundles_free(bundles, nodes, 0, reader)
    check_bundles_free((replace(bundle, device=Device(0, "cpu", 0)) for bundle in bundles), nodes, 0, Taken)
    with pytest.raises(UserError) as refused:
        check_bundles_free([*bundles, *bundles], nodes, 0, Taken)
    line = str(refused.value)
    assert line.startswith("placement: GPUs in use by others: GPU 1 (47.2 of 150.8 GB, pid ")
    assert " of node 10.0.0.7; expected" in line
    assert line.count("GPU ") == 1 and "ray::gpus_in_use" in line  # looked at by a task, and told once


@pytest.mark.processes
def test_a_node_that_does_not_answer_holds_nobody_up(
    bundles: tuple[Bundle, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_availability, "_ANSWER_S", 3.0)
    begin = time.monotonic()
    check_bundles_free(bundles, [Node("10.0.0.7", gpus=2, cpu_slots=2)], 0, Stuck)
    assert 3 <= time.monotonic() - begin < 20


class Started(Exception):
    """A role's processes would have been started."""


@pytest.mark.processes
def test_no_process_of_a_role_is_started_beside_others(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.setattr(ray_session, "start_ray", lambda **_: None)
    monkeypatch.setattr(ray_session, "stop_ray", lambda: None)
    monkeypatch.setattr(resource_pool, "reserve", lambda devices, _limit_s: as_gpus(reserve(devices)))
    monkeypatch.setattr(role_startup, "_Start", start)
    monkeypatch.setattr(role_startup, "WAIT_S", 0.0)
    use(monkeypatch, Taken)
    run: Any = None
    for overrides, error in (
        ((), UserError),
        (("placement.shared_gpus=true",), Started),
        (("placement.actor=cpu:0", "placement.rollout=cpu:0", "placement.reward=cpu:1"), Started),
    ):
        with pytest.raises(error), role_startup.start_roles(load_recipe(DEMO, overrides), run):
            pass
