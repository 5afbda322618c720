"""Seconds of a step from its phases, the devices of each role, and staleness.

Synchronous: generation, scoring, updates and the weight transfer follow one another. Within scoring and within the
updates, roles on other devices work at the same time, and those on the same devices take turns.

With staleness s the engines, on devices of their own, begin the batch of step k once the update of step k - 1 - s is
done, and the update of step k begins once its batch is complete: the recurrence below, on a clock that jumps from event
to event. In a stream requests of later batches fill the slots of ended ones: batches follow one another as fast as the
engines make their tokens, and each is complete once its own tail has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_STEPS = 24
"""Steps of the recurrence, of which the second half is measured."""


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of each phase by itself.

    Args:
        rollout: generation of a step's responses, with its tail.
        stream: the same without the tail.
        scoring: passes over all samples, by role.
        update: updates, by role.
        transfer: of the weights.
        driver: between the phases.
    """

    rollout: float
    stream: float
    scoring: Mapping[str, float]
    update: Mapping[str, float]
    transfer: float
    driver: float


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step.

    Args:
        step: from one step to the next.
        phases: seconds of each phase: "rollout", "scoring", "update", "transfer", "driver".
        hidden: seconds of phases that others cover.
        bottleneck: phase, or roles of a phase, that the step waits for longest.
    """

    step: float
    phases: Mapping[str, float]
    hidden: float
    bottleneck: str


def step_seconds(
    seconds: PhaseSeconds, groups: Sequence[frozenset[str]], *, staleness: int = 0, stream: bool = False
) -> StepSeconds:
    """Predict the seconds of a step.

    Args:
        seconds: of its phases.
        groups: roles that share devices; "rollout" is one.
        staleness: updates by which the engines' weights may be behind; above 0 only with engines on their own devices.
        stream: batches are generated without pause.
    """
    scoring, update = (_together(of_role, groups) for of_role in (seconds.scoring, seconds.update))
    rollout = seconds.stream if stream and staleness else seconds.rollout
    phases = {
        "rollout": rollout,
        "scoring": scoring,
        "update": update,
        "transfer": seconds.transfer,
        "driver": seconds.driver,
    }
    total = sum(phases.values())
    latency = seconds.rollout if stream else rollout
    step = total if not staleness else _pipelined(phases, staleness, latency)
    names = {"rollout": rollout, "training": scoring + update} if staleness else phases
    bottleneck = max(names, key=lambda name: names[name])
    return StepSeconds(step, phases, max(0.0, total - step), bottleneck)


def _together(of_role: Mapping[str, float], groups: Sequence[frozenset[str]]) -> float:
    """Seconds of roles of which those of a group take turns."""
    return max((sum(of_role.get(role, 0.0) for role in group) for group in groups), default=0.0)


def _pipelined(phases: Mapping[str, float], staleness: int, latency: float) -> float:
    """Predict the seconds of a step in a steady state.

    Args:
        phases: seconds by phase; "rollout" are those between two batches of engines that never wait.
        staleness: at least 1.
        latency: seconds from the begin of a batch to its last response.
    """
    training = phases["scoring"] + phases["update"] + phases["driver"]
    generated, trained = [0.0], [0.0]  # moments at which batches and updates are done; the first are there
    for number in range(1, _STEPS + 1):
        version = max(0, number - 1 - staleness)
        engines = max(generated[-1], trained[version]) + phases["rollout"]
        generated.append(max(engines, trained[version] + latency) + phases["transfer"])
        trained.append(max(trained[-1], generated[-1]) + training + phases["transfer"])
    return (trained[-1] - trained[_STEPS // 2]) / (_STEPS - _STEPS // 2)
