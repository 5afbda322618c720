"""Rates of copies inside one GPU and between the GPUs of a machine, by the ways in which a transfer could make them.

    PYTHONPATH=. python benchmarks/copy_rates.py > rates.json

One process drives all GPUs that it sees. For one GPU, a pair (one way and both ways) and all GPUs at once it measures
one large copy a pair by the copy engines, the kernel on the sources (push) and on the targets (pull), and a graph of
copies, for several sizes of segments. The last run of each way is checked bit for bit. Rates are of the slowest GPU, in
GB/s sent by each; a copy inside one GPU reads and writes that much.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine3d.platform.copies import Copies, CopyMethod, RunCopies
from engine3d.platform.cuda import copy as cuda_copy

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WARM_UPS, REPETITIONS = 2, 10
MOST_NODES = 20_000
"""A graph with more nodes than this on one GPU takes longer to build than anything here may take."""

ROW_BYTES, ROWS = 4 * KIB, 512
STRIDED_SHARE = 0.2
"""Share of the bytes of the mix that are blocks of rows, cut out of rows of twice the width."""

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """`segments` segments of a pair, which lie in order in the source and in a random order in the target. In bytes."""

    segments: int
    rows: int
    row_bytes: int
    source_stride: int
    source_start: int
    target_start: int

    @property
    def source_bytes(self) -> int:
        return self.segments * self.rows * self.source_stride

    @property
    def target_bytes(self) -> int:
        return self.segments * self.rows * self.row_bytes

    def order(self) -> np.ndarray:
        return np.random.default_rng(0).permutation(self.segments)


def blocks(kind: str, nbytes: int) -> list[Part]:
    """The segments of one pair, of about `nbytes` bytes."""
    if kind != "mix":
        size = {"16KB": 16 * KIB, "256KB": 256 * KIB, "3MB": 3 * MIB}[kind]
        return [Part(max(1, nbytes // size), 1, size, size, 0, 0)]
    runs = Part(max(1, int(nbytes * (1 - STRIDED_SHARE)) // (3 * MIB)), 1, 3 * MIB, 3 * MIB, 0, 0)
    blocks = max(1, int(nbytes * STRIDED_SHARE) // (ROWS * ROW_BYTES))
    return [runs, Part(blocks, ROWS, ROW_BYTES, 2 * ROW_BYTES, runs.source_bytes, runs.target_bytes)]


class Memory:
    """Source and target memory of every pair, filled with random bits."""

    def __init__(self, pairs: list[Pair], kind: str, nbytes: int, devices: list[torch.device]) -> None:
        self.pairs = pairs
        self.devices = devices
        self.blocks = blocks(kind, nbytes)
        self.bytes_a_pair = sum(block.target_bytes for block in self.blocks)
        source_bytes = sum(block.source_bytes for block in self.blocks)
        self.sources, self.targets = {}, {}
        for source, target in pairs:
            generator = torch.Generator(devices[source]).manual_seed(source * 8 + target)
            words = torch.empty(source_bytes // 8, dtype=torch.int64, device=devices[source])
            self.sources[source, target] = words.random_(generator=generator).view(torch.bfloat16)
            self.targets[source, target] = torch.zeros(
                self.bytes_a_pair // 2, dtype=torch.bfloat16, device=devices[target]
            )

    def copies(self, runner: int, pairs: list[Pair]) -> Copies:
        """The copies of some pairs as device `runner` sees their memory."""
        columns: list[list[np.ndarray]] = [[] for _ in range(9)]
        for number, block in ((number, block) for number in range(len(pairs)) for block in self.blocks):
            numbers = np.arange(block.segments, dtype=np.int64)
            same = np.ones_like(numbers)
            values = (
                same * number,
                same * number,
                block.source_start + numbers * block.rows * block.source_stride,
                same * block.source_stride,
                same * number,
                block.target_start + block.order() * block.rows * block.row_bytes,
                same * block.row_bytes,
                same * block.rows * 2,
                same * block.row_bytes,
            )
            for index, (column, value) in enumerate(zip(columns, values, strict=True)):
                # All but the three numbers are bytes of elements of two bytes.
                column.append(value if index in (0, 1, 4) else value // 2)
        return Copies(
            [alias(self.sources[pair], self.devices[runner]) for pair in pairs],
            [alias(self.targets[pair], self.devices[runner]) for pair in pairs],
            *(np.concatenate(column) for column in columns),
        )

    def clear(self) -> None:
        for target in self.targets.values():
            target.zero_()

    def check(self) -> None:
        """Compare every target with its source, without the code that is measured."""
        for pair in self.pairs:
            source, target = (memory[pair].view(torch.int64) for memory in (self.sources, self.targets))
            for block in self.blocks:
                words = block.row_bytes // 8
                strides = (block.rows * block.source_stride // 8, block.source_stride // 8, 1)
                shape = (block.segments, block.rows, words)
                sent = source.as_strided(shape, strides, block.source_start // 8)
                received = target[block.target_start // 8 :][: block.segments * block.rows * words].view(shape)
                order = torch.from_numpy(block.order()).to(target.device)
                step = max(1, 512 * MIB // (block.rows * block.row_bytes))
                for first in range(0, block.segments, step):
                    expected = sent[first : first + step].to(target.device)
                    if not torch.equal(received[order[first : first + step]], expected):
                        raise AssertionError(f"GPU {pair[0]} to {pair[1]}: the bits differ")


def alias(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same memory as if it lay on another device, which is how memory of another process is mapped."""
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), device, tensor.numel() * tensor.dtype.itemsize
    )
    return torch.empty(0, dtype=tensor.dtype, device=device).set_(storage, 0, (tensor.numel(),), (1,))


def by_engines(copies: Copies) -> RunCopies:
    """One large copy for each pair, each on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in copies.sources]

    def run() -> None:
        main = torch.cuda.current_stream()
        for stream, source, target in zip(streams, copies.sources, copies.targets, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                target.copy_(source[: target.numel()], non_blocking=True)
            main.wait_stream(stream)

    return run


def synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def seconds(runs: dict[int, RunCopies], devices: list[torch.device]) -> tuple[float, float]:
    """Median over repetitions of the longest GPU's time by events, and of the wall time of all."""
    by_events, by_clock = [], []
    for repetition in range(WARM_UPS + REPETITIONS):
        synchronize(devices)
        started = time.perf_counter()
        events = []
        for number, run in runs.items():
            with torch.cuda.device(devices[number]):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                events.append((begin, end))
        synchronize(devices)
        if repetition >= WARM_UPS:
            by_clock.append(time.perf_counter() - started)
            by_events.append(max(begin.elapsed_time(end) for begin, end in events) / 1e3)
    return statistics.median(by_events), statistics.median(by_clock)


def built(
    memory: Memory, on_target: bool, build: Callable[[Copies], RunCopies]
) -> tuple[dict[int, RunCopies], float, int]:
    """Return the copy functions by the GPU that copies, the seconds to build them, and the most segments of one GPU."""
    runs, most = {}, 0
    started = time.perf_counter()
    for number in sorted({pair[on_target] for pair in memory.pairs}):
        # Each GPU begins with another peer.
        pairs = sorted(
            (pair for pair in memory.pairs if pair[on_target] == number),
            key=lambda pair: (pair[not on_target] - number) % len(memory.devices),
        )
        with torch.cuda.device(memory.devices[number]):
            copies = memory.copies(number, pairs)
            runs[number] = build(copies)
            most = max(most, len(copies))
    synchronize(memory.devices)
    return runs, time.perf_counter() - started, most


def kernel(programs_per_sm: int | None = None, method: CopyMethod = "mixed") -> Callable[[Copies], RunCopies]:
    def build(copies: Copies) -> RunCopies:
        if programs_per_sm is None:
            return cuda_copy.runner(copies, method)
        return cuda_copy.runner(copies, method, programs_per_sm)

    return build


def ways(sweep: bool) -> Iterator[tuple[str, bool, Callable[[Copies], RunCopies]]]:
    """Name, whether the target's GPU copies, and what builds it."""
    yield "push", False, kernel()
    yield "pull", True, kernel()
    yield "graph", False, kernel(method="engines")
    if sweep:
        for programs_per_sm in (1, 2, 6):
            yield f"push, {programs_per_sm} programs an SM", False, kernel(programs_per_sm)


def measure(pairs: list[Pair], kind: str, nbytes: int, devices: list[torch.device], sweep: bool) -> dict[str, Any]:
    memory = Memory(pairs, kind, nbytes, devices)
    sent = memory.bytes_a_pair * max(sum(pair[0] == number for pair in pairs) for number in range(len(devices)))
    results: dict[str, Any] = {"GB_a_pair": memory.bytes_a_pair / 1e9}

    def record(name: str, runs: dict[int, RunCopies], **conditions: Any) -> None:
        by_events, by_clock = seconds(runs, devices)
        results[name] = {"GB/s": round(sent / by_events / 1e9, 1), "ms": round(by_events * 1e3, 3)}
        results[name] |= {"wall_ms": round(by_clock * 1e3, 3)} | conditions

    runs, _, _ = built(memory, False, by_engines)
    record("one copy_ a pair", runs)
    copies = sum(block.segments for block in memory.blocks)
    for name, on_target, build in ways(sweep):
        if name == "pull" and all(source == target for source, target in pairs):
            continue
        if name == "graph" and copies * max(1, len(devices) - 1) > MOST_NODES:
            continue
        memory.clear()
        runs, building, most = built(memory, on_target, build)
        record(name, runs, build_ms=round(building * 1e3, 1), pieces_a_GPU=most)
        memory.check()
        print(f"{pairs} {kind} {name}: {results[name]}", file=sys.stderr, flush=True)
        del runs
        gc.collect()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0, help="of a pair in the small cases")
    parser.add_argument(
        "--large-gb", type=float, default=15.0, help="of a pair when all GPUs send at once; 0 leaves it"
    )
    arguments = parser.parse_args()
    started = time.perf_counter()
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", number) for number in range(count)]
    every = [(source, target) for source in range(count) for target in range(count) if source != target]
    for source, target in every:
        # torch lets a GPU reach a peer at the first copy to it; the kernel and the graph need that done.
        torch.ones(8, device=devices[source]).to(devices[target])
    small, large = (int(gigabytes * GIB) for gigabytes in (arguments.gb, arguments.large_gb))
    kinds = ("16KB", "256KB", "3MB", "mix")
    cases: list[tuple[str, list[Pair], int, tuple[str, ...]]] = [("inside one", [(0, 0)], small, kinds)]
    if count > 1:
        cases.append(("one way", [(0, 1)], small, kinds))
        cases.append(("both ways", [(0, 1), (1, 0)], small, ("3MB", "mix")))
    if count > 2:
        cases.append(("all at once", every, small, kinds))
    if count > 1 and large:
        cases.append(("all at once, large", every, large, ("3MB", "mix")))
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rates": {},
    }
    for name, pairs, nbytes, some in cases:
        results["rates"][name] = {}
        for kind in some:
            sweep = kind == "3MB" and nbytes == small
            results["rates"][name][kind] = measure(pairs, kind, nbytes, devices, sweep)
            gc.collect()
            torch.cuda.empty_cache()
    results["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
