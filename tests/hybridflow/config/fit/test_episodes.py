"""Settings that do not go with episodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from hybridflow.algorithms.config import load
from hybridflow.config.fit.episodes import EPISODIC, OF_TURNS
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import load_recipe
from hybridflow.environments.config import EnvironmentConfig

GAME = Path(__file__).parents[4] / "launch/recipes/game.yaml"


def test_episodes_give_the_reward() -> None:
    recipe = load_recipe(GAME)
    (function,) = recipe.functions["reward"].functions
    assert (function.name, function.on_failure) == ("environment", "drop")
    assert recipe.groups_in_flight and not recipe.sets


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rollout.stream=null", "environment is set without rollout.stream"),
        ("rollout.lease=true", "rollout.lease=true, which was not tried"),
        ("rollout.engine.routes=true", "routes of its tokens were not tried"),
        ("algorithm.name=ppo", "algorithm.name=ppo, which was not tried; expected one of grpo, dr_grpo, rloo, "),
        ("algorithm.name=remax", "algorithm.name=remax, which was not tried"),
        (
            "algorithm={name: dapo, dynamic_sampling: false, overlong_filter: true}",
            "algorithm.overlong_filter=True, which",
        ),
        (
            "algorithm={name: dapo, dynamic_sampling: false, overlong_buffer: 2}",
            "algorithm.overlong_buffer=2, which was",
        ),
        ("algorithm.name=dapo", "algorithm.dynamic_sampling=true, which was not tried"),
        ("algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling=true, which was not tried"),
        ("reward.functions=[{name: length, path: length}]", "reward is set with environment, which gives the reward"),
        (
            "evaluation.eval={data: {path: a.parquet}, reward: {functions: [{name: length, path: length}]}}",
            "evaluation.eval.reward is set with environment, which gives the reward; expected none of it",
        ),
        ("environment.max_turn_tokens=17", "environment.max_turn_tokens=17 with rollout.sampling.max_new_tokens=16"),
        (
            "environment.turn_discount=0.5",
            "turn_discount=0.5 with credit='episode', which does not use it; expected cre",
        ),
        ("environment.path=guess", "expected package.module:Class or some/file.py:Class"),
        ("environment.path=a-b:Guess", "expected the name of a module or a file that ends with .py"),
    ],
)
def test_what_was_not_tried_is_refused(override: str, reason: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_recipe(GAME, [override])
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("environment.path=a:B", "path and tools are set together, expected one of them"),
        ("environment.role=user", "role is set with tools, which have none; expected none"),
        ("environment.tools.functions=[]", "environment.tools.functions"),
        ("environment.tools.functions=[calculator]", "expected one of python, search, package.module:function"),
        ("environment.tools.reward=judge", "is 'judge', which was not tried with tools"),
        ("environment.tools.on_exception=stop", "environment.tools.on_exception"),
        ("environment.limits.processes=20", None),
        ("environment.tool_timeout_s=9", None),
        ("data.files.chat.tools=[{type: function}]", "data.files.chat.tools is set with environment.tools"),
        ("data.files.train=[{path: a.parquet, tools: tools}]", "has tools=tools with environment.tools"),
        (
            "evaluation.eval={data: {path: a.parquet, tools: tools}}",
            "evaluation.eval.data has tools=tools with environment.tools",
        ),
        ("data={source: arithmetic}", "environment.tools is set with data.source=arithmetic, whose prompts are no mes"),
    ],
)
def test_what_does_not_go_with_tools_is_refused(override: str, reason: str | None) -> None:
    more = []
    if reason is None:  # of a sandbox
        more = ["environment.tools.functions=[python]"]
        reason = "up to 145" if "processes" in override else "tool_timeout_s=9 with programs that may take 10 s"
    with pytest.raises(SettingsError) as error:
        load_recipe(GAME.with_name("tools.yaml"), [override, *more])
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["environment.path=a:B"], "path and agent are set together, expected one of them"),
        (["environment.role=user"], "role=user is set with agent, whose messages have roles of their own"),
        (["environment.agent=null"], "neither path nor tools nor agent is set"),
        (["environment.agent=play"], "is 'play', expected package.module:Class or some/file.py:Class, or such a func"),
        (["environment.agent=[]"], "is without the words of a command"),
        (["environment.agent=[python, a.py]", "environment.arguments={a: 1}"], "arguments is set with the words of a"),
        (
            ["evaluation.eval={data: {path: a.parquet}}"],
            "evaluation.eval has temperature=0 with environment.agent",
        ),
        (["train.layout.cp=2"], "environment.agent is set with train.layout.cp=2, which was not tried"),
        (
            ["trainer.max_staleness=1"],
            "environment.agent is set with trainer.max_staleness above 0",
        ),
        (["algorithm.name=gspo"], "environment.agent is set with algorithm.name=gspo, which was not tried"),
        (["environment.agent=null", "environment.path=a:B", "environment.ignored_options=[seed]"], "without agent"),
    ],
)
def test_what_does_not_go_with_agents_is_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_recipe(GAME.parents[2] / "examples/own_agent.yaml", overrides)
    assert reason in str(error.value)


def test_algorithms_of_episodes_draw_and_update_as_grpo_does() -> None:
    plain = load("grpo")
    of_module = {load("rloo").make_experience.__qualname__, plain.make_experience.__qualname__}
    for name in EPISODIC:
        algorithm = load(name)
        assert algorithm.make_experience.__qualname__ in of_module and not algorithm.settings.model_fields.keys() & {
            "critic_warmup_steps"
        }, name
        more = ["algorithm.dynamic_sampling=false"] if name == "dapo" else []
        more += ["trainer.mini_batches=1"] if algorithm.settings.on_policy else []
        assert load_recipe(GAME, [f"algorithm.name={name}", *more]).environment is not None


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (
            "{name: rloo}",
            "algorithm.name=rloo, whose advantages are of complete responses; expected credit=episode, or",
        ),
        ("{name: gspo}", "algorithm.name=gspo, whose advantages are of complete responses"),
        (
            "{kl_coef: 0.1, kl_in: reward}",
            "algorithm.kl_in=reward, whose penalty is of a complete response; expected kl",
        ),
    ],
)
def test_credit_of_turns_needs_advantages_of_tokens(algorithm: str, reason: str) -> None:
    for name in OF_TURNS:
        assert load_recipe(GAME, ["environment.credit=turn", f"algorithm.name={name}"]).environment is not None
    with pytest.raises(SettingsError) as error:
        load_recipe(GAME, ["environment.credit=turn", f"algorithm={algorithm}"])
    assert reason in str(error.value)


def test_arguments_that_json_has_not_are_refused() -> None:
    with pytest.raises(ValidationError, match="set is not JSON serializable, expected what JSON has"):
        EnvironmentConfig(path="a:B", arguments={"numbers": {1, 2}})
