"""Transfers of a whole model from Megatron-Core to SGLang, measured: every transport, and what other systems do.

The same model is built in both, with random weights on the trainer's side; what arrives is compared once for each
transport, bit for bit, with what SGLang's loader makes of an export.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.parted_engine import PartedEngine
from benchmarks.reshard_trainer import Trainer
from benchmarks.stock_engine import StockEngine
from engine3d.errors import EngineError
from engine3d.layout import Layout
from engine3d.models import load_model_spec
from engine3d.models.precision import Precision, served_shapes
from engine3d.platform import platform
from engine3d.rendezvous import listen, serve, tcp_address
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.describe.shards import Location
from engine3d.reshard.plan.coordinate import Orders, coordinate
from engine3d.reshard.plan.rounds import STAGING_BYTES
from engine3d.reshard.plan.transfers import Link, Plan
from engine3d.rollout import Request, RolloutConfig, RolloutEngine, SamplingConfig

BUCKET_BYTES = 512 * 10**6
SCRATCH_BYTES = 8 << 30
PROMPT = [[11, 12, 13, 14, 15]]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=8, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """Model, layouts and settings of a measurement.

    Args:
        model: directory with config.json.
        train: layout of the trainer, on the first devices.
        tp, ep, engines: of the rollout.
        hosts: of each engine: one process for each on this machine. What goes to another host than the first goes as
            between hosts.
        colocated: whether the engines are on the trainer's devices, or on those after them.
        ways: of "share" (engines use the trainer's memory where they can), "one_sided", "engines" (one-sided, by the
            copy engines alone), "collective" and "baseline".
        repeats, warm_ups: transfers of each way.
        dtype: of the weights.
        precision: of quantised weights of the engines; None for none.
    """

    model: Path
    train: Layout
    tp: int
    ep: int
    engines: int
    hosts: int
    colocated: bool
    ways: tuple[str, ...]
    repeats: int
    warm_ups: int
    dtype: str
    scratch: Path
    verify: bool
    precision: Precision | None = None


WAYS = ("share", "one_sided", "engines", "collective", "baseline")


def measure(case: Case) -> dict[str, Any]:
    """Start trainer and engines, and measure every way. Everything is gone when this returns."""
    case.scratch.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="reshard-", dir=case.scratch))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        return _Run(case, directory, stack).measure()


class _Run:
    def __init__(self, case: Case, directory: Path, stack: contextlib.ExitStack) -> None:
        self.case, self.directory = case, directory
        self.logs = Path.cwd() / "runs" / "reshard-logs"
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        self.trainer = Trainer(case.model, case.train, case.dtype, self.logs, case.precision)
        stack.callback(self.trainer.end)
        self.version = 0
        self.store = serve(listen("127.0.0.1"))
        self.pool = stack.enter_context(ThreadPoolExecutor(16))

    def measure(self) -> dict[str, Any]:
        case = self.case
        with _timed("trainer") as timer:
            self.trainer.call("start")
            self.trainer.call("fill", 1)
        result: dict[str, Any] = {"devices": self.trainer.call("device"), "trainer_start_s": timer()}
        empty = self.trainer.call("memory")
        if platform.device_type == "cuda":
            result["nvlink_copy_gb_s"] = self.copy_rate()
        if case.verify:
            with _timed("export") as timer:
                self.trainer.call("export", self.directory / "export")
            result["export_s"] = timer()
        if case.precision is not None:
            runs = [max(self.trainer.call("quantise")) for _ in range(case.warm_ups + case.repeats)]
            result["quantise_ms"] = 1000 * statistics.median(runs[case.warm_ups :])
        result["ways"] = {}
        if ours := [way for way in case.ways if way != "baseline"]:
            published = [self.directory / f"shards-{rank}" for rank in range(case.train.world_size)]
            self.trainer.call("publish", by_rank=[(path,) for path in published])
            with contextlib.ExitStack() as started:
                with _timed("engines") as timer:
                    self.engines = self.start_engines(published if "share" in ours else [], started)
                result["engines_start_s"] = timer()
                loaded = self.trainer.call("memory")
                result["device_bytes"] = {
                    "trainer_parameters": [memory["allocated_bytes"] for memory in empty],
                    "used_before_engines": [memory["device_used_bytes"] for memory in empty],
                    "used_with_engines": [memory["device_used_bytes"] for memory in loaded],
                }
                result["ways"] = {way: self.measure_way(way) for way in ours}
                self.trainer.call("close")
        if "baseline" in case.ways:
            with contextlib.ExitStack() as started:
                self.stock = self.start_stock_engines(started)
                result["ways"]["baseline"] = baseline = self.measure_baseline()
            for way in ours:
                stats = result["ways"][way]
                stats["times_faster_than_baseline"] = baseline["transaction_ms"] / stats["transaction_ms"]
        return result

    def config(self) -> RolloutConfig:
        case = self.case
        cuda = platform.device_type == "cuda"
        return RolloutConfig(
            tp=case.tp,
            ep=case.ep,
            dtype=case.dtype,
            precision=case.precision,
            context_length=min(2048, load_model_spec(case.model).sizes.max_positions),
            max_total_tokens=16384,
            max_running_requests=16,
            mem_fraction_static=0.85 if cuda else 0.3,
            start_timeout_s=420,
            server_args={"load_format": "dummy"} | ({"cuda_graph_max_bs_decode": 8} if cuda else {}),
        )

    def start_engines(self, published: list[Path], started: contextlib.ExitStack) -> list[RolloutEngine]:
        engines = []
        for number in range(self.case.engines):
            ranks = self.ranks(number)
            engine = PartedEngine(
                self.case.model,
                self.config(),
                self.case.hosts,
                devices=tuple(ranks) if platform.device_type == "cuda" else (),
                log_path=self.logs / f"engine-{number}.log",
                weight_sources=[published[rank] for rank in ranks] if published and self.case.colocated else (),
            )
            started.callback(engine.shutdown)
            engines.append(engine)
        return list(self.pool.map(PartedEngine.start, engines))

    def start_stock_engines(self, started: contextlib.ExitStack) -> list[StockEngine]:
        engines = []
        for number in range(self.case.engines):
            devices = tuple(self.ranks(number)) if platform.device_type == "cuda" else ()
            engine = StockEngine(self.case.model, self.config(), devices, self.logs / f"stock-engine-{number}.log")
            started.callback(engine.shutdown)
            engines.append(engine)
        for engine in engines:
            engine.wait_until_up()
        return engines

    def ranks(self, engine: int) -> range:
        """Devices of an engine, by index on this machine."""
        first = engine * self.case.tp + (0 if self.case.colocated else self.case.train.world_size)
        return range(first, first + self.case.tp)

    def measure_way(self, way: str) -> dict[str, Any]:
        _say(f"{way}: connecting")
        plan, stats = self.connect(way)
        # The engines hold other weights: random ones, or those of the last proof.
        self.trainer.call("fill", 1)
        stats |= self.repeat(self.transfer, self.verify if self.case.verify else None)
        stats["serves_what_was_sent"] = self.serves_what_was_sent(
            self.transfer, lambda: self.on_engines(_greedy_logprobs)
        )
        stats |= _rates(plan, stats, self.case.train.world_size)
        _say(f"{way}: {json.dumps(stats)}")
        return stats

    def measure_baseline(self) -> dict[str, Any]:
        self.trainer.call("fill", 1)
        stats = self.repeat(self.baseline, None)
        stats["serves_what_was_sent"] = self.serves_what_was_sent(
            self.baseline, lambda: [engine.logprobs(PROMPT[0], GREEDY) for engine in self.stock]
        )
        _say(f"baseline: {json.dumps(stats)}")
        return stats

    def repeat(self, transfer: Callable[[], dict[str, Any]], verify: Callable[[], bool] | None) -> dict[str, Any]:
        """Transfer the trainer's weights again and again; verify the first one."""
        stats: dict[str, Any] = {}
        runs = []
        for number in range(self.case.warm_ups + self.case.repeats):
            self.trainer.call("peak_since")
            runs.append(transfer())
            if number in (0, 1):
                stats["peak_extra_bytes"] = max(self.trainer.call("peak_since"))
            if number == 0 and verify is not None:
                stats["verified"] = verify()
        runs = runs[self.case.warm_ups :]
        for name in runs[0]:
            stats[name] = statistics.median(run[name] for run in runs)
        stats["all_transaction_ms"] = [round(run["transaction_ms"], 3) for run in runs]
        return stats

    def connect(self, way: str) -> tuple[Plan, dict[str, Any]]:
        sources: list[SharedShards] = self.trainer.call("share")
        locations = self.locations()
        shared = self.on_engines(
            lambda engine, number: engine.share_weights(f"engine {number}", number * self.case.tp, locations[number])
        )
        tensors = served_shapes(load_model_spec(self.case.model), self.case.precision)
        start = time.perf_counter()
        orders: Orders = coordinate(
            sources,
            list(itertools.chain.from_iterable(shared)),
            tensors,
            transport="collective" if way == "collective" else "auto",
            store=lambda: tcp_address("127.0.0.1", self.store.port),
            group=way,
            staging_bytes=STAGING_BYTES,
            timeout_s=120.0,
        )
        plan_seconds = time.perf_counter() - start
        method = "engines" if way == "engines" else None
        self.trainer.start_call("connect", by_rank=[(order, method) for order in orders.send])
        tp = self.case.tp
        self.receivers = orders.engines_receive
        if self.receivers:
            self.on_engines(
                lambda engine, number: engine.connect_weights(orders.receive[number * tp : (number + 1) * tp])
            )
        connected = self.trainer.results()
        plan = orders.plan
        return plan, {
            "plan_s": plan_seconds,
            "connect_s": max(rank["connect_s"] for rank in connected),
            "staging_bytes": max(rank["staging_bytes"] for rank in connected),
            "bytes_needed": plan.bytes_needed,
            "bytes_moved": plan.bytes_moved,
            "bytes_aliased": plan.bytes_aliased,
            "moved_over_needed": plan.bytes_moved / plan.bytes_needed if plan.bytes_needed else 1.0,
            "pieces": sum(len(transfer.segments) for transfer in plan.transfers),
        }

    def locations(self) -> list[list[Location] | None]:
        """Return the locations of each engine's ranks, or None if the platform knows them. Devices are CPU slots, hosts
        are made up.
        """
        if platform.device_type == "cuda" and self.case.hosts == 1:
            return [None] * self.case.engines
        first = 0 if self.case.colocated else self.case.train.world_size
        tp, share = self.case.tp, self.case.tp // self.case.hosts
        nodes = [platform.node, *(f"{platform.node}, host {host}" for host in range(1, self.case.hosts))]
        return [
            [Location(nodes[rank // share], _device_name(first + number * tp + rank)) for rank in range(tp)]
            for number in range(self.case.engines)
        ]

    def transfer(self) -> dict[str, Any]:
        """One transaction: every engine serves a new version at its end."""
        self.version += 1
        start = time.perf_counter()
        self.on_engines(lambda engine: engine.begin_weights(self.version))
        begun = time.perf_counter()
        self.trainer.start_call("send", self.version)
        if self.receivers:
            self.on_engines(lambda engine: engine.receive_weights(self.version))
        sent = self.trainer.results()
        written = time.perf_counter()
        self.on_engines(lambda engine: engine.seal_weights(self.version))
        sealed = time.perf_counter()
        self.on_engines(lambda engine: engine.commit_weights(self.version))
        end = time.perf_counter()
        return {
            "transfer_ms": 1000 * max(seconds for seconds, _ in sent),
            "begin_ms": 1000 * (begun - start),
            "send_call_ms": 1000 * (written - begun),
            "seal_ms": 1000 * (sealed - written),
            "commit_ms": 1000 * (end - sealed),
            "transaction_ms": 1000 * (end - start),
        }

    def baseline(self) -> dict[str, Any]:
        """The whole model gathered, converted and handed over in buckets."""
        tp = self.case.tp
        start = time.perf_counter()
        self.trainer.call("begin_baseline", BUCKET_BYTES)
        buckets = 0
        gathering = 0.0
        while True:
            before = time.perf_counter()
            payloads = self.trainer.call("next_bucket")
            gathering += time.perf_counter() - before
            if payloads[0] is None:
                break
            buckets += 1
            for number, engine in enumerate(self.stock):
                engine.start_update(payloads[number * tp : (number + 1) * tp])
            for engine in self.stock:
                engine.wait_until_updated()
        for engine in self.stock:
            engine.flush_cache()
        seconds = time.perf_counter() - start
        return {
            "transaction_ms": 1000 * seconds,
            "transfer_ms": 1000 * seconds,
            "gather_and_convert_ms": 1000 * gathering,
            "buckets": buckets,
        }

    def serves_what_was_sent(self, transfer: Callable[[], Any], logprobs: Callable[[], list[list[float]]]) -> bool:
        """True if other weights change what every engine generates, and the same weights bring it back."""
        rounds = []
        for seed in (2, 1, 2):
            self.trainer.call("fill", seed)
            transfer()
            rounds.append(logprobs())
        return all(first == third != second for first, second, third in zip(*rounds, strict=True))

    def verify(self) -> bool:
        """Raises EngineError where an engine does not hold the export."""
        for number, ranks in enumerate(self.on_engines(lambda e: e.verify_weights(self.directory / "export"))):
            for rank, mismatches in enumerate(ranks):
                if mismatches:
                    raise EngineError(f"engine {number} rank {rank}: {mismatches[0]} and {len(mismatches) - 1} more")
        return True

    def copy_rate(self) -> float:
        """GB/s of one large copy from every GPU to the next, all at the same time: the median over runs, then ranks."""
        handles = self.trainer.call("share_scratch", SCRATCH_BYTES)
        runs = self.trainer.call("copy_rate", handles)
        self.trainer.call("drop_scratch")
        slowest = [max(seconds) for seconds in zip(*runs, strict=True)]
        return SCRATCH_BYTES / 2 / statistics.median(slowest[2:]) / 1e9

    def on_engines(self, action: Callable[..., Any]) -> list[Any]:
        """Do something with all engines at the same time; `action` takes the engine, and its number if it wants."""
        takes_number = action.__code__.co_argcount - len(action.__defaults__ or ()) > 1
        return list(
            self.pool.map(
                lambda pair: action(pair[1], pair[0]) if takes_number else action(pair[1]), enumerate(self.engines)
            )
        )


def _device_name(index: int) -> str:
    """Return the name of a device of this machine, as its rank reports it."""
    if platform.device_type == "cuda":
        return str(torch.cuda.get_device_properties(index).uuid)
    return platform.device_name(index)


def _rates(plan: Plan, stats: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Bytes by link, and the rate at which the busiest rank sent to other devices."""
    by_link = {link.value: 0 for link in Link if link is not Link.MEMORY}
    crossing: dict[int, int] = {}
    arriving: dict[int, int] = {}
    for transfer in plan.transfers:
        by_link[transfer.link.value] += transfer.nbytes
        if transfer.link is not Link.DEVICE:
            crossing[transfer.source] = crossing.get(transfer.source, 0) + transfer.nbytes
            arriving[transfer.target] = arriving.get(transfer.target, 0) + transfer.nbytes
    busiest = max([0, *crossing.values(), *arriving.values()])
    return {
        "bytes_by_link": by_link,
        "busiest_rank_crossing_bytes": busiest,
        "crossing_gb_s": busiest / stats["transfer_ms"] / 1e6,
    }


@contextlib.contextmanager
def _timed(what: str) -> Iterator[Callable[[], float]]:
    start = time.perf_counter()
    yield lambda: round(time.perf_counter() - start, 3)
    _say(f"{what}: {time.perf_counter() - start:.1f} s")


def _say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def _greedy_logprobs(engine: RolloutEngine) -> list[float]:
    engine.submit([Request(0, PROMPT[0], GREEDY)], together=True)
    [response] = engine.wait_for([0])
    return response.logprobs
