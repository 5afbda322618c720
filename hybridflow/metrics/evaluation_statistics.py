"""Figures of an evaluation with k responses to each prompt: `mean@k`, `pass@j`, `maj@k`, with confidence intervals.

Pure functions of numbers. A response that was not scored, since what scores it failed, is in none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

CONFIDENCE = 0.95
"""Confidence of every interval."""
_Z = 1.959963984540054
"""The standard normal distribution's quantile for it, at 1 - (1 - CONFIDENCE) / 2."""

Measure = Literal["accuracy", "reward_mean", "score_mean", "preference_accuracy"]
"""Figure that sums up a set: the share of exact matches; the mean reward of other reward functions; the mean score of
the reward model where there are no functions; or the accuracy on pairs of `data`, where no engines run."""
ACCURACY: Measure = "accuracy"
REWARD: Measure = "reward_mean"
SCORE: Measure = "score_mean"
PREFERENCE: Measure = "preference_accuracy"
PREFERENCE_LOSS, PREFERENCE_MARGIN = "preference_loss", "preference_margin"
LENGTH = "response_length_mean"
TRUNCATED = "truncated_fraction"
LOW, HIGH = "_low", "_high"
"""Suffixes of a metric's name for the ends of its interval."""


@dataclass(frozen=True)
class ScoredResponse:
    """A response that was scored.

    Args:
        reward: that it got.
        passes: whether that is a passing one.
        vote: stands for its final answer, equal for equal answers; None where it has none.
    """

    reward: float
    passes: bool
    vote: int | None = None


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts.

    Args:
        value: of it.
        low, high: ends of its 95 % confidence interval; None where one prompt says nothing of the spread.
        prompts: that it is over.
    """

    value: float
    low: float | None
    high: float | None
    prompts: int

    def named(self, name: str) -> dict[str, float]:
        """The value and the ends of its interval, by the names of their metrics."""
        ends = {f"{name}{LOW}": self.low, f"{name}{HIGH}": self.high}
        return {name: self.value} | {end: value for end, value in ends.items() if value is not None}


def pass_at(drawn: int, passing: int, j: int) -> float:
    """Chance that at least one of j responses passes, from `drawn` of which `passing` did, without bias.

    1 - C(n - c, j) / C(n, j), as the product of Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    equation 1.

    Raises:
        ValueError: fewer than j were drawn, or more pass than were drawn.
    """
    if not (1 <= j <= drawn and 0 <= passing <= drawn):
        raise ValueError(f"pass@{j} of {drawn} responses of which {passing} pass")
    if drawn - passing < j:
        return 1.0
    return 1.0 - math.prod(1.0 - j / total for total in range(drawn - passing + 1, drawn + 1))


def sizes(k: int) -> list[int]:
    """The j of `pass@j` for k responses: the powers of two up to k, and k."""
    return sorted({1 << power for power in range(k.bit_length())} | {k})


def majority(votes: Sequence[int | None]) -> int | None:
    """Place of the first response whose vote most of them share; of votes that are as many, the one drawn first.

    Returns:
        None where nobody has voted.
    """
    counts: dict[int, int] = {}
    for vote in votes:
        if vote is not None:
            counts[vote] = counts.get(vote, 0) + 1
    if not counts:
        return None
    best = max(counts, key=counts.__getitem__)  # the first of several, in the order in which they were drawn
    return votes.index(best)


def wilson(passing: float, trials: int) -> tuple[float, float]:
    """The 95 % interval of a proportion: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical
    Inference"; as in Brown, Cai and DasGupta 2001, "Interval Estimation for a Binomial Proportion", equation 4."""
    share, square = passing / trials, _Z * _Z
    centre = (passing + square / 2) / (trials + square)
    half = _Z * math.sqrt(trials) / (trials + square) * math.sqrt(share * (1 - share) + square / (4 * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def over_prompts(values: Sequence[float], *, proportion: bool) -> Estimate:
    """The mean of one figure for each prompt, with its interval: prompts are drawn, and their responses are clusters.

    The standard error is that of prompts' means: Miller 2024, "Adding Error Bars to Evals" (arXiv 2411.00640).
    Where every prompt's value is 0 or 1 it is a proportion of prompts, which is Wilson's: the standard error is 0
    where all of them are equal, and too small with few.

    Args:
        values: one for each prompt.
        proportion: whether they are shares or chances, from 0 to 1.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("no prompts to take a mean over")
    count = len(values)
    mean = math.fsum(values) / count
    if proportion and all(value in (0.0, 1.0) for value in values):
        return Estimate(mean, *wilson(sum(values), count), count)
    if count == 1:
        return Estimate(mean, None, None, count)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = _Z * math.sqrt(variance / count)
    low, high = mean - half, mean + half
    if proportion:
        low, high = max(0.0, low), min(1.0, high)
    return Estimate(mean, low, high, count)


def estimates(
    groups: Iterable[Sequence[ScoredResponse]], k: int, *, votes: bool, measure: Measure = REWARD
) -> dict[str, Estimate]:
    """Metrics of an evaluation by name: as `figure_names` has them.

    - `reward_mean`: mean reward of a prompt's responses, over prompts. As `accuracy` it has no interval of its
      own: that is the interval of `mean@k`.
    - `mean@k`: share of a prompt's responses that pass, over prompts.
    - `pass@j`: chance that one of j responses passes. Prompts of which fewer than j responses were scored are left out.
    - `maj@k`: whether the response with the most frequent final answer passes. Responses without one do not vote; a
      prompt where none has one does not pass.

    Args:
        groups: for each prompt its responses that were scored, in the order in which they were drawn.
        k: responses that were asked for.
        votes: whether responses vote.
        measure: name of the mean reward.

    Raises:
        ValueError: no response was scored.
    """
    scored = [group for group in groups if group]
    passed = [sum(response.passes for response in group) for group in scored]
    counts = [len(group) for group in scored]
    rewards = [math.fsum(response.reward for response in group) / len(group) for group in scored]
    mean = over_prompts(rewards, proportion=False)
    estimated: dict[str, Estimate] = {measure: replace(mean, low=None, high=None) if measure == ACCURACY else mean}
    shares = [passing / count for passing, count in zip(passed, counts, strict=True)]
    estimated[f"mean@{k}"] = over_prompts(shares, proportion=True)
    for j in sizes(k):
        chances = [pass_at(n, c, j) for n, c in zip(counts, passed, strict=True) if n >= j]
        if chances:
            estimated[f"pass@{j}"] = over_prompts(chances, proportion=True)
    if votes and k > 1:
        winners = [majority([response.vote for response in group]) for group in scored]
        right = [float(index is not None and group[index].passes) for group, index in zip(scored, winners, strict=True)]
        estimated[f"maj@{k}"] = over_prompts(right, proportion=True)
    return estimated


def figure_names(k: int, *, votes: bool, measure: Measure = REWARD) -> list[str]:
    """Figures of an evaluation with k responses to each prompt."""
    return [measure, f"mean@{k}", *(f"pass@{j}" for j in sizes(k)), *([f"maj@{k}"] if votes and k > 1 else [])]


def with_intervals(estimated: Mapping[str, Estimate]) -> dict[str, float]:
    """Every value and every end of an interval, by name."""
    return {name: value for metric, estimate in estimated.items() for name, value in estimate.named(metric).items()}
