"""What an evaluation measured, of which prompts and after which step, and what two of them say of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from hybridflow.config.judge_identity import asked_judge_identity
from hybridflow.config.recipe import Recipe
from hybridflow.data.prompts import Prompts

Measure = Literal["accuracy", "reward_mean", "score_mean", "preference_accuracy"]

_EXACT_MATCH = "arithmetic"
"""The builtin reward that is 1 for a text that is exactly the answer and 0 for any other: its mean is an accuracy."""


@dataclass(frozen=True)
class Subject:
    """What is measured, and of what.

    Args:
        measure: "accuracy", the share of exact matches; "reward_mean", of the reward functions; "score_mean", of the
            reward model where there are no functions, without its weight; or "preference_accuracy", of responses that
            the data have, where no engines run.
        prompts: how many are evaluated.
        learned_from: how many of them the model learns from too, in training or in the warm-up.
        identity: of the prompts, the rewards and the sampling; two evaluations compare only where it is the same.
    """

    measure: Measure
    prompts: int
    learned_from: int
    identity: str

    @classmethod
    def of(cls, recipe: Recipe, evaluation: Prompts, learned_from: Sequence[Prompts]) -> Self:
        """What the evaluations of a run measure.

        Args:
            recipe: of the run.
            evaluation: the prompts of evaluation.
            learned_from: those of every phase that learns.
        """
        evaluated = [example.prompt for example in evaluation.examples]
        learned = [phase.text_hashes() for phase in learned_from if len(phase)]
        again = np.isin(evaluation.text_hashes(), np.concatenate(learned)) if learned else np.zeros(0, dtype=bool)
        rewards: list[Any] = []
        measure: Measure = "score_mean"
        sampling: dict[str, Any] = {}
        if not recipe.algorithm.needs_engines:
            measure, rewards = "preference_accuracy", [recipe.algorithm.name]
        elif recipe.reward is not None:
            functions = recipe.reward.functions
            rewards = [
                (each.name, each.path, each.weight, *([each.arguments] if each.arguments else [])) for each in functions
            ]
            rewards += asked_judge_identity(functions, recipe.judge)
            exact = [(each.path, each.weight) for each in functions] == [(_EXACT_MATCH, 1.0)]
            measure = "accuracy" if exact else "reward_mean"
        elif recipe.reward_model is not None:
            rewards = [str(recipe.reward_model.path.absolute())]
        if recipe.algorithm.needs_engines:
            sampling = recipe.eval_sampling.model_dump(mode="json")
        answers = [example.answer for example in evaluation.examples]
        facts = json.dumps([evaluated, answers, rewards, sampling, recipe.trainer.eval_samples], default=str)
        return cls(
            measure=measure,
            prompts=len(evaluated),
            learned_from=int(again.sum()),
            identity=hashlib.sha256(facts.encode()).hexdigest()[:16],
        )

    @property
    def metric(self) -> str:
        """Name in the metrics: `eval/accuracy` of held-out prompts, `eval/training_accuracy` of others, and so on."""
        return f"eval/{'training_' if self.learned_from else ''}{self.measure}"

    def __str__(self) -> str:
        if self.measure == "accuracy" and not self.learned_from:
            return "held-out accuracy"
        if self.measure == "preference_accuracy":
            kind = {0: "held-out ", self.prompts: "training "}.get(self.learned_from, "")
            some = f" ({self.learned_from} of them with training prompts)" if kind == "" else ""
            return f"preference accuracy of {self.prompts} {kind}examples{some}"
        words = {"accuracy": "accuracy", "reward_mean": "mean reward", "score_mean": "mean reward model score"}
        if not self.learned_from:
            return f"{words[self.measure]} of {self.prompts} held-out prompts"
        if self.learned_from == self.prompts:
            return f"{words[self.measure]} of {self.prompts} training prompts"
        return f"{words[self.measure]} of {self.prompts} prompts ({self.learned_from} of them training prompts)"


@dataclass(frozen=True)
class Measured:
    """An evaluation.

    Args:
        subject: what was measured.
        step: after which training step; 0 before the first.
        value: what came out.
    """

    subject: Subject
    step: int
    value: float


def summary(first: Measured | None, last: Measured | None) -> list[str]:
    """What the first and the last evaluation of a run say, in a line; nothing where nothing was measured.

    Two lines where they did not measure the same, because the run was resumed with other prompts, rewards or sampling.
    """
    if first is None or last is None or first.step == last.step:
        return [_single(each) for each in (last or first,) if each is not None]
    if first.subject != last.subject:
        return [_single(first), f"{_single(last)}; not compared, because it was measured otherwise"]
    points = f" ({100 * (last.value - first.value):+.1f} points)" if "accuracy" in first.subject.measure else ""
    values = f"{first.value:.3f} -> {last.value:.3f}{points}"
    return [f"{first.subject}: {values}{_count(first.subject)}, step {first.step} -> step {last.step}"]


def _single(measured: Measured) -> str:
    return f"{measured.subject}: {measured.value:.3f}{_count(measured.subject)}, step {measured.step}"


def _count(subject: Subject) -> str:
    """How many prompts, where the subject does not say it."""
    return f", {subject.prompts} prompts" if str(subject) == "held-out accuracy" else ""
