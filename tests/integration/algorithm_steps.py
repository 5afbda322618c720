"""Two steps of the recipe of every algorithm, on roles that are started once, and all figures of them; then the same
steps once more from their stored samples (`replayed_steps`).

    python -m tests.integration.algorithm_steps OUTPUT CASE ...

Starting models and engines takes most of the time of a short run. Here one actor, one engine and every model that any
algorithm asks for are started; then each case has a trainer of its own over those that it needs, which begins with the
initial weights, fresh optimizers, the first prompts and the first draws. So a case's figures are its own, whichever
cases came before it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.algorithms.base import Experience
from hybridflow.config.reading.yaml_loader import build_settings, read_with_bases
from hybridflow.config.recipe import Recipe
from hybridflow.metrics.logger import Metrics
from hybridflow.planning.data.recipe_prompts import RecipePrompts
from hybridflow.roles.config import ModelRole
from hybridflow.rundir.file_names import EVENTS, SAMPLE_STORE
from hybridflow.trainer.event_log import EventLog
from hybridflow.trainer.run import start_trainer
from hybridflow.trainer.samples.store import SampleStore
from hybridflow.trainer.startup.role_startup import wait_for
from hybridflow.trainer.startup.run_setup import open_run, prepare
from hybridflow.trainer.trainer import Trainer
from hybridflow.trainer.weight_sync import NoEngines
from tests.integration.own_loop import OF_THE_RUN
from tests.integration.reference_runs import ROOT, merged, run_figures, run_module
from tests.integration.replayed_steps import REPLAYED, initial_models, replayed

STEPS = 2
RECIPES = ROOT / "launch/recipes"

_GIVEN: dict[str, Any] = {"rollout": None, "reward": None, "placement": {"rollout": None}}
"""Settings of a case whose data have the responses."""

CASES: dict[str, dict[str, Any]] = {
    "distillation": {"base": "algorithms/distillation"},
    "distillation-loss": {
        "base": "algorithms/distillation",
        "algorithm": {
            "divergence_in": "loss",
            "divergence": "jsd",
            "top_k": 6,
            "top_k_of": "student",
            "reward_coef": 0.5,
            "kl_coef": 0.01,
        },
    },
    "grpo": {"base": "demo"},
    "ppo": {"base": "ppo", "algorithm": {"critic_warmup_steps": 0}},
    "ippo": {"base": "ppo", "algorithm": {"name": "ippo", "critic_warmup_steps": 0}, "actor": "one"},
    "remax": {"base": "remax"},
    "grpo-corrected": {"base": "algorithms/corrected"},
    "grpo-icepop": {
        "base": "demo",
        "algorithm": {
            "correction": {"weights": "token", "mask": "token", "mask_low": 0.5, "mask_high": 5.0, "veto": 1e-4}
        },
    },
    # The ratio to the engines' own log-probs; of the second step, whose samples are of older weights, nothing is left.
    "grpo-bypass": {
        "base": "demo",
        "algorithm": {
            "correction": {"against": "rollout", "mask": "sequence", "mask_low": 0.99999, "mask_high": 1.00001}
        },
        "trainer": {"max_staleness": 1},
    },
    "safe_rlhf": {"base": "safe_rlhf", "algorithm": {"critic_warmup_steps": 0}},
    "dapo": {"base": "algorithms/dapo", "rollout": {"samples_per_prompt": 2}},  # of which two are equal here and there
    "vapo": {"base": "algorithms/vapo", "algorithm": {"critic_warmup_steps": 1}},
    "pf_ppo": {"base": "algorithms/pf_ppo", "algorithm": {"critic_warmup_steps": 0}},
    "rloo": {"base": "algorithms/rloo"},
    "reinforce_plus_plus": {"base": "algorithms/reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {"base": "algorithms/reinforce_plus_plus_baseline"},
    "dr_grpo": {"base": "algorithms/dr_grpo"},
    "gpg": {"base": "algorithms/gpg"},
    "opo": {"base": "algorithms/opo"},
    "pass_at_k": {"base": "algorithms/pass_at_k", "algorithm": {"right_above": 1.25}},
    # Of two samples to a prompt, which are equal here and there.
    "rloo-dynamic": {
        "base": "algorithms/rloo",
        "algorithm": {"dynamic_sampling": True},
        "rollout": {"samples_per_prompt": 2},
    },
    # The second step is of samples of older weights, of which the teacher reads the tokens alone.
    "distillation-ahead": {"base": "algorithms/distillation", "trainer": {"max_staleness": 1}},
    # Whose tokens are chosen among those that the correction leaves.
    "kl_cov-corrected": {
        "base": "algorithms/kl_cov",
        "algorithm": {
            "kl_cov_fraction": 0.2,
            "correction": {"weights": "token", "mask": "token", "mask_low": 0.9, "mask_high": 1.1},
        },
        "trainer": {"max_staleness": 1},
    },
    # Coefficients that change from the first step to the second.
    "grpo-coefficients": {
        "base": "demo",
        "algorithm": {
            "kl_coef": 0.05,
            "kl_estimator": "k3+",
            "dual_clip": 3.0,
            "entropy_controller": "adaptive",
            "entropy_target": 5.0,
            "entropy_coef_step": 0.01,
            "entropy_coef_max": 0.05,
            "schedules": {
                "kl_coef": {"shape": "cosine", "to": 0.01, "over": 2},
                "clip_high": {"shape": "steps", "at": {2: 0.25}},
            },
        },
    },
    # Most of whose responses are truncated, and out of the loss.
    "dapo-overlong": {
        "base": "algorithms/dapo",
        "algorithm": {"overlong_filter": True, "kl_coef": 0.05, "kl_estimator": "k1+"},
        "rollout": {"samples_per_prompt": 2},
    },
    **{name: {"base": f"algorithms/{name}"} for name in ("gspo", "gspo_token", "cispo", "sapo", "clip_cov", "kl_cov")},
    "dpo": {
        "base": "algorithms/dpo",
        **_GIVEN,
        "algorithm": {"label_smoothing": 0.1, "nll_coef": 0.2},
        "trainer": {"mini_batches": 2, "epochs": 2},
    },
    "dpo-group": {"base": "algorithms/dpo_online", "trainer": {"mini_batches": 2}},
    "dpo-ipo": {"base": "algorithms/ipo", **_GIVEN, "algorithm": {"length_normalisation": True}},
    "kto": {"base": "algorithms/kto", **_GIVEN, "algorithm": {"desirable_weight": 1.3}},
}
"""A recipe in `launch/recipes` each, and what a case has on top of it."""
REPRESENTATIVE = (
    *("distillation", "grpo", "ppo", "remax", "grpo-corrected", "grpo-icepop", "grpo-bypass", "safe_rlhf", "pf_ppo"),
    *("rloo-dynamic", "kl_cov-corrected", "grpo-coefficients", "dpo", "dpo-group"),
)
"""Cases that have between them every role, correction and kind of data: those of `make test`."""

_SPLIT: dict[str, Any] = {"layout": {"ep": 1, "tp": 1, "cp": 2}, "packing": True, "micro_batch_tokens": 16}
"""Two context-parallel ranks. Sequences of more than 8 tokens are split over them."""
_ON_SPLIT = {"train": _SPLIT, "placement": {"actor": "cpu:0-1"}}
SPLIT_CASES: dict[str, dict[str, Any]] = {
    "distillation-split": merged(CASES["distillation"], {**_ON_SPLIT, "teacher": {"train": _SPLIT}}),
    "dpo-split": merged(CASES["dpo"], _ON_SPLIT),
}
"""Cases on context-parallel ranks. Their values are those of the case without `-split` but for rounding."""

_ONE_RANK = {"train": {"layout": {"ep": 1}}}
_COMMON: dict[str, Any] = {
    "seed": 7,
    "train": {"layout": {"ep": 1}, "optimizer": {"lr": 1.0e-3, "warmup_steps": 0}},
    "rollout": {"engine": {"deterministic": True}, "sampling": {"max_new_tokens": 5}, "samples_per_prompt": 4},
    "reward": {"functions": [{"name": "characters", "path": f"{ROOT}/tests/integration/reward.py:score"}]},
    "data": {"arithmetic": {"train_size": 40}},
    "warmup": None,
    "trainer": {"steps": STEPS, "prompts_per_step": 8},
    "evaluation": {"eval": {"prompts": 8}},
    "placement": {"actor": "cpu:0", "rollout": "cpu:1"},
}
"""Settings of every case."""
_CRITICS = ("critic", "cost_critic")
TEACHER = "teacher-model"
ROLES = "roles"
"""The run that starts all roles."""
_FEW: dict[str, Any] = {"metrics": {"console": False, "csv": False, "tensorboard": False}}


class EveryRole(Recipe):
    """The recipe that the roles are started with: those of all algorithms."""

    @property
    def models(self) -> dict[str, ModelRole]:
        assert self.teacher is not None
        return {"reference": self.reference, "teacher": self.teacher} | super().models


def recorded_as(case: str) -> str:
    """The name of a case among the stored values."""
    return f"steps/{case.removesuffix('-split')}"


@dataclass(frozen=True)
class SteppedCases:
    """Values of cases by their names, and the directory with that of each."""

    directory: Path
    values: dict[str, Any]


def run_cases_apart(directory: Path, *cases: str) -> SteppedCases:
    """`run_cases` in a process of its own.

    Raises:
        AssertionError: it failed.
    """
    output = directory / "stepped.json"
    run_module("tests.integration.algorithm_steps", str(output), *cases)
    return SteppedCases(directory, json.loads(output.read_text()))


def recipe_of(case: str, directory: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All that a case's recipe says."""
    overrides = {key: value for key, value in settings.items() if key != "base"}
    said, _ = read_with_bases(RECIPES / f"{settings['base']}.yaml")
    of_others: dict[str, Any] = {role: _ONE_RANK for role in _CRITICS if role in said}
    if "teacher" in said or case == ROLES:
        of_others["teacher"] = {"path": str(directory / TEACHER), "train": {"layout": {"tp": 1}, "dtype": "float32"}}
    return merged(merged(merged(said, _COMMON), of_others | _FEW), overrides) | {
        "name": case,
        "run_dir": str(directory),
    }


def make_teacher(directory: Path) -> None:
    """A teacher of another size than the other models, which has learned nothing."""
    case = {"base": "algorithms/distillation-teacher"}
    run = prepare(build_settings(Recipe, recipe_of("teacher", directory, case), {}, "teacher"))
    with run.lock:
        run.model_directory.rename(directory / TEACHER)


def run_cases(directory: Path, cases: Sequence[str]) -> dict[str, Any]:
    """Step every case; what each found, by its name. All are of `CASES`, or all of `SPLIT_CASES`."""
    make_teacher(directory)
    settings = SPLIT_CASES if set(cases) <= SPLIT_CASES.keys() else CASES
    of_roles = settings[cases[0]] if settings is SPLIT_CASES else CASES["safe_rlhf"]
    started = build_settings(EveryRole, recipe_of(ROLES, directory, of_roles), {}, ROLES)
    by_case = {}
    with open_run(started) as opened, start_trainer(opened) as first:
        wait_for(first.roles, *first.roles.starting)
        version = 0
        for case in cases:
            recipe = build_settings(Recipe, recipe_of(case, directory, settings[case]), {}, case)
            with trainer_of(recipe, first, version) as trainer:
                columns = step_case(trainer)
                version = trainer.version
            trainer.source.close()
            trainer.roles.actor.export(directory / case / "model").result()
            by_case[case] = {"columns": columns, **without_versions(run_figures(directory / case))}
            (directory / case / REPLAYED).write_text(json.dumps(replayed(trainer, directory / case, STEPS)))
            print(case, flush=True)
    return by_case


def without_versions(values: dict[str, Any]) -> dict[str, Any]:
    """Without those of the weights, which go on from case to case."""
    samples = [{name: value for name, value in sample.items() if name != "version"} for sample in values["samples"]]
    return values | {"samples": samples}


def step_case(trainer: Trainer) -> list[dict[str, Any]]:
    """The columns of each step's experience."""
    begin_anew(trainer)
    by_step = []
    for number in range(1, STEPS + 1):
        step = trainer.next_step(number)
        experience = trainer.algorithm.make_experience(step)
        step.wait_for_columns()
        columns = experience.batch.fetch().columns()
        trainer.learn(step, functools.partial(_same, experience))
        by_step.append({name: column.tolist() for name, column in columns.items() if name not in _OF_THE_RUN})
    return by_step


_OF_THE_RUN = OF_THE_RUN | {"policy_versions"}


def _same(experience: Experience) -> Experience:
    return experience


def begin_anew(trainer: Trainer) -> None:
    """The initial weights, in every model and in the engines, and fresh optimizers."""
    initial_models(trainer)
    trainer.begin()


@contextmanager
def trainer_of(recipe: Recipe, first: Trainer, version: int) -> Iterator[Trainer]:
    """The trainer of a case over the roles that it needs, with metrics, samples and events in the case's directory.

    Args:
        recipe: of the case.
        first: the trainer of all roles.
        version: of the weights that the engines have.
    """
    with (
        Metrics(recipe.metrics, recipe.directory) as sinks,
        SampleStore(recipe.samples, recipe.directory / SAMPLE_STORE, 0) as samples,
        EventLog(recipe.directory / EVENTS, None) as events,
    ):
        trainer = _trainer(recipe, first, sinks, samples, events)
        trainer.version = version
        yield trainer


def _trainer(recipe: Recipe, first: Trainer, sinks: Metrics, samples: SampleStore, events: EventLog) -> Trainer:
    roles, models = first.roles, recipe.models
    roles = dataclasses.replace(
        roles,
        reference=roles.reference if "reference" in models else None,
        teacher=roles.teacher if "teacher" in models else None,
        scalar={role: group for role, group in roles.scalar.items() if role in models},
        functions={what: group for what, group in roles.functions.items() if what in recipe.functions},
        trained=recipe.trained_roles,
    )
    setup, weights = first.setup, first.weights
    if not recipe.algorithm.needs_engines:
        prompts = RecipePrompts(recipe, setup.tokenizer)
        setup = dataclasses.replace(setup, train=prompts.of_training.train, sets=prompts.sets)
        weights = NoEngines()
        roles = dataclasses.replace(roles, rollout=None)
    return Trainer(
        recipe,
        setup,
        roles,
        weights,
        sinks,
        first.checkpoints,
        first.phases,
        first.devices,
        samples,
        events,
        first.evaluations.thread,
    )


def main(output: str, *cases: str) -> None:
    path = Path(output)
    path.write_text(json.dumps(run_cases(path.parent, cases)))


if __name__ == "__main__":
    main(*sys.argv[1:])
