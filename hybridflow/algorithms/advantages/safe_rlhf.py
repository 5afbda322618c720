"""Safe-RLHF (Dai et al., arXiv:2310.12773): the most reward at no more than a limit of cost.

    max_theta min_{lambda >= 0}  J_R(theta) - lambda * (E[cost] - limit)

The policy takes steps up this Lagrangian by PPO with `safe_advantages`, the multiplier steps down it.

Where this departs from the paper:
- A KL penalty goes, whole, into the rewards and, with the other sign, into the costs: (-k - lambda * k) / (1 + lambda)
  = -k, so that its weight is the same whatever the multiplier is. The paper's appendix B gives each half of it. The
  costs that update the multiplier have no such part.
- Advantages are mixed first and clipped in one surrogate; the paper clips one surrogate of rewards and one of costs and
  mixes the losses. The two differ where both clip and the advantages have different signs.
- The multiplier has a floor, see `LagrangeMultiplier`.
- What an adaptive KL coefficient is held against is the divergence that the update measures, `train/reference_kl`,
  which has nothing to do with costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.checks import check_shapes

if TYPE_CHECKING:
    from torch import Tensor


def safe_advantages(reward_advantages: Tensor, cost_advantages: Tensor, multiplier: float) -> Tensor:
    """Compute the advantages of the Lagrangian, for the clipped surrogate.

        A = (A_reward - multiplier * A_cost) / (1 + multiplier)

    The division keeps the size of a step whatever the multiplier is. Both have one shape, any shape: (B, S') or (R,)
    float32, and so has the result. Computed in float64. Raises ValueError for tensors of other shapes.
    """
    check_shapes("safe_advantages", reward_advantages=reward_advantages, cost_advantages=cost_advantages)
    mixed = reward_advantages.to(torch.float64) - multiplier * cost_advantages.to(torch.float64)
    return (mixed / (1 + multiplier)).to(torch.float32)
