"""Samples of GPUs, on a real Ray and in real files; only the GPUs themselves are made up."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray

from hybridflow.cluster.devices.device_map import Device, pool_devices
from hybridflow.cluster.devices.device_monitor import DeviceMonitor
from hybridflow.cluster.devices.nvml import NvmlReader
from hybridflow.cluster.ray.resource_pool import Bundle, cluster_nodes, release, reserve
from hybridflow.config.recipe import load_recipe
from hybridflow.metrics import names as metrics
from hybridflow.metrics.device_samples import DeviceFile, DeviceSample, read_samples, summarise
from tests.support.fake_devices import Absent, Lost, Silent, Steady
from tests.support.runs import DEMO

SAMPLE = DeviceSample(1.8e9, "10.0.0.1", 0, 50.0, 2**30, 400.0, 1980.0)


def test_the_file_holds_one_object_a_sample_and_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "devices.jsonl"
    first = DeviceFile(path)
    first.add([SAMPLE, replace(SAMPLE, gpu=1, power_w=math.nan)])
    assert json.loads(path.read_text().splitlines()[0]) == {
        "time": 1.8e9,
        "node": "10.0.0.1",
        "gpu": 0,
        "utilisation": 50.0,
        "memory_bytes": 2**30,
        "power_w": 400.0,
        "clock_mhz": 1980.0,
    }
    with path.open("a") as file:
        file.write('{"time": 1.8')  # a kill
    again = DeviceFile(path)
    again.add([replace(SAMPLE, time=1.9e9)])
    samples = read_samples(path)
    assert [(sample.time, sample.gpu) for sample in samples] == [(1.8e9, 0), (1.8e9, 1), (1.9e9, 0)]
    assert math.isnan(samples[1].power_w)


def test_power_and_energy_are_of_all_gpus_together() -> None:
    samples = [
        *(replace(SAMPLE, power_w=power, utilisation=10.0) for power in (100.0, 300.0)),
        *(replace(SAMPLE, gpu=1, memory_bytes=3 * 2**30, power_w=50.0, utilisation=40.0) for _ in range(2)),
        replace(SAMPLE, node="10.0.0.2", power_w=25.0, utilisation=25.0),
    ]
    use = summarise(samples, 10.0)
    assert (use.utilisation_mean, use.power_mean_w, use.energy_j) == (25.0, 275.0, 2750.0)
    assert use.memory_peak_bytes == 3 * 2**30


def test_a_recipe_says_how_often() -> None:
    assert load_recipe(DEMO).metrics.device_interval_s == 1.0
    assert load_recipe(DEMO, ["metrics.device_interval_s=0"]).metrics.device_interval_s == 0


@pytest.fixture(scope="module")
def bundles(ray_cluster: None) -> Iterator[tuple[Bundle, ...]]:
    """Two CPU slots that Ray holds, taken for GPUs."""
    reserved = reserve(pool_devices({"role": "cpu:0-1"}, {}, cluster_nodes()))
    yield tuple(
        replace(bundle, device=Device(0, "cuda", index), visible=str(index))
        for index, bundle in enumerate(reserved["role"].bundles)
    )
    release(reserved)


def samplers() -> list[psutil.Process]:
    """Ray names the process of an actor after its class."""
    results = []
    for process in psutil.process_iter():
        try:
            if any("ray::_Sampler" in word for word in process.cmdline()):
                results.append(process)
        except psutil.Error:
            continue
    return results


def wait_for(condition: Callable[[], object], limit_s: float = 180.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def collected(monitor: DeviceMonitor) -> dict[str, float]:
    """The next figures."""
    values: dict[str, float] = {}

    def collect() -> dict[str, float]:
        values.update(monitor.collect())
        return values

    wait_for(collect)
    return values


@pytest.mark.processes
def test_samples_go_to_the_file_and_figures_to_the_step(tmp_path: Path, bundles: tuple[Bundle, ...]) -> None:
    path = tmp_path / "devices.jsonl"
    with DeviceMonitor([*bundles, *bundles], 0.05, path, make_reader=Steady) as monitor:
        collected(monitor)

        def has_sampled() -> bool:  # between two steps: of no figure
            monitor.begin()
            return len(read_samples(path)) > 20

        wait_for(has_sampled)
        begin = time.monotonic()
        time.sleep(1)
        values = collected(monitor)
        seconds = time.monotonic() - begin
        assert monitor.collect().keys() <= values.keys()
    assert values.keys() == {
        metrics.DEVICE_UTILISATION,
        metrics.DEVICE_POWER,
        metrics.DEVICE_MEMORY,
        metrics.DEVICE_ENERGY,
    }
    assert values[metrics.DEVICE_UTILISATION] == pytest.approx(15, abs=1)
    assert values[metrics.DEVICE_POWER] == pytest.approx(300)
    assert values[metrics.DEVICE_MEMORY] == 2048
    assert 300 * 0.9 < values[metrics.DEVICE_ENERGY] <= 300 * (seconds + 0.1)
    samples = read_samples(path)
    assert {sample.gpu for sample in samples} == {0, 1}
    assert len({sample.node for sample in samples}) == 1
    times = [sample.time for sample in samples if sample.gpu == 0]
    assert times == sorted(set(times))
    assert times[1] - times[0] >= 0.04
    wait_for(lambda: not samplers())


@pytest.mark.processes
def test_what_a_gpu_does_not_say_is_no_figure(tmp_path: Path, bundles: tuple[Bundle, ...]) -> None:
    with DeviceMonitor(bundles, 0.05, tmp_path / "devices.jsonl", make_reader=Silent) as monitor:
        values = collected(monitor)
    assert values.keys() == {metrics.DEVICE_UTILISATION, metrics.DEVICE_MEMORY}


def until_told(monitor: DeviceMonitor, capsys: pytest.CaptureFixture[str]) -> str:
    """Lines of a monitor that has given up; it prints and returns nothing more after that."""
    said: list[str] = []

    def lines_said() -> list[str]:
        monitor.collect()
        said.extend(capsys.readouterr().err.splitlines())
        return said

    wait_for(lines_said)
    assert monitor.collect() == {}
    assert capsys.readouterr().err == ""
    [line] = said
    return line


@pytest.mark.processes
@pytest.mark.parametrize(
    ("reader", "cause"), [(Lost, "OSError: GPU is lost"), (Absent, "RuntimeError: NVML Shared Library Not Found")]
)
def test_a_reader_that_fails_is_told_in_one_line(
    tmp_path: Path,
    bundles: tuple[Bundle, ...],
    capsys: pytest.CaptureFixture[str],
    reader: Callable[[Sequence[str]], NvmlReader],
    cause: str,
) -> None:
    with DeviceMonitor(bundles[:1], 0.02, tmp_path / "devices.jsonl", make_reader=reader) as monitor:
        line = until_told(monitor, capsys)
    assert line == f"hybridflow: devices: the GPUs are no longer watched: {cause}"
    assert capsys.readouterr().err == ""
    wait_for(lambda: not samplers())


@pytest.mark.processes
def test_a_sampler_that_is_killed_is_told_in_one_line(
    tmp_path: Path, bundles: tuple[Bundle, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with DeviceMonitor(bundles, 0.05, tmp_path / "devices.jsonl", make_reader=Steady) as monitor:
        collected(monitor)
        [sampler] = samplers()
        sampler.kill()
        line = until_told(monitor, capsys)
    assert line.startswith("hybridflow: devices: the GPUs are no longer watched: The actor died")
    assert read_samples(tmp_path / "devices.jsonl")


@pytest.mark.processes
def test_a_disk_that_is_gone_is_told_in_one_line(
    tmp_path: Path, bundles: tuple[Bundle, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with DeviceMonitor(bundles, 0.05, tmp_path / "gone" / "devices.jsonl", make_reader=Steady) as monitor:
        assert "No such file or directory" in until_told(monitor, capsys)


@pytest.mark.processes
def test_a_sampler_that_hangs_holds_nobody_up(tmp_path: Path, bundles: tuple[Bundle, ...]) -> None:
    with DeviceMonitor(bundles, 0.05, tmp_path / "devices.jsonl", make_reader=Steady) as monitor:
        collected(monitor)
        [sampler] = samplers()
        sampler.suspend()
        monitor.begin()
        began = time.monotonic()
        for _ in range(40):  # only the first waits
            assert monitor.collect() == {}
        assert time.monotonic() - began < 20
        sampler.resume()
        collected(monitor)
        sampler.suspend()
    sampler.wait(timeout=20)


@pytest.mark.processes
def test_an_exception_ends_the_samplers_too(tmp_path: Path, bundles: tuple[Bundle, ...]) -> None:
    monitor = DeviceMonitor(bundles, 0.05, tmp_path / "devices.jsonl", make_reader=Steady)
    with pytest.raises(KeyError), monitor:
        collected(monitor)
        raise KeyError
    wait_for(lambda: not samplers())


@pytest.mark.processes
def test_without_gpus_nothing_is_started(
    tmp_path: Path, bundles: tuple[Bundle, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [replace(bundle, device=Device(0, "cpu", 0)) for bundle in bundles]
    monkeypatch.setattr(ray, "remote", lambda *_, **__: pytest.fail("an actor was started"))
    for taken_, interval_s in ((slots, 1.0), (bundles, 0.0)):
        with DeviceMonitor(taken_, interval_s, tmp_path / "devices.jsonl") as monitor:
            assert monitor.collect() == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_nvml_reads_the_gpus() -> None:
    torch = pytest.importorskip("torch")
    torch.cuda.is_available() or pytest.skip("no GPU")
    reader = NvmlReader(["0"])
    assert reader.gpus == [0]
    reading = reader.read(0)
    assert 0 <= reading.utilisation <= 100
    assert reading.memory_bytes > 0
    assert reading.power_w > 1 and reading.clock_mhz > 100
    memory = reader.memory(0)
    assert 0 < memory.used_bytes < memory.total_bytes
    assert memory.total_bytes >= torch.cuda.get_device_properties(0).total_memory
    assert reader.capability(0) == torch.cuda.get_device_capability(0)
