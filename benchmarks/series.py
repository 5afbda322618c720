"""Measurements one after another, each with a limit, and what is left of each kept as it comes.

    python benchmarks/series.py benchmarks/series/h200-4gpu.yaml --out results [--only NAME,...] [--within SECONDS]

A series is a list of measurements:

    - name: rollout                # of its directory in `--out`
      limit_s: 330                 # after which it is ended, with all that it has started
      command: python benchmarks/rollout.py --model {scratch}/model --rollout tp=4,ep=4
      needs: model                 # left out where that one has not ended well

In a command `{here}` is the measurement's own directory, and `{scratch}` one for all of the series (`--scratch`; a
temporary one, removed at the end, if not given). The command's output goes to `stdout` and `stderr` in its directory.
`series.json` in `--out` has each command with its exit code and seconds, and is written after each. `--within` bounds
the whole: a measurement gets what is left of it, and none is begun with less than half of its limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from benchmarks.reshard_plan import Parser, versions
from engine3d.errors import UserError
from engine3d.settings import Settings

_GRACE_S = 15.0
_LEAST = 0.5
"""Share of its limit: with less time left a measurement is not begun."""
CUT_OFF = 124
"""Exit code of one that was ended at its limit, as of timeout(1)."""


class Measurement(Settings):
    """One command; see the module."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    command: str = Field(min_length=1)
    limit_s: float = Field(gt=0)
    needs: str | None = None


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 1 where a measurement has failed, 2 for arguments that cannot be right."""
    parser = Parser(prog="series.py", description="Measurements one after another, each with a limit.")
    parser.add_argument("series", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="for a directory of each measurement")
    parser.add_argument("--only", help="names of measurements, with commas")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds for all of them")
    parser.add_argument("--scratch", type=Path, help="kept, with what a series before has left there")
    try:
        options = parser.parse_args(arguments)
        chosen = _chosen(read_series(options.series), options.only)
        with _scratch(options.scratch) as scratch:
            return run(chosen, options.out, scratch, options.within)
    except UserError as error:
        print(f"series.py: {error}", file=sys.stderr)
        return 2


def read_series(path: Path) -> list[Measurement]:
    """The measurements of a file, in their order.

    Raises:
        UserError: names what is wrong with it.
    """
    try:
        measurements = TypeAdapter(list[Measurement]).validate_python(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    known: set[str] = set()
    for measurement in measurements:
        if measurement.name in known:
            raise UserError(f"{path}: {measurement.name}: two measurements have this name")
        if measurement.needs is not None and measurement.needs not in known:
            raise UserError(f"{path}: {measurement.name} needs {measurement.needs}, which is not before it")
        known.add(measurement.name)
    return measurements


def run(series: Sequence[Measurement], out: Path, scratch: Path, within_s: float) -> int:
    """Make the measurements and keep what they leave.

    Args:
        series: in their order; what one needs and is not among them has been made before.
        out: for their directories.
        scratch: for what they share.
        within_s: seconds for all of them.

    Returns:
        The exit code: 1 if one of them has failed, was cut off or left out.
    """
    deadline = time.monotonic() + within_s
    made: dict[str, dict[str, Any]] = {}
    for measurement in series:
        needed = made.get(measurement.needs) if measurement.needs is not None else None
        left_s = deadline - time.monotonic()
        if needed is not None and needed["exit_code"] != 0:
            made[measurement.name] = {"exit_code": None, "why": f"{measurement.needs} has not ended well"}
        elif left_s < _LEAST * measurement.limit_s:
            made[measurement.name] = {
                "exit_code": None,
                "why": f"{max(0.0, left_s):.0f} s were left of {measurement.limit_s:g}",
            }
        else:
            made[measurement.name] = _measure(
                measurement, out / measurement.name, scratch, min(measurement.limit_s, left_s)
            )
        out.mkdir(parents=True, exist_ok=True)
        (out / "series.json").write_text(json.dumps({"measurements": made, "versions": versions()}, indent=2) + "\n")
        print(f"{measurement.name}: {_outcome(made[measurement.name])}", flush=True)
    return int(any(result["exit_code"] != 0 for result in made.values()))


def _measure(measurement: Measurement, here: Path, scratch: Path, limit_s: float) -> dict[str, Any]:
    command = measurement.command
    for name, path in (("{here}", here), ("{scratch}", scratch)):
        command = command.replace(name, shlex.quote(str(path)))
    return {"command": command} | run_command(["bash", "-c", command], here, limit_s)


def run_command(
    command: Sequence[str], here: Path, limit_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a command in a session of its own, and end with it all that is in its process group.

    Args:
        command: its arguments.
        here: for its `stdout` and `stderr`.
        limit_s: after which it is ended.
        environment: its variables; those of this process if None.

    Returns:
        Its `exit_code`, 124 if it was ended at its limit, and its `seconds`.
    """
    here.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (here / "stdout").open("w") as out, (here / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True, env=environment
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            code = CUT_OFF
        finally:
            _signal(process, signal.SIGKILL)
            process.wait()
    return {"exit_code": code, "seconds": round(time.monotonic() - began, 1)}


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _outcome(result: dict[str, Any]) -> str:
    if result["exit_code"] is None:
        return f"not begun: {result['why']}"
    if result["exit_code"] == CUT_OFF:
        return f"cut off after {result['seconds']:.0f} s"
    return f"exit code {result['exit_code']} after {result['seconds']:.0f} s"


def _chosen(series: list[Measurement], names: str | None) -> list[Measurement]:
    if names is None:
        return series
    requested = names.split(",")
    known = [measurement.name for measurement in series]
    if unknown := [name for name in requested if name not in known]:
        raise UserError(f"--only {unknown[0]}: expected names of {', '.join(known)}")
    return [measurement for measurement in series if measurement.name in requested]


@contextlib.contextmanager
def _scratch(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="series-") as directory:
        yield Path(directory)


if __name__ == "__main__":
    sys.exit(main())
