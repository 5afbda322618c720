"""`hybridflow launch slurm`: the script that it prints, and what it refuses. Jobs are tests of hosts."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from tests.support.runs import DEMO, ROOT

SCRIPT = ROOT / "launch/slurm.sbatch"
BEGIN, END = "# Settings of this job\n", "# End of settings\n"


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Return the output of the command."""
    assert main(["launch", "slurm", *words, "--dry-run"]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def options(script: str) -> list[str]:
    """Return the options of sbatch that the script's own lines give."""
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH ")]


def settings(script: str) -> list[str]:
    """The lines that the command fills in."""
    return script.partition(BEGIN)[2].partition(END)[0].splitlines()


def test_the_script_is_printed_with_all_options_filled_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--nodes", "4", "--gpus-per-node", "8", "--time", "24:00:00", "--partition", "gpu", "--account", "team"]
    given += ["--interface", "eth0", "--role", "train=3", "--role", "rollout=1", "--cpu-slots", "2"]
    given += ["--max-restarts", "3", "--spares", "1"]
    script = printed(capsys, DEMO, *given, "name=a.b", "run_dir=my runs")
    printed_options = options(script)
    expected = [
        "job-name=hybridflow-a.b",
        "nodes=4",
        "gpus-per-node=8",
        "time=24:00:00",
        "partition=gpu",
        "account=team",
    ]
    assert [option for option in [*expected, "no-kill", "requeue"] if printed_options.count(option) != 1] == []
    assert (
        sum(option.startswith(("nodes=", "job-name=")) for option in printed_options) == 2
    )  # in place of the script's own
    assert settings(script) == [
        f"directory={shlex.quote(str(tmp_path))}",
        f"python={sys.executable}",
        "interface=eth0",
        "cpu_slots=2",
        "roles='train train train rollout'",
        "restarts=3",
        "spares=1",
        f"words=({DEMO} name=a.b 'run_dir=my runs')",
    ]


def test_all_else_is_the_script_of_the_repository(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script, repository_script = printed(capsys, DEMO, "--nodes", "2"), SCRIPT.read_text()
    assert "no-kill" not in options(script)
    assert script.partition(END)[2] == repository_script.partition(END)[2] != ""
    assert script.splitlines()[0] == repository_script.splitlines()[0] == "#!/usr/bin/env bash"
    if shutil.which("shellcheck") is not None:
        (tmp_path / "job").write_text(script)
        done = subprocess.run(["shellcheck", tmp_path / "job"], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--nodes", "0"], "--nodes 0: expected a whole number of at least 1 and at most 16,384"),
        (["--nodes", "2", "--time", "1h"], "--time 1h: expected Slurm's form, such as 24:00:00, 2-00 or 90"),
        (["--nodes", "2", "--partition", "a b"], "--partition a b: expected one word of letters, digits and .,:+=@%/-"),
        (["--nodes", "2", "--role", "train=1"], "--role train=1: 1 nodes, expected 2 (--nodes)"),
        (["--nodes", "2", "--spares", "1"], "--spares 1 without --max-restarts: a node that stands by would never be"),
        (["--nodes", "2", "--max-restarts", "1", "--spares", "2"], "--spares 2 of 2 nodes: expected fewer"),
        (["--nodes", "2", "seed=none"], "override seed=none: seed = 'none': expected a whole number"),
    ],
)
def test_refused(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, DEMO, *words, code=2).startswith(f"hybridflow: {line}")
