"""Settings of algorithms against those of the run around them: one line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.errors import UserError
from engine3d.training.config import TrainConfig
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.planning.checks.recipe import check_recipe
from hybridflow.planning.memory.samples import check_replay, replay_bytes
from tests.support.runs import DEMO

AHEAD = ("trainer.mini_batches=1", "trainer.epochs=1", "trainer.max_staleness=1", "placement.rollout=cpu:2")
STREAM = ("rollout.stream={}", "placement.rollout=cpu:2")
EASY = "{path: easy.jsonl, weight: 1}"
FILES = ("warmup=null", "evaluation.eval=null", "data.source=files")
STEADY = [*FILES, f"data.files.train=[{EASY}, {{path: hard.jsonl, weight: 2}}]"]
RISING = [
    *FILES,
    f"data.files.train=[{EASY}, {{path: hard.jsonl, weight: [{{step: 1, weight: 0}}, {{step: 5, weight: 2}}]}}]",
]
ROLLOUT_ROUTES, UPDATE_ROUTES = "train.routing_replay=rollout", "train.routing_replay=update"
PRETRAINED = "algorithm={name: vapo, critic_warmup_steps: 1}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.name=dapo", "trainer.steps=null", "trainer.epochs_of_data=2"],
            "trainer.epochs_of_data=2 with algorithm.dynamic_sampling=true, where a step draws as many prompts as it "
            "needs; expected trainer.steps, or dynamic_sampling=false",
        ),
        (
            ["algorithm.dynamic_sampling=true", "trainer.max_staleness=1", "placement.rollout=cpu:2"],
            "trainer.max_staleness=1 with algorithm.dynamic_sampling=true, whose further prompts are drawn once the "
            "rewards of the first are known; expected 0, or dynamic_sampling=false",
        ),
        (
            ["algorithm={name: dapo, overlong_buffer: 5}"],
            "algorithm.overlong_buffer=5 with rollout.sampling.max_new_tokens=4, before which it lies; expected at "
            "most as many",
        ),
        (
            ["algorithm={name: pf_ppo, filtration: best-n, filtration_n: 9}"],
            "algorithm.filtration_n=9 with rollout.samples_per_prompt=8, expected at most as many",
        ),
        (
            ["algorithm.name=pf_ppo", "trainer.max_staleness=1", "placement.rollout=cpu:2"],
            "trainer.max_staleness=1 with algorithm.replay_buffer_size=10000, which were not tried together; expected "
            "0, or replay_buffer_size=0",
        ),
        (
            ["algorithm={name: pf_ppo, kl_guard: 0.1}"],
            "algorithm.kl_guard is set with algorithm.replay_buffer_size=10000, where the policy before the step did "
            "not make all samples; expected no kl_guard, or replay_buffer_size=0",
        ),
        (
            ["algorithm={name: kl_cov, correction: {weights: token}}", *AHEAD],
            "algorithm.correction.against='proximal' with algorithm.name=kl_cov and one update a step, which starts "
            "from the very policy that its ratio is to; expected trainer.mini_batches or epochs above 1, "
            "against='rollout', or no correction",
        ),
        (
            ["algorithm={name: vapo, critic_warmup_steps: 120}"],
            "algorithm.critic_warmup_steps=120 with trainer.steps=120, in which the policy would never learn; expected "
            "more steps, or fewer of the critic alone",
        ),
        (
            ["algorithm={name: ppo, critic_warmup_steps: 7}", "trainer.steps=6"],
            "algorithm.critic_warmup_steps=7 with trainer.steps=6, in which the policy would never learn; expected "
            "more steps, or fewer of the critic alone",
        ),
        (
            ["algorithm.dynamic_sampling=true", *RISING],
            "data.files.train: hard has a weight from step 5 on with algorithm.dynamic_sampling=true, where a step "
            "draws as many prompts as it needs; expected weights that do not change, or dynamic_sampling=false",
        ),
        (
            [ROLLOUT_ROUTES, "algorithm.name=pf_ppo", "warmup=null"],
            "train.routing_replay=rollout with algorithm.name=pf_ppo, which was not tried; expected none",
        ),
        (
            [ROLLOUT_ROUTES, "algorithm={name: dpo, pairs: group}", "warmup=null"],
            "train.routing_replay=rollout with algorithm.name=dpo, which was not tried; expected none",
        ),
        (
            [UPDATE_ROUTES, "warmup=null", "trainer.mini_batches=1", "trainer.epochs=1"],
            "train.routing_replay=update with one update a step, whose own routes are those of the old log-probs; "
            "expected trainer.mini_batches or epochs above 1, rollout, or none",
        ),
        (
            [UPDATE_ROUTES, "warmup=null", *AHEAD],
            "train.routing_replay=update with trainer.max_staleness=1, where the ratio is to the engines' log-probs: "
            "there are no routes of the trainer's; expected rollout, an algorithm.correction, or none",
        ),
        (
            [UPDATE_ROUTES, "warmup=null", "algorithm.correction={against: rollout}", *AHEAD],
            "train.routing_replay=update with algorithm.correction, which needs no log-probs of the policy before the "
            "step: there are no routes of them; expected rollout, or none",
        ),
        (
            [UPDATE_ROUTES, "warmup=null", "trainer.epochs=2", "rollout.engine.routes=true"],
            "train.routing_replay=update with rollout.engine.routes=true, whose routes nobody would read; expected "
            "rollout, or false",
        ),
        (
            ["algorithm.kl_coef=0.1", "reference.train.routing_replay=rollout"],
            "reference.train.routing_replay=rollout: expected none, because this model has its own routes",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_recipe(DEMO, overrides)
    [line] = caught.value.lines
    assert line.endswith(message)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm={name: dapo, dynamic_sampling: false}", "trainer.steps=null", "trainer.epochs_of_data=2"],
        ["algorithm={name: dapo, dynamic_sampling: false}", "trainer.max_staleness=1", "placement.rollout=cpu:2"],
        ["algorithm={name: dapo, overlong_buffer: 4}"],
        ["algorithm={name: ppo, critic_warmup_steps: 5}", "trainer.steps=6"],
        RISING,
        ["algorithm.dynamic_sampling=true", *STEADY],
        ["algorithm.dynamic_sampling=true", *STREAM],
        ["algorithm.name=remax", *STREAM],
        ["algorithm={name: pf_ppo, replay_buffer_size: 0}", "trainer.max_staleness=1", "placement.rollout=cpu:2"],
        [PRETRAINED, "trainer.max_staleness=1", "placement.rollout=cpu:2"],
        ["algorithm.name=kl_cov", *AHEAD],
        ["algorithm={name: kl_cov, correction: {against: rollout}}", *AHEAD],
        ["algorithm={name: kl_cov, correction: {weights: token}}", *AHEAD, "trainer.epochs=2"],
        [ROLLOUT_ROUTES, "warmup=null", *AHEAD],
        [UPDATE_ROUTES, "warmup=null", "trainer.epochs=2"],
        [UPDATE_ROUTES, "warmup=null", "algorithm.correction={weights: token}", *AHEAD],
    ],
)
def test_what_goes_together_is_not(overrides: list[str]) -> None:
    load_recipe(DEMO, overrides)


def test_engines_return_routes_where_they_are_replayed_by_the_actor_alone() -> None:
    recipe = load_recipe(DEMO, [ROLLOUT_ROUTES, "warmup=null", "algorithm.kl_coef=0.1"])
    assert recipe.has_routes and recipe.train_config("actor").routing_replay == "rollout"
    assert recipe.train_config("reference").routing_replay == "none"
    live = recipe.model_copy(update={"train": recipe.train.model_copy(update={"older_routes": "live"})})
    reference = live.train_config("reference")
    assert TrainConfig.model_validate(reference.model_dump()) == reference  # a plan writes it into a recipe
    assert load_recipe(DEMO, ["rollout.engine.routes=true"]).has_routes
    assert not load_recipe(DEMO).has_routes


def test_a_policy_that_would_never_learn_in_one_pass_over_the_data_is_refused_by_check(tmp_path: Path) -> None:
    """The demo's 1,000 prompts make 16 steps of 64."""

    def of_steps(count: int) -> Recipe:
        one_pass = ("trainer.steps=null", "trainer.epochs_of_data=1")
        vapo = f"algorithm={{name: vapo, critic_warmup_steps: {count}}}"
        return load_recipe(DEMO, [f"run_dir={tmp_path}", vapo, *one_pass])

    with pytest.raises(SettingsError) as caught:
        check_recipe(of_steps(16))
    [line] = caught.value.lines
    assert line.startswith("algorithm.critic_warmup_steps=16 with trainer.steps=16, in which the policy would never")
    check_recipe(of_steps(15))


def test_a_buffer_larger_than_memory_is_refused_by_check_in_one_line(tmp_path: Path) -> None:
    recipe = load_recipe(DEMO, [f"run_dir={tmp_path}", "algorithm={name: pf_ppo, replay_buffer_size: 2000000000}"])
    with pytest.raises(SettingsError) as caught:
        check_recipe(recipe)
    [line] = caught.value.lines
    assert line.startswith("algorithm.replay_buffer_size=2000000000: samples of up to 10 tokens take ")
    assert "on a host of" in line and "expected at most" in line


def test_the_most_that_is_said_to_fit_fits() -> None:
    memory = 10**9
    with pytest.raises(UserError, match=r"take 9\.8 GB with their copies, on a host of 1\.0 GB") as caught:
        check_replay(_of_size(25_000).algorithm.kept_samples, 10_000, memory)
    most = int(str(caught.value).rpartition("at most ")[2].replace(",", ""))
    check_replay(_of_size(most).algorithm.kept_samples, 10_000, memory)
    with pytest.raises(UserError):
        check_replay(_of_size(most + 1).algorithm.kept_samples, 10_000, memory)
    check_replay(_of_size(10**9).algorithm.kept_samples, 10_000, None)
    assert replay_bytes(load_recipe(DEMO).algorithm.kept_samples, 10_000) == 0


def _of_size(samples: int) -> Recipe:
    return load_recipe(DEMO, [f"algorithm={{name: pf_ppo, replay_buffer_size: {samples}}}"])
