"""Short programs of Python per second in the sandbox, compared with plain subprocesses in the same run.

python benchmarks/sandbox.py --programs 300 --at-a-time 4

Rounds of both alternate. Each program prints a sum. The result is one JSON object on stdout: programs per second by
wall clock and CPU milliseconds per program, of each round. With `--perf` also the CPU time of a program with all
processes that confine it, by `perf stat`, which other programs of the machine are not in.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridflow.sandbox.config import SandboxSettings
from hybridflow.sandbox.local import LocalSandbox
from hybridflow.sandbox.program import Verdict, python_program

SOURCE = "print(sum(range(1000)))"
RIGHT = b"499500\n"
_COUNTED = 30
"""Programs whose CPU time is counted."""


@dataclass(frozen=True)
class Round:
    """One round of programs.

    Args:
        programs_per_s: by wall clock.
        cpu_ms: CPU milliseconds per program, of this process and of all that it has waited for. The sandbox's programs
            are not its children, so that theirs are not in it.
        machine_cpu_ms: CPU milliseconds per program of the complete machine, other processes included.
    """

    programs_per_s: float
    cpu_ms: float
    machine_cpu_ms: float


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=300, help="of a round")
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--perf", action="store_true", help="count the CPU time of programs by perf")
    arguments = parser.parse_args()
    sandbox = LocalSandbox(SandboxSettings(at_a_time=arguments.at_a_time))
    await sandbox.start()
    slots = asyncio.Semaphore(arguments.at_a_time)
    command = [str(Path(sys.base_prefix) / "bin/python3"), "-B", "-c", SOURCE]

    async def in_sandbox() -> None:
        result = await sandbox.run(python_program(SOURCE))
        assert (result.verdict, result.stdout) == (Verdict.EXITED, RIGHT), result

    async def plain() -> None:
        async with slots:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env={}
            )
            output, _ = await process.communicate()
            assert output == RIGHT, output

    rounds: dict[str, list[Round]] = {"sandbox": [], "subprocess": []}
    for _ in range(arguments.rounds):
        rounds["subprocess"].append(await _measured(plain, arguments.programs))
        rounds["sandbox"].append(await _measured(in_sandbox, arguments.programs))
    best = {kind: max(measured.programs_per_s for measured in some) for kind, some in rounds.items()}
    print(
        json.dumps(
            {
                "cores": len(os.sched_getaffinity(0)),
                "load_before": os.getloadavg(),
                "means": sandbox.means,
                "arguments": vars(arguments),
                "rounds": {kind: [asdict(measured) for measured in some] for kind, some in rounds.items()},
                "program_cpu_ms": await _program_cpu_ms() if arguments.perf else None,
                "best_programs_per_s": best,
                "ratio": best["sandbox"] / best["subprocess"],
            },
            indent=1,
        )
    )


async def _measured(run: Callable[[], Awaitable[None]], programs: int) -> Round:
    began, cpu, machine = time.perf_counter(), _cpu_s(), _machine_cpu_s()
    await asyncio.gather(*(run() for _ in range(programs)))
    seconds = time.perf_counter() - began
    return Round(
        round(programs / seconds, 1),
        round((_cpu_s() - cpu) / programs * 1000, 2),
        round((_machine_cpu_s() - machine) / programs * 1000, 2),
    )


async def _program_cpu_ms() -> float:
    """CPU milliseconds of a program in the sandbox, with bubblewrap and all that it starts: the median of some."""
    perf, bubblewrap = shutil.which("perf"), shutil.which("bwrap")
    assert perf is not None and bubblewrap is not None
    with tempfile.TemporaryDirectory() as directory:
        counted, wrapper = Path(directory, "counted"), Path(directory, "bwrap")
        wrapper.write_text(
            f'#!/bin/sh\nexec {perf} stat -x, -e task-clock --append -o {counted} -- {bubblewrap} "$@"\n'
        )
        wrapper.chmod(0o755)
        path = os.environ["PATH"]
        os.environ["PATH"] = f"{directory}{os.pathsep}{path}"
        sandbox = LocalSandbox(SandboxSettings(at_a_time=1))
        await sandbox.start()
        os.environ["PATH"] = path
        counted.unlink()
        for _ in range(_COUNTED):
            result = await sandbox.run(python_program(SOURCE))
            assert (result.verdict, result.stdout) == (Verdict.EXITED, RIGHT), result
        lines = counted.read_text().splitlines()
    return statistics.median(float(line.split(",")[0]) for line in lines if "task-clock" in line)


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _machine_cpu_s() -> float:
    """CPU time of the machine that was not idle, in seconds."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq = map(int, words[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    asyncio.run(main())
