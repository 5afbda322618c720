"""Dynamic sampling: drop groups of equal rewards and draw more prompts (DAPO, arXiv:2503.14476, section 3.2).

A group whose rewards are all equal has no advantages. Such groups are dropped, and more prompts are drawn until the
step has `trainer.prompts_per_step` groups, in a limited number of rounds. Every drawn prompt is one of:

    used        trained on
    filtered    all its rewards are equal ("all right" if above 0, else "all wrong"), or no sample is in the loss
    failed      none of its samples has a reward
    surplus     has different rewards, and the step was full: of the last round, those that were drawn last

and is counted as that in the metrics `sampling/...`. The compared reward is that of the functions and the reward model,
before penalties of the algorithm, as the paper's condition is on the answer alone. Equal means equal to the last bit:
a limit on a standard deviation would let rounding errors decide.

Where public implementations differ: verl draws a fixed number each round and cuts a full batch off at its end, NeMo-RL
as well. Here a round draws the missing number divided by the share of groups that had different rewards so far in the
step. The next step never trains on a surplus sample, which would be of older weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from engine3d.errors import EngineError
from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.base import Step
from hybridflow.algorithms.checks import check_finite, check_mask, check_rows
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from torch import Tensor

type InLoss = Callable[[RemoteBatch], Tensor]
"""A batch -> (B,) bool: the samples that are going to be in the loss."""


class DynamicSamplingSettings(AlgorithmSettings):
    """Settings of dynamic sampling, for algorithms that compare the samples of a prompt with each other."""

    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and draw more prompts until a step has `trainer.prompts_per_step`
    groups."""
    dynamic_sampling_rounds: int = Field(default=10, ge=1)
    """The most rollouts of a step, the first one included."""
    dynamic_sampling_draw: Literal["expected", "missing"] = "expected"
    """Prompts of a round. "expected": as many as are expected to fill the step, by the share of good groups in it so
    far, at most `trainer.prompts_per_step`; some may be too many. "missing": as many as are missing, in more rounds. At
    least one for each engine in either case.
    """
    dynamic_sampling_at_limit: Literal["learn", "stop"] = "learn"
    """After the last round of a step that is not full: train on the groups so far, if they are enough for all ranks and
    mini-batches, or stop the run."""

    @property
    def _unused(self) -> dict[str, str]:
        keys = [key for key in DynamicSamplingSettings.model_fields if key.startswith("dynamic_sampling_")]
        why = "dynamic_sampling false, which does not use it; expected dynamic_sampling true"
        return super()._unused | (dict.fromkeys(keys, why) if not self.dynamic_sampling else {})


class GroupKind(Enum):
    """Outcome of a group in dynamic sampling."""

    GOOD = "different rewards"
    ALL_RIGHT = "all rewards equal and above 0"
    ALL_WRONG = "all rewards equal and not above 0"
    OUTSIDE_LOSS = "no sample in the loss"


def group_kinds(rewards: Tensor, group_ids: Tensor, in_loss: Tensor | None = None) -> dict[int, GroupKind]:
    """Return the kind of each group, by its id in ascending order.

    A group is exactly the samples of its id, wherever they stand; one that has lost samples is what is left of it. So a
    group of one has equal rewards.

    `rewards` (B,) float32, `group_ids` (B,) int64, `in_loss` (B,) bool: the samples that are going to be in the loss,
    all if None. A group without one is OUTSIDE_LOSS whatever its rewards. Samples outside the loss are
    part of the comparison, as they are of the baseline. Raises ValueError for a reward that is not finite, naming its
    row, and for columns of other shapes.
    """
    check_rows("group_kinds", rows=len(rewards), rewards=rewards, group_ids=group_ids)
    check_finite("dynamic sampling", "reward", rewards)
    groups, member_of = group_ids.unique(return_inverse=True)
    empty = rewards.new_zeros(len(groups))
    lowest = empty.scatter_reduce(0, member_of, rewards, "amin", include_self=False)
    highest = empty.scatter_reduce(0, member_of, rewards, "amax", include_self=False)
    counts = torch.ones_like(groups)
    if in_loss is not None:
        check_mask("group_kinds", in_loss)
        check_rows("group_kinds", rows=len(rewards), in_loss=in_loss)
        counts = torch.zeros_like(groups).index_add(0, member_of, in_loss.to(torch.int64))
    kinds = {}
    for group, low, high, count in zip(*(column.tolist() for column in (groups, lowest, highest, counts)), strict=True):
        equal = GroupKind.ALL_RIGHT if low > 0 else GroupKind.ALL_WRONG
        kinds[group] = GroupKind.OUTSIDE_LOSS if not count else equal if low == high else GroupKind.GOOD
    return kinds


@dataclass
class SamplingTally:
    """Outcomes of a step's prompts so far."""

    rounds: int = 0
    drawn: int = 0
    used: int = 0
    failed: int = 0
    surplus: int = 0
    filtered: Counter[GroupKind] = field(default_factory=Counter)

    @property
    def good(self) -> int:
        """Groups with different rewards."""
        return self.used + self.surplus

    def count(self, drawn: int, kinds: Mapping[int, GroupKind], target: int) -> list[int]:
        """Count one more round, which needs `target` groups. Return the used groups in the order of their ids."""
        good = [group for group, kind in kinds.items() if kind is GroupKind.GOOD]
        self.rounds += 1
        self.drawn += drawn
        self.failed += drawn - len(kinds)
        self.filtered.update(kind for kind in kinds.values() if kind is not GroupKind.GOOD)
        self.used += min(len(good), target)
        self.surplus += max(len(good) - target, 0)
        return good[:target]

    def metrics(self) -> dict[str, float]:
        """Return the counts of the step."""
        return {
            metrics.SAMPLING_ROUNDS: self.rounds,
            metrics.SAMPLING_DRAWN: self.drawn,
            metrics.SAMPLING_USED: self.used,
            metrics.SAMPLING_FILTERED: self.filtered.total(),
            metrics.SAMPLING_FAILED: self.failed,
            metrics.SAMPLING_SURPLUS: self.surplus,
        }

    def shares(self) -> dict[str, Tensor]:
        """Return for each drawn prompt 1 if it was of a kind, and 0 if not, of which the mean is the kind's share."""
        drawn = torch.arange(self.drawn)
        return {
            metrics.SAMPLING_ALL_RIGHT: (drawn < self.filtered[GroupKind.ALL_RIGHT]).double(),
            metrics.SAMPLING_ALL_WRONG: (drawn < self.filtered[GroupKind.ALL_WRONG]).double(),
        }

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind.value} {self.filtered[kind]}" for kind in GroupKind if self.filtered[kind])
        failed = f", failed {self.failed}" if self.failed else ""
        return f"{self.used} of {self.drawn} prompts in {self.rounds} rounds are used ({kinds}{failed})"


def next_round(tally: SamplingTally, target: int, config: DynamicSamplingSettings, *, least: int = 1) -> int:
    """Return how many prompts the next round draws, at least `least`, for a step that needs `target` groups and has
    fewer.
    """
    missing = target - tally.used
    if config.dynamic_sampling_draw == "missing" or not tally.drawn:
        return max(missing, least)
    if not tally.good:
        return target
    return max(min(target, math.ceil(missing * tally.drawn / tally.good)), least)


def rewarded_samples[C: AlgorithmSettings](step: Step[C], in_loss: InLoss | None = None) -> RemoteBatch:
    """Return the step's samples with rewards and the log-probs that are needed.

    They come by dynamic sampling if the settings have it and turn it on.

    Args:
        in_loss: which samples are going to be in the loss; all if None.

    Raises:
        EngineError: too few groups after the last round.
    """
    config: AlgorithmSettings = step.config
    if isinstance(config, DynamicSamplingSettings) and config.dynamic_sampling:
        return step.logprobs(_draw_until_full(step, config, in_loss))
    return step.rewards(step.logprobs(step.generate(step.draw())))


def _draw_until_full(step: Step[Any], config: DynamicSamplingSettings, in_loss: InLoss | None) -> RemoteBatch:
    target = step.prompts_per_step
    tally, batches = SamplingTally(), []
    while tally.used < target and tally.rounds < config.dynamic_sampling_rounds:
        draw = step.draw(next_round(tally, target, config, least=step.least_prompts))
        batch = step.rewards(step.generate(draw), partial=True)
        ids = batch.per_sample["group_ids"]
        kinds = group_kinds(batch.per_sample["rewards"], ids, None if in_loss is None else in_loss(batch))
        used = tally.count(len(draw.indices), kinds, target - tally.used)
        if used:
            batches.append(batch.select(torch.isin(ids, torch.tensor(used)).nonzero()[:, 0]))
    step.values.update(tally.metrics())
    step.log(tally.shares())
    samples = sum(map(len, batches))
    if tally.used < target:
        short = f"step {step.number}: {tally}"
        limit = f"algorithm.dynamic_sampling_rounds={config.dynamic_sampling_rounds}"
        if config.dynamic_sampling_at_limit == "stop" or samples < step.least_samples:
            raise EngineError(
                f"{short}, expected {target} of different rewards within {limit}, or at least {step.least_samples} "
                "samples with algorithm.dynamic_sampling_at_limit=learn"
            )
        log.warning(f"{short}, fewer than {target} within {limit}; the step trains on those")
    return RemoteBatch.concatenate(batches)
