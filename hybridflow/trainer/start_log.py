"""Lines that say what a run is starting, so that nobody wonders at a minute of silence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.recipe import Recipe
from hybridflow.errors.log import log

_ACRONYM = 5
"""Letters of an algorithm's name that is written in capitals."""


class StartLog:
    """Prints lines, each with the seconds since this was made. Any thread may use it."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, what: str) -> None:
        """Print one line."""
        log.info(f"start {time.monotonic() - self._began:5.1f} s  {what}")

    def roles(self, devices: Mapping[str, Sequence[Device]]) -> None:
        """Say which roles start, and on how many devices."""
        self.say("starting " + ", ".join(f"{role} ({_amount(held)})" for role, held in devices.items()))

    def ready_after[R](self, role: str, start: Callable[[], R]) -> R:
        """Start a role and say that it is ready, before anybody who waits for it says more."""
        result = start()
        self.say(f"{role} is ready")
        return result


def steps_sentence(recipe: Recipe, steps_done: int) -> str:
    """Describe the steps of a run in one sentence, such as "GRPO: 120 steps of 64 prompts x 8 samples".

    Args:
        recipe: of the run.
        steps_done: after which it resumes; 0 of a fresh start.
    """
    name, trainer = recipe.algorithm.name, recipe.trainer
    name = name.upper() if len(name) <= _ACRONYM else name.rpartition("/")[2]
    steps = f"{trainer.steps:,} steps of"
    if steps_done:
        steps = f"steps {steps_done + 1:,} to {trainer.steps:,}, each of"
    if not recipe.algorithm.needs_engines:
        return f"{name}: {steps} {trainer.prompts_per_step:,} examples"
    return f"{name}: {steps} {trainer.prompts_per_step:,} prompts x {recipe.rollout.samples_per_prompt:,} samples"


def _amount(devices: Sequence[Device]) -> str:
    kind = "GPU" if devices[0].kind == "cuda" else "CPU slot"
    return f"{len(devices)} {kind}{'s' if len(devices) > 1 else ''}"
