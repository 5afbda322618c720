"""Use of a run's GPUs: sampled on every node, collected by the driver once a step.

    with DeviceMonitor(bundles, interval_s=1.0, path=directory / "devices.jsonl") as monitor:
        monitor.begin()
        ...
        values |= monitor.collect()     # figures of the time in between; the samples are in the file

Training does not depend on it: a sampler that fails or dies is told in one line, and there are no more figures.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.util
from ray.exceptions import RayError

from hybridflow.cluster.devices.nvml import MakeReader, NvmlReader
from hybridflow.cluster.ray import ray_session
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.device_samples import DeviceFile, DeviceSample, summarise

if TYPE_CHECKING:
    from hybridflow.cluster.devices.device_map import Device
    from hybridflow.cluster.ray.resource_pool import Bundle

_MOST_WAITING = 100_000
"""Samples that a node keeps for a driver that does not ask for them; the oldest go."""
_PATIENCE_S = 0.5
"""Limit of the driver's wait for the samplers; what comes later counts for the next step."""


class _Sampler:
    """Made a Ray actor: samples the GPUs of its node on a thread."""

    def __init__(self, make_reader: MakeReader, visible: Sequence[str], interval_s: float) -> None:
        self._node = ray.util.get_node_ip_address()
        self._interval_s = interval_s
        self._samples: deque[DeviceSample] = deque(maxlen=_MOST_WAITING)
        self._error: Exception | None = None
        # A reader that fails is found by the first call: an actor whose making fails says less.
        threading.Thread(target=self._sample, args=(make_reader, visible), daemon=True).start()

    def drain(self) -> list[DeviceSample]:
        """The samples since the last call. Raises what has ended the sampling."""
        if self._error is not None:
            raise self._error
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def _sample(self, make_reader: MakeReader, visible: Sequence[str]) -> None:
        try:
            reader = make_reader(visible)
            while True:
                begin = time.monotonic()
                for gpu in reader.gpus:
                    read = reader.read(gpu)
                    now = time.time()
                    self._samples.append(
                        DeviceSample(
                            now, self._node, gpu, read.utilisation, read.memory_bytes, read.power_w, read.clock_mhz
                        )
                    )
                time.sleep(max(0.0, begin + self._interval_s - time.monotonic()))
        except Exception as error:
            # As text: what reads the driver may lack the exception's class.
            self._error = RuntimeError(f"{type(error).__name__}: {' '.join(str(error).split())}")


class DeviceMonitor:
    """The samplers of a run, one a node, and the file of what they have sampled.

    To be entered when the devices are reserved, and left before they are released. Of CPU slots there is nothing to
    sample: without GPUs, nothing is started.

    Args:
        bundles: what the run holds; each may stand there several times.
        interval_s: seconds between two samples of a GPU; 0 turns everything off.
        path: the file; samples are appended.
        make_reader: for GPUs that are not NVIDIA's.
    """

    def __init__(
        self, bundles: Iterable[Bundle], interval_s: float, path: Path, *, make_reader: MakeReader = NvmlReader
    ) -> None:
        nodes: dict[int, dict[Device, Bundle]] = {}
        for bundle in bundles:
            if bundle.device.kind == "cuda" and interval_s > 0:
                nodes.setdefault(bundle.device.node, {})[bundle.device] = bundle
        self._nodes_held, self._interval_s, self._make_reader = nodes, interval_s, make_reader
        self._path = path
        self._file: DeviceFile | None = None
        self._samplers: dict[int, Any] = {}  # of ActorHandle[_Sampler], which Ray makes without types
        self._pending: dict[int, ray.ObjectRef] = {}
        self._since = time.monotonic()

    def __enter__(self) -> DeviceMonitor:
        actor_class: Any = ray.remote(num_cpus=0, max_restarts=0)(_Sampler) if self._nodes_held else None
        for node, bundles in self._nodes_held.items():
            visible = [bundle.visible for bundle in bundles.values()]
            options = actor_class.options(scheduling_strategy=next(iter(bundles.values())).strategy())
            self._samplers[node] = options.remote(self._make_reader, visible, self._interval_s)
        self._since = time.monotonic()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """End the samplers; where all is well, what they still have is written."""
        if error is None:
            self.collect()
        self._end()

    def begin(self) -> None:
        """Begin a span of time, whose figures the next call of `collect` gives."""
        self._write_new()
        self._since = time.monotonic()

    def collect(self) -> dict[str, float]:
        """Figures of the time since `begin`, by metric name; none without a sample. The samples are in the file."""
        samples = self._write_new()
        return _metrics(samples, time.monotonic() - self._since) if samples else {}

    def _write_new(self) -> list[DeviceSample]:
        """Write what is new to the file, and return it."""
        if not self._samplers:
            return []
        try:
            samples = self._arrived()
            if samples:
                self._file = self._file or DeviceFile(self._path)
                self._file.add(samples)
            return samples
        except (RayError, OSError) as error:
            self._end()
            cause = str(getattr(error, "cause", None) or error).strip().splitlines()[0]
            line = f"the GPUs are no longer watched: {cause}"
            log.warning(f"devices: {line}")
            return []

    def _arrived(self) -> list[DeviceSample]:
        """Samples of the samplers that answer in time. For one that did not last time, nobody waits again."""
        fresh = {node: sampler.drain.remote() for node, sampler in self._samplers.items() if node not in self._pending}
        self._pending |= fresh
        if fresh:
            ray.wait(list(fresh.values()), num_returns=len(fresh), timeout=_PATIENCE_S)
        pending = list(self._pending.values())
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        samples: list[DeviceSample] = []
        for node in [node for node, answer in self._pending.items() if answer in ready]:
            samples += ray.get(self._pending.pop(node))
        return samples

    def _end(self) -> None:
        samplers, self._samplers = self._samplers, {}
        self._pending.clear()
        if ray_session.ray_answers():
            for sampler in samplers.values():
                ray.kill(sampler)
        if self._file is not None:
            self._file.close()
            self._file = None


def _metrics(samples: Sequence[DeviceSample], seconds: float) -> dict[str, float]:
    use = summarise(samples, seconds)
    values = {
        metrics.DEVICE_UTILISATION: use.utilisation_mean,
        metrics.DEVICE_POWER: use.power_mean_w,
        metrics.DEVICE_MEMORY: use.memory_peak_bytes / 2**20,
        metrics.DEVICE_ENERGY: use.energy_j,
    }
    return {name: value for name, value in values.items() if not math.isnan(value)}
