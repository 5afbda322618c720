"""IPPO, independent PPO: several actors, each of which learns by PPO as if it were alone (arXiv:2011.09533).

    L_i(theta_i) = PPO's loss of actor i, over its own responses, its own rewards and its own critic,   i = 1 ... N

Nothing is shared between the actors but the prompts: model, layout, placement, rewards, critic, optimizer and seed are
each one's own, under `actors:` of the recipe (`hybridflow/config/actors.py`), and all learn at the same time. The
paper's actors act in one environment, whose transitions depend on all of them; to an actor the others are part of it.
Here a response is a whole episode and its reward that of the actor alone, so that the gradient of one actor is exactly
PPO's.

De Witt et al. share the parameters of actor and critic between agents where these are alike; here they are not shared.
"""

from __future__ import annotations

from hybridflow.algorithms import ppo
from hybridflow.algorithms.base import Algorithm


class IPPOSettings(ppo.PPOSettings):
    """Settings of IPPO: PPO's, of each actor."""

    name: str = "ippo"


ALGORITHM = Algorithm(IPPOSettings, ppo.make_experience, ppo.with_advantages, ppo.learn)
