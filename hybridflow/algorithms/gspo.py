"""GSPO: GRPO with one ratio for a whole response (arXiv:2507.18071). Needs the roles that GRPO needs.

The ratio is the geometric mean of the tokens' ratios, so it moves far less than theirs: the clip range is of the order
of 1e-4, and its default is the paper's (section 5.1), found with responses of thousands of tokens. Short responses need
a wider one. A response is clipped whole or not at all. In a mixture of experts, where routers of the two engines differ
at single tokens, the mean is what makes ratios usable.
"""

from __future__ import annotations

from pydantic import Field

from hybridflow.algorithms import grpo
from hybridflow.algorithms.base import Algorithm
from hybridflow.algorithms.losses.aggregation import AggregationMode
from hybridflow.algorithms.losses.sequence_ratio import gspo_loss
from hybridflow.algorithms.settings import ClippedSettings


class GSPOSettings(grpo.GroupSettings, ClippedSettings):
    """Settings of GSPO: GRPO's, with other defaults."""

    name: str = "gspo"
    loss_aggregation: AggregationMode = "seq-mean-token-mean"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    clip_high: float = Field(default=4e-4, gt=0)


ALGORITHM = Algorithm(GSPOSettings, grpo.make_experience, grpo.with_advantages, grpo.learn, policy_loss=gspo_loss)
