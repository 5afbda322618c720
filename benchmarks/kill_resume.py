"""Kills runs at random moments and compares what they become with a run that was left alone.

    python benchmarks/kill_resume.py --kills 50 --directory runs/kills
    python benchmarks/kill_resume.py --kills 30 --directory runs/kills --stream [--lease]

A run is killed again and again, each time resumed with resume=auto, until it has come to its end; then the next one
begins, until there were as many kills as wanted. Prints a table, and last one JSON object. With `--stream` rollouts
come beside training, so what a step learns from depends on the moment and no two runs are the same: then every draw of
a prompt is accounted for, and every prompt of an epoch. With `--lease` one of the engines is on a slot of the actor.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kill_harness import LEASE, RECIPE, STREAM, KilledRun, account, compare, draw
from benchmarks.reshard_plan import versions

_STEPS, _STREAM_STEPS = 8, 10
_GROUPS, _SAMPLES, _PROMPTS = 8, 4, 20
_MOST_KILLS_OF_A_RUN = 8


def main() -> int:
    """Run the command line; 1 if a run was not the same, or left something behind."""
    parser = argparse.ArgumentParser(prog="kill_resume.py", description="Kills runs, and compares what they become.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--stream", action="store_true", help="rollouts as a stream")
    parser.add_argument("--lease", action="store_true", help="with --stream: the trainer leases an engine its slot")
    parser.add_argument("--directory", type=Path, default=Path("runs/kills"), help="to be made")
    options = parser.parse_args()
    directory = options.directory.absolute()
    if directory.exists():
        parser.error(f"--directory: {directory} exists already, expected a new directory")
    generator = random.Random(options.seed)
    random.seed(options.seed)
    if options.lease and not options.stream:
        parser.error("--lease without --stream, expected both")
    recipe, steps = (STREAM, _STREAM_STEPS) if options.stream else (RECIPE, _STEPS)
    recipe = (*recipe, *LEASE) if options.lease else recipe
    started = time.monotonic()
    reference, left_over = None if options.stream else KilledRun(directory / "reference", recipe), 0
    if reference is not None:
        outcome = reference.run()
        left_over = len(outcome.left_over)
        if outcome.exit_code:
            print(reference.output[-3000:], file=sys.stderr)
            return 1
        print(f"uninterrupted run: {time.monotonic() - started:.0f} s", flush=True)
    print("kill  run  target      phase    step  exit  ended_s  left_over", flush=True)

    totals = {"kills": 0, "runs": 0, "lost": 0, "duplicated": 0, "left_over": left_over}
    totals |= {"of_several_versions": 0} if options.stream else {"identical": 0}
    while totals["kills"] < options.kills:
        run = KilledRun(directory / f"run-{totals['runs']}", recipe)
        kills = 0
        while True:
            continues = kills < _MOST_KILLS_OF_A_RUN and totals["kills"] < options.kills
            outcome = run.run(draw(generator, totals["kills"], steps) if continues else None)
            totals["left_over"] += len(outcome.left_over)
            if not outcome.killed:
                break
            kills += 1
            totals["kills"] += 1
            print(
                f"{totals['kills']:4}  {totals['runs']:3}  {outcome.target:10}  {outcome.phase:7}  {outcome.step:4}"
                f"  {outcome.exit_code:4}  {outcome.seconds:7.1f}  {outcome.left_over or '-'}",
                flush=True,
            )
        totals["runs"] += 1
        if outcome.exit_code:
            print(run.output[-3000:], file=sys.stderr)
            return 1
        if reference is None:
            stock = account(run, steps=steps, groups=_GROUPS, samples=_SAMPLES, prompts=_PROMPTS)
            right, wrong = not (stock.lost or stock.duplicated), (stock.lost, stock.duplicated)
            totals["of_several_versions"] += stock.of_several_versions
            verdict = f"{stock.learned} draws, {stock.lost} lost, {stock.duplicated} twice"
        else:
            same = compare(run, reference)
            right, wrong = same.identical, (same.lost, same.duplicated)
            totals["identical"] += kills * same.identical
            verdict = "identical" if same.identical else "NOT identical"
        totals["lost"] += wrong[0]
        totals["duplicated"] += wrong[1]
        left = f", left over: {outcome.left_over}" if outcome.left_over else ""
        print(f"run {totals['runs'] - 1}: {kills} kills, {verdict}{left}", flush=True)
        if right:
            shutil.rmtree(run.directory)
    if reference is not None:
        shutil.rmtree(reference.directory)
    print(json.dumps(totals | {"seconds": round(time.monotonic() - started), "versions": versions()}))
    identical = totals.get("identical", totals["kills"]) == totals["kills"]
    identical = identical and not (totals["lost"] or totals["duplicated"])
    return 0 if identical and not totals["left_over"] else 1


if __name__ == "__main__":
    sys.exit(main())
