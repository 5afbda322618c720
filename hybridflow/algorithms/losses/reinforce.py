"""The policy gradient without a ratio, for algorithms that train on samples of the current policy alone."""

from __future__ import annotations

from hybridflow.algorithms.losses.kl import LOG_RATIO_LIMIT
from hybridflow.algorithms.losses.policy import PolicyLoss, TokenColumns
from hybridflow.algorithms.settings import AlgorithmSettings


def reinforce_loss(columns: TokenColumns, config: AlgorithmSettings) -> PolicyLoss:
    """Compute the loss whose gradient is the policy gradient's estimate (Williams, 1992).

        loss_t = -A_t log pi(token_t)

    The ratio pi(token) / pi_old(token) is measured, and takes no part: after an update the samples are those of another
    policy, and this gradient would be of neither. So `AlgorithmSettings.on_policy` goes with it, which refuses a second
    update from a rollout. On the first one the gradient is that of PPO's surrogate. The loss itself is no measure of
    progress: its size is that of the log-probs.
    """
    log_ratio = (columns.logprobs.detach() - columns.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return PolicyLoss(loss=-columns.advantages * columns.logprobs, ratio=log_ratio.exp())
