"""The evaluations of a run: what each figure of them is called, and the first and last of it."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.metrics import names as metrics
from hybridflow.report.run_data import RunData


@dataclass(frozen=True)
class Evaluation:
    """A figure that evaluations log.

    Args:
        metric: its name.
        title: what it is, and of which prompts.
        y_label: what its axis shows.
    """

    metric: str
    title: str
    y_label: str


EVALUATIONS = {
    "accuracy": Evaluation(metrics.EVAL_ACCURACY, "Held-out accuracy", "accuracy"),
    "eval-reward": Evaluation(metrics.EVAL_REWARD, "Mean reward of held-out prompts", "reward"),
    "eval-score": Evaluation(metrics.EVAL_SCORE, "Mean score of held-out prompts by the reward model", "score"),
    "eval-preference": Evaluation(metrics.EVAL_PREFERENCE, "Accuracy on held-out pairs", "accuracy"),
    "training-preference": Evaluation(metrics.EVAL_TRAINING_PREFERENCE, "Accuracy on training pairs", "accuracy"),
    "training-accuracy": Evaluation(metrics.EVAL_TRAINING_ACCURACY, "Accuracy on training prompts", "accuracy"),
    "training-reward": Evaluation(metrics.EVAL_TRAINING_REWARD, "Mean reward of training prompts", "reward"),
    "training-score": Evaluation(
        metrics.EVAL_TRAINING_SCORE, "Mean score of training prompts by the reward model", "score"
    ),
}
"""By the name of their plot."""


def measured(run: RunData, evaluation: Evaluation) -> str:
    """The first and the last value with their steps, and of how many prompts; empty where nothing was measured."""
    series = run.series(evaluation.metric, "eval")
    if series is None:
        return ""
    first, last = (f"{series.values[end]:.4g} (step {series.steps[end]:.0f})" for end in (0, -1))
    values = first if len(series.steps) == 1 else f"{first} → {last}"
    counts = [run.series(name, "eval") for name in (metrics.EVAL_PROMPTS, metrics.EVAL_TRAINING_PROMPTS)]
    prompts, learned = (int(each.values[-1]) if each is not None else 0 for each in counts)
    if not prompts:
        return values  # as earlier versions logged it
    some = f", {learned} of them training prompts" if 0 < learned < prompts else ""
    return f"{values}, {prompts:,} prompts{some}"
