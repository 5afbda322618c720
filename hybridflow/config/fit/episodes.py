"""Settings that do not go with episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hybridflow.algorithms.dynamic_sampling import DynamicSamplingSettings
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.config.evaluation import PlannedSet
from hybridflow.data.config import DataConfig
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.rollout.config import RolloutRole

EPISODIC = (
    *("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg", "opo", "pass_at_k"),
    *("dapo", "gspo", "gspo_token", "cispo", "sapo", "clip_cov", "kl_cov"),
)
"""Algorithms that train on episodes: those of one batch of samples without a critic, whose advantages and losses are
tested with tokens that are not the policy's between others."""
_OF_TREES = ("grpo", "dr_grpo", "rloo")
"""Algorithms that train on samples of several sequences: those whose losses are of single tokens, as was tested."""
OF_TURNS = ("grpo", "dr_grpo", "gspo_token", "cispo")
"""Algorithms with advantages of turns: those with a mean of the group, whose losses take an advantage of each token."""
OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Settings of sampling that an agent's requests may name."""
_OF_LENGTHS = ("overlong_filter", "overlong_buffer")
"""Settings of DAPO by lengths of responses, in which tokens of the environment would count."""


def episode_errors(
    environment: EnvironmentConfig,
    algorithm: AlgorithmSettings,
    rollout: RolloutRole,
    *,
    data: DataConfig,
    off_policy: bool,
    cp: Sequence[str],
    sets: Mapping[str, PlannedSet],
    has_routes: bool,
    scored: Iterable[str],
) -> Iterator[str]:
    """Yield a line for each setting that does not go with episodes.

    Args:
        environment, algorithm, rollout, data: of the recipe.
        off_policy: True if a step may train on samples of older weights.
        cp: settings of models that split sequences over context-parallel ranks.
        sets: the held-out sets.
        has_routes: True if engines return routes.
        scored: settings of further rewards and costs.
    """
    if rollout.stream is None:
        yield "environment is set without rollout.stream, by which turns are requested one by one; expected stream: {}"
    if rollout.lease:
        yield "environment is set with rollout.lease=true, which was not tried; expected false"
    if has_routes:
        yield "environment is set, and routes of its tokens were not tried; expected engine.routes=false and no replay"
    yield from _algorithm_errors(environment, algorithm)
    if environment.agent is not None and cp:
        yield (
            f"environment.agent is set with {cp[0]}, which was not tried with several sequences of a sample; expected 1"
        )
    if environment.agent is not None and off_policy:
        yield "environment.agent is set with trainer.max_staleness above 0, which was not tried; expected 0"
    if environment.tools is not None:
        yield from _tool_errors(data, sets.values())
    for name in scored:
        yield f"{name} is set with environment, which gives the reward; expected none of it"
    for planned in sets.values():
        yield from _set_errors(planned, rollout)
    if environment.max_turn_tokens is not None and environment.max_turn_tokens > rollout.sampling.max_new_tokens:
        yield (
            f"environment.max_turn_tokens={environment.max_turn_tokens} with rollout.sampling.max_new_tokens="
            f"{rollout.sampling.max_new_tokens} of all turns and observations of an episode; expected no more"
        )


def _algorithm_errors(environment: EnvironmentConfig, algorithm: AlgorithmSettings) -> Iterator[str]:
    """Yield a line for each setting of the algorithm that does not go with episodes."""
    for name in _OF_LENGTHS:
        if value := getattr(algorithm, name, None):
            yield f"environment is set with algorithm.{name}={value}, which was not tried; expected none"
    if algorithm.name not in EPISODIC:
        yield (
            f"environment is set with algorithm.name={algorithm.name}, which was not tried; expected one of "
            f"{', '.join(EPISODIC)}"
        )
    elif isinstance(algorithm, DynamicSamplingSettings) and algorithm.dynamic_sampling:
        yield "environment is set with algorithm.dynamic_sampling=true, which was not tried; expected false"
    if environment.agent is not None and algorithm.name not in _OF_TREES:
        yield (
            f"environment.agent is set with algorithm.name={algorithm.name}, which was not tried with several "
            f"sequences of a sample; expected one of {', '.join(_OF_TREES)}"
        )
    if environment.credit == "turn" and algorithm.name not in OF_TURNS:
        yield (
            f"environment.credit=turn is set with algorithm.name={algorithm.name}, whose advantages are of complete "
            f"responses; expected credit=episode, or one of {', '.join(OF_TURNS)}"
        )
    elif environment.credit == "turn" and algorithm.needs_reference and algorithm.kl_in == "reward":
        yield (
            "environment.credit=turn is set with algorithm.kl_in=reward, whose penalty is of a complete response; "
            "expected kl_in=loss"
        )


def _set_errors(planned: PlannedSet, rollout: RolloutRole) -> Iterator[str]:
    """Yield a line for each setting of a held-out set that does not go with episodes."""
    setting = f"evaluation.{planned.name}"
    if planned.settings.reward is not None:
        yield f"{setting}.reward is set with environment, which gives the reward; expected none of it"
    if planned.environment is None or planned.environment.agent is None:
        return
    for name in OF_SAMPLING:
        if (value := getattr(planned.sampling, name)) != (trained := getattr(rollout.sampling, name)):
            yield (
                f"{setting} has {name}={value:g} with environment.agent, whose requests may name the {name} of "
                f"rollout.sampling; expected {trained:g}"
            )


def _tool_errors(data: DataConfig, sets: Iterable[PlannedSet]) -> Iterator[str]:
    """Yield a line for each setting of the data that does not go with `environment.tools`."""
    if data.files is None:
        yield (
            f"environment.tools is set with data.source={data.source}, whose prompts are no messages; expected "
            "data.source=files"
        )
        return
    if data.files.chat.tools:
        yield "data.files.chat.tools is set with environment.tools, which are given to the template; expected none"
    for planned in sets:
        if planned.settings.data is not None and planned.settings.data.tools is not None:
            yield (
                f"evaluation.{planned.name}.data has tools={planned.settings.data.tools} with environment.tools, which "
                "are given to the template; expected none"
            )
    for source in (*data.files.train, *data.files.sft):
        if source.tools is not None:
            yield (
                f"data.files: {source.label} has tools={source.tools} with environment.tools, which are given to the "
                "template; expected none"
            )
