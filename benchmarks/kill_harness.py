"""Runs a recipe, kills part of it at a chosen moment, lets it resume, and compares it with one that was left alone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
Target = Literal["driver", "trainer", "rollout", "engine", "everything"]
TARGETS: tuple[Target, ...] = ("driver", "trainer", "rollout", "everything")
PHASES = ("start", "load", "warmup", "rollout", "reward", "infer", "update", "sync", "eval", "save")
RECIPE = (
    str(ROOT / "launch/recipes/demo.yaml"),
    "name=killed",
    "warmup.steps=2",
    "trainer.steps=8",
    "trainer.prompts_per_step=8",
    "evaluation.eval.interval=3",
    "evaluation.eval.prompts=16",
    "evaluation.eval.samples=1",
    "rollout.samples_per_prompt=4",
    "rollout.engine.deterministic=true",
    "data.arithmetic.train_size=20",
    "checkpoint={save_interval: 2, keep_last_k: 2}",
)
"""The demo in small: the prompts begin a second epoch within step 3, and evaluations lie between checkpoints."""
STREAM = (
    str(ROOT / "launch/recipes/stream.yaml"),
    *RECIPE[1:],
    "trainer.steps=10",
    "placement.rollout=cpu:2-3",
    "rollout.stream.on_new_weights=resend",
    "rollout.over_sampling=0.25",
    "rollout.sampling={max_new_tokens: 24, ignore_eos: true}",
    "rollout.engine.max_running_requests=3",
)
"""The same as a stream of two engines: of responses of 24 tokens some are under way whenever weights change."""
LEASE = ("placement.actor=cpu:0-1", "placement.rollout=cpu:1-2", "rollout.lease=true", "rollout.lease_after_s=0")
"""Placement of two engines, one of them on a slot of the actor, which leases it while it waits."""
_MARK = "HYBRIDFLOW_KILL_HARNESS"
_EXIT_LIMIT_S = 180.0
_GONE_LIMIT_S = 60.0
_LOOK_S = 1.0
_LIST_S = 0.02
_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ (\d+) +/dev/shm/", re.MULTILINE)


@dataclass(frozen=True)
class Kill:
    """Target and moment of a kill.

    Args:
        target: the driver, one of the actor's ranks, one of the rollout engine's processes with its rank or without, or
            all processes at once.
        phase: of `phase.json`; the kill comes in it, or as soon as it is over.
        step: in which the phase is awaited, or a later one.
        delay_s: from the beginning of the phase.
        number: the signal that kills, or one that asks a driver to end.
    """

    target: Target
    phase: str
    step: int
    delay_s: float
    number: signal.Signals = signal.SIGKILL


@dataclass
class Outcome:
    """Outcome of a kill.

    Args:
        killed: whether the run came to the moment.
        target: what was killed.
        step, phase: what the run was at when it was killed.
        exit_code: of the driver.
        seconds: until the driver had ended after the kill.
        left_over: what was still there a minute later; where everything was killed, of the processes alone, because
            the next start removes the rest.
    """

    killed: bool
    exit_code: int
    target: str = ""
    step: int = -1
    phase: str = ""
    seconds: float = 0.0
    left_over: list[str] = field(default_factory=list)


class KilledRun:
    """A run in a directory of its own, which is started, killed and resumed as often as one likes.

    Args:
        directory: to be made; holds the run, its output and its temporary files.
        recipe: a recipe file and overrides.
        interpreter: program that runs it.
    """

    def __init__(self, directory: Path, recipe: Sequence[str] = RECIPE, *, interpreter: str = sys.executable) -> None:
        self.directory, self._recipe, self._interpreter = directory, list(recipe), interpreter
        self.run_directory = directory / next(word.split("=", 1)[1] for word in recipe if word.startswith("name="))
        # The path of a socket must stay short, so this is not below a directory of pytest's.
        self.temporary = Path(f"/tmp/kill-{os.getpid()}-{abs(hash(directory)) % 10**6}")
        """Where its processes make their temporary files."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        self._shared = _shared_memory()
        self._of_others: set[int] = set()
        """Files there that processes of no run of this directory were seen with, such as those of a test beside."""

    @property
    def output(self) -> str:
        """All that the run printed."""
        return (self.directory / "output.log").read_text()

    def run(self, kill: Kill | None = None, *, limit_s: float = 600.0) -> Outcome:
        """Start or resume the run, and kill it if and when it comes to the moment.

        Raises:
            AssertionError: it does not end within the limit.
        """
        with self.watching_others():
            return self._run(kill, limit_s)

    def _run(self, kill: Kill | None, limit_s: float) -> Outcome:
        phase_file = self.run_directory / "phase.json"
        phase_file.unlink(missing_ok=True)
        settings = [*self._recipe, f"run_dir={self.directory}", "resume=auto"]
        with (self.directory / "output.log").open("a") as log:
            driver = subprocess.Popen(
                [self._interpreter, "-m", "hybridflow", "train", *settings],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | {_MARK: str(self.directory), "TMPDIR": str(self.temporary)},
                start_new_session=True,
            )
        outcome = Outcome(killed=False, exit_code=0)
        try:
            if kill is not None and _await(kill, phase_file, driver, limit_s):
                outcome.step, outcome.phase = _phase(phase_file)
                outcome.killed, outcome.target = self._kill(kill, driver), kill.target
            started = time.monotonic()
            outcome.exit_code = driver.wait(_EXIT_LIMIT_S if outcome.killed else limit_s)
            outcome.seconds = time.monotonic() - started
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end:\n{self.output[-2000:]}") from None
        finally:
            if driver.poll() is None:
                self.end()
        # Where nobody is left to tidy up, the next start does.
        outcome.left_over = self.left_over(_GONE_LIMIT_S, files=not (outcome.killed and outcome.target == "everything"))
        return outcome

    @contextlib.contextmanager
    def watching_others(self) -> Iterator[None]:
        """Note which shared memory is that of other processes, in the block."""
        ended = threading.Event()
        watch = threading.Thread(target=self._watch_others, args=(ended,))
        watch.start()
        try:
            yield
        finally:
            ended.set()
            watch.join()

    def _watch_others(self, ended: threading.Event) -> None:
        """Note the semaphores of other processes. Their names do not say whose they are, and a kill leaves them."""
        # By the numbers of files: a semaphore is mapped by another name than it has afterwards. At once when there is a
        # new one, for whoever made it may be killed soon; and now and then, for a file is mapped after it is there.
        known, looked = _shared_memory(), -_LOOK_S
        while not ended.wait(_LIST_S):
            names, now = _shared_memory(), time.monotonic()
            if names <= known and now - looked < _LOOK_S:
                continue
            known, looked = known | names, now
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, OSError):
                    mapped = _mapped(Path(f"/proc/{process.pid}/maps"))
                    if mapped - self._of_others and not self._is_own(process):
                        self._of_others |= mapped

    def _kill(self, kill: Kill, driver: subprocess.Popen[bytes]) -> bool:
        """Kill a target; false where there is no such process yet, or any more."""
        killed = False
        for process in self._victims(kill.target, driver):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(kill.number)
                killed = True
        return killed

    def _victims(self, target: Target, driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
        if target == "driver":
            return [psutil.Process(driver.pid)]
        everything = self.processes()
        if target == "everything":
            return everything
        logs = {"trainer": ("actor-",), "rollout": ("rollout-", "sglang-"), "engine": ("sglang-",)}[target]
        processes = [process for process in everything if _log_of(process).startswith(logs)]
        return [random.choice(processes)] if processes else []

    def processes(self) -> list[psutil.Process]:
        """Every process of the run: what carries its mark, or has its files open, since some hide their environment."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if self._is_own(process):
                    processes.append(process)
        return processes

    def _is_own(self, process: psutil.Process) -> bool:
        directories = (str(self.directory), str(self.temporary))
        files = (file.path for file in process.open_files())
        marked = process.environ().get(_MARK) == str(self.directory)
        return marked or any(path.startswith(directories) for path in files)

    def left_over(self, limit_s: float, *, files: bool = True) -> list[str]:
        """Return what the run has left behind: processes, shared memory, temporary files and sockets. Waits for their
        end.
        """
        deadline = time.monotonic() + limit_s
        while True:
            leftovers = [f"process {process.pid}: {_name(process)}" for process in self.processes()]
            if files:
                leftovers += [
                    f"shared memory {name}" for name in _unused(_shared_memory() - self._shared, self._of_others)
                ]
                leftovers += [f"file {path}" for path in self.temporary.rglob("*") if not path.is_dir()]
            if not leftovers or time.monotonic() > deadline:
                return leftovers
            time.sleep(0.25)

    def end(self) -> None:
        """Kill whatever is left."""
        for process in self.processes():
            process.kill()

    def records(self) -> list[dict[str, Any]]:
        """All records of training, evaluation and warm-up without times, rates and memory."""
        lines = (self.run_directory / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [
            {name: value for name, value in record.items() if not _varies(name)}
            for record in records
            if record["phase"] != "checkpoint"
        ]

    def model(self) -> dict[str, bytes]:
        """The files of the trained model."""
        return {path.name: path.read_bytes() for path in sorted((self.run_directory / "model").iterdir())}


@dataclass(frozen=True)
class Comparison:
    """A resumed run beside the one that was left alone.

    Args:
        identical: whether all figures and all bytes of the trained model are the same.
        lost, duplicated: records of steps that are missing, or there more than once.
    """

    identical: bool
    lost: int
    duplicated: int


@dataclass(frozen=True)
class Account:
    """Draws of a stream by what became of them.

    Args:
        learned: draws of prompts that were, once or more.
        lost: draws, and prompts of an epoch, that no step has learned from; and steps without a record.
        duplicated: draws and prompts of an epoch that were learned from more than once, samples beside those of their
            group, and records of a step beside its own.
        of_several_versions: responses whose tokens were drawn with different weights.
    """

    learned: int
    lost: int
    duplicated: int
    of_several_versions: int


def account(run: KilledRun, *, steps: int, groups: int, samples: int, prompts: int) -> Account:
    """Take stock of a stream that has ended well, by its sample store.

    Args:
        run: which keeps the samples of all its steps.
        steps, groups, samples: of the run, of a step, of a group.
        prompts: of an epoch.
    """
    by_draw: dict[int, list[tuple[int, int]]] = {}
    several = 0
    for path in sorted((run.run_directory / "samples").glob("step-*.parquet")):
        table = pq.read_table(path, columns=["step", "group_id", "prompt_index", "policy_version", "newest_version"])
        for row in table.to_pylist():
            by_draw.setdefault(row["group_id"], []).append((row["step"], row["prompt_index"]))
            several += row["newest_version"] > row["policy_version"]
    draws = range(steps * groups)
    lost = len(set(draws) - by_draw.keys())
    duplicated = len(by_draw.keys() - set(draws)) + sum(max(0, len(rows) - samples) for rows in by_draw.values())
    lost += sum(max(0, samples - len(rows)) for rows in by_draw.values())
    duplicated += sum(len({step for step, _ in rows}) > 1 for rows in by_draw.values())
    for first in range(0, len(draws), prompts):
        epoch = [by_draw[draw][0][1] for draw in draws[first : first + prompts] if draw in by_draw]
        duplicated += len(epoch) - len(set(epoch))
        if len(draws) >= first + prompts:
            lost += prompts - len(set(epoch))
    logged = [record["step"] for record in run.records() if record["phase"] == "train"]
    lost += len(set(range(1, steps + 1)) - set(logged))
    duplicated += len(logged) - len(set(logged))
    return Account(len(by_draw), lost, duplicated, several)


def compare(run: KilledRun, reference: KilledRun) -> Comparison:
    """Compare two runs that have ended well."""
    actual, expected = run.records(), reference.records()
    names = [(record["phase"], record["step"]) for record in actual]
    return Comparison(
        identical=actual == expected and run.model() == reference.model(),
        lost=sum((record["phase"], record["step"]) not in names for record in expected),
        duplicated=len(names) - len(set(names)),
    )


def draw(generator: random.Random, number: int, steps: int) -> Kill:
    """The `number`-th kill: targets take turns, the moment is random."""
    phase = generator.choice(PHASES)
    longest = {"start": 12.0, "load": 20.0, "rollout": 0.5, "save": 0.2}.get(phase, 0.15)
    return Kill(
        target=TARGETS[number % len(TARGETS)],
        phase=phase,
        step=0 if phase in ("start", "load", "warmup") else generator.randint(1, steps),
        delay_s=generator.uniform(0, longest),
    )


def _await(kill: Kill, phase_file: Path, driver: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for the moment of a kill; false if the run ends before it comes."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if driver.poll() is not None:
            return False
        step, phase = _phase(phase_file)
        if phase == "end":
            return False
        if phase == kill.phase and step >= kill.step:
            time.sleep(kill.delay_s)
            return driver.poll() is None
        time.sleep(0.002)
    return False


def _phase(path: Path) -> tuple[int, str]:
    try:
        state = json.loads(path.read_text())
        return int(state["step"]), str(state["phase"])
    except (OSError, ValueError, KeyError):
        return -1, ""


def _varies(name: str) -> bool:
    """True if a metric depends on time, or on what was written when: two runs of the same bits differ in it."""
    return name.endswith(("_ms", "_per_sec", "mfu")) or name.startswith(("memory/", "device/", "samples/"))


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _unused(segments: set[str], of_others: set[int]) -> list[str]:
    """Return the segments that no process has mapped. Others are not this run's, or are reported with the process."""
    numbers = {}
    for name in segments:
        with contextlib.suppress(OSError):
            numbers[Path("/dev/shm", name).stat().st_ino] = name
    used = set(of_others)
    for maps in Path("/proc").glob("[0-9]*/maps") if segments else ():
        with contextlib.suppress(OSError):
            used |= _mapped(maps)
    return sorted(name for number, name in numbers.items() if number not in used)


def _mapped(maps: Path) -> set[int]:
    """The numbers of the files of shared memory that a process has mapped."""
    return set(map(int, _MAPPED.findall(maps.read_text())))


def _log_of(process: psutil.Process) -> str:
    """The name of the file that a process prints to."""
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink().name
    except OSError:
        return ""


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:100]
    except psutil.NoSuchProcess:
        return "gone"
