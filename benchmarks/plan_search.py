"""Seconds of the search of `hybridflow plan`, on this machine.

    python benchmarks/plan_search.py --gpus 64,1024 > results/plan/search.jsonl

plans each recipe on hosts of eight H200, and prints a line of JSON for each: CPU seconds of the search without imports,
and the best plan. PPO has four models of the actor's sizes: actor, critic, reference and reward model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridflow.config.actors import load_one_recipe
from hybridflow.config.recipe import Recipe
from hybridflow.planning.memory.estimate import recipe_specs
from hybridflow.planning.search.placements import PlacementSearch
from hybridflow.planning.search.recipe_work import recipe_work, search_settings
from hybridflow.planning.search.role_choices import SearchSettings
from hybridflow.planning.time.hardware import load_profile
from hybridflow.planning.time.workload import Workload

RECIPES = {"qwen3-30b-a3b-4xh200": 1024, "h200-1gpu": 8, "qwen3-235b-a22b-128k-64xh200": 1024}
"""Tokens of the prompts of each recipe."""


def workload(recipe: Recipe, algorithm: str, prompt_tokens: int) -> Workload:
    """The work of a recipe's step; with PPO also of a critic, a reference and a reward model of the actor's sizes."""
    work = recipe_work(recipe, recipe_specs(recipe), prompt_tokens=prompt_tokens)
    if algorithm == "grpo":
        return work
    actor = work.actor
    scalar = replace(actor.spec, value_head=True)
    others = (
        replace(actor, role="critic", spec=scalar, passes=1),
        replace(actor, role="reference", trained=False, passes=1),
        replace(actor, role="reward_model", spec=scalar, trained=False, passes=1),
    )
    return replace(work, roles=(actor, *others))


def settings(recipe: Recipe) -> SearchSettings:
    """The settings of a search, in which every model accepts what the actor does."""
    of_recipe = search_settings(recipe, recipe_specs(recipe))
    return replace(of_recipe, accepts=lambda role, layout, config: of_recipe.accepts("actor", layout, config))


def main() -> int:
    """Search for each recipe on each number of GPUs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", default="64,1024")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--algorithms", default="grpo,ppo")
    parser.add_argument("--prompts", type=int, default=1024, help="prompts of a step, so that each rank has work")
    options = parser.parse_args()
    for name, algorithm in itertools.product(options.recipes.split(","), options.algorithms.split(",")):
        recipe = load_one_recipe(
            Path("launch/recipes") / f"{name}.yaml", [f"trainer.prompts_per_step={options.prompts}"]
        )
        for gpus in map(int, options.gpus.split(",")):
            work = workload(recipe, algorithm, RECIPES[name])
            search = PlacementSearch(work, load_profile("h200"), settings(recipe))
            started, clock = time.process_time(), time.perf_counter()
            best = search.best(gpus, 3)[0]
            print(
                json.dumps(
                    {
                        "recipe": name,
                        "algorithm": algorithm,
                        "gpus": gpus,
                        "roles": len(work.roles) + 1,
                        "cpu_seconds": round(time.process_time() - started, 2),
                        "seconds": round(time.perf_counter() - clock, 2),
                        "load": round(os.getloadavg()[0], 1),
                        "plan": best.kind,
                        "step_seconds": round(best.step.step, 2),
                        "layouts": {role: str(proposal.layout) for role, proposal in best.roles.items()},
                        "engines": str(best.engines.shape) if best.engines is not None else None,
                    }
                ),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
