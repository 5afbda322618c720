"""GSPO-token: GSPO whose gradient is that of each token alone (arXiv:2507.18071, section 4.3).

With GRPO's advantages, one for all tokens of a response, it is GSPO to the last term; it is what an algorithm with
advantages of its own for each token composes.
"""

from __future__ import annotations

from hybridflow.algorithms import grpo
from hybridflow.algorithms.base import Algorithm
from hybridflow.algorithms.gspo import GSPOSettings
from hybridflow.algorithms.losses.sequence_ratio import gspo_token_loss


class GSPOTokenSettings(GSPOSettings):
    """Settings of GSPO-token: GSPO's."""

    name: str = "gspo_token"


ALGORITHM = Algorithm(
    GSPOTokenSettings, grpo.make_experience, grpo.with_advantages, grpo.learn, policy_loss=gspo_token_loss
)
