"""Runs whose parts are killed, stopped or asked to end: one row a case, and what the command must do then.

To see what a part does that stands still, rows share a run: a short one takes most of a minute.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hybridflow.rundir.status.first_failure import read_failure
from tests.support.runs import DEMO, ROOT

pytestmark = pytest.mark.processes

# No step of it ends the run; what it waits for is told soon, and an end by force comes soon.
ENDLESS = [
    "name=run",
    "warmup=null",
    "trainer.steps=100000",
    "trainer.prompts_per_step=8",
    "evaluation.eval.prompts=16",
    "evaluation.eval.samples=1",
    "rollout.samples_per_prompt=4",
    "data.arithmetic.train_size=64",
    "limits={quiet_s: 2, stop_s: 4}",
]
START_S = 240.0
END_S = 240.0
"""Until a run is gone, on a busy machine too."""
# Ray's C++ code waits in the driver before it knows where its log is.
_OF_RAY = re.compile(r"\[[\d ,:-]+ W \d+ \d+\] (gcs_client|rpc_client)\.\w+:\d+: .*")
_BESIDE = ("hybridflow: start: ", "hybridflow: metrics and logs are in ", "hybridflow: nothing to resume from: ")


class Run:
    """A run by the command, in a session of its own."""

    def __init__(self, directory: Path, overrides: Sequence[str] = ()) -> None:
        self.directory = directory
        self.errors = directory / "stderr"
        arguments = [DEMO, f"run_dir={directory}", *ENDLESS, *overrides]
        with self.errors.open("w") as errors:
            self._command = subprocess.Popen(
                [sys.executable, "-m", "hybridflow", "train", *arguments],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                cwd=ROOT,
                env=os.environ | {"TEST_RUN_MARK": str(directory)},
                # Shells have what runs in the background ignore it.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self.driver = psutil.Process(self._command.pid)
        self.started: dict[int, psutil.Process] = {}
        """Every process that the run was seen to have."""

    def lines(self) -> list[str]:
        """On stderr, without the card and the lines of a slow start, of Ray itself and of how to resume."""
        lines = self.errors.read_text().partition("hybridflow: first failure\n")[0].splitlines()
        return [line for line in lines if not line.startswith(_BESIDE) and not _OF_RAY.fullmatch(line)]

    def wait_until(
        self, condition: Callable[[Run], bool], limit_s: float = START_S, *, may_have_ended: bool = False
    ) -> None:
        deadline = time.monotonic() + limit_s
        while not condition(self):
            assert may_have_ended or self._command.poll() is None, f"the run has ended: {self.lines()}"
            assert time.monotonic() < deadline, f"not within {limit_s} s: {self.lines()}"
            time.sleep(0.1)

    def process(self, name: str) -> psutil.Process:
        """The driver, a server of Ray's, a rank or the host of an engine."""
        self.started |= {child.pid: child for child in self.driver.children(recursive=True)}
        if name == "driver":
            return self.driver
        return next(process for process in self.started.values() if process.is_running() and _matches(process, name))

    def end(self) -> int:
        """Exit code, once the command and all that it started are gone."""
        deadline = time.monotonic() + END_S
        code = self._command.wait(END_S)
        while left := [process for process in self.started.values() if _lives(process)]:
            assert time.monotonic() < deadline, f"left over: {[process.cmdline()[:3] for process in left]}"
            time.sleep(0.1)
        return code

    def kill(self) -> None:
        for process in [self.driver, *self.started.values()]:
            if _lives(process):
                process.kill()
        self._command.wait(10)


def _matches(process: psutil.Process, name: str) -> bool:
    """True if the process has this name, has it in its command, or writes the rank's log of this name."""
    try:
        if name.endswith(".log"):
            return Path(f"/proc/{process.pid}/fd/1").readlink().name == name
        return process.name() == name or name in " ".join(process.cmdline())
    except (psutil.Error, OSError):
        return False


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run with the overrides of the test's case, if it has one."""
    case = request.node.callspec.params["case"] if hasattr(request.node, "callspec") else None
    run = Run(tmp_path, case.overrides if case is not None else ())
    try:
        yield run
    finally:
        run.kill()


def listens(run: Run) -> bool:
    """The command is at its first lines, and handles signals."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{run.driver.pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def has(name: str) -> Callable[[Run], bool]:
    """A part is there."""
    return lambda run: any(_matches(process, name) for process in run.driver.children(recursive=True))


def phase(name: str) -> Callable[[Run], bool]:
    """The run has entered a phase."""

    def is_there(run: Run) -> bool:
        try:
            return bool(json.loads((run.directory / "run" / "phase.json").read_text())["phase"] == name)
        except (OSError, ValueError):
            return False

    return is_there


IN_ORDER = ("limits.stop_s=120",)  # on a busy machine too
ENGINE, RANK, RAYLET, GCS = "engine3d.rollout.host.program", "actor-1.log", "raylet", "gcs_server"


@dataclass(frozen=True)
class Case:
    """Signal to a run, and how the run ends.

    Args:
        when: it happens.
        target, number: which process gets which signal.
        code, line: exit code, and the pattern of the only line on stderr.
        overrides: of the run's recipe.
    """

    when: Callable[[Run], bool]
    target: str
    number: signal.Signals
    code: int
    line: str
    overrides: tuple[str, ...] = ()


CASES = {
    "asked to end at its first lines": Case(
        listens, "driver", signal.SIGTERM, 143, "hybridflow: terminated", overrides=IN_ORDER
    ),
    "interrupted at its first lines": Case(
        listens, "driver", signal.SIGINT, 130, "hybridflow: interrupted", overrides=IN_ORDER
    ),
    "asked to end while Ray starts": Case(
        has(GCS), "driver", signal.SIGTERM, 143, "hybridflow: terminated", overrides=IN_ORDER
    ),
    "interrupted while Ray starts": Case(
        has(RAYLET), "driver", signal.SIGINT, 130, "hybridflow: interrupted", overrides=IN_ORDER
    ),
    "with a Ray that does not start": Case(
        has(GCS),
        GCS,
        signal.SIGSTOP,
        1,
        r"hybridflow: Ray did not start on this machine within limits\.ray_start_s=12 s",
        ("limits.ray_start_s=12",),
    ),
    "without a raylet": Case(
        has(RANK),
        RAYLET,
        signal.SIGKILL,
        1,
        r"hybridflow: Ray's raylet \(process \d+\) (was killed by SIGKILL|died), .*",
    ),
    "without a GCS server": Case(
        has(RANK), GCS, signal.SIGKILL, 1, r"hybridflow: Ray's GCS server \(process \d+\) was killed by SIGKILL, .*"
    ),
}


# Others are as long, and next to these.
MARKS = {
    "interrupted at its first lines": pytest.mark.long,
    "asked to end while Ray starts": pytest.mark.long,
    "interrupted while Ray starts": pytest.mark.release,
    "with a Ray that does not start": pytest.mark.long,
    "without a raylet": pytest.mark.release,
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=MARKS.get(name, ())) for name, case in CASES.items()]
)
def test_a_run_that_loses_a_part_says_so_in_one_line_and_is_gone(run: Run, case: Case) -> None:
    run.wait_until(case.when)
    run.process(case.target).send_signal(case.number)
    if case.number == signal.SIGKILL:
        # A failure is kept before the driver says it: Ray kills a driver without a raylet, at a moment of its own. The
        # watchdog keeps what it says itself once all is gone.
        run.wait_until(lambda run: bool(run.lines()), may_have_ended=True)
        if "without a word" not in run.lines()[0]:
            run.driver.suspend()
            assert _kept(run) == run.lines()[0]
            run.driver.resume()
    code = run.end()
    assert (code, len(run.lines())) == (case.code, 1), run.lines()
    assert re.fullmatch(case.line, run.lines()[0])
    assert _kept(run) == (run.lines()[0] if code == 1 else None)


def _kept(run: Run) -> str | None:
    """The line of the failure in the run's directory."""
    failure = read_failure(run.directory / "run")
    return f"hybridflow: {failure.cause}" if failure is not None else None


@pytest.mark.long
def test_a_part_that_stands_still_is_named_and_does_not_keep_a_run_from_ending(run: Run) -> None:
    run.wait_until(phase("update"))
    # Whose call is waited for depends on the moment: one that is to begin waits for who has the devices before it.
    waits = r"hybridflow: step \d+, \w+: \w+ ranks? [01, ]+, \w+: no answer since [\d:]+ \(\d+ s\); process {pid} of "
    for name, line in (
        (GCS, r"hybridflow: Ray's GCS server \(process {pid}\) has been stopped since [\d:]+, as by SIGSTOP; .*"),
        (ENGINE, waits + "rollout is stopped .*"),
        (RANK, waits + "actor is stopped .*"),
    ):
        stopped = run.process(name)
        stopped.send_signal(signal.SIGSTOP)
        reported = re.compile(line.format(pid=stopped.pid))
        run.wait_until(lambda run, reported=reported: any(map(reported.fullmatch, run.lines())))  # type: ignore[misc]
        stopped.send_signal(signal.SIGCONT)
        step = json.loads((run.directory / "run" / "phase.json").read_text())["step"]
        run.wait_until(lambda run, step=step: _step(run) > step)  # type: ignore[misc]
    logs = run.directory / "run" / "logs"
    for log in ("driver", "actor-0", "actor-1", "rollout-0", "sglang-0"):
        assert "most recent call first" in (logs / f"{log}.stacks").read_text(), log
    # A raylet that stands still keeps the driver's main thread within Ray.
    run.process(RAYLET).send_signal(signal.SIGSTOP)
    run.wait_until(lambda run: "Ray's raylet" in run.lines()[-1])
    run.driver.send_signal(signal.SIGTERM)
    code = run.end()
    assert code == 143, run.lines()
    assert re.fullmatch(
        r"hybridflow: terminated(; what had not ended within \d+ s was ended by force)?", run.lines()[-1]
    )


def _step(run: Run) -> int:
    try:
        return int(json.loads((run.directory / "run" / "phase.json").read_text())["step"])
    except (OSError, ValueError):
        return 0
