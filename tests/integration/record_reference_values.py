"""Records what `test_reference_values.py` compares with: `python -m tests.integration.record_reference_values`.

Without `--replace` recorded values stay: it prints what differs from them, and ends with exit code 1. `--demo` compares
the demo's accuracy instead, with that of seed 1 in `benchmarks/results/demo`: four minutes, so no test does it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.integration.algorithm_steps import CASES as STEPPED
from tests.integration.algorithm_steps import recorded_as, run_cases_apart
from tests.integration.reference_runs import CASES, ROOT, VALUES, differences, run_case, store, stored

DEMO_LOG = ROOT / "benchmarks/results/demo/seed-1.log"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*CASES, *map(recorded_as, STEPPED)]
    parser.add_argument("cases", nargs="*", help=f"some of {', '.join(names)}; all if none is named")
    parser.add_argument("--replace", action="store_true", help="overwrite recorded values that differ")
    parser.add_argument("--demo", action="store_true", help="compare the demo's line")
    arguments = parser.parse_args()
    unknown = set(arguments.cases) - set(names)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no such case, expected {', '.join(names)}")
    if arguments.demo:
        return _compare_demo()
    return max(_record(name, values, replace=arguments.replace) for name, values in _runs(arguments.cases or names))


def _runs(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case and what it found; those that share their roles in one run."""
    for name in names:
        if name in CASES:
            with tempfile.TemporaryDirectory() as directory:
                yield name, run_case(name, Path(directory))
    if stepped := [case for case in STEPPED if recorded_as(case) in names]:
        with tempfile.TemporaryDirectory() as directory:
            for case, values in run_cases_apart(Path(directory), *stepped).values.items():
                yield recorded_as(case), values


def _record(name: str, values: dict[str, Any], *, replace: bool) -> int:
    is_recorded = (VALUES / f"{name}.json").exists()
    lines = differences(values, stored(name)["values"]) if is_recorded else []
    if lines and not replace:
        print(f"{name}: {len(lines)} values differ; --replace overwrites them", *lines, sep="\n", flush=True)
        return 1
    if is_recorded and not lines and not replace:
        print(f"{name}: the same", flush=True)
        return 0
    store(name, values)
    print(f"{name}: recorded", flush=True)
    return 0


def _compare_demo() -> int:
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-m", "hybridflow.cli", "train", "launch/recipes/demo.yaml", f"run_dir={directory}"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    lines = [
        next(line for line in text.splitlines() if line.startswith("held-out accuracy: "))
        for text in (done.stdout, DEMO_LOG.read_text())
    ]
    print(f"{lines[0]}\nexpected {lines[1]}")
    return int(not lines[0].startswith(lines[1]))


if __name__ == "__main__":
    sys.exit(main())
