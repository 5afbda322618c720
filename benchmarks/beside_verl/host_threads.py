"""Threads of a Linux host that run or wait for a processor, sampled each second.

    python benchmarks/beside_verl/host_threads.py threads.jsonl                       # until it is terminated
    python benchmarks/beside_verl/host_threads.py threads.jsonl --rollouts ENGINE.log

The first form writes a line for each second, which `compare.py` does for each of its runs. The second prints, for each
rollout in an engine's log, the decoding step and the busiest threads: processors used, share of time in wait for a
processor, switches and processors. Two timed loops, one of arithmetic and one of cache misses, show whether a processor
itself was slower.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

_INTERVAL_S = 1.0
_LEAST_SHARE = 0.05
"""Processors that a thread uses or waits for, below which it is left out."""
_DECODE = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d).*Decode batch, #running-req: (\d+).*\(token/s\): ([\d.]+)")
_BUSIEST = 9
_PAUSE_S = 4.0
"""Seconds without a decoding step between two rollouts."""


@dataclass(frozen=True)
class ThreadSample:
    """One thread over one interval.

    Args:
        pid: of its process.
        tid: its own.
        process: name of the process.
        name: of the thread.
        cpu: processors used, 0 to 1.
        wait: share of the interval in which it was ready and had no processor.
        processor: the last one.
        system: clock ticks in the kernel since its start.
        voluntary: switches since its start in which it waited for something.
        involuntary: switches since its start in which it lost its processor.
    """

    pid: int
    tid: int
    process: str
    name: str
    cpu: float
    wait: float
    processor: int
    system: int
    voluntary: int
    involuntary: int


def samples(interval_s: float = _INTERVAL_S) -> Iterator[dict[str, Any]]:
    """Yield a record for each interval, without end: its time, the busy share of each processor and its threads."""
    order = random.Random(1).sample(range(1_000_000), 20_000)
    objects = [f"{number}x" for number in range(1_000_000)]
    times, processors = _thread_times(), _processor_ticks()
    while True:
        time.sleep(interval_s)
        times_now, processors_now = _thread_times(), _processor_ticks()
        threads = [
            sample
            for key, at in times_now.items()
            if key in times and (sample := _sample(*key, times[key], at)) is not None
        ]
        ticks = [[b - a for a, b in zip(*rows, strict=True)] for rows in zip(processors, processors_now, strict=True)]
        yield {
            "time": time.time(),
            "busy": [round(1 - (row[3] + row[4]) / max(1, sum(row)), 2) for row in ticks],
            "stolen": round(sum(row[7] for row in ticks) / max(1, sum(map(sum, ticks))), 3),
            "loops_ms": _loops(objects, order),
            "threads": [asdict(thread) for thread in sorted(threads, key=lambda thread: -thread.cpu)],
        }
        times, processors = times_now, processors_now


def _thread_times() -> dict[tuple[int, int], tuple[int, int, int]]:
    """Nanoseconds of the clock, on a processor and in wait for one, by process and thread."""
    times = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                for thread in (directory / "task").iterdir():
                    cpu, wait, _ = (thread / "schedstat").read_text().split()
                    times[int(directory.name), int(thread.name)] = time.monotonic_ns(), int(cpu), int(wait)
            except OSError:  # it has ended
                continue
    return times


def _processor_ticks() -> list[list[int]]:
    """user, nice, system, idle, iowait, irq, softirq and steal of each processor."""
    rows = Path("/proc/stat").read_text().splitlines()
    return [[int(word) for word in row.split()[1:9]] for row in rows if re.match(r"cpu\d", row)]


def _sample(pid: int, tid: int, before: Sequence[int], at: Sequence[int]) -> ThreadSample | None:
    interval, cpu, wait = (later - earlier for earlier, later in zip(before, at, strict=True))
    if cpu + wait < _LEAST_SHARE * interval:
        return None
    directory = Path(f"/proc/{pid}/task/{tid}")
    try:
        name, _, rest = (directory / "stat").read_text().partition("(")[2].rpartition(")")
        status = (directory / "status").read_text()
        process = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended
        return None
    fields = rest.split()
    voluntary, involuntary = (int(number) for number in re.findall(r"ctxt_switches:\s+(\d+)", status))
    shares = round(cpu / interval, 3), round(wait / interval, 4)
    return ThreadSample(pid, tid, process, name, *shares, int(fields[36]), int(fields[12]), voluntary, involuntary)


def _loops(objects: Sequence[str], order: Sequence[int]) -> list[float]:
    """Milliseconds of a loop of arithmetic and of one over strings in random order, the minimum of three each."""
    arithmetic, misses = [], []
    for _ in range(3):
        start = time.perf_counter()
        sum(number & 7 for number in range(60_000))
        middle = time.perf_counter()
        sum(len(objects[index]) for index in order)
        arithmetic.append(middle - start)
        misses.append(time.perf_counter() - middle)
    return [round(min(arithmetic) * 1e3, 2), round(min(misses) * 1e3, 2)]


def rollouts(log: str) -> list[list[tuple[float, float]]]:
    """Read decoding steps from an engine's log: seconds since the epoch and milliseconds of a step, by rollout."""
    by_pause: list[list[tuple[float, float]]] = []
    for match in _DECODE.finditer(log):
        moment = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").timestamp()
        if not by_pause or moment - by_pause[-1][-1][0] > _PAUSE_S:
            by_pause.append([])
        by_pause[-1].append((moment, int(match[2]) / float(match[3]) * 1e3))
    return by_pause


def describe(records: Sequence[dict[str, Any]], steps: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Lines about one rollout. Its first second, and steps measured across its start, are left out."""
    during = [record for record in records if steps[0][0] + 1 <= record["time"] <= steps[-1][0]]
    if not during or len(steps) < 2:
        return
    busy = sum(statistics.mean(values) for values in zip(*(record["busy"] for record in during), strict=True))
    loops = [statistics.median(values) for values in zip(*(record["loops_ms"] for record in during), strict=True)]
    stolen = statistics.mean(record["stolen"] for record in during)
    median = statistics.median(milliseconds for _, milliseconds in steps[1:])
    yield (
        f"decoding step {median:.1f} ms, {len(during)} s: {busy:.1f} processors busy, {stolen:.3f} stolen, "
        f"loops {loops[0]:.2f} and {loops[1]:.2f} ms"
    )
    threads = defaultdict(list)
    for record in during:
        for thread in record["threads"]:
            threads[thread["pid"], thread["tid"]].append(thread)
    for (pid, tid), rows in sorted(threads.items(), key=lambda item: -sum(row["cpu"] for row in item[1]))[:_BUSIEST]:
        cpu, wait = (sum(row[name] for row in rows) / len(during) for name in ("cpu", "wait"))
        lost = (rows[-1]["involuntary"] - rows[0]["involuntary"]) / len(rows)
        slept = (rows[-1]["voluntary"] - rows[0]["voluntary"]) / len(rows)
        processors = dict(Counter(row["processor"] for row in rows).most_common(4))
        yield (
            f"  {pid}/{tid} {rows[0]['process']}/{rows[0]['name']}: cpu {cpu:.2f}, wait {wait:.3f}, "
            f"switches/s {slept:.0f} voluntary {lost:.0f} involuntary, processors {processors}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="host_threads.py", description="Threads of a Linux host that run or wait.")
    parser.add_argument("samples", type=Path, help="file of the samples")
    parser.add_argument("--rollouts", type=Path, metavar="LOG", help="print the rollouts of an engine's log")
    options = parser.parse_args(arguments)
    if options.rollouts is None:
        with options.samples.open("w", buffering=1) as file:
            for record in samples():
                file.write(json.dumps(record) + "\n")
    records = [json.loads(line) for line in options.samples.read_text().splitlines() if line.endswith("}")]
    for number, steps in enumerate(rollouts(options.rollouts.read_text(errors="replace")), 1):
        print("\n".join([f"rollout {number}:", *describe(records, steps)]))


if __name__ == "__main__":
    main()
