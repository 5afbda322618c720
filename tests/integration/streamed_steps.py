"""Steps of some algorithms from a stream with staleness 0 and from calls of all engines, on the same roles.

python -m tests.integration.streamed_steps OUTPUT [CASE ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.recipe import Recipe
from hybridflow.config.yaml_loader import build_settings
from hybridflow.metrics.logger import Metrics
from hybridflow.rundir.file_names import EVENTS, SAMPLE_STORE
from hybridflow.trainer.event_log import EventLog
from hybridflow.trainer.role_startup import wait_for
from hybridflow.trainer.run_setup import open_run
from hybridflow.trainer.sample_store import SampleStore
from hybridflow.trainer.trainer import start_trainer
from tests.integration.algorithm_steps import (
    CASES,
    ROLES,
    STEPS,
    EveryRole,
    make_teacher,
    recipe_of,
    step_case,
    trainer_of,
    without_versions,
)
from tests.integration.reference_runs import merged, run_figures

STREAMED = ("grpo", "ppo", "ippo", "remax", "dapo")
_STREAM: dict[str, Any] = {"rollout": {"stream": {}}}
_BOTH: dict[str, Any] = {"rollout": {"engine": {"token_versions": True}}}


def run_both(directory: Path, cases: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Step every case both ways and evaluate it; what each found, by its name and "call" or "stream"."""
    make_teacher(directory)
    started = build_settings(EveryRole, merged(recipe_of(ROLES, directory, CASES["safe_rlhf"]), _BOTH), {}, ROLES)
    found: dict[str, dict[str, Any]] = {}
    with open_run(started) as opened, start_trainer(opened) as first:
        wait_for(first.roles, *first.roles.starting)
        version = 0
        for case in cases:
            for way, settings in {"call": _BOTH, "stream": merged(_BOTH, _STREAM)}.items():
                name = f"{case}-{way}"
                said = merged(recipe_of(case, directory, CASES[case]), settings) | {"name": name}
                recipe = build_settings(Recipe, said, {}, name)
                with (
                    Metrics(recipe.metrics, directory / name) as sinks,
                    SampleStore(recipe.samples, directory / name / SAMPLE_STORE, 0) as samples,
                    EventLog(directory / name / EVENTS, None) as events,
                ):
                    trainer = trainer_of(recipe, first, sinks, samples, events)
                    trainer.version = version
                    columns = step_case(trainer)
                    trainer.evaluate(STEPS)
                    version = trainer.version
                trainer.roles.actor.export(directory / name / "model").result()
                figures = without_versions(run_figures(directory / name))
                found.setdefault(case, {})[way] = {"columns": columns, **figures}
                trainer.source.close()
                print(name, flush=True)
    return found


def main(output: str, *cases: str) -> None:
    path = Path(output)
    path.write_text(json.dumps(run_both(path.parent, cases or STREAMED)))


if __name__ == "__main__":
    main(*sys.argv[1:])
