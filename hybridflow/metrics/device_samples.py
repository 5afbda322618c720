"""Samples of a run's GPUs over time, in a file: one JSON object a sample."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine3d.errors import UserError
from engine3d.input_files import JsonError, lines, parse_json
from hybridflow.rundir.atomic_files import AppendedFile, replace_file, whole_lines


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One GPU at one time.

    Args:
        time: seconds since the epoch by the clock of the node.
        node: the node's address.
        gpu: the GPU's index as NVML counts them on the node.
        utilisation: share of the last moments in which a kernel ran, in %.
        memory_bytes: in use, by whatever process.
        power_w: drawn, in W; nan where the GPU does not say.
        clock_mhz: of the streaming multiprocessors, in MHz.
    """

    time: float
    node: str
    gpu: int
    utilisation: float
    memory_bytes: int
    power_w: float
    clock_mhz: float


_FIELDS = {field.name for field in dataclasses.fields(DeviceSample)}


class DeviceFile:
    """Appends samples to a file; what is there already stays, but for a half-written last line.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and not all(complete for _, complete in lines(path, errors="replace")):
            replace_file(path, "".join(f"{line}\n" for line in whole_lines(path)))
        self._file = AppendedFile(path)

    def add(self, samples: Iterable[DeviceSample]) -> None:
        """Write samples; they survive the death of this process. Raises OSError where none of them was written."""
        self._file.add("".join(f"{_line(sample)}\n" for sample in samples))

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def _line(sample: DeviceSample) -> str:
    # JSON has no nan; the sinks of the metrics write it as a string too.
    values = {name: str(value) if value != value else value for name, value in dataclasses.asdict(sample).items()}
    return json.dumps(values)


def read_samples(path: Path) -> list[DeviceSample]:
    """The samples of a file, in their order.

    Raises:
        UserError: naming the file and the line that is no sample.
    """
    return [_parse(path, number, line) for number, line in enumerate(whole_lines(path), start=1)]


def _parse(path: Path, number: int, line: str) -> DeviceSample:
    try:
        values = parse_json(line)
        if values.keys() != _FIELDS:
            raise ValueError
        return DeviceSample(
            float(values["time"]),
            str(values["node"]),
            int(values["gpu"]),
            float(values["utilisation"]),
            int(values["memory_bytes"]),
            float(values["power_w"]),
            float(values["clock_mhz"]),
        )
    except (ValueError, AttributeError, TypeError, OverflowError) as error:
        expected = ", ".join(field.name for field in dataclasses.fields(DeviceSample))
        error_text = f"not JSON ({error})" if isinstance(error, JsonError) else repr(line[:60])
        raise UserError(f"{path}:{number}: {error_text}, expected an object with {expected}") from None


@dataclass(frozen=True)
class DeviceUse:
    """Utilisation of the GPUs of a run in a span of time.

    Args:
        utilisation_mean: over all samples, in %.
        power_mean_w: of all GPUs together, in W.
        memory_peak_bytes: of the GPU that held most.
        energy_j: of all GPUs together, in J.
    """

    utilisation_mean: float
    power_mean_w: float
    memory_peak_bytes: int
    energy_j: float


def summarise(samples: Sequence[DeviceSample], seconds: float) -> DeviceUse:
    """The use of the GPUs in a span of time.

    Args:
        samples: of that span; at least one.
        seconds: how long it was; energy is mean power times this, which holds for GPUs that were sampled evenly.
    """
    power: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        power.setdefault((sample.node, sample.gpu), []).append(sample.power_w)
    power_mean_w = sum(sum(values) / len(values) for values in power.values())
    return DeviceUse(
        utilisation_mean=sum(sample.utilisation for sample in samples) / len(samples),
        power_mean_w=power_mean_w,
        memory_peak_bytes=max(sample.memory_bytes for sample in samples),
        energy_j=power_mean_w * seconds,
    )


@dataclass(frozen=True)
class RunDevices:
    """The GPUs of a whole run, which has had others where it was started again on other hosts.

    Args:
        at_once: how many it had at one time, at most.
        power_mean_w: of all that it had at a time together, in W; nan where a GPU does not say.
    """

    at_once: int
    power_mean_w: float

    @classmethod
    def of(cls, samples: Sequence[DeviceSample]) -> RunDevices:
        """Build it from at least one sample."""
        of_gpu: dict[tuple[str, int], list[DeviceSample]] = {}
        for sample in samples:
            of_gpu.setdefault((sample.node, sample.gpu), []).append(sample)
        spans = [
            (min(sample.time for sample in gpu_samples), max(sample.time for sample in gpu_samples))
            for gpu_samples in of_gpu.values()
        ]
        # At one moment those that begin come before those that end.
        changes = sorted([(begin, -1) for begin, _ in spans] + [(end, 1) for _, end in spans])
        had = most = 0
        sampled_s, before = 0.0, changes[0][0]
        for time, change in changes:
            sampled_s += time - before if had else 0.0
            had, before = had - change, time
            most = max(most, had)
        power = [sum(sample.power_w for sample in gpu_samples) / len(gpu_samples) for gpu_samples in of_gpu.values()]
        if not sampled_s:
            return cls(most, sum(power))
        shares = [(end - begin) / sampled_s for begin, end in spans]
        return cls(most, sum(mean * share for mean, share in zip(power, shares, strict=True)))
