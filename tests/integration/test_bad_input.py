"""Bad input: a row for each, with the one line that it gets. No traceback, no hang, no memory, no process left.

The next case is a row in a module of `tests/support/bad_input`: a name, the words of the command, which also make
the input, and what the first line on stderr has to say. `tests/support/commands.py` runs commands with limits.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_input import files, models, settings, surroundings
from tests.support.bad_input.place import Case, Place
from tests.support.commands import MAY_MOUNT, ROOT, Commands, Outcome
from tests.support.runs import command as training
from tests.support.runs import records

TABLES = {
    "recipe": settings.RECIPES,
    "number": settings.NUMBERS,
    "devices": settings.DEVICES,
    "model": models.MODELS,
    "weights": models.WEIGHTS,
    "data": files.DATA,
    "checkpoint": files.CHECKPOINTS,
    "report": files.REPORTS,
    "surroundings": surroundings.SURROUNDINGS,
}
_LIMIT_S = 240.0
"""Wall time in seconds after which a command hangs."""
CASES = [pytest.param(case, id=f"{table}-{case.name}") for table, cases in TABLES.items() for case in cases]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("printed")) as commands:
        yield commands


@pytest.fixture(scope="module")
def model_directory(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    commands.call("tests.support.bad_input.place:make", str(directory))
    return directory


@pytest.fixture
def at(commands: Commands, model_directory: Path, tmp_path: Path) -> Place:
    return Place(tmp_path, model_directory, commands)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_bad_input_gets_one_line(case: Case, at: Place, commands: Commands) -> None:
    if case.mounts and not MAY_MOUNT:
        pytest.skip("needs namespaces of mounts")
    outcome = run(case, at, commands)
    lines = outcome.err.splitlines()
    assert not outcome.killed, f"still running after {outcome.seconds:.1f} s; {outcome.err[-2000:]}"
    assert "Traceback" not in outcome.err, outcome.err[-4000:]
    assert outcome.code == case.code, f"{outcome.code}: {outcome.out[-1000:]}{outcome.err[-2000:]}"
    assert 1 <= len(lines) <= case.lines, outcome.err[-2000:]
    assert lines[0].startswith("hybridflow: ") and re.search(case.line, lines[0]), lines[0][:1000]
    assert len(lines[0]) < 600, lines[0]
    assert not outcome.left_over
    assert outcome.cpu_seconds <= case.seconds, f"{outcome.cpu_seconds:.1f} s"
    assert outcome.peak_bytes <= case.gigabytes * 1e9, f"{outcome.peak_bytes / 1e9:.2f} GB"


def run(case: Case, at: Place, commands: Commands) -> Outcome:
    return commands.run(
        case.words(at),
        at.directory,
        stdout=case.stdout,
        environment=case.environment,
        mounts={target.replace("HERE", str(at.directory)): kind for target, kind in case.mounts.items()},
        open_files=case.open_files,
        imported=case.imported,
        kill_after_s=_LIMIT_S,
    )


# The program that follows has a mount of its own there, and the same process id.
WITH_A_HOME_TO_READ = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro none "$HOME" && exec "$@"', "sh")


@pytest.mark.release
@pytest.mark.processes
def test_a_run_goes_on_without_standard_output_or_home_and_ends_without_its_directory(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    with (tmp_path / "err").open("w") as errors, Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [*(WITH_A_HOME_TO_READ if MAY_MOUNT else ()), *training(tmp_path, "trainer.steps=1000")],
            stdout=full,
            stderr=errors,
            cwd=ROOT,
            # Ray would write a token of its own below the home directory.
            env=os.environ | {"HOME": str(tmp_path / "home"), "RAY_AUTH_TOKEN": "a" * 64},
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 300
            while len(trained(tmp_path / "small")) < 2:
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "err").read_text()
                time.sleep(0.2)
            while (tmp_path / "small").exists() and time.monotonic() < deadline:
                shutil.rmtree(tmp_path / "small", ignore_errors=True)  # the run may write into it meanwhile
            assert process.wait(timeout=120) == 1
        finally:
            process.terminate()
            process.wait(timeout=60)
    first, *others = lines = (tmp_path / "err").read_text().splitlines()
    assert [line for line in lines if not line.startswith("hybridflow: ")] == []
    assert first == (
        "hybridflow: standard output cannot be written: No space left on device; the run continues without it"
    )
    removed = f"hybridflow: run directory {tmp_path}/small was removed or replaced during the run"
    assert any(line.startswith(removed) for line in others)  # the timeline has no place either


def trained(directory: Path) -> list[dict[str, Any]]:
    return records(directory, "train") if (directory / "metrics.jsonl").exists() else []
