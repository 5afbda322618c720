"""Steps of some algorithms from a stream with staleness 0 and from calls of all engines, on the same roles.

python -m tests.integration.streamed_steps OUTPUT [CASE ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.reading.yaml_loader import build_settings
from hybridflow.config.recipe import Recipe
from hybridflow.trainer.run import start_trainer
from hybridflow.trainer.startup.role_startup import wait_for
from hybridflow.trainer.startup.run_setup import open_run
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
_TRAIN: dict[str, Any] = {"packing": True, "recompute": "full", "optimizer": {"offload": True}}
_BOTH: dict[str, Any] = {"rollout": {"engine": {"token_versions": True}}, "train": _TRAIN}
_CRITIC: dict[str, Any] = {"critic": {"offload": True, "train": _TRAIN}}


def run_both(directory: Path, cases: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Step every case both ways and evaluate it; what each found, by its name and "call" or "stream"."""
    make_teacher(directory)
    said = merged(_settings(ROLES, directory, "safe_rlhf"), _BOTH)
    started = build_settings(EveryRole, said, {}, ROLES)
    by_case: dict[str, dict[str, Any]] = {}
    with open_run(started) as opened, start_trainer(opened) as first:
        wait_for(first.roles, *first.roles.starting)
        version = 0
        for case in cases:
            for way, settings in {"call": _BOTH, "stream": merged(_BOTH, _STREAM)}.items():
                name = f"{case}-{way}"
                said = merged(_settings(case, directory, case), settings) | {"name": name}
                recipe = build_settings(Recipe, said, {}, name)
                with trainer_of(recipe, first, version) as trainer:
                    columns = step_case(trainer)
                    trainer.evaluate(STEPS)
                    version = trainer.version
                trainer.roles.actor.export(directory / name / "model").result()
                values = without_versions(run_figures(directory / name))
                by_case.setdefault(case, {})[way] = {"columns": columns, **values}
                trainer.source.close()
                print(name, flush=True)
    return by_case


def _settings(name: str, directory: Path, case: str) -> dict[str, Any]:
    """Settings of a case, with a critic that is offloaded if it has one."""
    said = recipe_of(name, directory, CASES[case])
    return merged(said, _CRITIC) if "critic" in said else said


def main(output: str, *cases: str) -> None:
    path = Path(output)
    path.write_text(json.dumps(run_both(path.parent, cases or STREAMED)))


if __name__ == "__main__":
    main(*sys.argv[1:])
