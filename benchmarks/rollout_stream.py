"""Engine utilization of a stream of rollouts compared with the batch call, and the cost of its controller.

    python benchmarks/rollout_stream.py --output stream.json                   64 engines, on a virtual clock
    python benchmarks/rollout_stream.py --transfers --output transfers.json    the same, all at once and rolling
    python benchmarks/rollout_stream.py --lease 16 --output lease.json           with engines that the trainer leases
    python benchmarks/rollout_stream.py --controller --output controller.json  256 engines of 512 requests, in real time

The controller, its scheduler and its books are the real ones; engines only count tokens (`stand_in_engine.py`).
Responses have published lengths (`response_lengths.py`). Prints a table, and writes one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.controller_load import ControllerLoad, measure_controller
from benchmarks.response_lengths import LONGEST, PUBLISHED, Lengths
from benchmarks.stream_load import DeviceLease, Measured, Transfer, Workload, measure_batch, measure_stream
from hybridflow.rollout.ledger import StreamLimits


@dataclass(frozen=True)
class Case:
    """A way of making steps.

    Args:
        name: shown in the table.
        limits: of the stream; None of a batch call.
        ahead: whether a batch call is one step ahead.
        as_long_again: as `Workload.as_long_again`.
    """

    name: str
    limits: StreamLimits | None = None
    ahead: bool = False
    as_long_again: bool = False


def cases(groups: int, extra: int) -> list[Case]:
    """Return the cases to compare, for steps of `groups` groups, with `extra` further ones where there is
    over-sampling.
    """

    def stream(name: str, staleness: int, as_long_again: bool = False, **limits: Any) -> Case:
        return Case(f"stream, {name}", StreamLimits(groups, staleness, **limits), as_long_again=as_long_again)

    return [
        Case("batch call, step by step"),
        Case("batch call, one step ahead", ahead=True),
        stream("staleness 0", 0),
        stream("staleness 1", 1),
        stream("staleness 4", 4),
        stream("staleness 1, late evicted", 1, late="evict"),
        stream("staleness 1, late evicted, as long again", 1, True, late="evict"),
        stream("staleness 4, late evicted", 4, late="evict"),
        stream("staleness 0, over-sampled", 0, extra=extra),
        stream("staleness 0, over-sampled, as long again", 0, True, extra=extra),
        stream("staleness 1, over-sampled", 1, extra=extra),
        stream("staleness 1, over-sampled and carried", 1, extra=extra, excess="carry"),
        stream("staleness 1, over-sampled, late evicted", 1, extra=extra, late="evict"),
        stream("staleness 4, over-sampled and carried", 4, extra=extra, excess="carry"),
    ]


def transfers(engine_s: float, actor_s: float) -> dict[str, Transfer | None]:
    """Ways in which engines get new weights, by name."""
    some = max(1, round(engine_s / actor_s)) if actor_s else 1
    transfers_by_name: dict[str, Transfer | None] = {"in no time": None}
    for policy, wait in (("wait", True), ("go on", False)):
        for name, at_a_time in {"all at once": None, "rolling, 1": 1, f"rolling, {some}": some}.items():
            transfers_by_name[f"{policy}, {name}"] = Transfer(wait, at_a_time, engine_s, actor_s)
    return transfers_by_name


def measure_transfers(workload: Workload, train_s: float, staleness: int, ways: dict[str, Transfer | None]) -> Any:
    """The figures of each way, which are printed as they come."""
    print(f"staleness {staleness}, training takes {train_s:.1f} s")
    print(
        f"{'':24}{'step s':>8}{'busy':>8}{'slots':>8}{'trainer':>9}{'waits s':>9}{'pause s':>9}{'longest':>9}"
        f"{'tokens/s':>10}{'of at once':>12}{'staleness':>11}"
    )
    by_transfer: dict[str, dict[str, Any]] = {}
    for name, transfer in ways.items():
        measured = measure_stream(workload, train_s, StreamLimits(workload.groups, staleness), transfer)
        stats = measured.stats
        by_transfer[name] = stats | {"transfer": transfer and asdict(transfer)}
        at_once = by_transfer.get(f"{name.split(',')[0]}, all at once", stats)
        by_transfer[name]["of_at_once"] = measured.tokens_per_s / at_once["tokens_per_s"]
        print(
            f"{name:24}{measured.step_s:8.1f}{measured.busy:8.1%}{measured.slots:8.1%}{measured.trainer:9.1%}"
            f"{measured.sync_s:9.1f}{measured.pause_s:9.2f}{measured.longest_pause_s:9.1f}{measured.tokens_per_s:10,.0f}"
            f"{by_transfer[name]['of_at_once']:12.2f}{measured.mean_staleness:7.2f} ≤ {measured.most_staleness}",
            flush=True,
        )
    return {"staleness": staleness, "train_s": train_s, "ways": by_transfer}


def measure_lease(workload: Workload, train_s: float, lease: DeviceLease) -> Any:
    """The figures of a stream with engines that are leased, and without them, which are printed as they come."""
    print(f"{workload.engines} engines, and {lease.engines} that are leased; training takes {train_s:.1f} s")
    print(f"{'':24}{'step s':>8}{'slots':>8}{'trainer':>9}{'reclaimed':>11}{'tokens/s':>10}{'of without':>12}")
    more = replace(workload, engines=workload.engines + lease.engines)
    by_staleness: dict[str, dict[str, Any]] = {}
    for staleness in (0, 1, 4):
        limits, without = StreamLimits(workload.groups, staleness), 0.0
        for name, load, leased in ((f"{staleness}", workload, None), (f"{staleness}, leased", more, lease)):
            measured = measure_stream(load, train_s, limits, lease=leased)
            without = without or measured.tokens_per_s
            by_staleness[name] = measured.stats | {"of_without": measured.tokens_per_s / without}
            print(
                f"{f'staleness {name}':24}{measured.step_s:8.1f}{measured.slots:8.1%}{measured.trainer:9.1%}"
                f"{measured.reclaimed:11.0f}{measured.tokens_per_s:10,.0f}{by_staleness[name]['of_without']:12.2f}",
                flush=True,
            )
    return {"train_s": train_s, "engines": workload.engines, "lease": asdict(lease), "staleness": by_staleness}


def measure(workload: Workload, train_share: float, extra: int) -> Iterator[tuple[Case, Measured]]:
    """The figures of each case.

    Args:
        workload: of all.
        train_share: seconds of training over those of the batch call's rollout.
        extra: groups of over-sampling.
    """
    _, rollout_s = measure_batch(workload, 0.0, ahead=False)
    train_s = train_share * rollout_s
    for case in cases(workload.groups, extra):
        load = replace(workload, as_long_again=case.as_long_again)
        if case.limits is None:
            yield case, measure_batch(load, train_s, ahead=case.ahead)[0]
        else:
            yield case, measure_stream(load, train_s, case.limits)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="rollout_stream.py", description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, help="64; 256 with --controller")
    parser.add_argument("--slots", type=int, help="requests that an engine runs at once: 128; 512 with --controller")
    parser.add_argument("--groups", type=int, help="prompts a step: 512; 2048 with --controller")
    parser.add_argument("--samples", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--task", choices=sorted(PUBLISHED), default="math", help="whose lengths responses have")
    parser.add_argument(
        "--step-ms",
        type=float,
        nargs=2,
        default=(6.0, 0.0364),
        metavar=("FIRST", "MORE"),
        help="of a decoding step: without requests, and of each one more",
    )
    parser.add_argument(
        "--train-share",
        type=float,
        nargs="*",
        default=[28 / 72, 0.0],
        help="seconds of training over those of the batch call's rollout",
    )
    parser.add_argument("--over-sampling", type=float, default=0.25, help="further groups, as a share of a step's")
    parser.add_argument("--warm-up", type=int, default=8, help="steps before those that are measured")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transfers", action="store_true", help="compare ways of bringing new weights to engines")
    parser.add_argument(
        "--transfer-s",
        type=float,
        nargs=2,
        default=(0.76, 0.0477),
        metavar=("ENGINE", "ACTOR"),
        help="with --transfers: in which an engine takes the weights in, and in which the actor sends them to one",
    )
    parser.add_argument("--lease", type=int, metavar="ENGINES", help="compare with so many engines that are leased")
    parser.add_argument(
        "--lease-s",
        type=float,
        nargs=2,
        default=(0.5, 1.0),
        metavar=("AFTER", "TURN"),
        help="with --lease: that a step waits before, and in which the trainer's devices change hands",
    )
    parser.add_argument("--controller", action="store_true", help="measure the controller's CPU, in real time")
    parser.add_argument("--staleness", type=int, default=16, help="with --controller")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds before those of --seconds")
    parser.add_argument("--seconds", type=float, default=20.0, help="with --controller")
    parser.add_argument("--output", type=Path, help="file for the JSON object; else it is printed")
    options = parser.parse_args(arguments)
    workload = Workload(
        engines=options.engines or (256 if options.controller else 64),
        slots=options.slots or (512 if options.controller else 128),
        groups=options.groups or (2048 if options.controller else 512),
        samples=options.samples,
        task=options.task,
        step_s=(options.step_ms[0] / 1000, options.step_ms[1] / 1000),
        warm_up=options.warm_up,
        steps=options.steps,
        seed=options.seed,
    )
    if min(workload.warm_up, workload.steps, workload.samples) < 1:
        parser.error("--warm-up, --steps, --samples: expected at least 1 of each")
    if workload.groups < workload.engines:
        parser.error(f"--groups {workload.groups}: expected at least one for each of {workload.engines} engines")
    results: dict[str, Any] = {
        "command": [
            "python",
            "benchmarks/rollout_stream.py",
            *_shown(sys.argv[1:] if arguments is None else arguments),
        ],
        "machine": _machine(),
        "versions": {"python": platform.python_version()},
        "workload": asdict(workload) | {"mean_tokens": Lengths(workload.task, 0).mean},
    }
    if options.controller:
        load_before = os.getloadavg()[0]
        load = measure_controller(workload, options.staleness, options.seconds, options.settle)
        print(_controller_line(load))
        results |= {"staleness": options.staleness, "load_before": load_before, "controller": asdict(load)}
    elif options.lease:
        _, rollout_s = measure_batch(workload, 0.0, ahead=False)
        lease = DeviceLease(options.lease, *options.lease_s)
        results["measured"] = [measure_lease(workload, share * rollout_s, lease) for share in options.train_share]
    elif options.transfers:
        _, rollout_s = measure_batch(workload, 0.0, ahead=False)
        ways = transfers(*options.transfer_s)
        results["transfer_s"] = options.transfer_s
        results["measured"] = [
            measure_transfers(workload, share * rollout_s, staleness, ways)
            for share in options.train_share
            for staleness in (1, 4)
        ]
    else:
        results["measured"] = [
            _measured(workload, share, round(options.over_sampling * workload.groups)) for share in options.train_share
        ]
    text = json.dumps(results, indent=1)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(f"{text}\n")
    return 0


def _measured(workload: Workload, train_share: float, extra: int) -> dict[str, Any]:
    """The figures of all cases, which are printed as they come."""
    by_case: dict[str, dict[str, Any]] = {}
    print(f"training takes {train_share:.3f} of the batch call's rollout")
    print(
        f"{'':48}{'step s':>8}{'least':>8}{'busy':>8}{'slots':>8}{'trainer':>9}{'tokens/s':>10}{'of batch':>10}"
        f"{'of ahead':>10}{'given up':>10}{'length':>8}{'staleness':>11}"
    )
    for case, measured in measure(workload, train_share, extra):
        stats = measured.stats
        stats["least_step_s"] = _least_step_s(workload, case, measured)
        by_case[case.name] = stats
        batch, ahead = (by_case.get(name, stats) for name in ("batch call, step by step", "batch call, one step ahead"))
        for name, other in (("of_batch", batch), ("of_ahead", ahead)):
            stats[name] = measured.tokens_per_s / other["tokens_per_s"]
        shown = "" if case.name.startswith("batch") and not case.ahead else f"{stats['of_ahead']:.2f}"
        print(
            f"{case.name:48}{measured.step_s:8.1f}{stats['least_step_s']:8.1f}{measured.busy:8.1%}{measured.slots:8.1%}{measured.trainer:9.1%}"
            f"{measured.tokens_per_s:10,.0f}{stats['of_batch']:10.2f}{shown:>10}{measured.given_up:10.1%}"
            f"{measured.mean_tokens:8.0f}{measured.mean_staleness:7.2f} ≤ {measured.most_staleness}",
            flush=True,
        )
    return {"train_share": train_share, "extra": extra, "cases": by_case}


def _least_step_s(workload: Workload, case: Case, measured: Measured) -> float:
    """Seconds below which steps cannot be that learn from every response, if each has one of the longest.

    Such a response is begun with weights that are one step old when it is learned from at staleness 1, and takes its
    time even alone on an engine; so from the change of weights on, a response and a training make staleness + 1 steps.
    """
    train_s = measured.trainer * measured.step_s
    longest_s = LONGEST * sum(workload.step_s)
    if case.limits is None:
        return max(longest_s, train_s) if case.ahead else longest_s + train_s
    return max(train_s, (longest_s + train_s) / (case.limits.max_staleness + 1))


def _controller_line(load: ControllerLoad) -> str:
    return (
        f"{load.requests_before:,} to {load.requests:,} requests in flight, {load.groups:,} groups, "
        f"{load.ends_per_s:,.0f} ends/s, {load.steps} steps in {load.seconds:.0f} s: controller {load.controller:.3f} "
        f"cores, engines' books {load.engines:.3f}, memory {load.memory_bytes >> 20} MiB"
    )


def _shown(arguments: Sequence[str]) -> list[str]:
    """The arguments with names of files in place of paths."""
    return [Path(argument).name if "/" in argument else argument for argument in arguments]


def _machine() -> dict[str, Any]:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {"cpu": model[1] if model else platform.machine(), "cores": len(os.sched_getaffinity(0))}


if __name__ == "__main__":
    sys.exit(main())
